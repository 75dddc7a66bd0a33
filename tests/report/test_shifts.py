"""Logs from before the two means of the shift had names of their own: the same numbers under today's names."""

import json
from pathlib import Path
from typing import Any

import pytest

from anchorhold.report.collect import collect, read_run
from anchorhold.report.matrix import matrix
from anchorhold.report.plots import plot_epochs
from anchorhold.report.training_page import write_training_page
from tests.report.invented import a_run

CUB = Path(__file__).parents[2] / "results" / "cub"
OLD = {"epoch": 1, "r1": 50.0, "active_first": 0.4, "shift": 0.1, "shift_overall": 0.3, "separability": 0.4}
DERIVED = {"shift_perturbed": 0.25, "shift_overall_perturbed": 0.75}
RENAMED = {"shift_all": 0.1, "shift_overall_all": 0.3}


def shifts(path: Path) -> dict[str, float]:
    (row,) = read_run(path).rows
    return {name: value for name, value in row.items() if name.startswith("shift")}


@pytest.mark.parametrize(
    ("change", "settings", "derived"),
    [
        ({}, {}, DERIVED),
        ({}, {"defence": {"start": "random"}}, {"shift_perturbed": 0.1, "shift_overall_perturbed": 0.3}),
        ({}, {"train": {"benign": 0.5}}, {}),  # which counts in the one mean and not in the other
        ({"active_first": 0.05}, {}, {}),
        ({"active_first": None}, {}, {}),
    ],
)
def test_an_old_log_has_the_names_of_today(
    tmp_path: Path, change: dict[str, Any], settings: dict[str, Any], derived: dict[str, float]
) -> None:
    a_run(tmp_path, [OLD | change], **settings)
    assert shifts(tmp_path) == pytest.approx(RENAMED | derived)
    assert read_run(tmp_path).derived == set(derived)


def test_phases_are_derived_where_the_share_is_known(tmp_path: Path) -> None:
    phases = {"shift_cap": 0.2, "shift_overall_cap": 0.4}
    a_run(tmp_path / "some", [OLD | phases])
    a_run(tmp_path / "all", [OLD | phases | {"active_first": 1.0}])
    a_run(tmp_path / "turns", [OLD | {"shift_anchors": 0.2, "active_first_anchors": 0.8}])
    assert shifts(tmp_path / "some").keys() == {*RENAMED, *DERIVED, "shift_all_cap", "shift_overall_all_cap"}
    assert shifts(tmp_path / "all")["shift_overall_perturbed_cap"] == 0.4
    assert shifts(tmp_path / "turns")["shift_perturbed_anchors"] == pytest.approx(0.25)


def test_a_log_of_today_is_read_as_it_is(tmp_path: Path) -> None:
    row = {"epoch": 1, "shift_all": 0.1, "shift_perturbed": 0.9, "shift_perturbed_cap": 0.8, "active_first": 0.5}
    a_run(tmp_path, [row])
    assert read_run(tmp_path).rows == (row,) and not read_run(tmp_path).derived


@pytest.mark.parametrize("name", sorted(path.parent.name for path in CUB.glob("*/metrics.jsonl")))
def test_committed_runs_read_with_the_same_numbers(name: str) -> None:
    logged = [json.loads(line) for line in (CUB / name / "metrics.jsonl").read_text().splitlines()]
    for old, row in zip(logged, read_run(CUB / name).rows, strict=True):
        for ending in ("", "_cap", "_anp"):
            for mean in ("shift", "shift_overall"):
                today = f"{mean}_all{ending}"
                assert row.get(today) == old.get(f"{mean}{ending}", old.get(today))
        assert "shift" not in row and {name: row[name] for name in old if "shift" not in name}.items() <= old.items()


def test_perturbed_triplets_of_hm_move_further_than_those_of_cap_on_cub() -> None:
    """Over all triplets it is the other way round, since HM leaves most of them alone. The page has the same table."""
    rows = {
        name: {row["epoch"]: row for row in read_run(CUB / name).rows}
        for name in ("hm-lga-112", "hm-lga-photos", "catride")
    }

    def found(name: str, whose: str, phase: str = "") -> list[float]:
        return [
            rows[name][epoch][f"{mean}_{whose}{phase}"] for mean in ("shift", "shift_overall") for epoch in (10, 40, 75)
        ]

    hm, every = found("hm-lga-112", "perturbed"), found("hm-lga-112", "all")
    cap, anp = (found("catride", "perturbed", phase) for phase in ("_cap", "_anp"))
    assert hm[0:3:2] == pytest.approx([0.284, 0.265], abs=6e-4)
    assert cap[0:3:2] == pytest.approx([0.185, 0.244], abs=6e-4)
    assert all(a < b < c for a, b, c in zip(every[:3], cap, hm))
    page = (CUB.parent / "notes" / "cub-catride.md").read_text(encoding="utf-8")
    logged = found("hm-lga-photos", "perturbed")
    derived = [
        rows["hm-lga-photos"][epoch]["shift_all"] / rows["hm-lga-photos"][epoch]["active_first"] for epoch in (10, 75)
    ]
    too_large = [a - b for a, b in zip(derived, logged[0:3:2])]
    assert all(f"{value:.3f}".lstrip("0") in page for value in too_large) and min(too_large) > 0
    for line in (hm, every, logged, cap, anp):
        assert f"| {' | '.join(f'{value:.3f}'.lstrip('0') for value in line)} |" in page


def test_figures_and_tables_say_what_is_derived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(
        "anchorhold.report.plots.save_figure", lambda figure, axes, names, out: drawn.append((axes, names))
    )
    a_run(tmp_path / "hm", [OLD])
    both = {"shift_cap": 0.2, "shift_overall_cap": 0.4, "shift_anp": 0.3, "shift_overall_anp": 0.3}
    a_run(tmp_path / "tride", [OLD | both | {"active_first": 1.0}], recipe="catride")
    found = collect([tmp_path]).entries
    plot_epochs(found, "shift", tmp_path / "c.png")
    axes, names = drawn[0]
    points = [[line.get_ydata()[0] for line in axis.lines] for axis in axes]
    assert points == [pytest.approx(each) for each in ([0.25, 0.2, 0.3], [0.75, 0.4, 0.3], [0.1, 0.2, 0.3])]
    assert [name.split()[:2] for _, name in names] == [["hm", "(perturbed:"], ["tride", "CAP"], ["tride", "ANP"]]
    assert all("perturbed" in axis.get_ylabel() for axis in axes[:2]) and "all" in axes[2].get_ylabel()
    table = matrix(found, "name", "train.seed", ["shift_perturbed"])
    assert any("derived" in note for note in table.notes)
    page = write_training_page(tmp_path / "hm").read_text()
    assert "derived" in page and "of perturbed triplets" in page and "of all triplets" in page
