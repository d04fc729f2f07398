"""The commands that show runs from their files: `show`, `report` and `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polytier._terminal import say, wide_console
from polytier.report import markdown_latex as texts
from polytier.report.blocks import Heading, Section, Table
from polytier.report.palette import names_in
from polytier.report.tables import line, print_summary, print_unfinished, print_until, table
from polytier.runs.read import RunRecord

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that hold some.")]


def show(
    folders: Folders,
    until: Annotated[
        float | None,
        typer.Option("--until", metavar="LEVEL", help="Also the bytes until a level of the leading metric, as 0.9."),
    ] = None,
) -> None:
    """The result of a run from its files alone: metrics, traffic, groups learned; of several, a table by data."""
    folder = folders[0]
    if len(folders) > 1 or (folder.is_dir() and not (folder / "config.toml").exists()):
        print_tables(folders, until)
        return
    run = RunRecord(folder)
    if run.summary is None:
        print_unfinished(wide_console(), run)
        return
    print_summary(wide_console(), run.config, run.summary, folder)
    if until is not None:
        print_until(wide_console(), run, until)
    if not run.finished:
        say(f"on its way to round {run.wanted}; go on with: polytier resume {folder}")


def report(
    folders: Folders,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="FOLDER", help="Also every chart as a file, for a paper.")
    ] = None,
    form: Annotated[str, typer.Option("--format", metavar="png|svg|pdf", help="What these files are.")] = "png",
    tables: Annotated[
        Path | None, typer.Option("--tables", metavar="FOLDER", help="Also tables.md and tables.tex.")
    ] = None,
) -> None:
    """One page about runs, which needs no network: tables, metrics, devices, traffic, collaboration, data."""
    from polytier.report.figures import FORMATS, charts_in, require, save
    from polytier.report.page import render
    from polytier.report.page_contents import page_of
    from polytier.runs.folder import atomic, write_text

    if form not in FORMATS:
        raise ValueError(f"--format {form!r} is unknown; allowed: {', '.join(FORMATS)}")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file such as {out / 'report.html'}")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"{out} cannot be written: there is no folder {out.parent}; make it first")
    for folder in (figures, tables):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; name a folder")
    if figures is not None:
        require()
    title, subtitle, blocks = page_of(folders)
    if tables is not None:
        tables.mkdir(parents=True, exist_ok=True)
        write_text(tables / "tables.md", f"# {title}\n\n" + "\n".join(as_text(blocks, "## {}\n", texts.markdown)))
        write_text(tables / "tables.tex", "\n".join(as_text(blocks, "% {}\n", texts.latex)))
        say(f"tables.md and tables.tex are in {tables}")
    if figures is not None:
        from polytier.studies.compare import slug

        figures.mkdir(parents=True, exist_ok=True)
        charts, names = charts_in(blocks), names_in(blocks)
        for number, chart in enumerate(charts, 1):
            with atomic(figures / f"{number:02}-{slug(chart.title.lower())}.{form}") as partial:
                save(chart, partial, form, names)
        say(f"{len(charts)} figures are in {figures}")
    page = render(title, blocks, subtitle)
    write_text(out, page)
    say(f"the page is {out} ({len(page.encode()) / 1e6:.1f} MB)")


def as_text(blocks: list[Any], heading: str, write: Any) -> list[str]:
    """All tables, with the headings that they stand below."""
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
    """The summary of the page on a terminal: a table for each data set."""
    from polytier.report.page_contents import summary_tables

    console = wide_console()
    for title, summary, notes in summary_tables(folders, until):
        line(console, title, style="bold")
        rows = [[texts.text_of(cell) for cell in row] for row in summary.rows]
        console.print(table(summary.columns, rows, right=True))
        for note in (summary.note, *notes):
            line(console, note)
        console.print()


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, or a folder that holds some.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On this machine alone; 0: any.")] = 8000,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
) -> None:
    """Serve the same page while runs go on; it follows them. Ctrl-C ends it."""
    from polytier.report.server import serve

    def ready(address: str) -> None:
        say(f"{folder} is shown at {address}; Ctrl-C ends this")
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(folder, port, ready)
