"""Runs side by side: every cell comes from where it should, and a collapse is a cell of its own."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from anchorhold.config.build import to_dict
from anchorhold.config.recipes import settings_from
from anchorhold.errors import RunError, SettingsError
from anchorhold.report.collect import Entry, collect
from anchorhold.report.compare import epsilon_table, runs_table
from anchorhold.report.compare_page import write_compare_page
from anchorhold.report.entangled import entanglement
from anchorhold.report.matrix import matrix
from anchorhold.report.methods import method_of
from anchorhold.report.rendering import render
from anchorhold.report.tables import Estimate, Link, Mean, Table, notes_of, plain, used
from tests.report.invented import a_curve, a_run, an_audit, flat_rows


def lines(table: Table) -> list[dict[str, Any]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row)) for row in table.rows]


@pytest.mark.parametrize(
    ("recipe", "defence", "name"),
    [
        ("natural", {"sampler": "distance"}, "N/A[D]"),
        ("natural", {"loss": "contrastive"}, "N/A[R, contrastive]"),
        ("act", {"sampler": "softhard"}, "ACT[S]"),
        ("hm-lga", {}, "HM[S, LGA]"),
        ("hm-lga", {"source": "random", "destination": "semihard"}, "HM[R, M]"),
        ("hm-lga", {"destination": "0"}, "HM[S, 0]"),
        ("hm-lga", {"destination": "-0.1"}, "HM[S, -0.1]"),
    ],
)
def test_methods_have_their_published_names(recipe: str, defence: dict[str, str], name: str) -> None:
    settings = settings_from(recipe, {"data": {"name": "digits"}, "defence": defence})
    assert method_of(to_dict(settings)["defence"]) == name


@pytest.mark.parametrize(
    ("defence", "name"),
    [
        ({"name": "hardness", "source": "softhard", "destination": "semihard", "boost": 0.1}, "HM[S, g_B(M)]"),
        ({"name": "hardness", "source": "softhard", "destination": "lga", "boost": 0.0, "ics": 0.5}, "HM[S, LGA]&ICS"),
        ({"name": "est", "sampler": "random", "ics": 0.0}, "EST[R]"),
        ({"name": "tride"}, "CA-TRIDE"),
        ({"name": "tride", "phases": "anp", "form": "code"}, "CA-ANP (code)"),
        ({"name": "tride", "top_rank_loss": False}, "CA-TRIDE w/o L_TR"),
        ({"name": "tride", "top_rank_loss": False, "top_rank_term": False}, "CA-TRIDE w/o TPR"),
        ({"name": "tride", "phases": "cap", "guide": "hardness", "stop": False}, "naive CAP"),
        ({"name": "tride", "guide": "hardness"}, "TRIDE by H"),
        ({"name": "tride", "sampler": "softhard", "ics": 0.5}, "CA-TRIDE[S]&ICS"),
        ({"name": "free", "source": "softhard", "destination": "lga", "ics": 0.5}, "free HM[S, LGA]&ICS"),
        ({"name": "somebody-elses", "sampler": "mine"}, "somebody-elses[mine]"),
        ({}, ""),
    ],
)
def test_methods_are_told_from_run_json_alone(defence: dict[str, Any], name: str) -> None:
    assert method_of(defence) == name


def test_a_line_for_each_run(tmp_path: Path) -> None:
    rows = [{"epoch": 4, "r1": 41.0, "r2": 52.0, "map_r": 13.0}, {"epoch": 5, "seconds": 99.0}]
    train = {"epochs": 5, "seed": 12345}
    an_audit(a_run(tmp_path / "a", rows, seconds=100.5, image_steps=12345, train=train))
    a_run(tmp_path / "b", [{"epoch": 1, "seconds": 7.0}], recipe="natural", status="interrupted")
    an_audit(tmp_path / "c", ers=20, r1=33)
    a, b, c = lines(runs_table(collect([tmp_path]).entries))
    assert [a[key] for key in ("name", "method", "steps", "data", "epochs", "seed")] == [
        "a",
        "HM[S, LGA]",
        8,
        "digits",
        5,
        12345,
    ]
    assert [a[key] for key in ("r1", "r2", "map_r", "seconds", "image_steps", "status")] == [
        41,
        52,
        13,
        100.5,
        12345,
        "done",
    ]
    assert a["ers_published"] == Estimate(30, 29, 31) and a["ers_corrected"] == Estimate(25, 24, 26)
    assert a["ars_published"] == Estimate(40, 39, 41) and a["ars_corrected"] == Estimate(45, 44, 46)
    assert b["r1"] is b["ers_published"] is b["steps"] is None
    assert b["seconds"] == 7 and b["method"] == "N/A[R]" and b["status"] == "interrupted, 1 of 15"
    assert (
        c["method"] is None
        and c["data"] == "digits/test"
        and c["r1"] == Estimate(33, 32, 34)
        and c["status"] == "audit alone"
    )
    assert " 12345 " in render(runs_table(collect([tmp_path]).entries))  # a seed is a name, without a comma


def test_a_collapsed_run_has_no_score_even_if_it_was_audited(tmp_path: Path) -> None:
    """ERS rates a collapsed model at about 30: no number may stand there."""
    an_audit(a_run(tmp_path / "warned", flat_rows()), r1=2)
    a_run(tmp_path / "stopped", flat_rows(3), status="stopped", reason="the model collapsed")
    for line in lines(runs_table(collect([tmp_path]).entries)):
        assert line["ers_published"] == line["ers_corrected"] == line["ars_corrected"] == "collapse"
        assert plain(line["r1"]) == 2 and line["status"].startswith("collapsed")


def noted(table: Table) -> list[str]:
    return notes_of(table, used(table))


def test_a_table_says_at_which_eps_and_over_how_many_queries_r1_strong_is(tmp_path: Path) -> None:
    for name in "ab":
        a_curve(an_audit(a_run(tmp_path / name), queries=60))
    a_run(tmp_path / "c")  # not audited
    table = runs_table(collect([tmp_path]).entries)
    rows = list(csv.DictReader(io.StringIO(render(table, "csv"))))
    assert [(float(row["eps"]), row["norm"], row["queries"]) for row in rows[:2]] == [(8 / 255, "linf", "60")] * 2
    assert rows[2]["eps"] == rows[2]["queries"] == ""
    latex = render(table.only(["r1", "r1_strong"]), "latex")
    assert r"run & R@1 & R@1 strong at 8/255 \\" in latex
    assert "R@1 strong: over 60 queries" in latex and "ε strong" not in render(table)
    assert "0.0 [" not in render(table.only(["eps"])) and "8/255" in render(table.only(["eps"]))
    a_curve(an_audit(tmp_path / "b", eps=0.06, queries=1200), eps=0.06)
    table = runs_table(collect([tmp_path]).entries)
    heads = render(table).splitlines()[0].split("   ")
    assert {"R@1 strong", "ε strong", "queries strong"} <= {head.strip() for head in heads}
    assert "norm strong" not in render(table) and "R@1 strong:" not in render(table)
    (note,) = (each for each in render(table.only(["r1_strong"])).splitlines() if each.startswith("R@1 strong:"))
    assert note == "R@1 strong: at 8/255 over 60 queries (a); at 0.06 over 1,200 queries (b)"
    assert "R@1 strong" not in "".join(noted(table.only(["r1"])))


def test_r1_stands_at_every_eps_that_two_curves_share(tmp_path: Path) -> None:
    a_curve(an_audit(a_run(tmp_path / "a"), queries=60), (50.0, 40.0, 30.0, 20.0, 10.0))  # 0, 2, 4, 6, 8 of 255
    a_curve(an_audit(a_run(tmp_path / "b")), (55.0, 35.0, 15.0))  # 0, 4, 8
    an_audit(a_run(tmp_path / "c"))  # without a curve
    entries = collect([tmp_path]).entries
    rows = list(csv.DictReader(io.StringIO(render(runs_table(entries), "csv"))))
    keys = ["r1_at_0", "r1_at_4/255", "r1_at_8/255"]
    assert [key for key in rows[0] if re.fullmatch(r"r1_at_[^_]+", key)] == keys
    assert [[row[key] for key in keys] for row in rows] == [
        ["50.0", "30.0", "10.0"],
        ["55.0", "35.0", "15.0"],
        [""] * 3,
    ]
    assert (rows[1]["r1_at_4/255_low"], rows[1]["r1_at_4/255_high"]) == ("34.0", "36.0")
    assert "R@1 at" not in render(runs_table(entries))  # many columns, so they have a table of their own
    head, _, *body = render(epsilon_table(entries)).splitlines()
    assert re.split(r" {2,}", head)[2:] == ["R@1 clean", "R@1 at 4/255", "R@1 at 8/255"]
    assert [line.split()[0] for line in body[:2]] == ["a", "b"] and "35.0 [34.0, 36.0]" in body[1]
    page = write_compare_page(entries, tmp_path / "compare.html").read_text(encoding="utf-8")
    assert ">R@1 at 4/255</th>" in page and re.search(r">35\.0\s*<span[^>]*>\[34\.0, 36\.0\]<", page)
    with pytest.raises(RunError, match="no audit here has R@1 against ε"):
        epsilon_table(collect([tmp_path / "c"]).entries)


def test_one_curve_with_other_eps_takes_none_from_the_others(tmp_path: Path) -> None:
    a_curve(an_audit(a_run(tmp_path / "a")), (50.0, 40.0, 30.0, 20.0, 10.0))  # 0, 2, 4, 6, 8 of 255
    a_curve(an_audit(a_run(tmp_path / "b")), (55.0, 35.0, 15.0))  # 0, 4, 8
    a_curve(an_audit(a_run(tmp_path / "c")), (60.0, 45.0), eps=6 / 255)  # 0, 6
    table = epsilon_table(collect([tmp_path]).entries)
    rows = list(csv.DictReader(io.StringIO(render(table, "csv"))))
    keys = ["r1_at_0", "r1_at_4/255", "r1_at_6/255", "r1_at_8/255"]
    assert [[row[key] for key in keys] for row in rows] == [
        ["50.0", "30.0", "20.0", "10.0"],
        ["55.0", "35.0", "", "15.0"],
        ["60.0", "", "45.0", ""],
    ]


def test_r1_at_each_eps_has_the_doubts_of_the_runs(tmp_path: Path) -> None:
    """That ensembles or attacks differ."""
    for name, steps in (("a", 8), ("b", 32)):
        path = a_curve(an_audit(tmp_path / name), (50.0, 40.0, 30.0))
        audit = json.loads((path / "audit.json").read_text())
        audit["settings"]["steps"] = steps
        audit["curve"]["attacks"] = {"R@1": [f"of-{name}"]}
        (path / "audit.json").write_text(json.dumps(audit))
    told = " ".join(str(note) for note in epsilon_table(collect([tmp_path]).entries).notes)
    assert all(word in told for word in ("of-a", "of-b", "8 steps", "32 steps"))


def test_curves_of_two_norms_share_no_eps(tmp_path: Path) -> None:
    for name in ("linf", "l2"):
        path = a_curve(an_audit(tmp_path / name, eps=0.2), (50.0, 40.0, 30.0), eps=0.2)
        audit = json.loads((path / "audit.json").read_text())
        audit["settings"]["norm"] = name
        (path / "audit.json").write_text(json.dumps(audit))
    found = {line["name"]: line for line in lines(runs_table(collect([tmp_path]).entries))}
    assert plain(found["l2"]["r1_at_l2_0.2"]) == 30 and found["l2"]["r1_at_51/255"] is None
    assert plain(found["linf"]["r1_at_51/255"]) == 30 and found["linf"]["r1_at_l2_0.2"] is None
    assert plain(found["linf"]["r1_at_0"]) == plain(found["l2"]["r1_at_0"]) == 50


def test_an_eps_of_l2_says_so(tmp_path: Path) -> None:
    path = a_curve(an_audit(tmp_path / "a", eps=0.2), eps=0.2)
    audit = json.loads((path / "audit.json").read_text())
    audit["settings"]["norm"] = "l2"
    (path / "audit.json").write_text(json.dumps(audit))
    assert "R@1 strong at L2 0.2 " in render(runs_table(collect([tmp_path]).entries))
    a_curve(an_audit(tmp_path / "b", eps=0.2), eps=0.2)
    table = runs_table(collect([tmp_path]).entries)
    assert "norm strong" in render(table)
    told = render(table.only(["r1_strong"]))
    assert "at L2 0.2 over" in told and "at 51/255 over" in told
    assert [line.split()[-1] for line in render(table.only(["eps"])).splitlines()[2:4]] == ["0.2", "51/255"]


def test_different_ensembles_behind_r1_strong_are_named(tmp_path: Path) -> None:
    known = {"a": ["starts", "apgd", "square"], "b": ["pgd", "square"], "c": ["pgd", "square"]}
    for name, members in known.items():
        path = a_curve(an_audit(a_run(tmp_path / name), strong=name == "b"))
        audit = json.loads((path / "audit.json").read_text())
        audit["curve"]["attacks"] = {"R@1": ["ES", "LTM", *members]}
        if name == "b":  # a strong audit tells what each member left
            audit["strong"] = {
                "members": ["cw", *members],
                "after": {"recall": dict.fromkeys(["standard", *members], 1.0)},
            }
        (path / "audit.json").write_text(json.dumps(audit))
    table = runs_table(collect([tmp_path]).entries)
    (note,) = (each for each in noted(table) if "ensembles" in each)
    assert note.endswith("with care: starts, apgd, square (a); pgd, square (b, c)")
    assert not any("ensembles" in each for each in noted(table.only(["r1"])))
    assert [row["members"] for row in csv.DictReader(io.StringIO(render(table, "csv")))][1:] == ["pgd, square"] * 2
    assert json.loads(render(table, "json"))["rows"][0]["members"] == "starts, apgd, square"
    alike = runs_table([entry for entry in collect([tmp_path]).entries if entry.name != "a"])
    assert not any("ensembles" in each for each in noted(alike)) and "members strong" not in render(alike)


def test_notes_name_only_what_is_shown(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a"), strong=True)
    table = runs_table(collect([tmp_path]).entries)
    assert noted(table.only(["r1", "ers_corrected"])) == ["R@1, ERS in %; [95 % intervals over queries]"]
    assert noted(table.only(["map_r"])) == ["mAP@R in %"]
    assert noted(table.only(["seconds", "status"]))[:1] == ["no run here has a value for seconds"]
    assert noted(table)[0] == "R@1, R@2, mAP@R, ERS, ARS in %; [95 % intervals over queries]"


def test_audits_that_attack_differently_are_named(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a"))
    an_audit(a_run(tmp_path / "b"))
    assert len(noted(runs_table(collect([tmp_path]).entries))) == 1
    an_audit(tmp_path / "b", eps=16 / 255)
    note = noted(runs_table(collect([tmp_path]).entries))[-1]
    assert "cannot be compared" in note and "ε 8/255" in note and "ε 16/255" in note


def combination(path: Path, source: str, destination: str, r1: float, ers: float = 0.0, **more: Any) -> None:
    defence = {"source": source, "destination": destination, **more.pop("defence", {})}
    run = a_run(path, [{"epoch": 1, "r1": r1}], defence=defence, **more)
    if ers:
        an_audit(run, ers=ers, r1=r1)


def test_table_two_of_001(tmp_path: Path) -> None:
    combination(tmp_path / "1", "softhard", "semihard", 38.0, 29.6)
    combination(tmp_path / "2", "random", "semihard", 27.0, 35.1)
    combination(tmp_path / "3", "softhard", "0", 5.0, status="stopped")
    a_run(tmp_path / "4", recipe="natural")
    a_run(tmp_path / "5", status="training")
    table = matrix(collect([tmp_path]).entries, "source", "destination")
    assert [column.head for column in table.columns] == [
        "source \\ destination",
        *("0 R@1", "0 ERS publ.", "semihard R@1", "semihard ERS publ."),
    ]
    assert table.rows == (
        ("random", None, None, Mean(27.0, 1, 1), Mean(35.1, 1, 1)),
        ("softhard", "collapse", "collapse", Mean(38.0, 1, 1), Mean(29.6, 1, 1)),
    )
    assert any("not finished: 5" in note for note in table.notes)
    assert any("without source or destination: 4" in note for note in table.notes)


def test_several_runs_in_a_cell_are_averaged_and_counted(tmp_path: Path) -> None:
    for seed, r1 in enumerate((30.0, 33.0)):
        combination(tmp_path / f"a{seed}", "random", "lga", r1, train={"seed": seed})
    combination(tmp_path / "a2", "random", "lga", 1.0, status="stopped", train={"seed": 2})
    for seed in range(2):
        combination(tmp_path / f"b{seed}", "random", "hardest", 1.0, status="stopped", train={"seed": seed})
    table = matrix(collect([tmp_path]).entries, "source", "defence.destination", ["r1"])
    assert [column.head for column in table.columns[1:]] == ["hardest", "lga"]
    assert table.rows == (("random", "collapse (2)", Mean(31.5, 2, 3)),)
    assert len(table.notes) == 1 and "number of runs" in table.notes[0]  # seeds may differ
    row = next(csv.DictReader(io.StringIO(render(table, "csv"))))
    assert row["defence.destination=lga r1"] == "31.5" and row["defence.destination=lga r1_runs"] == "2"
    combination(tmp_path / "a3", "random", "lga", 40.0, defence={"steps": 2}, train={"seed": 3})
    table = matrix(collect([tmp_path]).entries, "source", "destination", ["r1"])
    assert table.notes[-1] == "some means are over runs that differ in defence.steps"


def test_numbers_come_in_order_and_any_logged_value_may_be_asked_for(tmp_path: Path) -> None:
    for steps in (16, 2, 8):
        rows = [{"epoch": 1, "r1": 1.0, "shift_all": steps / 100}]
        a_run(tmp_path / str(steps), rows, defence={"steps": steps})
    table = matrix(collect([tmp_path]).entries, "steps", "train.seed", ["shift_all"])
    assert table.rows == tuple((str(steps), Mean(steps / 100, 1, 1)) for steps in (2, 8, 16))


@pytest.mark.parametrize(("norm", "shown"), [("linf", ["51/255", "102/255"]), ("l2", ["0.2", "0.4"])])
def test_a_matrix_shows_eps_in_the_norm_of_its_runs(tmp_path: Path, norm: str, shown: list[str]) -> None:
    for eps in (0.2, 0.4):
        a_run(tmp_path / str(eps), defence={"eps": eps, "norm": norm})
    table = matrix(collect([tmp_path]).entries, "eps", "train.seed", ["r1"])
    assert [row[0] for row in table.rows] == shown
    table = matrix(collect([tmp_path]).entries, "train.seed", "defence.eps", ["r1"])
    assert [column.head for column in table.columns[1:]] == shown


def test_recipes_are_compared_like_settings_and_what_nobody_has_is_not_announced(tmp_path: Path) -> None:
    for recipe in ("hm", "hm-lga"):  # one defence
        a_run(tmp_path / recipe, recipe=recipe)
    table = matrix(collect([tmp_path]).entries, "recipe", "train.seed")
    assert [row[0] for row in table.rows] == ["hm", "hm-lga"]
    assert table.notes[0] == "rows: recipe, columns: train.seed; R@1"  # no ERS: nothing was audited


def test_questions_without_an_answer_are_refused(tmp_path: Path) -> None:
    entries = collect([a_run(tmp_path)]).entries
    with pytest.raises(SettingsError, match="did you mean source"):
        matrix(entries, "sorce", "destination")
    with pytest.raises(SettingsError, match="did you mean ers"):
        matrix(entries, "source", "destination", ["er"])
    with pytest.raises(RunError, match="no finished run"):
        matrix([Entry(e.path, {**e.info, "status": "training"}, e.rows) for e in entries], "source", "destination")


def test_entanglement(tmp_path: Path) -> None:
    """Tian et al. 2024's table 5 has CUB at .287 between and .226 within classes: .79."""
    a_run(tmp_path / "a", [{"epoch": 1, "inter_distance": 0.287, "intra_distance": 0.226, "mean_distance": 9.0}])
    apart = (0.287 - 0.226) / 0.287
    a_run(tmp_path / "b", [{"epoch": 1, "mean_distance": 0.287, "separability": apart}])
    a_run(tmp_path / "c", [{"epoch": 1, "mean_distance": 0.287, "separability": 1.1}])
    a_run(tmp_path / "d", [{"epoch": 1}])
    an_audit(tmp_path / "e")
    table = entanglement(collect([tmp_path]).entries)
    a, b, c, d = lines(table)
    assert a["name"] == Link("a", tmp_path / "a" / "run.json")
    for line in (a, b):
        assert line["inter"] == 0.287 and line["intra"] == pytest.approx(0.226)
        assert line["entanglement"] == pytest.approx(0.226 / 0.287)
    assert c["intra"] is c["entanglement"] is d["inter"] is None
    assert "b, c, d" in table.notes[-1]
    with pytest.raises(RunError, match="these are audits"):
        entanglement(collect([tmp_path / "e"]).entries)
