"""A sweep: every value once, what is done is left alone, and a collapse does not end it."""

import json
from pathlib import Path
from typing import Any

import pytest

from anchorhold.config.build import to_dict
from anchorhold.data.datasets import dataset
from anchorhold.data.splits import Dataset
from anchorhold.errors import Interrupted, RunError, SettingsError
from anchorhold.report.tables import Mean
from anchorhold.runs.folder import Run
from anchorhold.training import sweeping
from anchorhold.training.sweeping import parse_vary, points, sweep

pytestmark = pytest.mark.medium

QUICK = {
    "data": {"name": "digits"},
    "train": {"epochs": 1},
    "model": {"dim": 8},
    "batch": {"pairs": 300},
    "defence": {"steps": 1},
}
AUDITED = {"limit": 12, "eps": 0.2, "alpha": 0.1, "steps": 2, "resamples": 20}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return dataset("digits")


class Heard:
    """A report that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def task(self, name: str, total: int, done: int = 0) -> Any:
        from anchorhold.console import Silent

        return Silent().task(name, total, done)


def test_values_and_their_combinations() -> None:
    vary = parse_vary(["defence.steps=4,8", "train.seed= 0, 1"])
    assert vary == {"defence.steps": ["4", "8"], "train.seed": ["0", "1"]}
    found = points("hm-lga", vary, {"data": {"name": "digits"}})
    assert [point.folder for point in found] == [
        f"defence.steps={steps},train.seed={seed}" for steps in (4, 8) for seed in (0, 1)
    ]
    assert [(p.settings.defence.steps, p.settings.train.seed) for p in found] == [(4, 0), (4, 1), (8, 0), (8, 1)]


def test_methods_are_varied_like_settings(digits: Dataset, tmp_path: Path) -> None:
    vary = parse_vary(["recipe=natural,act", "train.seed=0,1"])
    found = points("hm-lga", vary, {"data": {"name": "digits"}})
    kinds = [(to_dict(point.settings)["defence"]["name"], point.settings.train.seed) for point in found]
    assert kinds == [("natural", 0), ("natural", 1), ("act", 0), ("act", 1)]
    heard = Heard()
    quick = {name: values for name, values in QUICK.items() if name != "defence"}
    swept = sweep(digits, "", {"recipe": ["natural"]}, tmp_path, overrides=quick, report=heard)  # type: ignore[arg-type]
    assert [file.name for file in swept.files] == ["compare.md", "compare.csv", "sweep.png"]
    assert not any("no figure" in line for line in heard.lines)


def test_folders_have_names_that_any_file_system_takes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("eps 4.pt", "run/model.safetensors", "other/eps 4.pt")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")
    digits = {"data": {"name": "digits"}}
    weights = [str(files[0]), "none", str(files[1]), "timm:some/name", "x" * 300]
    found = points("natural", {"model.weights": weights}, digits)
    names = [point.folder.removeprefix("model.weights=") for point in found]
    assert names[:4] == ["eps-4", "none", "run", "timm-some-name"] and len(names[4]) < 100
    assert found[0].settings.model.weights == weights[0] and found[1].settings.model.weights == ""
    with pytest.raises(SettingsError, match="would share a folder"):
        points("natural", {"model.weights": [str(files[0]), str(files[2])]}, digits)
    numbers = points("hm-lga", {"defence.eps": ["8/255", "0.5"], "defence.destination": ["-0.1", "0.1"]}, digits)
    assert [point.folder.replace("defence.", "") for point in numbers] == [
        f"eps={eps},destination={goal}" for eps in ("8-255", "0.5") for goal in ("-0.1", "0.1")
    ]
    assert numbers[0].settings.defence.eps == 8 / 255 and numbers[0].settings.defence.destination == -0.1


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "vary one or two"),
        (["defence.steps"], "--vary needs"),
        (["steps=4"], "--vary needs"),
        (["defence.steps=4,,8"], "--vary needs"),
        (["defence.steps=4", "defence.steps=8"], "given twice"),
        (["a.b=1", "a.c=1", "a.d=1"], "vary one or two"),
    ],
)
def test_what_cannot_be_varied_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        parse_vary(texts)


@pytest.mark.parametrize(
    ("vary", "overrides", "words"),
    [
        ({"defence.eps": ["8/255", "0.03137254901960784"]}, {}, "give the same settings"),
        ({"defence.steps": ["4"]}, {"defence": {"steps": "8"}}, "both set and varied"),
        ({"defence.steps": ["4"]}, {"defence": "hardness"}, "defence is a section"),
        ({"defence.stps": ["4"]}, {}, "did you mean defence.steps"),
        ({"data.held_out": ["2", "3"]}, {}, "a sweep has one data set"),
    ],
)
def test_every_point_is_checked_before_the_first_is_trained(
    vary: dict[str, list[str]], overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        points("hm-lga", vary, {"data": {"name": "digits"}, **overrides})


@pytest.mark.slow
def test_a_sweep_of_digits_and_the_same_again(digits: Dataset, tmp_path: Path) -> None:
    vary = {"defence.eps": ["0.1", "77/255"]}
    found = sweep(digits, "hm-lga", vary, tmp_path, overrides=QUICK, audited=AUDITED, device="cpu")
    folders = [tmp_path / "defence.eps=0.1", tmp_path / "defence.eps=77-255"]
    for folder, eps in zip(folders, (0.1, 77 / 255)):
        info = Run(folder).read_json()
        assert info["status"] == "done" and info["settings"]["defence"]["eps"] == pytest.approx(eps)
        assert json.loads((folder / "audit/audit.json").read_text())["settings"]["eps"] == 0.2
    assert [row[0] for row in found.tables[0].rows] == [folder.name for folder in folders]
    head, first, _ = (tmp_path / "compare.csv").read_text().splitlines()
    line = dict(zip(head.split(","), first.replace("HM[S, LGA]", "").split(",")))
    assert float(line["r1"]) > 30 and 0 < float(line["ers_published"]) < 100
    assert "| defence.eps=0.1 |" in (tmp_path / "compare.md").read_text()
    assert found.problems == () and (tmp_path / "sweep.png" in found.files) == (tmp_path / "sweep.png").exists()

    times = {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*.*")}
    heard = Heard()
    again = sweep(digits, "hm-lga", vary, tmp_path, overrides=QUICK, audited=AUDITED, device="cpu", report=heard)
    assert again.tables == found.tables
    assert times == {path: path.stat().st_mtime_ns for path in times}  # nothing was trained or audited again
    assert heard.lines.count("already done") == heard.lines.count("already audited") == 2
    with pytest.raises(RunError, match=r"other settings \(train\.epochs = 1\)"):
        sweep(digits, "hm-lga", vary, tmp_path, overrides={**QUICK, "train": {"epochs": 2}}, device="cpu")
    with pytest.raises(RunError, match="would lose its ε 51/255"):
        sweep(digits, "hm-lga", vary, tmp_path, overrides=QUICK, audited={**AUDITED, "eps": 0.3}, device="cpu")


def test_a_model_that_training_stops_for_collapse_is_left_behind(digits: Dataset, tmp_path: Path) -> None:
    vary = {"train.collapse_distance": ["5", "0"]}  # nothing is as far apart as 5
    overrides = {**QUICK, "train": {"epochs": 2, "collapse_warmup": 0}, "defence": {}}
    heard = Heard()
    found = sweep(digits, "natural", vary, tmp_path, overrides=overrides, device="cpu", report=heard)
    statuses = [Run(tmp_path / str(row[0])).read_json()["status"] for row in found.tables[0].rows]
    assert statuses == ["stopped", "done"]
    assert [row[-1] for row in found.tables[0].rows] == ["collapsed, epoch 2", "done"]
    assert any("this counts as a result" in line for line in heard.lines)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """fit and resume that train nothing, by what they were called with; 8 steps collapse, 9 are interrupted once."""
    calls: list[tuple[str, int]] = []

    def end(run: Run, steps: int, first: bool) -> Run:
        run.append({"epoch": 1, "r1": 40.0 - steps, "separability": 0.4})
        if steps == 8:
            run.update_json(status="stopped", reason="the model collapsed by epoch 1")
            raise RunError("training stopped: the model collapsed")
        if steps == 9 and first:
            run.update_json(status="interrupted")
            raise Interrupted("stopped and saved")
        run.update_json(status="done")
        return run

    def fit(model: None, data: Dataset, *, settings: Any, out: Path, **options: Any) -> Run:
        calls.append(("fit", settings.defence.steps))
        run = Run.create(out, {"settings": to_dict(settings), "data": {"name": data.name}, "status": "training"})
        return end(run, settings.defence.steps, True)

    def resume(out: Path, **options: Any) -> Run:
        run = Run(out)
        calls.append(("resume", run.read_json()["settings"]["defence"]["steps"]))
        return end(run, calls[-1][1], False)

    monkeypatch.setattr(sweeping, "fit", fit)
    monkeypatch.setattr(sweeping, "resume", resume)
    return calls


def test_a_collapse_is_a_result_and_what_was_stopped_goes_on(
    digits: Dataset, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    vary = {"defence.steps": ["4", "8", "9", "2"]}
    overrides = {"data": {"name": "digits"}}
    with pytest.raises(Interrupted, match="run the same sweep again"):
        sweep(digits, "hm-lga", vary, tmp_path, overrides=overrides)
    assert trained == [("fit", 4), ("fit", 8), ("fit", 9)]
    heard = Heard()
    found = sweep(digits, "hm-lga", vary, tmp_path, overrides=overrides, report=heard)
    assert trained[3:] == [("resume", 9), ("fit", 2)]  # 4 is done, and 8 has collapsed: that will not change
    keys = [column.key for column in found.tables[0].columns]
    rows = [dict(zip(keys, row)) for row in found.tables[0].rows]
    assert [row["steps"] for row in rows] == [4, 8, 9, 2]
    assert [row["ers_published"] for row in rows] == [None, "collapse", None, None]
    assert rows[1]["status"] == "collapsed, epoch 1"
    moved = {"data": {"name": "digits", "root": "elsewhere"}}
    assert sweep(digits, "hm-lga", vary, tmp_path, overrides=moved).tables == found.tables and len(trained) == 5


def test_two_settings_make_a_matrix_and_seeds_are_averaged(
    digits: Dataset, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    vary = {"defence.source": ["random", "softhard"], "defence.steps": ["2", "8"], "train.seed": ["0", "1"]}
    found = sweep(digits, "hm-lga", vary, tmp_path, overrides={"data": {"name": "digits"}})
    assert len(found.tables[0].rows) == 8
    (first, *cells), _ = found.tables[1].rows
    assert first == "random" and cells[0] == Mean(38.0, 2, 2) and cells[2] == "collapse (2)"
    assert "defence.source \\\\ defence.steps" in (tmp_path / "compare.md").read_text()


def test_a_fault_that_is_no_result_ends_the_sweep(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: Any, **__: Any) -> Run:
        raise RunError("the disk is full")

    monkeypatch.setattr(sweeping, "fit", fit)
    with pytest.raises(RunError, match="the disk is full"):
        sweep(digits, "hm-lga", {"defence.steps": ["2"]}, tmp_path, overrides={"data": {"name": "digits"}})


def test_without_matplotlib_there_is_still_the_table(
    digits: Dataset, tmp_path: Path, trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    heard = Heard()
    found = sweep(
        digits, "hm-lga", {"defence.steps": ["2"]}, tmp_path, overrides={"data": {"name": "digits"}}, report=heard
    )
    assert [file.name for file in found.files] == ["compare.md", "compare.csv"]
    assert any("pip install" in line for line in heard.lines)
