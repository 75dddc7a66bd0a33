"""Every link inside the built site leads to a page, a file or an anchor that exists.

Sphinx checks the references it resolves itself. This reads the finished HTML, as a browser would, and so it finds
plain links and anchors too. A link that leads nowhere is a warning, which `./start docs` makes an error.
"""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

__all__ = ["broken", "setup"]

_log = logging.getLogger(__name__)
_PLACES = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src"}


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        self.anchors |= {name for name in (held.get("id"), held.get("name")) if name}
        target = held.get(_PLACES.get(tag, ""))
        if target:
            self.links.append(target)


def broken(site: Path) -> list[tuple[str, str]]:
    """(page, link) for every link of the site that leads nowhere inside it."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            to = urlsplit(link)
            if to.scheme or to.netloc or link in ("#", "#top"):
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(to.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                found.append((path.relative_to(site).as_posix(), link))
    return found


def _check(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        for page, link in broken(Path(app.outdir).resolve()):
            _log.warning("the link %s leads nowhere", link, location=page.removesuffix(".html"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", _check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
