"""Tables as Markdown and LaTeX."""

from __future__ import annotations

from polytier.report.blocks import Cell, Table

LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\n": " ",
}


def markdown(table: Table) -> str:
    """A pipe table with its title and note; the best cells are bold."""
    head = [escaped(column) for column in table.columns]
    lines = [
        f"**{escaped(table.title)}**",
        "",
        row_of(head),
        row_of(["---:" if right else "---" for right in to_the_right(table)]),
    ]
    for row in table.rows:
        lines.append(row_of([marked(cell, escaped(text_of(cell)), "**{}**") for cell in row]))
    return "\n".join([*lines, *(["", escaped(table.note)] if table.note else []), ""])


def latex(table: Table) -> str:
    """A table for booktabs (`\\usepackage{booktabs}`)."""
    caption = tex(". ".join(filter(None, (table.title, table.note))))
    columns = "".join("lr"[right] for right in to_the_right(table))
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{columns}}}"]
    lines += [r"\toprule", " & ".join(map(tex, table.columns)) + r" \\", r"\midrule"]
    for row in table.rows:
        lines.append(" & ".join(marked(cell, tex(text_of(cell)), r"\textbf{{{}}}") for cell in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def to_the_right(table: Table) -> list[bool]:
    """Whether each column holds numbers, which are aligned to the right."""
    return [
        any(isinstance(row[k], Cell) and isinstance(row[k].value, int | float) for row in table.rows)  # type: ignore[union-attr]
        for k in range(len(table.columns))
    ]


def text_of(cell: Cell | str) -> str:
    """The text of a cell."""
    return cell if isinstance(cell, str) else cell.text


def marked(cell: Cell | str, text: str, how: str) -> str:
    """The text in the format `how` if the cell is one of the best."""
    return how.format(text) if isinstance(cell, Cell) and cell.tone == "good" else text


def row_of(cells: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """The text with a backslash before each character that has a meaning in Markdown."""
    for mark in "\\|*_`<[":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


def tex(text: str) -> str:
    """The text with each character that has a meaning in LaTeX replaced."""
    return "".join(LATEX.get(letter, letter) for letter in text)
