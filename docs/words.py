"""How many words the pages have, and how many sentences are over 25 words long.

python docs/words.py                 all pages of the site and README.md
python docs/words.py docs/audit/*.md
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["LONGEST", "counts", "main", "pages_of_the_site", "prose", "sentences"]

LONGEST = 25  # words of a sentence
ROOT = Path(__file__).resolve().parents[1]
_SHORT = re.compile(r"\b(et al|e\.g|i\.e|cf|vs|eqs?|figs?|sect|no|approx|resp)\.", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?…])[\"'”’)*_]*\s+(?=[\"'“‘(*_`\[{]*[A-ZÀ-Þ0-9\[{`])")


def pages_of_the_site() -> list[Path]:
    found = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return [ROOT / "README.md", *(path for path in found if path.name != "changelog.md")]


def prose(text: str) -> list[str]:
    """The paragraphs, list items, headings and table cells of a page, without code, comments and addresses."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2[ \t]*$", "\n", text, flags=re.M | re.S)
    text = re.sub(r"^\s*(?:%|:{3,}|:\w+:).*$", "", text, flags=re.M)
    text = re.sub(r"\{\w+\}`+[^`]*`+", "NAME", text)  # {num}`…`, {repo}`…`
    text = re.sub(r"`+[^`]*`+", "NAME", text)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>\n]+>", "", text)
    text = re.sub(r"^(\s*#+ .*)$", r"\1\n", text, flags=re.M)  # a heading ends with its line
    parts: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)|\n(?=\s*[|#])|(?<=\|)\n", text):
        block = block.strip()
        if re.fullmatch(r"[|:\-\s]*", block):
            continue
        cells = block.strip("|").split("|") if block.startswith("|") else [block]
        parts += [re.sub(r"^(?:[-*+]|\d+\.|#+|>)\s+", "", cell.strip()) for cell in cells]
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences(text: str) -> list[str]:
    """The sentences of a page.

    >>> sentences("One `a b`. Two, as in Tian et al. 2024.")
    ['One NAME.', 'Two, as in Tian et al. 2024.']
    """
    found = []
    for part in prose(text):
        marked = _SHORT.sub(lambda short: short[0].replace(".", "\0"), part)
        found += [each.replace("\0", ".").strip() for each in _END.split(marked)]
    return [each for each in found if re.search(r"\w", each)]


def length(sentence: str) -> int:
    """Its words; a sign alone is none."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def counts(texts: Iterable[str]) -> tuple[int, int, int]:
    """Words, sentences, and sentences over 25 words."""
    lengths = [length(sentence) for text in texts for sentence in sentences(text)]
    return sum(lengths), len(lengths), sum(each > LONGEST for each in lengths)


def main(arguments: Sequence[str]) -> None:
    long = "--long" in arguments  # also print them
    pages = [Path(each) for each in arguments if each != "--long"] or pages_of_the_site()
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    print(f"{'page':40} {'words':>7} {'sentences':>9} {'over 25':>8} {'share':>7}")
    for name, chosen in [*((str(page), [text]) for page, text in texts.items()), ("all", list(texts.values()))]:
        words, number, over = counts(chosen)
        name = name.removeprefix(f"{ROOT}/")
        print(f"{name:40} {words:>7,} {number:>9,} {over:>8,} {over / max(number, 1):>7.1%}")
        if long and name != "all":
            for sentence in sentences(chosen[0]):
                if length(sentence) > LONGEST:
                    print(f"    {length(sentence)}: {sentence}")


if __name__ == "__main__":
    main(sys.argv[1:])
