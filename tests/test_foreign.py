"""What somebody else's folders and names can do: nothing to a terminal, a spreadsheet or files elsewhere."""

import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import anchorhold as ah
from anchorhold.cli.main import app
from anchorhold.console import Console
from anchorhold.errors import ModelError, RunError
from anchorhold.index.embedding import embed
from anchorhold.index.folder import Index
from anchorhold.report.collect import walk
from anchorhold.report.rendering import render
from anchorhold.report.tables import Column, Table
from anchorhold.runs.folder import Run

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\rname"


def clean(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def told(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_errors_show_escape_sequences_and_do_not_send_them(tmp_path: Path) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    (folder / "run.json").write_text('{"schema": "\\u001b[31mother\\nline"}')
    code, text = told("resume", str(folder))
    assert code == 2 and clean(text) and "\\x1b]0;owned" in text and text.count("\n") == 1
    code, text = told("compare", str(tmp_path / EVIL / "missing"))
    assert code == 2 and clean(text) and "\\x1b" in text


def test_what_others_raise_is_shown_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import anchorhold.cli.doctor

    for error in (ModelError(f"theirs: {EVIL}\nmore"), RunError(EVIL), PermissionError(13, "denied", EVIL)):

        def fail(error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(anchorhold.cli.doctor, "findings", fail)
        code, text = told("doctor")
        assert code == 2 and clean(text) and text.count("\n") == 1


def test_results_and_news_are_visible_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import anchorhold.cli.doctor

    monkeypatch.setattr(anchorhold.cli.doctor, "findings", lambda: [("✓", EVIL)])
    code, text = told("doctor")
    assert code == 0 and clean(text) and text.startswith("✓ x\\x1b")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    Console().say(f"{EVIL}\nsecond line")
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert clean(said) and said.count("\n") == 2


def test_a_name_like_a_formula_is_text_in_a_spreadsheet_and_itself_when_it_is_read_again(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    names = ["=cmd('a').png", "+1.png", "-2.png", "@x.png", "'=y.png", "plain.png"]
    for number, name in enumerate(names):
        (photos / "-1").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(photos / name)
    index = embed(ah.Embedder("small", 4, size=8), photos, tmp_path / "index", device="cpu")
    with open(tmp_path / "index" / "ids.csv", newline="") as file:
        cells = [row[0] for row in csv.reader(file)][1:]
    assert not any(each[0] in "=+-@" for each in cells) and "plain.png" in cells
    assert sorted(row[0] for row in Index(index.path).rows) == sorted(names)


def test_tables_keep_numbers_and_disarm_formulas() -> None:
    table = Table((Column("run", "run"), Column("gain", "gain")), [["=HYPERLINK(1)", -0.5], ["-0.5", None]], [])
    rows = list(csv.reader(io.StringIO(render(table, "csv"))))
    assert rows[1:] == [["'=HYPERLINK(1)", "-0.5"], ["-0.5", ""]]


def test_links_out_of_the_given_folders_are_not_followed(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    Run.create(mine / "secret", {"status": "done"})
    (theirs / "inner").mkdir(parents=True)
    (theirs / "out").symlink_to(mine)
    (theirs / "within").symlink_to(theirs / "inner")
    problems: list[str] = []
    assert list(walk([theirs], problems)) == [theirs, theirs / "inner"]
    assert len(problems) == 1 and str(theirs / "out") in problems[0]
    link = tmp_path / "link"
    link.symlink_to(mine)
    assert list(walk([link], [])) == [link, link / "secret"]  # the user gave it
    assert theirs / "out" / "secret" in list(walk([theirs, mine], []))  # and here its target too
    code, text = told("report", str(theirs))
    assert code == 2 and [each.name for each in (mine / "secret").iterdir()] == ["run.json"], text


def test_parts_and_shards_behind_a_link_are_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "000000.safetensors").write_text("theirs")
    for folder, name in (("index", ".anchorhold-parts"), ("audit", "shards")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).symlink_to(victim)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    model = ah.Embedder("small", 4, channels=1, size=8)
    with pytest.raises(RunError, match="is a symbolic link"):
        embed(model, tmp_path, tmp_path / "index", device="cpu")
    with pytest.raises(RunError, match="is a symbolic link"):
        ah.audit(model, ah.dataset("digits").test, limit=2, epsilons=(), out=tmp_path / "audit", device="cpu")
    assert (victim / "000000.safetensors").read_text() == "theirs"
