"""Numbers come from JSON: one that no file holds fails the build, and so does a link into nowhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from _ext.changelog import led
from _ext.links import broken
from _ext.numbers import Unfilled, filled, value_at

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
        "extensions = ['myst_parser', '_ext.numbers', '_ext.links']\n"
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
    code, said = build(root, "[a](#gone)", "-W")
    assert code and "gone" in said
