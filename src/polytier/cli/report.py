"""The commands that show runs from their files: `show`, `report` and `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polytier._terminal import say, wide_console
from polytier._text import counted
from polytier.cli.options import a_path, real_number, whole_number
from polytier.report import markdown_latex as texts
from polytier.report.blocks import Heading, Section, Table
from polytier.report.palette import names_in
from polytier.report.tables import line, print_fitting, print_summary, print_unfinished, print_until
from polytier.runs.read import RunRecord

Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR...", parser=a_path, help="Run folders, or folders that contain some.")
]


def show(
    folders: Folders,
    until: Annotated[
        float | None,
        typer.Option(
            "--until",
            metavar="LEVEL",
            parser=real_number(),
            help="Also show the bytes sent until the leading metric reaches this level, such as 0.9.",
        ),
    ] = None,
) -> None:
    """Show the result of a run from its files: metrics, traffic, learned groups; for several runs, a table."""
    folder = folders[0]
    if len(folders) > 1 or (folder.is_dir() and not (folder / "config.toml").exists()):
        print_tables(folders, until)
        return
    run = RunRecord(folder)
    if run.changed:
        say(f"{folder / 'config.toml'} has changed since the run was started: {', '.join(run.changed)}")
    if run.summary is None:
        print_unfinished(wide_console(), run)
        return
    print_summary(wide_console(), run.config, run.summary, folder)
    if until is not None:
        print_until(wide_console(), run, until)
    if not run.finished:
        say(f"not finished: {counted(run.wanted, 'round')} requested; continue with: polytier resume {folder}")


def report(
    folders: Folders,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", parser=a_path, help="The page.")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="FOLDER", parser=a_path, help="Folder for every chart as a separate file."),
    ] = None,
    form: Annotated[str, typer.Option("--format", metavar="png|svg|pdf", help="Format of these files.")] = "png",
    tables: Annotated[
        Path | None,
        typer.Option("--tables", metavar="FOLDER", parser=a_path, help="Folder for tables.md and tables.tex."),
    ] = None,
) -> None:
    """Write one HTML page about runs that needs no network: tables, metrics, devices, traffic, data."""
    from polytier.files.write import atomic, make_folder, write_text
    from polytier.report.figures import FORMATS, charts_in, require, save
    from polytier.report.page import render
    from polytier.report.page_contents import page_of

    if form not in FORMATS:
        raise ValueError(f"--format {form!r} is unknown; allowed: {', '.join(FORMATS)}")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; give a file such as {out / 'report.html'}")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"{out} cannot be written: the folder {out.parent} does not exist; create it first")
    for folder in (figures, tables):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; give a folder")
    if figures is not None:
        require()
    title, subtitle, blocks = page_of(folders)
    if tables is not None:
        make_folder(tables)
        write_text(tables / "tables.md", f"# {title}\n\n" + "\n".join(as_text(blocks, "## {}\n", texts.markdown)))
        write_text(tables / "tables.tex", "\n".join(as_text(blocks, "% {}\n", texts.latex)))
        say(f"tables.md and tables.tex are in {tables}")
    if figures is not None:
        from polytier.studies.compare import slug

        make_folder(figures)
        charts, names = charts_in(blocks), names_in(blocks)
        for number, chart in enumerate(charts, 1):
            with atomic(figures / f"{number:02}-{slug(chart.title.lower())}.{form}") as partial:
                save(chart, partial, form, names)
        say(f"{counted(len(charts), 'figure')} in {figures}")
    page = render(title, blocks, subtitle)
    write_text(out, page)
    say(f"the page is {out} ({len(page.encode()) / 1e6:.1f} MB)")


def as_text(blocks: list[Any], heading: str, write: Any) -> list[str]:
    """All tables as text, with their headings."""
    found: list[str] = []
    for block in blocks:
        if isinstance(block, Heading):
            found.append(heading.format(block.text))
        elif isinstance(block, Table):
            found.append(write(block))
        elif isinstance(block, Section):
            found += as_text(list(block.blocks), heading, write)
    return found


def print_tables(folders: list[Path], until: float | None) -> None:
    """Print the summary of the page: a table per data set."""
    from polytier.report.page_contents import summary_tables

    console = wide_console()
    for title, summary, notes in summary_tables(folders, until):
        line(console, title, style="bold")
        rows = [[texts.text_of(cell) for cell in row] for row in summary.rows]
        columns = [list(cells) for cells in zip(*rows, strict=True)] if rows else [[] for _ in summary.columns]
        print_fitting(console, dict(zip(summary.columns, columns, strict=True)), "the page of `polytier report`")
        for note in (summary.note, *notes):
            line(console, note)
        console.print()


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=a_path, help="A run folder, or a folder that contains some.")
    ],
    port: Annotated[
        int,
        typer.Option(
            "--port",
            parser=whole_number(0, 65535),
            metavar="<int>",
            help="Port on this machine; 0 selects a free one.",
        ),
    ] = 8000,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Serve the report page while runs are in progress; it updates itself. Ctrl-C stops the server."""
    from polytier.report.server import serve

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a run folder, or a folder that contains some")

    def ready(address: str) -> None:
        missing = "" if folder.exists() else "as soon as a run makes it "
        say(f"{folder} is shown {missing}at {address} (Ctrl-C stops the server)")
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(folder, port, ready)
