"""The changelog of the repository as a page of the site, with its links led to pages here or to files there."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

__all__ = ["led", "setup"]


def led(text: str) -> str:
    """The text with links from the repository's root made links of docs/, or roles that link to the repository.

    >>> led("[a](docs/b.md#c), [d](results/e.json), [f](https://g.org)")
    '[a](b.md#c), {repo}`d <results/e.json>`, [f](https://g.org)'
    """

    def one(link: re.Match[str]) -> str:
        words, target = link[1], link[2]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        if target.startswith("docs/") and target.partition("#")[0].endswith((".md", ".ipynb")):
            return f"[{words}]({target.removeprefix('docs/')})"
        return f"{{repo}}`{words.replace('`', '')} <{target}>`"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", one, text)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    if name == "changelog":
        path = Path(app.confdir).parent / "CHANGELOG.md"
        app.env.note_dependency(str(path))
        source[0] = led(path.read_text(encoding="utf-8"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
