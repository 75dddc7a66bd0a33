"""Pages: a template, one style sheet and one script become a single file without external resources.

Autoescape is always on, so names are never markup. The content policy forbids all requests and foreign scripts.
"""

import base64
import hashlib
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runs.writing import atomic
from ..version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

__all__ = ["cut", "fixed", "place", "write_page"]


def write_page(template: str, out: Path, **values: Any) -> Path:
    """Fill a template of `templates/` and write it atomically; returns its path."""
    environment = _environment()
    script, style = (_text(name) for name in ("page.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    common = {"script": script, "style": style, "digest": digest, "made": made, "version": __version__}
    text = environment.get_template(template).render(**common, **values)
    with atomic(out) as temporary:
        # File names that are not Unicode contain lone surrogates, which UTF-8 cannot encode.
        temporary.write_bytes(text.encode("utf-8", errors="replace"))
    return out


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("anchorhold", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"ours": Markup, "fixed": fixed, "cut": cut, "breakable": _breakable}
    return environment


def _breakable(text: str) -> "Markup":
    """A name with possible line breaks after underscores, which class names use for spaces."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in text.split("_"))


@cache
def _text(name: str) -> str:
    return resources.files("anchorhold").joinpath("report", "templates", name).read_text(encoding="utf-8")


def place(folder: Path) -> str:
    """The path of a folder for a command; relative or its name alone, since pages are shared."""
    whole = folder.resolve()
    here = Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else whole.name


def fixed(value: float | None, digits: int = 1) -> str:
    """A number with `digits` decimals, or a dash for None.

    >>> fixed(-0.04), fixed(None)
    ('0.0', '–')
    """
    return "–" if value is None else f"{round(value, digits) + 0.0:,.{digits}f}"


def cut(text: str, length: int = 60) -> str:
    """The beginning of a long text.

    >>> cut("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= length else text[: length - 1] + "…"
