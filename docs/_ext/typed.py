"""A decimal number in the text of a page comes from a file: {num} and {published} write it.

A number that somebody typed is right on one day. So a decimal such as 36.9 in prose or in a table is a warning, which
`./start docs` makes an error. Code, comments, formulas, addresses and the tables that `compare` writes are left out.
What is no result is allowed: versions, values of ε, and the numbers below, which define or set something.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

__all__ = ["ALLOWED", "prose_of", "setup", "text_of", "typed"]

_log = logging.getLogger(__name__)
_NUMBER = re.compile(r"(?<![\w.,/·-])[−+-]?\d[\d,]*\.\d+(?![\w]|\.\d)")

# What is no text of the page, in the order in which it is taken out.
_LEFT_OUT = (
    re.compile(r"<!-- compare .*?<!-- end -->", re.S),  # written and tested from the JSON files
    re.compile(r"<!--.*?-->", re.S),
    re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[ \t]*$", re.M | re.S),
    re.compile(r"^\s*(?:%|:\w+:).*$", re.M),
    re.compile(r"\{[\w-]+\}(`+)[^`]*\1"),  # roles
    re.compile(r"(`+)[^`\n].*?\1"),
    re.compile(r"\$[^$\n]+\$"),
    re.compile(r"\]\([^)]*\)|<https?://[^>]*>|https?://\S+"),
)
# What is allowed on every page.
_VERSION = re.compile(r"\b(?:Python|PyTorch|torch|CUDA|version|Apache|CC BY|ONNX|faiss)[ -]\d+\.\d+|\b\d+\.\d+\.\d+")
_SECTION = re.compile(r"\b[Ss]ections? \d+\.\d+")
_LEVEL = re.compile(r"\d+\.\d+ (?:is |\()?about \d+/255|\d+\.\d+(?= ε)")  # an ε as a decimal and in levels; 2.5 ε
_EPSILON = re.compile(r"\b(?:ε|eps)\s*(?:of|is|at|=)?\s*\d+\.\d+(?:(?:,| and| or) \d+\.\d+)*")

# What is allowed on one page: constants of formulas, settings, limits. Never what somebody measured here.
ALLOWED: Mapping[str, frozenset[str]] = {
    name: frozenset(numbers.split())
    for name, numbers in {
        "audit/flags": "0.001 0.02 0.05 1.05",  # limits in the code
        "audit/threats": "0.5",  # an ε in L2
        "definitions": "0.025 0.2 0.02 0.05 0.1",  # the Clopper-Pearson interval, γ, limits of collapse
        "guides/defences": "0.005 0.2 0.5 0.787 0.8 1.4",  # settings, and gigabytes by a formula
        "reproduce/differences": "4.6",  # ADML's appendix E, which no table has
        "reproduce/rows": "0.07 0.1 0.75",  # ξ, and how far ERS is from its columns
        "reproduce/settings": "0.01 0.04 0.05 0.1 0.2 0.25 0.5 0.75 1.4 9.5",
        "train/initialisation": "0.5",  # an ε in 1/255
        "train/recipes": "0.2",  # a setting
    }.items()
}


def text_of(source: str) -> str:
    """The page without code, comments, roles, formulas and addresses; every line stays where it is.

    >>> text_of("a `1.5` b\\n% 2.5\\n[3.5](x4.5.md)")
    'a  b\\n\\n[3.5'
    """
    for pattern in _LEFT_OUT:
        source = pattern.sub(lambda found: "\n" * found[0].count("\n"), source)
    return source


def typed(source: str, allowed: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """(line, number) for every decimal that is typed in the text of a page.

    >>> list(typed("R@1 is {num}`a.json:b|.1f` at ε = 0.03 with torch 2.4.\\nThe paper reports 38.0."))
    [(2, '38.0')]
    """
    for number, line in enumerate(text_of(source).splitlines(), 1):
        rest = _LEVEL.sub("", _EPSILON.sub("", _SECTION.sub("", _VERSION.sub("", line))))
        yield from ((number, found) for found in _NUMBER.findall(rest) if found not in allowed)


def prose_of(name: str, source: str) -> str:
    """The text of a page; of a notebook the text of its cells."""
    if not name.endswith(".ipynb"):
        return source
    cells = json.loads(source)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def _check(app: Sphinx, name: str, source: list[str]) -> None:
    page = str(app.env.doc2path(name))
    for line, number in typed(prose_of(page, source[0]), ALLOWED.get(name, frozenset())):
        told = "the number %s is typed; fill it in with {num} or {published}, or allow it in docs/_ext/typed.py"
        _log.warning(told, number, location=(name, line))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _check, priority=900)  # after the page of changes is filled in
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
