"""The numbers in docs/results.md are those of the JSON files they name."""

import json
import re
from pathlib import Path

import pytest

import anchorhold

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text()
ROWS = re.findall(r"^\| \[[^\]]*\]\(\.\./(results/[^)]*/run\.json)\)[^|]*\|(.*)\|$", PAGE, re.M)


def test_there_are_rows() -> None:
    assert len(ROWS) >= 3


@pytest.mark.parametrize(("path", "cells"), ROWS, ids=[path for path, _ in ROWS])
def test_a_training_row_repeats_its_run(path: str, cells: str) -> None:
    run = json.loads((ROOT / path).read_text())
    final, shown = run["final"], [cell.strip().replace(",", "") for cell in cells.split("|")]
    epochs, r1, r2, map_r, *_, seconds, image_steps = shown
    assert run["status"] == "done" and run["commit"] and "dirty" not in run["commit"]
    assert int(epochs) == final["epoch"] == run["settings"]["train"]["epochs"]
    assert [r1, r2, map_r] == [f"{final[name]:.1f}" for name in ("r1", "r2", "map_r")]
    assert seconds == f"{run['seconds']:.0f}" and int(image_steps) == run["image_steps"]


def test_the_digits_table_repeats_the_demos() -> None:
    for path in sorted((ROOT / "results" / "demo").glob("seed-*.json")):
        result = json.loads(path.read_text())
        for name in ("natural", "robust"):
            values = [result[name]["clean"], *result[name]["attacked"]]
            row = " | ".join([str(result["seed"]), name, *(f"{value:.1f}" for value in values)])
            assert f"| {row} |" in PAGE


AUDITS = re.findall(r"^\| \[[^\]]*\]\(\.\./(results/[^)]*/audit\.json)\) \| (\w+) \| (.*) \|$", PAGE, re.M)


def test_there_are_audits() -> None:
    assert len(AUDITS) >= 4


@pytest.mark.parametrize(("path", "protocol", "cells"), AUDITS, ids=[f"{path}-{name}" for path, name, _ in AUDITS])
def test_an_audit_row_repeats_its_audit(path: str, protocol: str, cells: str) -> None:
    found = json.loads((ROOT / path).read_text())
    outcome = found["protocols"][protocol]
    queries, *columns, ers, ars = cells.split(" | ")
    names = ["CA+", "CA-", "QA+", "QA-", "TMA", "ES:D", "ES:R", "LTM", "GTM", "GTT"]
    assert found["commit"] and "dirty" not in found["commit"]
    assert int(queries.replace(",", "")) == found["data"]["attacked"][0]
    shown = {name: float(cell) for name, cell in zip(names, columns, strict=True)}
    for name, value in shown.items():
        assert value == pytest.approx(outcome["columns"][name]["value"], abs=5e-4 if name in ("TMA", "ES:D") else 0.05)
    score = outcome["ers"]
    assert ers == f"{score['value']:.1f} ({score['low']:.1f} to {score['high']:.1f})"
    assert ars == f"{outcome['ars']['measured']['value']:.1f}"
    values = {name: outcome["columns"][name]["value"] for name in names}
    assert anchorhold.ers(values) == pytest.approx(score["value"])


def test_the_readme_repeats_the_audits() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    for name, words in (("natural", "has ERS {} as published and {} as described"), ("hm-lga", "HM[S, LGA] {} and {}")):
        found = json.loads((ROOT / "results" / "cub" / name / "audit.json").read_text())["protocols"]
        values = (f"{found[protocol]['ers']['value']:.1f}" for protocol in ("published", "corrected"))
        assert words.format(*values) in readme


def test_no_result_names_a_path_of_a_machine() -> None:
    for path in (ROOT / "results").rglob("*.json"):
        for value in re.findall(r'"(/[^"]*)"', path.read_text()):
            pytest.fail(f"{path}: {value}")


def test_the_page_on_speed_repeats_the_benchmark() -> None:
    page = (ROOT / "docs" / "speed.md").read_text()
    found = json.loads((ROOT / "results" / "speed" / "cpu.json").read_text())
    speed = found["speed"]
    assert found["commit"] and "dirty" not in found["commit"]
    parts = [*speed["samplers"].items(), *speed["objectives"].items(), ("HM[S, LGA]'s ascent", speed["ascent"])]
    for name, row in parts:
        cells = f"| {row['loops_s']:.3g} | {row['fast_s']:.3g} | {row['ratio']:.1f} |"
        assert re.search(rf"\| [^|]*{re.escape(name)}[^|]* {re.escape(cells)}", page), name
    assert min(row["ratio"] for _, row in parts[:-1]) >= 20 and speed["ascent"]["ratio"] >= 1.5
    for name, seconds in (("hm-lga", "105"), ("hm-lga-75", "113"), ("natural", "157")):
        assert (
            f"{json.loads((ROOT / 'results' / 'cub' / name / 'audit.json').read_text())['seconds']:.0f}"
            == seconds
            in page
        )
    for name, steps in (("hm-lga", 4200), ("hm-lga-75", 7875)):
        run = json.loads((ROOT / "results" / "cub" / name / "run.json").read_text())
        assert f"{1000 * run['seconds'] / steps:.0f} ms" in page


DIGITS = re.findall(r"^\| ([a-z-]+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.M)


def test_the_table_of_defences_repeats_its_runs() -> None:
    folder = ROOT / "results" / "digits"
    shown = {name: cells for name, *cells in DIGITS if (folder / f"{name}-0").is_dir()}
    assert {f"{name}-{seed}" for name in shown for seed in (0, 1)} == {path.name for path in folder.iterdir()}
    for name, cells in shown.items():
        for seed, (r1, published, corrected, recall, steps) in enumerate(zip(*(cell.split(" / ") for cell in cells))):
            run = json.loads((folder / f"{name}-{seed}" / "run.json").read_text())
            assert run["commit"] and "dirty" not in run["commit"] and run["settings"]["train"]["seed"] == seed
            if run["status"] == "stopped":
                assert (r1, published) == ("collapse", "–") and "collapsed" in run["reason"]
                continue
            audit = json.loads((folder / f"{name}-{seed}" / "audit.json").read_text())["protocols"]
            assert r1 == f"{run['final']['r1']:.1f}" and steps == f"{run['image_steps']:,}"
            assert [published, corrected] == [f"{audit[p]['ers']['value']:.1f}" for p in ("published", "corrected")]
            assert recall == f"{audit['corrected']['columns']['ES:R']['value']:.1f}"


def test_the_gaussians_repeat_their_runs() -> None:
    for path in sorted((ROOT / "results" / "gaussians").glob("seed-*.json")):
        found = json.loads(path.read_text())
        assert found["commit"] and "dirty" not in found["commit"]
        for name in ("natural", "robust"):
            row = found[name]
            numbers = f"{row['clean']:.1f} | {row['attacked']['nearest']:.1f} | {row['attacked']['margin']:.1f}"
            assert f"| {found['seed']} | {name} | {numbers} | {row['shift']:.3f} |" in PAGE
