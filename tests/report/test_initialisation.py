"""Figure 4 of the robust-init study: R@1 and ERS against the ε of the initial weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from anchorhold.cli.main import app
from anchorhold.errors import RunError
from anchorhold.report.collect import collect
from anchorhold.report.initialisation import plot_initialisation, start_eps
from tests.report.invented import a_run, an_audit
from tests.report.test_plots import curves, drawn  # noqa: F401 (a fixture)


def started(path: Path, start: str, recipe: str, r1: float, ers: float, sha: str, **more: Any) -> None:
    """A run from `start`: imagenet, or the exported model of a run folder."""
    source = start if start == "imagenet" else f"{start}/model.safetensors"
    about = {"config": {"backbone": "small", "dim": 16}, "weights": {"source": source, "sha256": sha}}
    a_run(path, [{"epoch": 1, "r1": r1}], recipe, **more)
    info = json.loads((path / "run.json").read_text())
    info["model"], info["settings"]["model"]["weights"] = about, start
    (path / "run.json").write_text(json.dumps(info))
    an_audit(path, ers=ers, r1=r1)


def a_study(folder: Path) -> None:
    for eps in (1, 4):
        a_run(
            folder / f"start-{eps}",
            [{"epoch": 1, "drift": 0.1}],
            "distil",
            defence={"eps": eps / 255},
            export=f"s{eps}",
        )
    a_run(folder / "start-l2", [{"epoch": 1, "drift": 0.1}], "distil", defence={"norm": "l2", "eps": 3.0}, export="l2")
    soft = {"sampler": "softhard", "start": "random"}
    for place, (start, sha) in enumerate((("imagenet", "i"), ("start-1", "s1"), ("start-4", "s4"), ("start-l2", "l2"))):
        at = start if start == "imagenet" else str(folder / start)
        started(folder / f"hm-{place}", at, "hm-lga", 30.0 + place, 20.0 + place, sha)
        started(folder / f"est-{place}", at, "est", 40.0 + place, 10.0 + place, sha, defence=soft)


def test_lines_by_method_against_the_epsilon_of_the_start(tmp_path: Path, drawn: list[Any]) -> None:  # noqa: F811
    a_study(tmp_path / "runs")
    plot_initialisation(collect([tmp_path / "runs"]).entries, tmp_path / "c.png")
    figure, (recall, published, _) = drawn[0]
    assert curves(recall) == [[(0, 40), (1, 41), (4, 42)], [(0, 30), (1, 31), (4, 32)]]  # none for the start in L2
    assert curves(published) == [[(0, 10), (1, 11), (4, 12)], [(0, 20), (1, 21), (4, 22)]]
    assert recall.get_xlabel() == "ε of the initial weights (1/255)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["EST[S]", "HM[S, LGA]"]


def test_the_command_draws_it_and_unknown_starts_are_one_line(tmp_path: Path, capsys: Any) -> None:
    a_study(tmp_path / "runs")
    words = ["plot", str(tmp_path / "runs"), "--what", "initialisation", "--out", str(tmp_path / "c.png")]
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert not ended.value.code and (tmp_path / "c.png").stat().st_size > 1000
    a_run(tmp_path / "alone", model={"weights": "somewhere.pt"})
    with pytest.raises(RunError, match="add the folders of the runs that made the weights"):
        plot_initialisation(collect([tmp_path / "alone"]).entries, tmp_path / "c.png")


def test_rows_say_what_their_weights_were_trained_against(tmp_path: Path) -> None:
    cases = (("robust-init/a5/cub/hm-lga-8-init-4", 4.0), ("hm/t6/cub/hm-lga-8", 0.0), ("", None))
    for place, (row, eps) in enumerate(cases):
        a_run(tmp_path / str(place), model={"weights": "somewhere.pt"}, on="cub", row=row)
        (entry,) = collect([tmp_path / str(place)]).entries
        assert start_eps(entry, [entry]) == eps
