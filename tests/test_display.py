"""What a notebook shows: short texts, escaped HTML without scripts, data frames, and progress below a cell."""

import builtins
import contextlib
import html.parser
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorhold as ah
from anchorhold.auditing.result import Audit
from anchorhold.columns import NOT_PERCENT
from anchorhold.console import Console, in_notebook
from anchorhold.display import frame_of, html_table
from anchorhold.errors import SettingsError
from anchorhold.index.searching import Found, Hit
from anchorhold.runs.folder import Run

EVIL = "<script>alert(1)</script>&\x1b[31m"


class Cells(html.parser.HTMLParser):
    """The cells of the tables, and every tag and attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"unclosed {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def checked(thing: Any) -> Cells:
    """The HTML of an object, after the rules of all of it: no script, no style sheet, no fixed colours."""
    text = thing._repr_html_()
    found = Cells(text)
    assert found.tags <= {"div", "strong", "table", "tr", "td", "th"} and found.attributes <= {"style"}
    assert "color:inherit" in text and "#" not in text.replace("&#", "") and "\x1b" not in text
    assert len(repr(thing).splitlines()) <= 2 and len(repr(thing)) < 400
    return found


@pytest.fixture(scope="module")
def audit() -> Audit:
    options: dict[str, Any] = {"limit": 6, "steps": 2, "resamples": 9, "device": "cpu"}
    return ah.audit(ah.Embedder("small", 8, channels=1, size=8), ah.dataset("digits"), epsilons=[0.01, 0.02], **options)


def test_a_table_escapes_all_it_is_given() -> None:
    text = html_table(EVIL, ["a", EVIL], [[EVIL, 1.5]], [EVIL], EVIL)
    assert "<script" not in text and text.count("&lt;script&gt;") == 5 and "\\x1b[31m" in text
    assert Cells(text).rows == [["a", EVIL.replace("\x1b", "\\x1b")], [EVIL.replace("\x1b", "\\x1b"), "1.5"]]


@pytest.mark.slow
def test_an_audit_shows_its_numbers(audit: Audit) -> None:
    cells = {row[0]: row[1:] for row in checked(audit).rows}
    assert cells["attack"] == ["before", "after (published)", "after (corrected)"]
    column = audit.protocols["corrected"].columns["LTM"]
    assert cells["LTM"][2] == f"{column.value:.1f} [{column.low:.1f}, {column.high:.1f}]"
    assert cells["LTM"][0] == f"{column.initial:.1f}"
    ers = audit.protocols["corrected"].ers
    assert ers is not None and cells["ERS"][2].startswith(f"{ers.value:.1f} [")
    assert f"ERS {ers.value:.1f} [" in repr(audit) and "\n" not in repr(audit)
    assert str(audit).count("\n") > 20  # print stays the table


def test_a_frame_of_an_audit_has_every_number(audit: Audit) -> None:
    frame = audit.to_frame()
    assert list(frame.columns[:6]) == ["kind", "protocol", "attack", "eps", "before", "after"]
    assert set(frame.kind) == {"clean", "attack", "score", "curve"}
    for protocol, outcome in audit.protocols.items():
        mine = frame[(frame.kind == "attack") & (frame.protocol == protocol)].set_index("attack")
        assert list(mine.index) == list(outcome.columns)
        for name, column in outcome.columns.items():
            row = mine.loc[name]
            assert (row.after, row.before, row.low, row.high) == (column.value, column.initial, column.low, column.high)
            assert row.eps == 8 / 255 and (row.unit == "percent") == (name not in NOT_PERCENT)
        score = frame[(frame.kind == "score") & (frame.protocol == protocol) & (frame.attack == "ERS")]
        assert outcome.ers is not None and score.after.tolist() == [outcome.ers.value]
    assert audit.curve is not None
    curve = frame[frame.kind == "curve"]
    for name, values in audit.curve["lines"].items():
        line = curve[curve.attack == name]
        assert line.eps.tolist() == list(audit.curve["eps"]) and line.after.tolist() == pytest.approx(values)
    clean = frame[frame.kind == "clean"].set_index("attack")
    assert clean.loc["R@1"].before == audit.clean["R@1"].value


def test_frames_without_pandas_are_one_line(monkeypatch: pytest.MonkeyPatch, audit: Audit, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (audit.to_frame, Run(tmp_path).to_frame, lambda: frame_of([])):
        with pytest.raises(SettingsError, match=r"^to_frame needs pandas.*pip install pandas$"):
            ask()


def test_a_run_shows_its_epochs(tmp_path: Path) -> None:
    info = {"status": "done", "settings": {"recipe": "natural", "train": {"epochs": 12}}}
    run = Run.create(tmp_path / "run", info)
    for epoch in range(1, 13):
        run.append(
            {"step": 3 * epoch, "epoch": epoch, "loss": 1 / epoch, **({"r1": 40.0 + epoch} if epoch % 2 == 0 else {})}
        )
    rows = checked(run).rows
    assert rows[0] == ["epoch", "loss", "r1"] and rows[1][0] == "…" and rows[-1] == ["12", "0.08333", "52"]
    assert len(rows) == 10  # a head, the dots, and eight epochs
    assert repr(run) == f"<Run {run.path}: status done, recipe natural, epoch 12 of 12, R@1 52.0>"
    frame = run.to_frame()
    assert frame.shape == (12, 4) and frame.loss.tolist() == pytest.approx([1 / epoch for epoch in range(1, 13)])
    assert frame.r1.isna().sum() == 6
    assert checked(Run(tmp_path / "none")).rows == [] and Run(tmp_path / "none").to_frame().empty


@pytest.mark.parametrize("record", ["", "[]", '{"schema": "x"}', '{"schema": "anchorhold.run/2", "status": {"a": 1}}'])
def test_a_damaged_run_is_still_shown(tmp_path: Path, record: str) -> None:
    (tmp_path / "run.json").write_text(record)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"epoch": "<b>", "loss": EVIL, "r1": None}) + "\n[\n")
    checked(Run(tmp_path))


def test_data_show_their_parts() -> None:
    data = ah.dataset("digits")
    assert repr(data) == (
        "<Dataset digits: train 901 images of 5 classes, 8×8×1 uint8;\n test 896 images of 5 classes, 8×8×1 uint8>"
    )
    assert checked(data).rows[1:] == [["train", "901", "5", "8×8×1 uint8"], ["test", "896", "5", "8×8×1 uint8"]]
    evil = ah.Split(EVIL, torch.tensor([0, 1]), ("a", "b"), images=torch.zeros(2, 4, 4, 3))
    assert "2 images of 2 classes, 4×4×3 float32" in repr(evil) and "\x1b" not in repr(evil)
    checked(evil)


def test_what_was_found_is_a_table() -> None:
    found = Found(f"{EVIL}.png", "index", (Hit(1, 0.25, "a.png", "cat"), Hit(2, 0.5, EVIL, "")))
    assert checked(found).rows[1] == ["1", "0.2500", "cat", "a.png"]
    assert str(found).count("\n") == 2


# Progress -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as a Jupyter kernel, without IPython."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)


def work(console: Console, until: int = 3) -> None:
    console.say("begun")
    with console.task("training", until) as advance:
        for done in range(1, until + 1):
            advance(done, f"epoch {done}")


def test_a_notebook_is_known_and_a_terminal_is_none(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_notebook()
    monkeypatch.setattr(builtins, "get_ipython", lambda: type("TerminalInteractiveShell", (), {})())
    assert not in_notebook()
    monkeypatch.setattr(builtins, "get_ipython", lambda: None)
    assert not in_notebook()
    monkeypatch.delattr(builtins, "get_ipython")
    assert not in_notebook()


def test_without_widgets_a_notebook_gets_plain_lines_below_the_cell(kernel: None, capsys: Any) -> None:
    work(Console())
    said = capsys.readouterr()
    assert said.err == "" and said.out.splitlines()[0] == "begun"
    assert said.out.splitlines()[-1].startswith("training: 3 of 3, ") and "epoch 3" in said.out


def test_with_widgets_a_notebook_draws_a_bar(kernel: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shown: list[Any] = []
    drawn: list[str] = []

    class Output(contextlib.AbstractContextManager[None]):
        def __exit__(self, *error: object) -> None:
            return

        def clear_output(self, wait: bool) -> None:
            drawn.clear()

    def display(thing: Any) -> None:
        target = shown if isinstance(thing, Output) else drawn
        target.append(thing if isinstance(thing, Output) else thing._repr_mimebundle_((), ())["text/plain"])

    parts = {"IPython": {}, "IPython.display": {"display": display}, "ipywidgets": {"Output": Output}}
    for name, inside in parts.items():
        module = types.ModuleType(name)
        vars(module).update(inside)
        monkeypatch.setitem(sys.modules, name, module)
    work(Console())
    bar = "".join(drawn)
    assert len(shown) == 1 and "training" in bar and "3/3" in bar and "epoch 3" in bar
    said = capsys.readouterr()
    assert said.out == "begun\n" and said.err == ""


def test_elsewhere_everything_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    work(Console())
    assert out.getvalue() == "" and err.getvalue().startswith("begun\ntraining: 3 of 3")
