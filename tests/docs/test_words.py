"""Plain words: ten habits that readers stumbled over are gone from pages and help, and few sentences are long."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from anchorhold.cli.main import app
from anchorhold.config.listing import list_settings
from anchorhold.config.recipes import recipe_names, recipe_text
from tests.docs.pages import PAGES, README, ROOT, called


def _words() -> Any:
    spec = importlib.util.spec_from_file_location("words_of_the_site", ROOT / "docs" / "words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


words = _words()

TERMS = {
    "print, for the papers": r"\b(?:in|by|of|from|than|to|as|with|against) print\b(?!\()|\bprint['’]s\b|\bprint: ?\d"
    r"|\bprint (?:has|says|reports|states|gives|is|does|names)\b",
    "look, for an evaluation": r"\b(?:a|each|every|per|the|last|first|next|between|both|all|best|of) looks?\b"
    r"(?! at| like)",
    "to be had": r"\bto be had\b",
    "whoever": r"\bwhoever\b",
    "nobody, for tensors": r"\bnobody\b",
    "so many, for N": r"\bso many\b",
    "goes on, for resumes": r"\b(?:goes|go|went) on\b(?! to)",
    "unit leaves": r"\b(?:units?|triplets?|samples?|image) leaves?\b(?! out)",
    "row, without which": r"\b(?:a|each|every|this|its|print['’]s) row (?:is|has|says|holds|reports|takes|runs)\b"
    r"|\bthe row\b(?! of| by| for| in| that)",
    "papers by number": r"\bpapers? [1-4]\b|\b(?:first|second|third|fourth) paper\b",
    "intake": r"\bintakes?\b",
    "shown or kept, as nouns": r"\b(?:a|the|of) (?:shown|kept)\b(?= (?:is|are|of|and|or)\b|[.,;])",
}


def found(text: str) -> list[str]:
    return [
        f"{name}: …{text[max(hit.start() - 40, 0) : hit.end() + 40]}…"
        for name, term in TERMS.items()
        for hit in re.finditer(term, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", [README, *PAGES], ids=called)
def test_a_page_has_none_of_the_terms(page: Path) -> None:
    problems = found("\n".join(words.prose(page.read_text(encoding="utf-8"))))
    assert not problems, "\n".join(problems)


def helps(command: Any, name: str = "anchorhold") -> Iterator[tuple[str, str]]:
    """(command, its help and the help of its options), for all commands."""
    parts = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
    yield name, "\n".join(parts)
    for below, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{name} {below}")


def _notebook(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def _template(path: Path) -> str:
    """The text of a template, without markup and expressions."""
    text = re.sub(
        r"<(script|style)\b.*?</\1>|{#.*?#}|{%.*?%}|{{.*?}}", " ", path.read_text(encoding="utf-8"), flags=re.S
    )
    return re.sub(r"<[^>]+>", " ", text)


def others() -> Iterator[tuple[str, str]]:
    """What people read beside pages and help: (name, text)."""
    yield from ((called(path), _notebook(path)) for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")))
    templates = ROOT / "src" / "anchorhold" / "report" / "templates"
    yield from ((called(path), _template(path)) for path in sorted(templates.glob("*.html")))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        if (ROOT / name).is_file():  # an sdist has not all of them
            yield name, "\n".join(words.prose((ROOT / name).read_text(encoding="utf-8")))
    yield from ((f"recipe {name}", recipe_text(name)) for name in recipe_names())
    yield "settings", "\n".join(each.meaning for each in list_settings())


OTHERS = dict(others())


@pytest.mark.parametrize("name", OTHERS)
def test_other_texts_have_none_of_the_terms(name: str) -> None:
    assert OTHERS[name].strip() and not found(OTHERS[name])


def test_other_texts_are_all_there() -> None:
    assert {"docs/notebooks/audit.ipynb", "recipe hm-lga", "settings"} <= {*OTHERS}
    assert {"src/anchorhold/report/templates/audit.html", "CHANGELOG.md"} <= {*OTHERS}


HELPS = dict(helps(typer.main.get_command(app)))


@pytest.mark.parametrize("name", HELPS)
def test_help_has_none_of_the_terms(name: str) -> None:
    assert len(HELPS) > 10 and not found(HELPS[name])


@pytest.mark.parametrize(
    "text",
    [
        "31.8 (print: 32.4)",
        "Print's row is neither",
        "steps between looks at whether: every look",
        "which are not to be had",
        "Whoever is done",
        "nobody leaves",
        "the last so many classes",
        "the same one again goes on",
        "finished units leave the batch",
        "see the row",
        "as paper 2 has it",
    ],
)
def test_the_terms_are_found(text: str) -> None:
    assert found(text)


@pytest.mark.parametrize(
    "text",
    [
        "It prints a table.",
        "print(audit)",
        "looks like an arbitrary image",
        "published row",
        "rows by name",
        "a row for each ε",
    ],
)
def test_other_uses_are_not(text: str) -> None:
    assert not found(text)


def test_few_sentences_are_long() -> None:
    """At most 1 % over 25 words on all pages and README."""
    _, number, over = words.counts(page.read_text(encoding="utf-8") for page in words.pages_of_the_site())
    assert number > 1000 and over <= 0.01 * number, f"{over} of {number}: python docs/words.py --long"


def test_words_and_sentences_are_counted() -> None:
    page = "# A heading\nOne two `three four`. Five et al. six!\n\n```text\nno\n```\n\n"
    page += "| a b | c |\n|---|---|\n| d. E f | {num}`x:y|z` |\n"
    assert words.sentences(page) == ["A heading", "One two NAME.", "Five et al. six!", "a b", "c", "d.", "E f", "NAME"]
    assert words.counts([page, " ".join(["word"] * 26)]) == (16 + 26, 9, 1)
