"""report, compare, plot and hardness on the command line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_main import run
from tests.report.invented import a_curve, a_run, an_audit, flat_rows

pytestmark = pytest.mark.medium


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    an_audit(a_run(tmp_path / "runs/a", flat_rows(3, separability=0.4), defence={"steps": 2}))
    a_run(tmp_path / "runs/b", [{"epoch": 1, "r1": 61.0}], defence={"steps": 4})


def test_compare(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, err = run(capsys, monkeypatch, "compare", "runs", "--sort", "r1")
    assert code == 0 and err == "" and out.index("\nb ") < out.index("\na ") and "30.0 [29.0, 31.0]" in out
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--out", "table.md")
    assert code == 0 and out == "written: table.md\n" and (tmp_path / "table.md").read_text().startswith("| run |")
    run(capsys, monkeypatch, "compare", "runs", "--out", "table.csv")
    assert (tmp_path / "table.csv").read_text().startswith("name,method,")
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--out", "table.tex", "--columns", "r1, ers_corrected,")
    assert code == 0 and r"run & R@1 & ERS corr. \\" in (tmp_path / "table.tex").read_text()
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--matrix", "source, steps", "--value", "r1")
    assert code == 0 and "softhard" in out and "61.0" in out
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--table", "entanglement")
    assert code == 0 and "inter-class" in out


def test_compare_prints_links_and_other_tables(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--format", "markdown")
    assert code == 0 and "| [a](runs/a/run.json) |" in out
    run(capsys, monkeypatch, "compare", "runs", "--out", "docs/table.md")
    assert "| [a](../runs/a/run.json) |" in (tmp_path / "docs/table.md").read_text()
    an_audit(tmp_path / "runs/a", strong=True, columns=True)
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--table", "columns", "--format", "csv")
    assert code == 0 and [line.split(",")[1] for line in out.splitlines()] == [
        *("protocol", "published", "corrected", "strong")
    ]
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--table", "strong")
    assert code == 0 and "ERS overstated by" in out and "7.0" in out


def test_compare_adds_r1_at_each_eps_below_the_runs(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a_curve(an_audit(Path("audits/c")), (50.0, 20.0))
    _, out, _ = run(capsys, monkeypatch, "compare", "audits")
    assert "R@1 at" not in out  # a single ε stands in the first table
    a_curve(an_audit(Path("audits/c")), (50.0, 40.0, 20.0))
    _, out, _ = run(capsys, monkeypatch, "compare", "audits")
    assert "R@1 at 4/255" in out and "40.0 [39.0, 41.0]" in out
    for more in (["--columns", "r1"], ["--format", "markdown"], ["--table", "columns"]):
        assert "R@1 at" not in run(capsys, monkeypatch, "compare", "audits", *more)[1]


def test_compare_into_a_page(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("one\n<!-- compare runs -->\n<!-- end -->\ntwo\n")
    os.makedirs("runs/c")
    Path("runs/c/run.json").write_text("{")
    code, out, err = run(capsys, monkeypatch, "compare", "runs", "--into", "page.md")
    assert code == 0 and out == "written: page.md (1 table)\n" and err.startswith("left out: cannot read runs/c")
    text = page.read_text()
    assert "| [a](runs/a/run.json) |" in text and text.startswith("one\n") and text.endswith("<!-- end -->\ntwo\n")


def test_report(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, err = run(capsys, monkeypatch, "report", "runs")
    assert code == 0 and err == ""
    assert out.splitlines() == [
        f"written: runs/{name}" for name in ("a/page.html", "a/training.html", "b/training.html")
    ]
    assert "does retrieval hold" in (tmp_path / "runs/a/page.html").read_text()
    Path("runs/a/audit.json").write_text("{")
    code, out, err = run(capsys, monkeypatch, "report", "runs/a")
    assert code == 0 and out == "written: runs/a/training.html\n" and err.startswith("left out: cannot read")
    Path("runs/a/audit.json").write_text('{"schema": "anchorhold.audit/1", "settings": {}, "protocols": {}}')
    code, out, err = run(capsys, monkeypatch, "report", "runs")
    assert code == 0 and "runs/b/training.html" in out and err.startswith("left out: ") and err.count("\n") == 1
    code, out, _ = run(capsys, monkeypatch, "report", "runs/b", "--out", "b.html")
    assert code == 0 and out == "written: b.html\n" and "training" in (tmp_path / "b.html").read_text()


def test_compare_as_a_page(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, _ = run(capsys, monkeypatch, "compare", "runs", "--sort", "r1", "--out", "table.html")
    text = (tmp_path / "table.html").read_text()
    assert code == 0 and out == "written: table.html\n" and text.index(">b</bdi></td>") < text.index(">a</bdi></td>")


def test_a_broken_folder_is_a_line_beside_the_table(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    os.makedirs("runs/c")
    Path("runs/c/run.json").write_text("{")
    code, out, err = run(capsys, monkeypatch, "compare", "runs", "--format", "csv")
    assert code == 0 and len(out.splitlines()) == 3
    assert err.startswith("left out: cannot read runs/c/run.json") and err.count("\n") == 1


def test_plot(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    code, out, _ = run(capsys, monkeypatch, "plot", "runs", "--what", "collapse", "--out", "c.png")
    assert code == 0 and out == "written: c.png\n" and (tmp_path / "c.png").stat().st_size > 1000
    for what in ("rows", "cost"):
        code, out, _ = run(capsys, monkeypatch, "plot", "runs", "--what", what, "--out", f"{what}.png")
        assert code == 0 and out == f"written: {what}.png\n" and (tmp_path / f"{what}.png").stat().st_size > 1000
    code, _, err = run(capsys, monkeypatch, "plot", "runs", "--what", "epsilon", "--out", "e.png")
    assert code == 2 and "R@1 against ε; audit with --curve" in err and not (tmp_path / "e.png").exists()
    a_curve(tmp_path / "runs/a")
    code, out, _ = run(capsys, monkeypatch, "plot", "runs", "--what", "epsilon", "--out", "e.png")
    assert code == 0 and out == "written: e.png\n" and (tmp_path / "e.png").stat().st_size > 1000
    code, _, err = run(capsys, monkeypatch, "plot", "runs/b", "--what", "rows", "--out", "r.png")
    assert code == 2 and "audit one with all nine attacks" in err
    code, _, err = run(capsys, monkeypatch, "plot", "runs", "--what", "robust", "--out", "r.png")
    assert code == 2 and "--set train.attack_eps=8/255" in err and not (tmp_path / "r.png").exists()
    code, _, _ = run(capsys, monkeypatch, "plot", "runs", "--against", "defence.steps", "--out", "s.svg")
    assert code == 0 and b"<svg" in (tmp_path / "s.svg").read_bytes()


def test_hardness(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--batches", "2", "--set", "model.dim=8", "--device", "cpu", "--format", "csv"]
    code, out, _ = run(capsys, monkeypatch, "hardness", "digits", *small)
    assert code == 0 and [line.split(",")[0] for line in out.splitlines()] == [
        *("sampler", "random", "semihard", "softhard", "distance", "hardest")
    ]
    code, out, _ = run(capsys, monkeypatch, "hardness", "digits", *small[:-1], "json")
    found = json.loads(out)
    assert code == 0 and found["settings"]["model"]["dim"] == 8 and found["batches"] == 2 and found["versions"]
    assert [row["sampler"] for row in found["rows"]] == ["random", "semihard", "softhard", "distance", "hardest"]


def test_hardness_by_default_is_the_table_s(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--set", "model.dim=8", "--device", "cpu", "--format", "json"]
    table = ["--set", "batch.pairs=56", "--set", "batch.mining_pairs=0"]
    rows = []
    for chosen in (small, [*small, *table]):
        code, out, _ = run(capsys, monkeypatch, "hardness", "digits", "--batches", "3", *chosen)
        rows.append(json.loads(out)["rows"])
        assert code == 0
    assert rows[0] == rows[1]

    asked: list[int] = []

    def counted(data: Any, settings: Any, batches: int, *_: Any) -> dict[str, Any]:
        asked.append(batches)
        return {"random": torch.zeros(2, 7)}

    monkeypatch.setattr("anchorhold.training.sampler_statistics.sampler_hardness", counted)
    run(capsys, monkeypatch, "hardness", "digits", *small)
    assert asked == [1000]


def test_sweep(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anchorhold.report.tables import Column, Table
    from anchorhold.training import sweeping

    asked: list[Any] = []

    def sweep(data: Any, recipe: str, vary: Any, out: Path, **options: Any) -> sweeping.Swept:
        asked.append((data.name, recipe, vary, out, options["overrides"], options["audited"]))
        table = Table((Column("name", "run"),), (("one",), ("two",)))
        return sweeping.Swept((table,), (out / "compare.md",), ("left out: three",))

    monkeypatch.setattr(sweeping, "sweep", sweep)
    arguments = ["digits", "--recipe", "natural", "--vary", "train.seed=1,2", "--set", "model.dim=8", "--out", "s"]
    code, out, err = run(capsys, monkeypatch, "sweep", *arguments, "--limit", "7", "--audit-eps", "1/2")
    assert code == 0 and "\none\n" in out and "written: s/compare.md" in out and err == "left out: three\n"
    code, _, _ = run(capsys, monkeypatch, "sweep", *arguments, "--no-audit")
    overrides = {"model": {"dim": "8"}, "data": {"name": "digits"}}
    budget = {"limit": 7, "eps": 0.5, "alpha": 3 / 8 * 0.5, "steps": 32}  # the step follows ε
    for found, audited in zip(asked, (budget, None), strict=True):
        assert found == ("digits", "natural", {"train.seed": ["1", "2"]}, Path("s"), overrides, audited)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("compare nowhere", "no folder nowhere"),
        ("compare runs --format txt", "no format"),
        ("compare runs --sort r3", "to sort by"),
        ("compare runs --table entangled", "did you mean entanglement?"),
        ("compare runs --table strong", "--strength strong"),
        ("compare runs --columns ,", "names no column"),
        ("compare runs --columns r1_loww", "there is no column"),
        ("compare runs --into none.md", "cannot read none.md"),
        ("compare runs --into none.md --sort r1", "leave out the other options"),
        ("plot runs/b --what rows --out c.png", "both R@1 and ERS"),
        ("compare runs --matrix source", "--matrix needs two settings"),
        ("compare runs --matrix source,destnation", "did you mean destination?"),
        ("compare runs --matrix source,steps --value r11", "did you mean r1?"),
        ("compare runs --matrix source,steps --out m.html", "leave out --matrix"),
        ("compare runs --format html", "--out compare.html"),
        ("report nowhere", "no folder nowhere"),
        ("report runs --out page.html", "there are 3 to write"),
        ("plot runs --out c.gif", ".png"),
        ("plot runs --what entanglement --out c.png", "compare DIR --table entanglement"),
        ("plot runs --what curvs --out c.png", "did you mean curves?"),
        ("plot runs --what rwos --out c.png", "did you mean rows?"),
        (
            "compare runs --out table.pdf",
            "give a file that ends in .md, .tex, .csv, .json or .txt",
        ),
        ("plot runs --against defence.stps --out c.png", "did you mean defence.steps?"),
        ("hardness digits --batches -1", "--batches must be at least 0"),
        ("hardness dgits", "did you mean digits?"),
        ("hardness nowhere --format yaml", "no format 'yaml'"),  # before the data are looked for
        ("hardness nowhere --out table.yaml", "give a file that ends in"),
        ("sweep digits --vary defence.steps --out s", "--vary needs"),
        ("sweep digits --vary steps=1,2 --out s", "--vary needs"),
        ("sweep digits --vary defence.stps=1,2 --out s", "did you mean defence.steps?"),
        ("sweep digits --vary defence.steps=1,x --out s", "defence.steps must be a whole number"),
        ("sweep digits --vary defence.steps=1,2 --audit-eps x --out s", "--audit-eps"),
    ],
)
def test_mistakes_are_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str) -> None:
    if arguments.startswith("plot"):
        pytest.importorskip("matplotlib", reason="plots are an extra")
    code, _, err = run(capsys, monkeypatch, *arguments.split())
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not os.path.exists("s") and not os.path.exists("c.png")
