"""Hooks of the documentation site (mkdocs.yml): pages made from files outside docs/, and the Python reference."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import polytier

ROOT = Path(__file__).parents[1]
# pages of the site that are files of the project
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
PAGES["changelog.md"] = "CHANGELOG.md"
ROOMS = {
    "runs": "Training and results",
    "data": "Data",
    "algorithms": "Methods",
    "method": "Methods of your own",
    "models": "Models and metrics",
    "messages": "Messages",
    "stack": "Rows",
    "tree": "The tree",
    "engines": "Engines",
    "studies": "Studies",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files in docs/."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in PAGES.items()}
    for page, text in {**made, "api.md": reference()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files of the project by links to their pages."""
    for page, source in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}(#[^)]*)?\)", rf"]({page}\1)", markdown)
    return re.sub(r"\]\(docs/", "](", markdown)


def reference() -> str:
    """The page of all public names, by room, with their docstrings."""
    parts = ["# Python\n\nEverything in `polytier.__all__`. What is not listed here may change without notice.\n"]
    for room, title in ROOMS.items():
        names = [name for name, module in polytier._MODULE.items() if module.split(".")[1] == room]
        parts += [f"## {title}\n", *(f"::: polytier.{name}\n" for name in sorted(names, key=str.lower))]
    return "\n".join(parts)
