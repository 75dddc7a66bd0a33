"""Numbers come from JSON: one that no file holds fails the build, and so does a link into nowhere."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

from anchorhold.reproduce.rows import rows
from tests.docs.pages import PAGES, ROOT, called

sys.path.insert(0, str(ROOT / "docs"))
from _ext.changelog import led
from _ext.links import broken
from _ext.numbers import PUBLISHED, Unfilled, filled, published, value_at
from _ext.typed import ALLOWED, prose_of, typed

sys.path.remove(str(ROOT / "docs"))

TREE = {
    "a": {"b.c": 1.25, "list": [3, {"x": -7}]},
    "ES:R": 13.67,
    "GTT@1": 2.0,
    "text": "cuda",
    "yes": True,
    "no": None,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps(TREE))
    (tmp_path / "results" / "bad.json").write_text("{")
    return tmp_path


@pytest.fixture
def outside(root: Path) -> Path:
    """The repository, beside a file that does not belong to it."""
    (root.parent / "outside.json").write_text('{"a": 1}')
    (root / "results" / "link.json").symlink_to(root.parent / "outside.json")
    return root


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('results/a.json:a."b.c"|.1f', "1.2"),
        ("results/a.json:a.list.0|d", "3"),
        ("results/a.json:a.list.1.x|+d", "-7"),
        ("results/a.json:ES:R|.1f", "13.7"),
        ("results/a.json:GTT@1|.0f", "2"),
        ("results/a.json:text|.3", "cud"),
    ],
)
def test_a_number_is_written_as_asked(root: Path, text: str, written: str) -> None:
    assert filled(text, root) == (written, root / "results" / "a.json")


@pytest.mark.parametrize(
    "text",
    [
        "results/none.json:a|.1f",
        "results/bad.json:a|.1f",
        "results/a.json:a.c|.1f",
        "results/a.json:a.list.2|d",
        "results/a.json:a.list.-1|d",
        "results/a.json:a.list.x|d",
        "results/a.json:ES:R.value|.1f",
        "results/a.json:a.list|d",
        "results/a.json:yes|d",
        "results/a.json:no|d",
        "results/a.json:text|s",
        "results/a.json:text|>9999999",
        "results/a.json:GTT@1|99999999.1f",
        "results/a.json:GTT@1|x^30",
        "results/a.json:GTT@1|f",
        "../outside.json:a|d",
        "results/link.json:a|d",
        "/etc/hosts:a|d",
        "results/a.json:text|.1f",
        "results/a.json:ES:R|.1q",
        "results/a.json:ES:R",
        "results/a.json:ES:R|",
        "results/a.json",
        'results/a.json:a."b.c|.1f',
        "results/a.json:a..list|d",
    ],
)
def test_what_is_not_there_is_an_error(outside: Path, text: str) -> None:
    with pytest.raises(Unfilled):
        filled(text, outside)


def test_a_place_with_dots_in_a_key() -> None:
    assert value_at(TREE, 'a."b.c"') == 1.25 and value_at(TREE, "a.list.1.x") == -7


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("hm/t6/cub/hm-lga-8:R@1", "38.0"),
        ("hm/t5/cub/hm-lga-8:ES:D", "0.783"),  # by another table's name, with three decimals
        ("catride/t2/cub/natural-r:CA-", "100"),
        ("catride/t2/cub/ca-tride-16:ARS:CA+", "32.6"),
        ("robust-init/a5/cub/hm-lga-8-init-0.5 : init", "0.5"),
    ],
)
def test_a_published_number_is_written_as_printed(text: str, written: str) -> None:
    assert published(text, ROOT) == (written, ROOT / PUBLISHED)


def test_every_name_of_every_row_can_be_written() -> None:
    for row in rows():
        for name in row.names:
            for column, value in row.published.items():
                assert float(published(f"{name}:{column}", ROOT)[0]) == value


@pytest.mark.parametrize(
    "text",
    ["hm/t6/cub/none:R@1", "hm/t6/cub/hm-lga-8", "hm/t6/cub/hm-lga-8:", ":R@1", "hm/t6/cub/hm-lga-8:r1"]
    + [f"hm/t6/cub/hm-lga-8:{column}" for column in ("init", "method", "recipe", "note")],
)
def test_what_was_not_published_is_an_error(text: str) -> None:
    with pytest.raises(Unfilled):
        published(text, ROOT)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("R@1 is 36.9.", ["36.9"]),
        ("R@1 is 36.9%, ERS 1,031.8 and −0.5", ["36.9", "1,031.8", "−0.5"]),
        ("(36.9 / 31.8)", ["36.9", "31.8"]),
        ("**36.9** and [31.8](a.md)", ["36.9", "31.8"]),
        ("at ε = 0.03, 0.06 and 0.1 R@1 is 4.5", ["4.5"]),
        ("`36.9` {num}`a.json:b.0.5|.1f` [a](b-1.5.md) $1.5$ https://a.org/1.5 <!-- 1.5 -->", []),
        ("Python 3.12, torch 2.4, version 0.2.0, Apache-2.0, section 4.5", []),
        ("ε 0.03; ε of 0.06; eps=0.1", []),
        ("0.06 is about 15/255; by 0.1 (about 25/255); steps of 2.5 ε/5; 2.5 of 5", ["2.5"]),
        ("8/255, 56 pairs, 5,924 queries, e-1.5x", []),
        ("the `a`` b` 1.5", ["1.5"]),
    ],
)
def test_typed_numbers_are_found(text: str, found: list[str]) -> None:
    assert [number for _, number in typed(text)] == found


def test_a_typed_number_has_the_line_of_its_page() -> None:
    page = "# Title\n\n```text\nR@1 1.5\n```\n% setup: 2.5\n\n<!-- compare results -->\n| 3.5 |\n<!-- end -->\n"
    page += "| a | 4.5 |\n"
    assert list(typed(page)) == [(11, "4.5")]
    assert list(typed(page, frozenset({"4.5"}))) == []


TEXTS = {page.relative_to(ROOT / "docs").with_suffix("").as_posix(): page for page in PAGES if page.parent != ROOT}
TEXTS |= {f"notebooks/{path.stem}": path for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))}


@pytest.mark.parametrize("name", TEXTS)
def test_no_number_of_a_page_is_typed(name: str) -> None:
    text = prose_of(TEXTS[name].name, TEXTS[name].read_text(encoding="utf-8"))
    assert not [
        f"{called(TEXTS[name])}:{line}: {number}" for line, number in typed(text, ALLOWED.get(name, frozenset()))
    ]


@pytest.mark.parametrize("name", ALLOWED)
def test_every_allowed_number_stands_on_its_page(name: str) -> None:
    page = TEXTS[name]
    found = {number for _, number in typed(prose_of(page.name, page.read_text(encoding="utf-8")))}
    assert not ALLOWED[name] - found


def test_links_of_html(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(
        '<h1 id="top-1">x</h1><a href="sub/b.html#there">1</a><a href="sub/b.html#gone">2</a><a href="#top-1">3</a>'
        '<a href="none.html">4</a><img src="picture.png"><img src="gone.png"><a href="https://example.org/x">5</a>'
    )
    (tmp_path / "sub" / "b.html").write_text('<p id="there"></p><a href="../index.html#top-1">1</a><a href="#no">2</a>')
    assert broken(tmp_path) == [
        ("index.html", "sub/b.html#gone"),
        ("index.html", "none.html"),
        ("index.html", "gone.png"),
        ("sub/b.html", "#no"),
    ]


def test_links_of_the_changelog_lead_to_pages_or_to_the_repository() -> None:
    text = "[a](docs/b.md#c), [`d`](results/e.json), [f](https://g.org), ![p](x.png), [h](docs/page.png)"
    wanted = "[a](b.md#c), {repo}`d <results/e.json>`, [f](https://g.org), ![p](x.png), {repo}`h <docs/page.png>`"
    assert led(text) == wanted


def build(root: Path, page: str, *options: str) -> tuple[int, str]:
    """Exit code and messages of a site of one page, with the extensions of this one."""
    docs = root / "docs"
    docs.mkdir(exist_ok=True)
    (docs / "conf.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r})\n"
        "extensions = ['myst_parser', '_ext.numbers', '_ext.links', '_ext.typed']\n"
        "repository_url = 'https://example.org/r'\n"
    )
    (docs / "index.md").write_text(f"# Page\n\n{page}\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-b", "html", *options, str(docs), str(root / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_build_fails_for_a_number_or_a_file_that_is_not_there(root: Path) -> None:
    code, said = build(root, "{num}`results/a.json:ES:R|.1f` and {repo}`results/a.json`, {repo}`all <results>`", "-W")
    html = (root / "out" / "index.html").read_text()
    assert code == 0 and ">13.7<" in html, said
    assert 'href="https://example.org/r/blob/main/results/a.json"' in html
    assert 'href="https://example.org/r/tree/main/results">all' in html
    code, said = build(root, "{num}`results/a.json:ES:D|.1f`")  # without -W too
    assert code and "index.md:3" in said and "ES:D" in said
    code, said = build(root, "{repo}`results/none.json`")
    assert code and "there is no file results/none.json" in said
    code, said = build(root, "{repo}`../../../../etc/hosts`")
    assert code and "there is no file" in said
    code, said = build(root, "Its R@1 is 36.9.", "-W")
    assert code and "index.md:3" in said and "36.9" in said
    code, said = build(root, "{published}`hm/t6/cub/hm-lga-8:R@1`")
    assert code and "there is no file" in said
    (root / PUBLISHED).parent.mkdir(parents=True)
    shutil.copy(ROOT / PUBLISHED, root / PUBLISHED)
    code, said = build(root, "{published}`hm/t6/cub/hm-lga-8:R@1`", "-W")
    assert code == 0 and ">38.0<" in (root / "out" / "index.html").read_text(), said
    code, said = build(root, "{published}`hm/t6/cub/none:R@1`")
    assert code and "index.md:3" in said and "hm/t6/cub/none" in said
    code, said = build(root, "[a](#gone)", "-W")
    assert code and "gone" in said


@pytest.mark.parametrize("model", ["natural", "robust"])
def test_the_practice_audits_print_what_their_json_holds(model: str) -> None:
    curve = json.loads((ROOT / f"results/practice/{model}.json").read_text(encoding="utf-8"))["curve"]
    page = (ROOT / "docs/train/quick-start.md").read_text(encoding="utf-8")
    lines = page[page.index(f"audit runs/{model} --data photos/") :].splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("R@1 "))
    assert [float(cell) for cell in lines[at].split()[1:]] == pytest.approx(curve["lines"]["R@1"], abs=0.051)
    ends = [float(end) for end in re.findall(r"[\d.]+", lines[at + 1])]
    assert ends == pytest.approx([end for span in curve["intervals"]["R@1"] for end in span], abs=0.051)


LISTS = ROOT / "results" / "lists"


def test_the_list_attack_prints_what_its_json_holds() -> None:
    """The printed lines of the page, as `ListAttack` writes them; the command's settings are those of the JSON."""
    found = json.loads((LISTS / "natural.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/guides/black-box.md").read_text(encoding="utf-8")
    block = page[page.index("$ anchorhold attack-list runs/natural") :].split("```")[0]
    command, printed = block.split("…\n", 1)
    asked = {name: float(value) for name, value in re.findall(r"--?(k|queries|eps|limit) ([\d.]+)", command)}
    assert asked == {name: found["settings"][name] for name in asked} and len(asked) == 4
    lines = [f"{queries:>10,}{r1:>8.1f}" for queries, r1 in found["curve"]]
    said = [
        f"{found['images']} images, lists of {asked['k']:g}, goal {found['settings']['goal']}, ε {asked['eps']}",
        f"{'queries':>10}{'R@1':>8}",
        *lines,
        f"{found['queries']:,} queries in all",
    ]
    shown = [line for line in printed.splitlines() if line != "…"]
    assert shown == [line for line in said if line in shown] and {lines[0], lines[-1]} <= set(shown)


@pytest.mark.parametrize("model", ["natural", "hm-lga", "robust"])
def test_the_list_attacks_of_a_model_are_of_one_commit_and_model(model: str) -> None:
    short, long = (json.loads((LISTS / f"{model}{end}.json").read_text(encoding="utf-8")) for end in ("", "-1000"))
    assert short["model"] == long["model"] and short["data"] == long["data"]
    assert short["commit"] == long["commit"] and "dirty" not in short["commit"]
    alike = ("k", "eps", "norm", "goal", "seed")
    assert [short["settings"][name] for name in alike] == [long["settings"][name] for name in alike]
    assert [queries for queries, _ in long["curve"]] == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert long["images"] == 200 and short["settings"]["limit"] == short["images"] == 20


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_the_bar_of_a_format_is_escaped_in_a_table(page: Path) -> None:
    r"""Elsewhere a cell would end at it, and the build would show the text of the role: write \| there."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert not [role for line in lines for role in re.findall(r"\{num\}`[^`]*`", line) if re.search(r"(?<!\\)\|", role)]
