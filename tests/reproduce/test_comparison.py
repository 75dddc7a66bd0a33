"""Which published row a run repeats, and whether it does."""

import json
from pathlib import Path
from typing import Any

import pytest

from anchorhold.errors import RunError
from anchorhold.report.collect import Entry, collect
from anchorhold.report.compare import published_table, runs_table
from anchorhold.report.rendering import render
from anchorhold.report.tables import Table, notes_of, used
from anchorhold.reproduce.comparison import ars_of, departures, plain_start_of, rerun_of, row_of, verdict
from anchorhold.reproduce.rows import row_named, rows
from tests.report.invented import a_run, an_audit

HM = "hm/t6/cub/hm-lga-8"  # 38.0 / 32.4, rerun 39.5 / 28.1


def told(table: Table) -> list[str]:
    """The notes below a table."""
    return notes_of(table, used(table))


def the_run(path: Path, row: str = HM, **more: Any) -> Entry:
    (entry,) = collect([a_run(path, on="cub", row=row, **more)]).entries
    return entry


@pytest.mark.parametrize(
    ("row", "again"),
    [
        (HM, (39.5, 28.1)),
        ("hm/t6/cub/hm-lga-ics-8", (38.1, 29.1)),
        ("hm/t6/cub/hm-lga-ics-32", (36.8, 31.3)),
        ("hm/t6/cub/act-r-8", (31.0, 29.4)),
        ("hm/t6/cub/est-r-8", (35.0, 7.3)),
        ("robust-init/a5/cub/hm-lga-8-init-4", (40.4, 47.2)),  # the robust-init study prints it twice
        ("hm/t6/cub/natural-r", None),  # the robust-init study copies it
        ("catride/t2/cub/ca-tride-16", None),
        ("hm/t6/cars/hm-lga-ics-8", None),
    ],
)
def test_the_rerun_is_that_of_000_with_the_same_settings(row: str, again: tuple[float, float] | None) -> None:
    found = rerun_of(row_named(row))
    assert (None if found is None else (found.published["R@1"], found.published["ERS"])) == again


def test_no_row_is_its_own_rerun_or_starts_elsewhere() -> None:
    for row in rows():
        again = rerun_of(row)
        if again is not None:
            assert again.id != row.id and again.data == row.data
            assert set(again.overrides) - {"defence.start=random"} == set(row.overrides) - {"defence.start=random"}
            assert again.published["init"] == row.published.get("init", 0.0)


def test_ars_of_001s_rows_is_printed_by_002() -> None:
    assert ars_of(row_named("hm/t6/cub/hm-lga-ics-32")) == 47.2
    assert ars_of(row_named("catride/t2/cub/ca-tride-16")) == 51.6
    assert ars_of(row_named(HM)) is None


@pytest.mark.parametrize(
    ("r1", "ers", "said"),
    [
        (38.0, 32.4, "reproduced"),
        (41.0, 37.4, "reproduced"),  # the corner of the band
        (41.04, 37.44, "reproduced"),  # as it is read, to a tenth
        (42.5, 28.1, "reproduced"),  # of the rerun
        (35.0, 27.4, "reproduced"),
        (34.9, 32.4, "outside"),
        (38.0, 37.5, "outside"),
        (35.5, 26.0, "outside"),  # R@1 of the paper and ERS of the rerun do not add up to a row
        (34.9, None, "outside"),
        (42.0, None, None),  # the rerun's may still be met
        (None, None, None),
        (None, 50.0, "outside"),
    ],
)
def test_the_band(r1: float | None, ers: float | None, said: str | None) -> None:
    assert verdict(row_named(HM), r1, ers) == said
    assert verdict(row_named(HM), r1, ers, departs=True) == ("within" if said == "reproduced" else said)


def test_print_that_has_no_ers_is_judged_by_r1_and_one_without_numbers_by_nothing() -> None:
    alone = row_named("catride/text/cub/naive-cap-16")
    assert verdict(alone, 4.0, 20.0) == "reproduced" and verdict(alone, 9.0, 20.0) == "outside"
    assert verdict(row_named("hm/t2/cub/hm-s-h-8"), 4.0, 20.0) is None


def test_other_settings_are_named_but_neither_seed_nor_place(tmp_path: Path) -> None:
    same = the_run(tmp_path / "a", train={"seed": 7, "evaluate_every": 1}, model={"weights": "mine.pt"})
    assert departures(same, row_named(HM)) == []
    other = the_run(tmp_path / "b", train={"epochs": 40}, defence={"steps": 4}, batch={"pairs": 56, "distinct": True})
    assert departures(other, row_named(HM)) == [
        "defence.steps 4, not 8",
        "batch.pairs 56, not 112",
        "batch.distinct True, not False",
        "train.epochs 40, not 75",
    ]
    assert departures(the_run(tmp_path / "c", recipe="act"), row_named(HM))[0] == "defence.name act, not hardness"


def test_a_part_of_the_network_or_no_start_is_no_reproduction(tmp_path: Path) -> None:
    for name, changes, told in (
        ("head", {"train": "head"}, ["model.train head, not all"]),
        ("lora", {"train": "lora", "lora_rank": 4}, ["model.train lora, not all"]),
        ("none", {"weights": ""}, ["start without weights"]),
    ):
        assert departures(the_run(tmp_path / name, model=changes), row_named(HM)) == told
    mean = the_run(tmp_path / "mean", train={"mean_from": 0.5})
    assert departures(mean, row_named(HM)) == ["train.mean_from 0.5, not 0.0"]
    run = a_run(tmp_path / "given", on="cub", row=HM, model={"weights": ""})  # a model that `fit` was given
    info = json.loads((run / "run.json").read_text())
    info["model"] = {"given": True, "weights": {"source": "robust.safetensors", "tensors": 100}}
    (run / "run.json").write_text(json.dumps(info))
    assert departures(collect([run]).entries[0], row_named(HM)) == ["start robust.safetensors"]


def test_a_robust_start_is_compared_with_a_run_of_the_same_settings(tmp_path: Path) -> None:
    """Augmentation and means of weights count; a setting that an older run does not have was at its default."""
    older, *others = [
        a_run(tmp_path / name, on="cub", model={"weights": "plain.safetensors"}, train=train)
        for name, train in (("older", {}), ("mean", {"mean_from": 0.5}), ("jitter", {}))
    ]
    for path, forgotten, changes in ((older, "mean_from", {}), (others[1], "", {"jitter": 0.2})):
        info = json.loads((path / "run.json").read_text())
        info["settings"]["train"].pop(forgotten, None)
        info["settings"]["data"] |= changes
        (path / "run.json").write_text(json.dumps(info))
    robust = a_run(tmp_path / "robust", on="cub", model={"weights": "robust.safetensors"})
    entries = collect([tmp_path]).entries
    (own,) = [each for each in entries if each.path == robust]
    assert {each.path for each in entries if plain_start_of(own, [each])} == {older}


def test_a_part_of_the_data_or_smaller_images_are_no_reproduction(tmp_path: Path) -> None:
    last = [{"epoch": 75, "r1": 36.0}]
    for name, images in (("a", [100, 100]), ("b", [5864, 5924]), ("c", [5830, 5924]), ("d", [5864, 5800])):
        run = a_run(tmp_path / name, last, on="cub", row=HM)
        info = json.loads((run / "run.json").read_text())
        info["data"]["images"] = images
        info["settings"]["data"] |= {"crop": 112} if name == "b" else {}
        (run / "run.json").write_text(json.dumps(info))
        an_audit(run, ers=33)
    assert [line["verdict"] for line in cells(tmp_path)] == ["within", "within", "reproduced", "within"]
    found = [departures(entry, row_named(HM)) for entry in collect([tmp_path]).entries]
    assert found[0] == ["100 of 5,864 training images", "100 of 5,924 test images"]
    assert found[1:] == [["data.crop 112, not 224"], [], ["5,800 of 5,924 test images"]]


def test_a_weaker_audit_or_a_robust_start_is_no_reproduction(tmp_path: Path) -> None:
    last = [{"epoch": 75, "r1": 36.0}]
    an_audit(a_run(tmp_path / "a", last, on="cub", row=HM), ers=33, eps=1 / 255)
    an_audit(a_run(tmp_path / "b", last, on="cub", row=HM, model={"weights": "resnet18_robust_linf4.pt"}), ers=33)
    some = an_audit(a_run(tmp_path / "c", last, on="cub", row=HM), ers=33) / "audit.json"
    some.write_text(
        some.read_text().replace('"attacked": [100, 100]', '"attacked": [100, 100], "images": [5924, 5924]')
    )
    assert [line["verdict"] for line in cells(tmp_path)] == ["within"] * 3
    found = [departures(entry, row_named(HM)) for entry in collect([tmp_path]).entries]
    assert found[0] == ["audit.eps 1/255, not 8/255"]
    assert found[1:] == [["start resnet18_robust_linf4.pt"], ["audited on 100 of 5,924 queries"]]


def test_a_row_counts_on_its_own_data_only(tmp_path: Path) -> None:
    assert row_of(the_run(tmp_path / "a")) == row_named(HM)
    assert row_of(the_run(tmp_path / "b", row="999/t1/cub/future")) is None
    (borrowed,) = collect([a_run(tmp_path / "c", row=HM)]).entries  # digits
    assert row_of(borrowed) is None


def test_held_out_classes_are_not_print_s_test(tmp_path: Path) -> None:
    last = [{"epoch": 75, "r1": 38.0}]
    an_audit(a_run(tmp_path / "a", last, on="cub", row=HM, held_out=20), ers=33)
    assert row_of(collect([tmp_path]).entries[0]) is None
    (line,) = cells(tmp_path)
    assert line["data"] == "cub, last 20 training classes" and line["verdict"] is line["paper_r1"] is None


def cells(*paths: Path) -> list[dict[str, Any]]:
    table = runs_table(collect(paths).entries)
    return [dict(zip([column.key for column in table.columns], row)) for row in table.rows]


def test_print_stands_beside_the_run(tmp_path: Path) -> None:
    last = [{"epoch": 75, "r1": 36.0}]
    an_audit(a_run(tmp_path / "a", last, on="cub", row=HM, commit="abc", batch={"pairs": 56}), ers=33)
    an_audit(a_run(tmp_path / "b", last, on="cub", row=HM), ers=33)
    a_run(tmp_path / "c", last, on="cub", row=HM, status="training")
    a_run(tmp_path / "d", last, on="cub", row=HM, status="stopped", batch={"kind": "classes"})
    an_audit(a_run(tmp_path / "e", last, on="cub"), ers=33)
    a, b, c, d, e = cells(tmp_path)
    assert [a[key] for key in ("paper_r1", "paper_ers", "paper_ars", "rerun_r1", "rerun_ers")] == [
        *(38.0, 32.4, None, 39.5, 28.1)
    ]
    assert [line["verdict"] for line in (a, b, c, d, e)] == ["within", "reproduced", None, "collapse", None]
    assert (a["batch"], d["batch"], a["commit"], b["commit"]) == ("56 pairs", "28 × 4", "abc", None)
    assert a["audit_seconds"] == 12.5 and c["audit_seconds"] is None and e["paper_r1"] is None
    notes = told(runs_table(collect([tmp_path]).entries))
    assert "other settings than the row's: a (batch.pairs 56, not 112); d (batch.kind classes, not pairs)" in notes
    assert not any("reproduced" in note for note in told(runs_table(collect([tmp_path / "e"]).entries)))


def test_published_rows_alone(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a", [{"epoch": 75, "r1": 36.0}], on="cub", row=HM), ers=33)
    an_audit(a_run(tmp_path / "b", [{"epoch": 75, "r1": 36.0}], on="cub"), ers=33)  # repeats none
    table = published_table(collect([tmp_path]).entries)
    (line,) = [dict(zip([column.key for column in table.columns], row)) for row in table.rows]
    whole = cells(tmp_path)[0]
    assert line == {key: whole[key] for key in line} and line["name"] == "a" and line["verdict"] == "reproduced"
    assert {"r1", "paper_r1", "rerun_r1", "ers_published", "paper_ers", "rerun_ers", "ers_corrected"} <= {*line}
    assert "[" not in render(table, "markdown").replace("HM[S, LGA]", "")  # the intervals are in the other table
    assert told(table)[0].startswith("reproduced: R@1 within 3 points")
    with pytest.raises(RunError, match="no run here repeats a published row; train with row=ROW"):
        published_table(collect([tmp_path / "b"]).entries)


ROBUST = "robust-init/a5/cub/hm-lga-8-init-4"  # 42.2 / 45.2, again 40.4 / 47.2; from plain weights 39.5 / 28.1


def test_from_robust_weights_the_gain_is_compared(tmp_path: Path) -> None:
    def trained(name: str, r1: float, ers: float, row: str, **more: Any) -> None:
        an_audit(a_run(tmp_path / name, [{"epoch": 75, "r1": r1}], on="cub", row=row, **more), ers=ers)

    weights = {"weights": "somewhere/resnet18_robust_linf4.pt"}
    trained("robust", 35.0, 42.5, ROBUST, model=weights)
    (line,) = cells(tmp_path)
    assert (line["verdict"], line["paper_r1"], line["rerun_r1"]) == ("gain", 42.2, None)  # no rerun: printed twice
    note = "gain: robust starts from resnet18_robust_linf4.pt, the paper from weights trained against ε = 4/255"
    gains = "+2.7 / +17.1 in robust-init/a5/cub/hm-lga-8-init-4; +0.9 / +19.1 in robust-init/a2/cub/hm-lga-8-init-4"
    said = ". Gain in R@1 and ERS published: "
    assert told(runs_table(collect([tmp_path]).entries))[-1] == note + said + gains
    trained("other-seed", 36.0, 30.0, HM, train={"seed": 1})
    trained("other-batch", 36.0, 30.0, HM, batch={"pairs": 56})
    trained("robust-too", 36.0, 30.0, HM, model=weights)
    assert told(runs_table(collect([tmp_path]).entries))[-1] == note + said + gains
    trained("plain", 36.5, 31.0, HM)
    assert told(runs_table(collect([tmp_path]).entries))[-1] == f"{note}{said}-1.5 / +11.5 over plain; {gains}"
    file = tmp_path / "plain" / "run.json"
    info = json.loads(file.read_text())
    del info["settings"]["defence"]["members"], info["settings"]["optimiser"]["schedule"]  # it is older than these
    file.write_text(json.dumps(info))
    assert told(runs_table(collect([tmp_path]).entries))[-1] == f"{note}{said}-1.5 / +11.5 over plain; {gains}"


def test_robust_is_what_the_weights_are_called_not_where_they_lie(tmp_path: Path) -> None:
    weights = {"weights": "robust-retrieval/resnet18_imagenet.safetensors"}
    last = [{"epoch": 75, "r1": 38.0}]
    an_audit(a_run(tmp_path / "a", last, on="cub", row=HM, model=weights), ers=33)
    assert [line["verdict"] for line in cells(tmp_path)] == ["reproduced"]
    an_audit(a_run(tmp_path / "b", last, on="cub", row=ROBUST, model=weights), ers=33)  # from plain ones after all
    assert "over a" not in told(runs_table(collect([tmp_path]).entries))[-1]
