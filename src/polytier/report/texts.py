"""Tables as Markdown and LaTeX."""

from __future__ import annotations

from polytier.report.blocks import Cell, Table

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "·": r"$\cdot$", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "\n": " ",
}  # fmt: skip


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
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{tex('. '.join(filter(None, (table.title, table.note))))}}}",
        rf"\begin{{tabular}}{{{''.join('lr'[right] for right in to_the_right(table))}}}", r"\toprule",
        " & ".join(map(tex, table.columns)) + r" \\", r"\midrule",
    ]  # fmt: skip
    for row in table.rows:
        lines.append(" & ".join(marked(cell, tex(text_of(cell)), r"\textbf{{{}}}") for cell in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def to_the_right(table: Table) -> list[bool]:
    """By column: whether it holds numbers."""
    return [
        any(isinstance(row[k], Cell) and isinstance(row[k].value, int | float) for row in table.rows)  # type: ignore[union-attr]
        for k in range(len(table.columns))
    ]


def text_of(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else cell.text


def marked(cell: Cell | str, text: str, how: str) -> str:
    return how.format(text) if isinstance(cell, Cell) and cell.tone == "good" else text


def row_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """What Markdown would take for its own marks is left as it is read."""
    for mark in "\\|*_`<[":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


def tex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
