"""The pages of the site as the tests see them: their blocks of code, and what stands in comments before these.

A comment is a line `% …` (or `<!-- … -->` in README.md, which GitHub shows) above a block:

    % not run: why          the block is only parsed
    % setup: net = MyNet()  a line of Python that runs before the block, which readers do not see
    % given: runs/a photos  a folder that the block needs: a run on digits or on photos, or an audit. What a page
                            names as runs/… or audits/… and does not make is given anyway, on digits.
    % file: models.py       the block is the content of this file
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LANGUAGES", "PAGES", "README", "ROOT", "Block", "blocks_of", "called", "commands_of"]

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts and page.name != "changelog.md"
]
LANGUAGES = {"bash", "console", "python", "text", "toml", "csv", "json", "yaml", "bibtex", "html", "sql"}
RUNNABLE = {"bash", "console", "python"}
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})(.*)$")
_COMMENT = re.compile(r"^\s*(?:%|<!--)\s*(not run|setup|given|file):\s*(.*?)\s*(?:-->)?$")
_NAMED = re.compile(r"`([\w/.-]+\.(?:py|toml|csv|json|sql))`")
_ENDINGS = {"python": ".py", "toml": ".toml", "csv": ".csv", "json": ".json", "sql": ".sql"}


@dataclass
class Block:
    """A block of code with the comments before it."""

    line: int
    language: str
    code: str
    not_run: str = ""
    setup: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    file: str = ""


def called(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order; directives are left out, what stands in ::: is not."""
    found: list[Block] = []
    lines, at = text.splitlines(), 0
    notes: list[tuple[str, str]] = []
    before = ""  # the last line of prose
    while at < len(lines):
        line = lines[at]
        told, fence = _COMMENT.match(line), _FENCE.match(line)
        if told:
            notes.append((told[1], told[2]))
        elif fence and not fence[2].startswith(":"):
            end = next(
                (i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[2]),
                len(lines),
            )
            language = fence[3].strip()
            if not language.startswith("{"):
                indent = len(fence[1])
                code = "\n".join(each[indent:] for each in lines[at + 1 : end])
                block = Block(at + 1, language, code)
                for kind, value in notes:
                    if kind == "not run":
                        block.not_run = value
                    elif kind == "file":
                        block.file = value
                    else:
                        (block.setup if kind == "setup" else block.given).append(value)
                named = _NAMED.findall(before)
                if not block.file and named and named[-1].endswith(_ENDINGS.get(language, "\0")):
                    block.file = named[-1]
                found.append(block)
            notes, before, at = [], "", end
        elif line.strip():
            notes, before = [], line
        at += 1
    return found


def commands_of(block: Block) -> list[tuple[str, list[str]]]:
    """(command, the lines that the page prints below it) of a bash or console block."""
    if block.language == "bash" and "<<" in block.code:  # a file that is written inline
        return [(block.code, [])]
    text = block.code.replace("\\\n", " ")
    if block.language == "bash":
        return [(line, []) for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:].strip(), []))
        elif found:
            found[-1][1].append(line)
    return found


def words_of(command: str) -> list[str]:
    """A command as words, without its comment."""
    return shlex.split(command, comments=True)
