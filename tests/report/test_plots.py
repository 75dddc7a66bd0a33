"""Figures: what is drawn, read back from the axes, and that nobody has to have matplotlib."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anchorhold.errors import AnchorholdError, RunError, SettingsError
from anchorhold.interface import command_line
from anchorhold.report import epsilon, plots
from anchorhold.report.collect import Entry, collect
from anchorhold.report.epsilon import plot_epsilon
from anchorhold.report.plots import PLOTS, plot_against, plot_epochs
from tests.report.invented import a_curve, a_run, an_audit, flat_rows

pytestmark = pytest.mark.medium

pytest.importorskip("matplotlib", reason="plots are an extra")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were made."""
    figures: list[Any] = []
    make = plots.new_figure

    def spy(*size: float) -> Any:
        figures.append(make(*size))
        return figures[-1]

    monkeypatch.setattr(plots, "new_figure", spy)
    monkeypatch.setattr(epsilon, "new_figure", spy)
    return figures


def curves(axis: Any) -> list[list[tuple[float, float]]]:
    """The lines of an axis, its stars left out."""
    lines = [line for line in axis.get_lines() if line.get_marker() != "*"]
    return [list(zip(line.get_xdata(), line.get_ydata())) for line in lines]


def stars(axis: Any) -> list[tuple[float, float]]:
    found = [line for line in axis.get_lines() if line.get_marker() == "*"]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in found]


def entries(*paths: Path) -> tuple[Entry, ...]:
    return collect(paths).entries


def test_curves_of_several_runs(tmp_path: Path, drawn: list[Any]) -> None:
    a_run(tmp_path / "a", [{"epoch": 1, "loss": 0.3}, {"epoch": 2, "loss": 0.2, "r1": 40.0}])
    a_run(tmp_path / "b", [{"epoch": 1, "loss": 0.5, "r1": None}, {"loss": 0.1}, {"epoch": 2, "loss": "?"}])
    out = plot_epochs(entries(tmp_path), "curves", tmp_path / "figures/c.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    figure, (loss, recall) = drawn[0]
    assert curves(loss) == [[(1, 0.3), (2, 0.2)], [(1, 0.5)]] and curves(recall) == [[(2, 40.0)]]
    assert (loss.get_xlabel(), recall.get_ylabel()) == ("epoch", "R@1 (%)")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    looks = {(line.get_color(), line.get_linestyle()) for line in loss.get_lines()}
    assert len(looks) == 2 and len({style for _, style in looks}) == 2


def test_shares_end_at_100(tmp_path: Path, drawn: list[Any]) -> None:
    a_run(tmp_path / "a", [{"epoch": 1, "loss": 104.0, "r1": 90.0}, {"epoch": 2, "loss": 1.0, "r1": 100.0}])
    plot_epochs(entries(tmp_path), "curves", tmp_path / "c.png")
    loss, recall = drawn[0][1]
    assert recall.get_ylim()[1] == 100 and loss.get_ylim()[1] > 104
    plot_against(entries(tmp_path), "defence.steps", tmp_path / "s.png")
    assert drawn[1][1][0].get_ylim() == (0, 100)


def test_the_figure_under_attack_needs_runs_that_were_attacked(tmp_path: Path) -> None:
    a_run(tmp_path / "a", [{"epoch": 1, "loss": 0.3, "r1": 50.0}])
    with pytest.raises(RunError, match=r"no run here has logged R@1 under attack; train with .*train\.attack_eps"):
        plot_epochs(entries(tmp_path), "robust", tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_recall_against_epsilon_of_several_models(tmp_path: Path, drawn: list[Any]) -> None:
    a_curve(an_audit(a_run(tmp_path / "a") / "audit"), [90.0, 50.0, 10.0])
    a_curve(an_audit(tmp_path / "b"), [80.0, 60.0])
    an_audit(tmp_path / "c")  # without a curve
    out = plot_epsilon(entries(tmp_path), tmp_path / "c.png")
    figure, (axis,) = drawn[0]
    eps = 8 / 255
    assert curves(axis) == [[(0, 90.0), (eps / 2, 50.0), (eps, 10.0)], [(0, 80.0), (eps, 60.0)]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "4/255", "8/255"]
    assert axis.get_ylim() == (0, 100) and len(axis.collections) == 2  # with intervals
    with Image.open(out) as file:
        assert file.info["Description"].startswith("a: 0.0000 90.0, 0.0157 50.0")


def test_each_norm_has_its_panel(tmp_path: Path, drawn: list[Any]) -> None:
    a_curve(an_audit(tmp_path / "a"))
    path = a_curve(an_audit(tmp_path / "b", eps=0.5), eps=0.5) / "audit.json"
    audit = json.loads(path.read_text())
    audit["settings"]["norm"] = "l2"
    path.write_text(json.dumps(audit))
    plot_epsilon(entries(tmp_path), tmp_path / "c.svg")
    first, second = drawn[0][1]
    assert "pixel" in first.get_xlabel() and "L2" in second.get_xlabel()
    assert first.get_lines()[0].get_color() != second.get_lines()[0].get_color()


def test_without_a_curve_one_line_says_how_to_get_one(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    with command_line(), pytest.raises(RunError, match=r"^no audit here has R@1 against ε; audit with --curve …$"):
        plot_epsilon(entries(an_audit(tmp_path / "b"), tmp_path / "a"), tmp_path / "c.png")


def test_a_collapse_is_a_star_where_the_run_ended(tmp_path: Path, drawn: list[Any]) -> None:
    a_run(tmp_path / "bad", flat_rows(3), status="stopped")
    a_run(tmp_path / "good", flat_rows(4, separability=0.4))
    plot_epochs(entries(tmp_path), "collapse", tmp_path / "c.svg")
    figure, axes = drawn[0]
    assert [axis.get_ylabel() for axis in axes] == ["separability", "mean distance d̄"]  # nobody logged collapseness
    assert [stars(axis) for axis in axes] == [[(3, 0.0)], [(3, 0.5)]]
    assert "collapse" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("what", PLOTS)
def test_every_figure_has_its_columns(tmp_path: Path, drawn: list[Any], what: str) -> None:
    columns = list(PLOTS[what])
    a_run(tmp_path / "a", [{"epoch": 1} | {name: place for place, name in enumerate(columns)}])
    plot_epochs(entries(tmp_path), what, tmp_path / "c.png")
    assert [curves(axis) for axis in drawn[0][1]] == [[[(1, place)]] for place in range(len(columns))]


def test_columns_by_name_and_what_nobody_logged(tmp_path: Path, drawn: list[Any]) -> None:
    a_run(tmp_path / "a", flat_rows(2))
    plot_epochs(entries(tmp_path), "mean_distance, loss", tmp_path / "c.pdf")
    assert [axis.get_ylabel() for axis in drawn[0][1]] == ["mean_distance", "loss"]
    with pytest.raises(SettingsError, match="did you mean collapse"):
        plot_epochs(entries(tmp_path), "colapse", tmp_path / "c.png")
    with pytest.raises(RunError, match="has logged shift"):
        plot_epochs(entries(tmp_path), "shift", tmp_path / "c.png")
    with pytest.raises(SettingsError, match=r"\.png"):
        plot_epochs(entries(tmp_path), "loss", tmp_path / "c.gif")
    with pytest.raises(RunError, match="finished an epoch"):
        plot_epochs(entries(an_audit(tmp_path / "b")), "loss", tmp_path / "c.png")


@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")  # not every letter is in the font
@pytest.mark.parametrize("name", ["_hidden", "$x^{$", "a" * 200, "line\nbreak", "名"])
def test_no_name_breaks_a_figure(tmp_path: Path, drawn: list[Any], name: str) -> None:
    a_run(tmp_path / name, flat_rows(1))
    plot_epochs(entries(tmp_path / name), "loss", tmp_path / "c.png")
    (text,) = drawn[0][0].legends[0].get_texts()
    assert 0 < len(text.get_text()) <= 42


def test_scores_against_a_number(tmp_path: Path, drawn: list[Any]) -> None:
    """Figures 6 and 7: in order of the number, one run with its interval, several with their range."""
    for steps, seed, r1 in ((8, 0, 40.0), (2, 0, 50.0), (8, 1, 44.0)):
        run = a_run(
            tmp_path / f"{steps}-{seed}", [{"epoch": 1, "r1": r1}], defence={"steps": steps}, train={"seed": seed}
        )
        an_audit(run, ers=steps + 10.0 + seed)
    a_run(tmp_path / "bad", flat_rows(3), status="stopped", defence={"steps": 16})
    a_run(tmp_path / "going", [{"epoch": 1, "r1": 9.0}], status="training", defence={"steps": 4})
    plot_against(entries(tmp_path), "defence.steps", tmp_path / "c.png")
    _, (recall, published, corrected) = drawn[0]
    assert curves(recall) == [[(2, 50.0), (8, 42.0)]]
    assert curves(published) == [[(2, 12.0), (8, 18.5)]] and curves(corrected) == [[(2, 7.0), (8, 13.5)]]
    spans = [[tuple(float(y) for _, y in path) for path in bars.get_segments()] for bars in published.collections]
    assert spans == [[(11.0, 13.0)], [(18.0, 19.0)]]
    assert all(stars(axis) == [(16, 0)] for axis in (recall, published, corrected))
    assert recall.get_xlabel() == "defence.steps" and published.get_ylabel() == "ERS publ. (%)"


def test_scores_against_names_with_a_line_for_each_series(tmp_path: Path, drawn: list[Any]) -> None:
    """the robust-init study's figure 4: initial weights are files, and are called by their names."""
    for place, weights in enumerate(("w/eps4.pt", "w/eps0.pt")):
        for steps in (4, 8):
            path = tmp_path / f"{place}-{steps}"
            a_run(path, [{"epoch": 1, "r1": steps + place}], defence={"steps": steps}, model={"weights": weights})
    plot_against(entries(tmp_path), "model.weights", tmp_path / "c.png", series="steps")
    figure, (recall,) = drawn[0]  # nothing was audited
    assert curves(recall) == [[(0, 5), (1, 4)], [(0, 9), (1, 8)]]
    assert [label.get_text() for label in recall.get_xticklabels()] == ["eps0", "eps4"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["steps = 4", "steps = 8"]
    a_run(tmp_path / "new", [{"epoch": 1, "r1": 1.0}], model={"weights": "v/eps4.pt"})
    plot_against(entries(tmp_path), "model.weights", tmp_path / "c.png")
    ticks = [label.get_text() for label in drawn[1][1][0].get_xticklabels()]
    assert ticks == ["v/eps4.pt", "w/eps0.pt", "w/eps4.pt"]  # two files of one name
    with pytest.raises(SettingsError, match=r"did you mean model\.weights"):
        plot_against(entries(tmp_path), "model.weigths", tmp_path / "c.png")


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path / "a", flat_rows(1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AnchorholdError, match="pip install"):
        plot_epochs(entries(tmp_path), "loss", tmp_path / "c.png")
