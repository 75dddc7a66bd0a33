"""Runs as points: where they stand, what is grey, and that no name lies on another."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from anchorhold.errors import RunError, SettingsError
from anchorhold.report import scatter
from anchorhold.report.collect import Entry, collect
from anchorhold.report.scatter import SCATTERS, plot_cost, plot_rows
from anchorhold.reproduce.rows import rows
from tests.report.invented import a_run, an_audit, flat_rows

pytestmark = pytest.mark.medium

pytest.importorskip("matplotlib", reason="plots are an extra")

HM = "hm/t6/cub/hm-lga-8"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    figures: list[Any] = []
    make = scatter.new_figure

    def spy(*size: float) -> Any:
        figures.append(make(*size))
        return figures[-1]

    monkeypatch.setattr(scatter, "new_figure", spy)
    return figures


def scored(path: Path, r1: float, ers: float, **more: Any) -> Path:
    strong = more.pop("strong", False)
    return an_audit(a_run(path, [{"epoch": 1, "r1": r1}], **{"on": "cub", **more}), ers=ers, r1=r1, strong=strong)


def entries(*paths: Path) -> tuple[Entry, ...]:
    return collect(paths).entries


def marks(axis: Any, grey: bool = False) -> list[tuple[float, float, bool]]:
    """x, y and whether it is filled; lines without a mark left out."""
    found = [line for line in axis.get_lines() if line.get_marker() != "None"]
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]), line.get_markerfacecolor() != "white")
        for line in found
        if (line.get_color() == scatter._GREY) == grey
    ]


def test_rows_and_print(tmp_path: Path, drawn: list[Any]) -> None:
    scored(tmp_path / "a", 36.0, 33.0, row=HM)
    scored(tmp_path / "b", 45.0, 40.0, strong=True)
    a_run(tmp_path / "not-audited", on="cub")
    an_audit(a_run(tmp_path / "collapsed", flat_rows(), on="cub"))
    out = plot_rows(entries(tmp_path), tmp_path / "c.png")
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size < 150_000
    figure, (axis,) = drawn[0]
    assert marks(axis) == [(36, 33, True), (36, 28, False), (45, 40, True), (45, 35, False), (45, 28, True)]
    printed = [row.published for row in rows() if row.data == "cub" and {"R@1", "ERS"} <= {*row.published}]
    expected = sorted((each["R@1"], each["ERS"]) for each in printed if each["R@1"] >= 10)
    assert sorted((x, y) for x, y, _ in marks(axis, grey=True)) == expected and len(expected) > 100
    (dotted,) = [line for line in axis.get_lines() if line.get_linestyle() == ":"]
    assert list(zip(dotted.get_xdata(), dotted.get_ydata())) == [(36, 33), (38.0, 32.4)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("published", "corrected", "strong", "in the papers", "in the papers, robust start")
    ]
    assert {text.get_text() for text in axis.texts} == {"a", "b"}


def test_cost_as_print_counts_it_and_as_it_was(tmp_path: Path, drawn: list[Any]) -> None:
    scored(tmp_path / "a", 36.0, 33.0, image_steps=3_000_000)
    scored(tmp_path / "b", 50.0, 4.0, recipe="natural", image_steps=0)
    scored(tmp_path / "c", 35.0, 30.0, defence={"steps": 32})  # an older run, which did not count
    plot_cost(entries(tmp_path), tmp_path / "c.png")
    _, (left, right) = drawn[0]
    assert [(x, y) for x, y, full in marks(left) if full] == [(9, 33), (1, 4), (33, 30)]
    assert marks(right) == [(3, 33, True), (3, 28, False), (0, 4, True), (0, -1, False)]
    grey = {(x, y) for x, y, _ in marks(left, grey=True)}
    assert {(9, 32.4), (33, 36.0), (17, 38.6), (1, 3.8)} <= grey and not marks(right, grey=True)


def test_what_a_start_has_cost_is_counted(tmp_path: Path, drawn: list[Any]) -> None:
    """Where the run that made the weights is not at hand, its cost is not known, and nothing is drawn."""

    def begins(name: str, start: str, ers: float = 30.0) -> None:
        folder = scored(tmp_path / name, 36.0, ers, image_steps=1_000_000)
        info = json.loads((folder / "run.json").read_text())
        info["model"]["weights"] = {"source": start}
        (folder / "run.json").write_text(json.dumps(info))

    begins("first", "resnet18.safetensors")
    begins("second", "first/model.safetensors", 31.0)
    begins("third", "second/model.safetensors", 32.0)
    begins("lost", "elsewhere/model.safetensors")
    begins("round", "round/model.safetensors")
    for name in ("twin", "b/twin"):
        begins(name, "resnet18.safetensors")
    begins("of-twins", "twin/model.safetensors")
    plot_cost(entries(tmp_path), tmp_path / "c.png")
    _, (left, right) = drawn[0]
    assert sorted((x, y) for x, y, full in marks(right) if full) == [(1, 30), (1, 30), (1, 30), (2, 31), (3, 32)]
    assert sum(full for *_, full in marks(left)) == 8
    assert right.get_xlabel().endswith("\nunknown for lost, of-twins, round")


def test_a_start_is_known_by_what_it_exported(tmp_path: Path, drawn: list[Any]) -> None:
    for name, more in (
        ("old", {"image_steps": 5_000_000}),
        ("start", {"image_steps": 2_000_000, "export": "abc"}),
        ("end", {"image_steps": 1_000_000}),
    ):
        scored(tmp_path / name, 36.0, 30.0, **more)
    info = json.loads((tmp_path / "end" / "run.json").read_text())
    info["model"]["weights"] = {"source": "old/model.safetensors", "sha256": "abc"}  # its folder was renamed since
    (tmp_path / "end" / "run.json").write_text(json.dumps(info))
    plot_cost(entries(tmp_path), tmp_path / "c.png")
    (right,) = drawn[0][1][1:]
    assert sorted(x for x, _, full in marks(right) if full) == [2, 3, 5] and "unknown" not in right.get_xlabel()


def test_runs_of_one_cost_stand_side_by_side(tmp_path: Path, drawn: list[Any]) -> None:
    for place in range(3):
        scored(tmp_path / str(place), 36.0, 30.0 + place)
    plot_cost(entries(tmp_path), tmp_path / "c.png")
    places = [x for x, _, full in marks(drawn[0][1][0]) if full]
    assert places[0] < places[1] == 9 < places[2] and places[2] < 11


@pytest.mark.parametrize("what", SCATTERS)
def test_no_name_lies_on_another_or_leaves_the_axes(tmp_path: Path, drawn: list[Any], what: str) -> None:
    for place in range(14):
        more = {"defence": {"steps": 8 if place < 9 else 16}, "image_steps": 2_000_000 + 100_000 * place}
        scored(tmp_path / f"a-rather-long-name-{place}", 36 + 0.4 * (place % 4), 33 + 0.3 * place, **more)
    SCATTERS[what](entries(tmp_path), tmp_path / "c.png")
    figure, axes = drawn[0]
    figure.draw_without_rendering()
    for axis in axes:
        boxes = [text.get_window_extent() for text in axis.texts]
        around = axis.get_window_extent()
        assert len(boxes) == 14
        for one, other in combinations(boxes, 2):
            assert one.x1 <= other.x0 + 1 or other.x1 <= one.x0 + 1 or one.y1 <= other.y0 + 1 or other.y1 <= one.y0 + 1
        assert all(around.x0 - 1 <= box.x0 and box.x1 <= around.x1 + 1 for box in boxes)
        assert all(around.y0 - 1 <= box.y0 and box.y1 <= around.y1 + 1 for box in boxes)


@pytest.mark.slow
def test_every_run_of_many_has_a_look_of_its_own(tmp_path: Path, drawn: list[Any]) -> None:
    for place in range(20):
        scored(tmp_path / f"{place:02}", 30.0 + place, 20.0)
    plot_rows(entries(tmp_path), tmp_path / "c.png")
    own = [line for line in drawn[0][1][0].get_lines() if line.get_marker() != "None" and line.get_ydata()[0] == 20]
    looks = {(line.get_color(), line.get_marker()) for line in own if line.get_color() != scatter._GREY}
    assert len(looks) == 20


@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")  # not every letter is in the font
@pytest.mark.parametrize("name", ["$x^{$", "a" * 200, "line\nbreak", "名", "<b>"])
def test_neither_a_name_nor_data_without_print_breaks_it(tmp_path: Path, drawn: list[Any], name: str) -> None:
    scored(tmp_path / name, 36.0, 33.0, on="digits", row=HM)
    for plot in SCATTERS.values():
        plot(entries(tmp_path), tmp_path / "c.svg")
    for figure, axes in drawn:
        assert not marks(axes[0], grey=True) and len(figure.legends[0].get_texts()) == 2
        assert 0 < len(axes[0].texts[0].get_text()) <= 32


@pytest.mark.parametrize("plot", SCATTERS.values())
def test_what_cannot_be_drawn_is_said(tmp_path: Path, plot: Any) -> None:
    with pytest.raises(RunError, match="both R@1 and ERS"):
        plot(entries(a_run(tmp_path / "a")), tmp_path / "c.png")
    scored(tmp_path / "b", 36.0, 33.0)
    scored(tmp_path / "c", 36.0, 33.0, on="digits")
    with pytest.raises(SettingsError, match="cub, digits"):
        plot(entries(tmp_path), tmp_path / "c.png")
    with pytest.raises(SettingsError, match=r"\.png"):
        plot(entries(tmp_path / "b"), tmp_path / "c.gif")
    assert not (tmp_path / "c.png").exists()
