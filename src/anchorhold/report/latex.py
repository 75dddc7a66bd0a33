"""A table as LaTeX, to paste into a paper: booktabs rules, names escaped, notes below."""

import re
import unicodedata
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
    "×": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "√": r"$\surd$",
    "∈": r"$\in$",
    "°": r"$^\circ$",
    "²": r"$^2$",
    "³": r"$^3$",
    "—": "---",
    "“": "``",
    "”": "''",
    "‘": "`",
    "’": "'",
    "\u00a0": "~",
    "\u2011": "-",
    "•": r"\textbullet{}",
    "′": r"$\prime$",
    "µ": r"$\mu$",  # the micro sign, apart from the letter
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


_MARKS = {"\u0304": "bar", "\u0305": "bar", "\u0302": "hat", "\u0303": "tilde", "\u0307": "dot", "\u20d7": "vec"}
_CLUSTER = re.compile(r"(.)([\u0300-\u036f\u20d0-\u20ff]*)", re.DOTALL)


def escaped(text: str) -> str:
    r"""Text in which LaTeX finds no command, and no sign that it cannot set.

    >>> escaped("hm_lga & 95 %")
    'hm\\_lga \\& 95 \\%'
    >>> escaped("C\u0304 ≥ μ")
    '$\\bar{\\mathrm{C}}$ $\\geq$ $\\mu$'
    """
    return "".join(_set(*parts) for parts in _CLUSTER.findall(unicodedata.normalize("NFC", text)))


def _set(letter: str, marks: str) -> str:
    """A letter with the marks over it that no letter of Unicode has, such as the bar of a mean."""
    if not marks:
        return _SIGNS.get(letter) or _plain(letter)
    inner = _greek(letter) or rf"\mathrm{{{_SIGNS.get(letter, letter)}}}"
    for mark in marks:
        inner = rf"\{_MARKS[mark]}{{{inner}}}" if mark in _MARKS else inner
    return f"${inner}$"


def _plain(letter: str) -> str:
    """Letters as they are; a sign that LaTeX may not know by its number."""
    if letter.isascii() or (letter.isalpha() and not _greek(letter)):
        return letter
    return f"${_greek(letter)}$" if _greek(letter) else f"U+{ord(letter):04X}"


def _greek(letter: str) -> str:
    r"""The command of a Greek letter, "" for others; `\Alpha` and its like do not exist."""
    told = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (?:FINAL )?(\w+)", unicodedata.name(letter, ""))
    if told is None or told[2] in ("OMICRON", *(_LATIN if told[1] == "CAPITAL" else ())):
        return ""
    name = {"LAMDA": "lambda"}.get(told[2], told[2].lower())
    return "\\" + (name.title() if told[1] == "CAPITAL" else name)


_LATIN = ("ALPHA", "BETA", "EPSILON", "ZETA", "ETA", "IOTA", "KAPPA", "MU", "NU", "RHO", "TAU", "CHI")


def latex_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[bool], notes: Sequence[str]) -> str:
    """A `tabular` with rules of booktabs; columns of `words` are aligned left, numbers right."""

    def line(cells: Sequence[str]) -> str:
        # A cell that begins with a bracket or a star would be read as an argument of the \\ before it.
        return (
            " & ".join(f"{{}}{cell}" if cell.startswith(("[", "*")) else cell for cell in map(escaped, cells)) + r" \\"
        )

    columns = "".join("l" if each else "r" for each in words)
    below = [rf"\par{{\footnotesize {escaped(note)}\par}}" for note in notes]
    body = [line(row) for row in rows]
    begin = [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    return "\n".join([*begin, line(head), r"\midrule", *body, r"\bottomrule", r"\end{tabular}", *below])
