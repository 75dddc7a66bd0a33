"""Protocol beside protocol: every cell from its own audit, and differences within one audit only."""

import json
from pathlib import Path
from typing import Any

import pytest

from anchorhold.columns import ERS_COLUMNS
from anchorhold.errors import RunError
from anchorhold.report.collect import collect
from anchorhold.report.compare import runs_table
from anchorhold.report.protocols import columns_table, strong_table
from anchorhold.report.rendering import render
from anchorhold.report.tables import Estimate, Table
from tests.report.invented import a_run, an_audit, flat_rows


def lines(table: Table) -> list[dict[str, Any]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row)) for row in table.rows]


def test_a_line_for_each_run_and_protocol(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a"), ers=30, columns=True)
    a_run(tmp_path / "not-audited")
    table = columns_table(collect([tmp_path]).entries)
    published, corrected = lines(table)
    assert (published["protocol"], corrected["protocol"]) == ("published", "corrected")
    assert [published[name].value for name in ERS_COLUMNS] == list(range(1, 11))
    assert [corrected[name].value for name in ERS_COLUMNS] == list(range(11, 21))
    assert published["ers"] == Estimate(30, 29, 31) and corrected["ers"] == Estimate(25, 24, 26)
    assert published["ars"].value == 40 and corrected["ars"].value == 45  # the published constants, and measured
    assert published["overstates"] == 5 and corrected["overstates"] is None and published["queries"] == 100
    text = render(table, "markdown", beside=tmp_path)
    assert "[a](a/audit.json)" in text and "strong" not in text
    assert [column.digits for column in table.columns if column.key in ("TMA", "ES:D", "GTT")] == [3, 3, 1]


def test_a_strong_audit_is_compared_with_its_own_images(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a"), ers=30, queries=500, columns=True)
    an_audit(tmp_path / "a/strong", ers=40, queries=50, strong=True, columns=True)
    entries = collect([tmp_path]).entries
    found = [
        (line["protocol"], line["queries"], line["ers"].value, line["overstates"])
        for line in lines(columns_table(entries))
    ]
    assert found == [
        ("published", 500, 30, 5),
        ("corrected", 500, 25, None),
        ("corrected", 50, 35, 7),
        ("strong", 50, 28, None),
    ]
    assert "(a/strong/audit.json) | strong" in render(columns_table(entries), "markdown", beside=tmp_path)
    (line,) = lines(strong_table(entries))
    assert line["ers_corrected"].value == 35 and line["ers_strong"].value == 28 and line["ers_overstates"] == 7
    assert line["ars_corrected"].value == 55 and line["ars_strong"].value == 48 and line["ars_overstates"] == 7
    assert line["queries"] == 50 and line["method"] == "HM[S, LGA]"
    table = runs_table(entries)
    assert lines(table)[0]["ers_strong"] == Estimate(28, 27, 29) and lines(table)[0]["ers_corrected"].value == 25
    assert "a 50 (the others 500)" in render(table)


def test_the_footer_explains_only_what_the_columns_hold(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a"), columns=True)
    table = columns_table(collect([tmp_path]).entries)
    whole = render(table)
    assert "in %, but TMA is a cosine and ES:D a distance; [95 % intervals" in whole
    assert "overstated by: ERS published minus ERS corrected, in points" in whole
    few = render(table.only(["CA+", "ES:D"]))
    assert "in %, but ES:D is a distance" in few
    assert not any(words in few for words in ("TMA", "intervals", "ARS", "overstated"))
    audit = json.loads((tmp_path / "a" / "audit.json").read_text())
    audit["protocols"] = {"corrected": {"columns": audit["protocols"]["corrected"]["columns"]}}  # one attack: no scores
    (tmp_path / "a" / "audit.json").write_text(json.dumps(audit))
    alone = render(columns_table(collect([tmp_path]).entries))
    assert not any(words in alone for words in ("intervals", "ARS", "overstated"))


def test_one_audit_may_have_all_three(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a"), strong=True)
    an_audit(a_run(tmp_path / "b"))
    entries = collect([tmp_path]).entries
    assert [(line["name"], line["overstates"]) for line in lines(columns_table(entries))] == [
        *(("a", 5), ("a", 7), ("a", None), ("b", 5), ("b", None))
    ]
    assert [line["name"] for line in lines(strong_table(entries))] == ["a"]
    table = runs_table(entries)
    assert [line["ers_strong"] for line in lines(table)] == [Estimate(18, 17, 19), None]
    assert "ERS strong" in render(table) and "another audit" not in render(table)
    assert "ERS strong" not in render(runs_table(entries[1:]))  # nobody has one


def test_a_collapsed_run_has_no_score_here_either(tmp_path: Path) -> None:
    an_audit(a_run(tmp_path / "a", flat_rows()), r1=2, strong=True, columns=True)
    entries = collect([tmp_path]).entries
    for line in lines(columns_table(entries)):
        assert line["ers"] == line["ars"] == "collapse" and line["overstates"] is None and line["CA+"] is not None
    assert lines(strong_table(entries))[0]["ers_strong"] == "collapse"
    assert lines(runs_table(entries))[0]["ers_strong"] == "collapse"


def test_without_audits_it_is_said_what_to_do(tmp_path: Path) -> None:
    entries = collect([a_run(tmp_path / "a")]).entries
    with pytest.raises(RunError, match=r"ah\.audit"):
        columns_table(entries)
    with pytest.raises(RunError, match="strength='strong'"):
        strong_table(collect([an_audit(tmp_path / "a")]).entries)
