"""Writes docs/settings.md from the declarations of the settings: `make docs`."""

from pathlib import Path

from polytier.cli.listing import settings_rows
from polytier.runs.spec import SCOPES, RunSpec, settings

HEAD = """# Settings

Every setting of a run: a flag of `polytier run`, a key of a TOML file, a keyword of `polytier.train`. This page is
made from their declarations in `src/polytier/runs/spec.py` by `make docs`; `polytier schema` prints the same as a JSON
schema for editors, `polytier list settings` on the terminal.

Settings marked * may differ between several models (`[models.NAME]`). A resumed run may change `rounds`, `engine`,
`workers` and `tile`.
"""


def page(spec: type[RunSpec] = RunSpec) -> str:
    """The text of docs/settings.md."""
    known, parts = settings(spec), [HEAD]
    for scope, title in SCOPES.items():
        parts.append(f"## {title}\n\n| key | flag | default | meaning |\n|---|---|---|---|")
        for name, flag, default, of, text in settings_rows(known, spec):
            if of == scope:
                cells = (f"`{name}`" + "*" * known[name].per_model, f"`{flag}`", default, text)
                parts.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        parts[-1] += "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page(), encoding="utf-8")
