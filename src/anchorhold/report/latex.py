"""A table for a paper: LaTeX with the rules of booktabs."""

from .tables import Table, one_line, used, written

__all__ = ["latex"]

_SIGNS = {sign: f"\\{sign}" for sign in "{}$&#%_"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "…": r"\ldots{}",
    "ε": r"$\varepsilon$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "→": r"$\rightarrow$",
    "−": "$-$",
}


def latex(table: Table) -> str:
    """The table as a tabular; notes follow as comments."""
    sides = used(table)
    words = [all(cell is None or isinstance(cell, str) for cell in cells) for _, cells in sides]
    lines = [_line([_escaped(one_line(column.head)) for column, _ in sides])]
    for place in range(len(table.rows)):
        lines.append(_line([_escaped(written(cells[place], column)) for column, cells in sides]))
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{''.join('l' if word else 'r' for word in words)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            *(f"% {one_line(note)}" for note in table.notes),
        ]
    )


def _line(cells: list[str]) -> str:
    # After the \\ of the line above, LaTeX would read a [ or * as an argument of it.
    guard = "{}" if cells and cells[0][:1] in ("[", "*") else ""
    return f"{guard}{' & '.join(cells)} \\\\"


def _escaped(text: str) -> str:
    return "".join(_SIGNS.get(sign, sign) for sign in text)
