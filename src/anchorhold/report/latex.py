"""A table as LaTeX, to paste into a paper: booktabs rules, names escaped, notes below."""

from collections.abc import Sequence

__all__ = ["escaped", "latex_table"]

_SIGNS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "…": r"\ldots{}",
    "−": "$-$",
    "±": r"$\pm$",
    "→": r"$\rightarrow$",
    "·": r"$\cdot$",
    "ε": r"$\epsilon$",
    "η": r"$\eta$",
    "γ": r"$\gamma$",
    "λ": r"$\lambda$",
    "α": r"$\alpha$",
    "×": r"$\times$",
    "β": r"$\beta$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escaped(text: str) -> str:
    r"""Text in which LaTeX finds no command.

    >>> escaped("hm_lga & 95 %")
    'hm\\_lga \\& 95 \\%'
    """
    return "".join(_SIGNS.get(letter, letter) for letter in text)


def latex_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[bool], notes: Sequence[str]) -> str:
    """A `tabular` with rules of booktabs; columns of `words` are aligned left, numbers right."""

    def line(cells: Sequence[str]) -> str:
        # A cell that begins with a bracket would be read as the argument of the \\ before it.
        return " & ".join(f"{{}}{cell}" if cell.startswith("[") else cell for cell in map(escaped, cells)) + r" \\"

    columns = "".join("l" if each else "r" for each in words)
    below = [rf"\par\footnotesize {escaped(note)}" for note in notes]
    body = [line(row) for row in rows]
    begin = [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    return "\n".join([*begin, line(head), r"\midrule", *body, r"\bottomrule", r"\end{tabular}", *below])
