"""Runs and audits are found, paired where they belong together, and left out with a word where they are broken."""

import json
import re
from pathlib import Path

import pytest

from anchorhold.errors import RunError
from anchorhold.report.collect import Entry, collect
from anchorhold.report.compare_page import write_compare_page
from anchorhold.report.tables import Estimate
from anchorhold.report.values import value_of
from tests.report.invented import a_run, an_audit, flat_rows


def by_name(*folders: Path) -> dict[str, Entry]:
    return {entry.name: entry for entry in collect(folders).entries}


def ers(entry: Entry) -> float | None:
    return None if entry.audit is None else entry.audit["protocols"]["published"]["ers"]["value"]


def test_runs_are_found_however_deep_and_once(tmp_path: Path) -> None:
    a_run(tmp_path / "one")
    a_run(tmp_path / "deep/er/two")
    (tmp_path / "deep/again").symlink_to(tmp_path)  # a circle
    a_run(tmp_path / ".hidden")
    assert list(by_name(tmp_path, tmp_path / "deep")) == ["deep/er/two", "one"]
    assert list(by_name(tmp_path / "one")) == ["one"]


def test_names_are_longer_where_two_runs_are_called_alike(tmp_path: Path) -> None:
    a_run(tmp_path / "a/x")
    a_run(tmp_path / "b/x")
    a_run(tmp_path / "b/y")
    assert list(by_name(tmp_path / "a", tmp_path / "b")) == ["a/x", "b/x", "b/y"]
    assert list(by_name(tmp_path / "a", tmp_path / "b/y")) == ["x", "y"]


def test_an_audit_inside_a_run_is_its_own(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "in-it"), ers=1)
    an_audit(a_run(tmp_path / "below") / "audits/standard", ers=2)
    found = by_name(tmp_path)
    assert {name: ers(entry) for name, entry in found.items()} == {"in-it": 1, "below": 2}


def test_an_audit_beside_its_run_is_told_by_its_name(tmp_path: Path) -> None:
    a_run(tmp_path / "runs/hm")
    a_run(tmp_path / "runs/hm-lga")
    an_audit(tmp_path / "audits/hm-lga-digits", ers=7)
    an_audit(tmp_path / "audits/hmm", ers=8)
    found = by_name(tmp_path)
    assert ers(found["runs/hm-lga"]) == 7 and ers(found["runs/hm"]) is None
    assert ers(found["audits/hmm"]) == 8 and not found["audits/hmm"].info


def test_of_two_namesakes_the_one_beside_the_audit_is_meant(tmp_path: Path) -> None:
    a_run(tmp_path / "a/hm")
    a_run(tmp_path / "b/hm")
    an_audit(tmp_path / "b/hm-digits", ers=3)
    found = by_name(tmp_path)
    assert ers(found["b/hm"]) == 3 and ers(found["a/hm"]) is None and len(found) == 2


@pytest.mark.parametrize("change", ["r1", "config", "images", "two runs"])
def test_an_audit_that_may_be_another_models_stays_alone(tmp_path: Path, change: str) -> None:
    a_run(tmp_path / "a/hm")
    place = an_audit(tmp_path / "audits/hm-digits", r1=51 if change == "r1" else 50)
    known = json.loads((place / "audit.json").read_text())
    if change == "config":
        known["model"]["config"] = {"backbone": "small", "dim": 17}
    if change == "images":
        known["data"]["query"]["fingerprint"] = "other"
    if change == "two runs":
        a_run(tmp_path / "b/hm")
    (place / "audit.json").write_text(json.dumps(known))
    found = by_name(tmp_path)
    assert ers(found["a/hm"]) is None and found["audits/hm-digits"].audit


def test_of_two_audits_the_one_with_more_queries_is_taken(tmp_path: Path) -> None:
    run = a_run(tmp_path / "hm")
    an_audit(run / "few", ers=1, queries=10)
    an_audit(run / "many", ers=2, queries=20)
    found = collect([tmp_path])
    assert [ers(entry) for entry in found.entries] == [2]
    assert len(found.problems) == 1 and "few" in found.problems[0]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("run.json", "{", "cannot read"),
        ("run.json", "[]", "schema None"),
        ("run.json", '{"schema": "anchorhold.run/99"}', "anchorhold.run/99"),
        ("run.json", '{"schema": "anchorhold.run/1", "status": "done"}', "no settings"),
        ("metrics.jsonl", b"\xff\xfe", "cannot read"),
        ("audit.json", '{"schema": "anchorhold.audit/1"', "cannot read"),
        ("audit.json", '{"schema": "anchorhold.audit/1"}', "lacks settings"),
        ("audit.json", '{"schema": "else"}', "schema 'else'"),
    ],
)
def test_what_is_broken_is_one_line_and_left_out(tmp_path: Path, file: str, text: str | bytes, words: str) -> None:
    a_run(tmp_path / "good")
    bad = a_run(tmp_path / "bad")
    (bad / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    found = collect([tmp_path])
    left = ["bad", "good"] if file == "audit.json" else ["good"]
    assert [entry.name for entry in found.entries] == left
    (line,) = found.problems
    assert "bad" in line and words in line and "\n" not in line


def test_a_torn_last_line_and_lines_of_another_kind_do_not_matter(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", [{"epoch": 1, "r1": 5.0}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('3\n{"epoch": 2, "r1": 6.0}\n{"epoch": 3, "r')
    (entry,) = collect([run]).entries
    assert entry.epoch == 2 and entry.last("r1") == 6


def test_an_audit_on_its_way_is_said(tmp_path: Path) -> None:
    (a_run(tmp_path / "a") / "audit/shards").mkdir(parents=True)
    found = collect([tmp_path])
    assert len(found.entries) == 1 and [line.split(",")[1] for line in found.problems] == [" an unfinished audit"]


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no folder"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(RunError, match=r"no run\.json"):
        collect([tmp_path])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="nothing to compare: left out"):
        collect([tmp_path])


def test_settings_by_their_own_name_or_dotted(tmp_path: Path) -> None:
    (entry,) = collect([a_run(tmp_path, defence={"steps": 3})]).entries
    assert entry.setting("steps") == entry.setting("defence.steps") == 3
    assert entry.setting("train.seed") == 0 and entry.setting("recipe") == "hm-lga"
    assert entry.setting("train.nothing") is entry.setting("seed") is None


def test_collapse_is_what_stopped_a_run_or_how_it_ended(tmp_path: Path) -> None:
    def entry(name: str, **about: object) -> Entry:
        return collect([a_run(tmp_path / name, **about)]).entries[0]  # type: ignore[arg-type]

    stopped = entry("stopped", rows=flat_rows(3), status="stopped", reason="the model collapsed by epoch 3: …")
    assert stopped.collapsed and stopped.finished and stopped.status == "collapsed, epoch 3"
    nan = entry("nan", rows=flat_rows(1), status="stopped", reason="the loss became NaN or infinite in epoch 2")
    assert nan.collapsed and nan.status == "loss not finite, epoch 1"
    warned = entry("warned", rows=flat_rows(5))
    assert warned.collapsed and warned.status == "collapsed, epoch 5"
    assert not entry("held", rows=flat_rows(5, separability=0.3)).collapsed
    assert not entry("back", rows=[*flat_rows(5), *flat_rows(6, separability=0.3)[-1:]]).collapsed
    assert not entry("warming", rows=flat_rows(3)).collapsed  # the second epoch is not judged
    shrunk = [{**row, "separability": 0.3, "mean_distance": 0.03} for row in flat_rows(5)]
    assert entry("shrunk", rows=shrunk).collapsed
    assert not entry("meant", rows=shrunk, train={"collapse_distance": 0.02}).collapsed
    pretraining = [{key: value for key, value in row.items() if key != "r1"} for row in flat_rows(5)]
    assert not entry("pretraining", rows=pretraining).collapsed
    going = entry("going", rows=flat_rows(2), status="interrupted", train={"epochs": 9})
    assert not going.finished and going.status == "interrupted, 2 of 9"


def test_a_strong_audit_stands_beside_the_one_that_attacks_more(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a"), ers=30, queries=500)
    an_audit(tmp_path / "a/strong", ers=31, queries=50, strong=True)
    an_audit(tmp_path / "a/smaller", ers=32, queries=20, strong=True)
    an_audit(a_run(tmp_path / "b"), ers=20, strong=True)
    an_audit(tmp_path / "c", ers=10, strong=True)
    found = collect([tmp_path])
    a, b, c = found.entries
    assert ers(a) == 30 and a.audit_at == tmp_path / "a" and a.strong is not None and a.strongest is a.strong
    assert ers(a.strong) == 31 and a.strong.audit_at == tmp_path / "a/strong"
    assert b.strong is None and b.strongest is b and c.strong is None and c.strongest is c
    (line,) = found.problems
    assert "smaller" in line
    plain = by_name(an_audit(a_run(tmp_path / "d")))["d"]
    assert plain.strongest is None


def test_rows_of_print_are_named_by_the_run_or_beside_it(tmp_path: Path) -> None:
    a_run(tmp_path / "a", row="hm/t6/cub/hm-lga-8")
    a_run(tmp_path / "b", row="")
    a_run(tmp_path / "c")
    lines = ['a = "hm/t6/cub/act-r-8"', 'b = "hm/t5/cub/hm-lga-ics-8"', 'elsewhere = "hm/t6/cub/natural-r"']
    (tmp_path / "rows.toml").write_text("\n".join(lines))
    found = collect([tmp_path])
    assert [entry.row for entry in found.entries] == ["hm/t6/cub/hm-lga-8", "hm/t6/cub/hm-lga-ics-8", ""]
    assert not found.problems
    assert by_name(tmp_path / "b")["b"].row == "hm/t6/cub/hm-lga-ics-8"  # the folder around it was not given


@pytest.mark.parametrize(
    ("text", "words"), [("b = ", "cannot be read"), ('b = "hm/t6/cub/hm-lga-9"', "did you mean"), ("b = 5", "no row")]
)
def test_a_bad_list_of_rows_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    a_run(tmp_path / "b")
    (tmp_path / "rows.toml").write_text(text)
    found = collect([tmp_path])
    (line,) = found.problems
    assert "rows.toml" in line and words in line and "\n" not in line
    assert [entry.row for entry in found.entries] == [""]


def with_curve(path: Path, norm: str = "linf", eps: float = 8 / 255, r1: float = 12.5) -> None:
    file = path / "audit.json"
    audit = json.loads(file.read_text(encoding="utf-8"))
    audit["settings"] |= {"norm": norm, "eps": eps}
    audit["curve"] = {"protocol": "strong", "eps": [0.0, eps], "lines": {"R@1": [50.0, r1]}, "queries": 100}
    file.write_text(json.dumps(audit), encoding="utf-8")


def test_the_curve_of_a_smaller_audit_is_kept(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    an_audit(tmp_path / "a" / "full", queries=900)
    with_curve(an_audit(tmp_path / "a" / "small", queries=100))
    found = collect([tmp_path])
    (entry,) = found.entries
    assert entry.audit_at == tmp_path / "a" / "full" and not found.problems
    assert entry.curved is not None and entry.curved.path == tmp_path / "a" / "small"
    cell = value_of(entry, "r1_strong")
    assert isinstance(cell, Estimate) and cell.value == 12.5


def test_a_curve_of_another_threat_is_left_out(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    an_audit(tmp_path / "a" / "full", queries=900)
    with_curve(an_audit(tmp_path / "a" / "small", queries=100), norm="l2", eps=0.5)
    found = collect([tmp_path])
    assert found.entries[0].curved is None and len(found.problems) == 1


def test_the_page_draws_one_chart_for_each_norm(tmp_path: Path) -> None:
    for name, norm, eps in (("a", "linf", 8 / 255), ("b", "l2", 0.5), ("c", "linf", 4 / 255)):
        with_curve(an_audit(tmp_path / name), norm, eps)
    page = write_compare_page(collect([tmp_path]).entries, tmp_path / "compare.html").read_text(encoding="utf-8")
    heads = re.findall(r"<h2>(R@1 against ε[^<]*)</h2>", page)
    assert sorted(heads) == [
        "R@1 against ε under the strong attack (L2)",
        "R@1 against ε under the strong attack (Linf)",
    ]
