"""Tables inside a page: written where they are asked for, and nothing else is touched."""

from pathlib import Path

import pytest

from anchorhold.errors import AnchorholdError, SettingsError
from anchorhold.report.insert import regenerated, write_into
from tests.report.invented import a_run, an_audit

PAGE = """# Mine
<!-- compare results/a -->
old
<!-- end -->
between
<!-- compare results/b --table columns --sort ers -->
<!-- end -->
after"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    an_audit(a_run(Path("results/a/one")), ers=20)
    an_audit(a_run(Path("results/b/two")), ers=30)
    Path("docs").mkdir()


def test_every_table_of_the_folders_is_made_again() -> None:
    text, count, problems = regenerated(PAGE, Path("docs"), [Path("results/a"), Path("results/b")])
    assert count == 2 and not problems and "\nold\n" not in text
    assert "| [one](../results/a/one/run.json) |" in text
    found = text.index("25.0 [24.0, 26.0]"), text.index("[two](../results/b/two/audit.json)")
    assert found[1] > text.index("between") and text.startswith("# Mine\n") and text.endswith("<!-- end -->\nafter")
    lines = [line for line in text.splitlines() if line.startswith("| [two]")]
    assert [line.split(" | ")[1] for line in lines] == ["published", "corrected"]
    again, _, _ = regenerated(text, Path("docs"), [Path("results/a"), Path("results/b")])
    assert again == text


def test_tables_of_other_folders_stay_as_they_are() -> None:
    text, count, _ = regenerated(PAGE, Path("docs"), [Path("results/b")])
    assert count == 1 and "\nold\n" in text and "[two]" in text and "[one]" not in text
    assert regenerated(PAGE, Path("docs"), [Path("results").resolve() / "a"])[1] == 1  # however it is written


def test_a_changed_number_is_seen() -> None:
    text, _, _ = regenerated(PAGE, Path("docs"), [Path("results/a"), Path("results/b")])
    for number in ("20.0 [19.0", "15.0 [14.0", "25.0 [24.0", "| 100 |"):
        assert number in text
        spoilt = text.replace(number, number.replace("0", "7", 1), 1)
        assert regenerated(spoilt, Path("docs"), [Path("results/a"), Path("results/b")])[0] == text != spoilt


def test_a_broken_run_is_told_and_the_others_are_shown() -> None:
    Path("results/a/bad").mkdir()
    Path("results/a/bad/run.json").write_text("{")
    Path("docs/page.md").write_text(PAGE)
    count, problems = write_into(Path("docs/page.md"), [Path("results/a")])
    (line,) = problems
    assert count == 1 and "results/a/bad/run.json" in line and "[one]" in Path("docs/page.md").read_text()


def test_a_name_cannot_end_the_table() -> None:
    a_run(Path("results/a/<!-- end -->"))
    text, _, _ = regenerated(PAGE, Path("docs"), [Path("results/a")])
    assert regenerated(text, Path("docs"), [Path("results/a")])[0] == text and text.count("\n<!-- end -->") == 2


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("nothing", "has no table"),
        ("<!-- compare results/b -->\n<!-- end -->", "has no table of these folders: it has 'results/b'"),
        ("<!-- compare results/a -->\n", "has no <!-- end -->"),
        ("<!-- compare results/a -->\n<!-- compare results/a -->\n<!-- end -->", "before the next table"),
        ("<!-- compare results/a --table colums -->\n<!-- end -->", "did you mean columns"),
        ("<!-- compare results/a --sorted r1 -->\n<!-- end -->", "not --sorted"),
        ("<!-- compare results/a --sort r3 -->\n<!-- end -->", "to sort by"),
        ("<!-- compare --table runs -->\n<!-- end -->", "names no folder"),
        ("<!-- compare 'results/a -->\n<!-- end -->", "cannot be read"),
    ],
)
def test_mistakes_leave_the_page_alone(page: str, words: str) -> None:
    file = Path("docs/page.md")
    file.write_text(page)
    with pytest.raises(SettingsError, match=words):
        write_into(file, [Path("results/a")])
    assert file.read_text() == page


def test_a_page_that_is_not_there_is_one_line() -> None:
    with pytest.raises(AnchorholdError, match="cannot read"):
        write_into(Path("docs/none.md"), [Path("results/a")])


def test_a_folder_of_pages_is_written_at_once() -> None:
    first, second, third = Path("docs/one.md"), Path("docs/two.md"), Path("docs/three.md")
    first.write_text(PAGE)
    second.write_text("<!-- compare results/a --links repo -->\n<!-- end -->\n")
    third.write_text("no table\n")
    count, problems = write_into(Path("docs"), [Path("results")])
    assert count == 3 and not problems and third.read_text() == "no table\n"
    assert "| [one](../results/a/one/run.json) |" in first.read_text()
    assert "| {repo}`one <results/a/one/run.json>` |" in second.read_text()  # from the working directory
    with pytest.raises(SettingsError, match="no page in docs has a table"):
        write_into(Path("docs"), [Path("other")])


def test_a_folder_keeps_the_rule_of_a_page() -> None:
    """What would stay the same is not written; a file that is no text is one line, and no page is touched."""
    made, page = Path("docs/one.md"), Path("docs/two.md")
    made.write_text(PAGE)
    assert write_into(Path("docs"), [Path("results")])[0] == 2
    before = made.stat().st_ino, made.stat().st_mtime_ns
    assert write_into(Path("docs"), [Path("results")])[0] == 2  # an atomic write would be another file
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == before
    page.write_bytes(b"\xff\xfe")
    Path("docs/a.md").write_text(PAGE)
    with pytest.raises(AnchorholdError, match=r"cannot read docs/two\.md"):
        write_into(Path("docs"), [Path("results")])
    assert Path("docs/a.md").read_text() == PAGE
