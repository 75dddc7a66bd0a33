"""Published rows as data: the file against the papers, each row against the settings of its method, and --row."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anchorhold.cli import main as cli
from anchorhold.config.build import to_dict
from anchorhold.config.recipes import settings_from
from anchorhold.config.settings import Settings
from anchorhold.errors import SettingsError
from anchorhold.reproduce.rows import Row, check_row, row_named, row_settings, rows

ROWS = rows()
SAMPLERS = {"R": "random", "M": "semihard", "S": "softhard", "D": "distance", "H": "hardest"}
CONSTANTS = {"0": 0.0, "-gamma/2": -0.1, "-gamma": -0.2}  # γ = 0.2


def built(row: Row, *changes: str) -> Settings:
    weights = ["model.weights=robust.pt"] if row.published.get("init") else []
    return settings_from(row.recipe, row_settings(row, [f"data.name={row.data}", *weights, *changes]))


# ---------------------------------------------------------------- the file


def test_names_say_where_a_row_is_printed() -> None:
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names))
    for row in ROWS:
        paper, table, data, method = row.id.split("/")
        assert (paper, data) == (row.paper, row.data) and table in row.tables and method
        assert list(row.tables) == sorted(set(row.tables))
        assert all(row_named(name) is row for name in row.names)


def test_no_row_is_lost() -> None:
    """How many distinct rows each table prints, counted by hand."""
    counts = Counter((row.paper, table) for row in ROWS for table in row.tables)
    assert {table: n for (paper, table), n in counts.items() if paper == "robust-init"} == {
        "a1": 30,
        "a2": 5,
        "a3": 25,
    } | {
        "a4": 25,  # 1 + 4 defences × 2 numbers of steps × 3 starts
        "a5": 37,  # 1 + 6 defences × 6 starts
    }
    assert {table: n for (paper, table), n in counts.items() if paper == "hm"} == {
        "t2": 25,  # 5 × 5 samplers
        "t3": 21,
        "t4": 14,  # of 16 lines two stand twice
        "t5": 13,  # of 14 one
        "t6": 27,
    }
    assert {table: n for (paper, table), n in counts.items() if paper == "catride"} == {"t1": 12, "t2": 12} | {
        "t3": 3,
        "t4": 3,
        "t5": 3,
        "text": 3,
    }
    assert {table: n for (paper, table), n in counts.items() if paper == "adml"} == {"t1": 6, "t7": 6, "text": 1} | {
        "t2": 12,  # 2 losses × 3 sets, natural and robust
        "t3": 12,
        "t4": 12,
        "t5": 36,  # 2 losses × 3 sets × (natural and 5 attack rates)
        "t6": 36,
    }
    assert sum(row.paper == "hm" and len({"t3", "t4", "t5", "t6"} & set(row.tables)) > 0 for row in ROWS) == 64


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("hm/t2/cub/hm-s-r-8", {"R@1": 48.3, "ERS": 13.7, "steps": 8}),
        ("hm/t2/cub/hm-r-s-8", {"steps": 8}),  # Collapse
        ("hm/t3/cub/act-s-16", {"R@1": 40.5, "R@2": 51.6, "mAP": 24.8, "NMI": 51.7, "CA+": 6.7, "GTT": 0.9}),
        ("hm/t4/cub/hm-s-0-8", {"R@1": 0.8, "TMA": 1.0, "ES:D": 0.0, "GTT": 14.1, "ERS": 29.7}),
        ("hm/t5/cub/hm-lga-ics1-8", {"TMA": 0.907, "ES:D": 0.329, "ERS": 33.7}),
        ("hm/t6/cub/hm-lga-ics-8", {"R@1": 37.2, "CA-": 40.9, "QA+": 14.7, "ERS": 33.5}),
        ("hm/t6/cars/hm-lga-8", {"R@1": 63.2, "LTM": 28.5, "GTM": 44.6, "ERS": 42.4}),
        ("catride/t1/cub/ca-tride-16", {"ARS:CA+": 32.6, "ARS:GTT": 5.1, "ARS": 51.6}),
        ("catride/t2/cub/ca-tride-16", {"CA+": 16.7, "TMA": 0.97, "ES:D": 0.16, "ERS": 38.6, "steps": 16}),
        ("catride/t5/cars/ca-tride-16", {"inter": 0.325, "intra": 0.256, "entanglement": 0.79}),
        ("catride/t3/cub/ca-anp-16", {"R@1": 34.2, "ARS:LTM": 61.1, "ERS": 34.0, "ARS": 47.8}),
        ("catride/t4/cub/ca-tride-without-top-rank-16", {"R@1": 32.7, "ARS:GTT": 0.7, "ERS": 33.3, "ARS": 39.3}),
        ("catride/text/cub/naive-anp-16", {"R@1": 7.8}),
        ("adml/t1/cub/natural-triplet", {"R@1": 59.3, "mAP@R": 21.7, "R@1 PGD .05": 0.0, "mAP@R PGD .1": 2.5}),
        ("adml/t7/cars/natural-contrastive", {"R@1 FGSM .01": 14.6, "mAP@R C&W .01": 2.3}),
        ("adml/t2/cub/adml-triplet", {"R@1 PGD .01": 23.0, "R@1 PGD .01 ±": 0.2, "mAP@R PGD .01": 8.6}),
        ("adml/t4/sop/adml-contrastive", {"R@1 C&W .01": 57.2, "mAP@R C&W .01": 32.6}),
        ("adml/t6/cars/adml-triplet-0.75", {"R@1": 70.3, "mAP@R": 18.1, "R@1 PGD .01": 39.7, "mAP@R PGD .01": 11.6}),
        ("adml/t5/cars/adml-contrastive-0.25", {"R@1 PGD .01": 27.1, "R@1": 74.0}),
        ("adml/t5/cars/adml-contrastive-1.0", {"R@1 PGD .01": 41.4, "R@1": 67.7}),
        ("adml/t6/cub/adml-contrastive-0.25", {"mAP@R": 21.9, "R@1": 60.1, "mAP@R PGD .01": 6.8}),
        ("adml/t5/sop/adml-contrastive-0.75", {"R@1 PGD .01": 48.7, "mAP@R PGD .01": 28.3}),
        ("robust-init/a1/cub/hm-lga-8-init-4", {"R@1": 40.4, "ERS": 47.2, "init": 4}),  # one setting,
        ("robust-init/a5/cub/hm-lga-8-init-4", {"R@1": 42.2, "ERS": 45.2, "init": 4}),  # printed twice
        ("robust-init/a3/cub/hm-d-h-8-init-4", {"R@1": 2.3, "NMI": 7.7, "ERS": 27.9}),
        ("robust-init/a4/cub/hm-lga-ics-32-init-4", {"R@1": 39.6, "TMA": 0.8, "ERS": 47.3}),
        ("robust-init/a5/cub/est-s-8-init-0.5", {"R@1": 49.5, "ES:R": 22.6, "ERS": 21.3, "init": 0.5}),
    ],
)
def test_numbers_as_printed(name: str, printed: dict[str, float]) -> None:
    found = row_named(name).published
    assert {column: found[column] for column in printed} == printed
    if name == "hm/t2/cub/hm-r-s-8":
        assert found.keys() == {"steps"}


def test_a_table_of_000_repeats_another() -> None:
    """A1 gives R@1 and ERS of what A2 and A3 give whole; Zhou & Patel 2022's natural row is quoted in A4 and A5."""
    assert row_named("robust-init/a5/cub/natural-r").published == row_named("hm/t6/cub/natural-r").published
    assert row_named("robust-init/a1/cub/hm-h-lga-8-init-4").note == "A1 reports ERS 34.4"


def test_numbers_lie_where_they_can() -> None:
    spans = {"TMA": (-1, 1), "ES:D": (0, 2), "steps": (2, 32), "init": (0, 8), "inter": (0, 2), "intra": (0, 2)}
    for row in ROWS:
        for column, value in row.published.items():
            low, high = spans.get(column, (0, 100))
            assert low <= value <= high, (row.id, column)
        if "R@2" in row.published:
            assert row.published["R@1"] < row.published["R@2"]


def test_the_overall_ars_is_the_mean_of_its_columns() -> None:
    scored = [row for row in ROWS if "ARS" in row.published]
    assert len(scored) == 16
    for row in scored:
        columns = [value for name, value in row.published.items() if name.startswith("ARS:")]
        off = abs(sum(columns) / 8 - row.published["ARS"])
        assert len(columns) == 8 and (off < 0.11 or "ARS" in row.note), row.id


# ---------------------------------------------------------------- settings


def expected(row: Row) -> dict[str, Any]:
    """What a method means, read from its name as printed."""
    if found := re.fullmatch(r"(N/A|ACT|EST)(?:\[(.)\])?", row.method):
        name = {"N/A": "natural", "ACT": "act", "EST": "est"}[found[1]]
        wanted: dict[str, Any] = {"name": name, "sampler": SAMPLERS[found[2] or "R"]}
        if name == "est":  # robust-init A.7, equation 6
            wanted["start"] = "random" if row.paper == "robust-init" else "zero"
    elif row.method == "HM":  # Tian et al. 2024 compares with the best of Zhou & Patel 2022
        wanted = {"name": "hardness", "source": "softhard", "destination": "lga", "boost": 0.0, "ics": 0.5}
    elif found := re.fullmatch(r"HM\[(.),(.)\]", row.method.replace("HM[S,0]", "")):
        source, destination = SAMPLERS[found[1]], SAMPLERS[found[2]]
        wanted = {"name": "hardness", "source": source, "destination": destination, "boost": 0.0, "ics": 0.0}
        if source == destination:  # regular training
            wanted = {"name": "natural", "sampler": source}
    elif found := re.fullmatch(r"HM\[(.),(.+?)\](&ICS)?(?:\((?:lambda|xi)=(.+)\))?", row.method):
        wanted = {"name": "hardness", "source": SAMPLERS[found[1]], "boost": 0.0, "ics": 0.5 if found[3] else 0.0}
        if found[2] == "g_B(M)":
            wanted |= {"destination": "semihard", "boost": float(found[4])}
        elif found[2] in CONSTANTS:
            wanted |= {"destination": CONSTANTS[found[2]]}
        else:
            wanted |= {"destination": "lga" if found[2] == "g_LGA" else SAMPLERS[found[2]]}
        if found[3] and found[4]:
            wanted["ics"] = float(found[4])
    elif row.recipe == "catride":
        naive, whole = "naive" in row.method, "w/o" not in row.method
        wanted = {"name": "tride", "form": "paper", "beta": 0.04, "gamma": 0.5}
        wanted |= {"phases": "cap" if "CAP" in row.method else "anp" if "ANP" in row.method else "both"}
        wanted |= {"guide": "hardness" if naive else "collapseness", "stop": not naive}
        wanted |= {"top_rank_loss": whole and not naive, "top_rank_term": not naive and row.method != "w/o TPR"}
        wanted |= {"attention": {"cub": 10.0, "cars": 9.5, "sop": 2.0}[row.data]}
    else:
        loss = "contrastive" if "contrastive" in row.method else "triplet"
        wanted = {"name": "adml", "loss": loss, "margin": {"contrastive": 1.0, "triplet": 0.2}[loss], "eps": 0.01}
        wanted |= {"perturb": "anchor" if "anchor" in row.method else "positive", "formulation": 2}
        rate = "0" if "natural" in row.method else row.method.partition("attack rate ")[2]
        wanted |= {"attack_rate": float(rate)} if rate else {}
    if wanted.get("ics") == 0.5 and row.data == "sop":
        wanted["ics"] = 0.05
    if "steps" in row.published:
        wanted["steps"] = row.published["steps"]
    return wanted


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_row_builds_the_settings_its_method_stands_for(row: Row) -> None:
    settings = built(row)
    found, wanted = to_dict(settings)["defence"], expected(row)
    assert {key: found[key] for key in wanted} == wanted
    assert settings.recipe == row.recipe and settings.data.name == row.data
    if row.paper == "adml":
        assert (settings.model.backbone, settings.model.dim, settings.optimiser.lr) == ("resnet50", 128, 1e-6)
        assert settings.train.epochs == (100 if row.data == "sop" else 150)
    else:
        assert (settings.model.backbone, settings.model.dim, settings.optimiser.lr) == ("resnet18", 512, 1e-5)
        assert (found.get("eps", 8 / 255), found.get("alpha", 1 / 255)) == (8 / 255, 1 / 255)
    check_row(row, settings)


def test_rows_that_collapse_as_published_are_trained_to_the_end() -> None:
    warned = {row.id for row in ROWS if "train.on_collapse=warn" in row.overrides}
    for row in ROWS:
        collapsed = "Collapse" in row.note or row.published.get("R@1", 100) < 10 or row.published.get("ES:D") == 0
        assert row.id in warned or not collapsed
    assert {"hm/t4/cub/hm-s-0-8", "hm/t6/cub/est-r-32", "catride/text/cub/naive-tride-16"} <= warned
    assert "hm/t6/cub/hm-lga-8" not in warned


@pytest.mark.parametrize("name", ["cub/adml-triplet", "cars/adml-triplet", "sop/adml-triplet", "sop/adml-contrastive"])
def test_table_2_of_003_has_the_best_attack_rate_of_table_5(name: str) -> None:
    rates = [row_named(f"adml/t5/{name}-{rate}") for rate in ("0.1", "0.25", "0.5", "0.75", "1.0")]
    best = max(rates, key=lambda row: (row.published["R@1 PGD .01"], row.published["mAP@R PGD .01"]))
    row = row_named(f"adml/t2/{name}")
    assert built(row).defence == built(best).defence
    assert abs(row.published["R@1 PGD .01"] - best.published["R@1 PGD .01"]) < 0.11  # five attacks, and one of them


def test_cells_of_003_that_were_read_from_a_scan_agree_with_its_other_tables_and_text() -> None:
    """Table 2 has Cars' best rate; appendix C says that rate 0.25 exceeds natural training on CUB, and no other."""
    rates = ("0.1", "0.25", "0.5", "0.75", "1.0")
    cars = [row_named(f"adml/t5/cars/adml-contrastive-{rate}").published.get("R@1 PGD .01") for rate in rates]
    assert cars == [None, 27.1, 35.7, 39.5, 41.4]
    assert cars[-1] == row_named("adml/t2/cars/adml-contrastive").published["R@1 PGD .01"]
    cub = [row_named(f"adml/t6/cub/adml-contrastive-{rate}").published["mAP@R"] for rate in rates]
    natural = row_named("adml/t1/cub/natural-contrastive").published["mAP@R"]
    assert cub == [17.2, 21.9, 15.8, 14.8, 13.2] and [rate for rate, at in zip(rates, cub) if at > natural] == ["0.25"]


def test_a_change_wins_over_the_row() -> None:
    row = row_named("hm/t4/cub/hm-s-0-8")
    settings = built(row, "defence.steps=3", "train.on_collapse=stop")
    assert (settings.defence.steps, settings.train.on_collapse, settings.defence.destination) == (3, "stop", 0.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hm/t6/cub/hm-lga-isc-8", "no row 'hm/t6/cub/hm-lga-isc-8'; did you mean hm/t6/cub/hm-lga-ics-8?"),
        ("zz", "no row 'zz'; `anchorhold recipes rows` lists them"),
    ],
)
def test_an_unknown_name_is_one_line(name: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        row_named(name)
    assert str(caught.value) == words


def test_a_row_is_of_its_data_set_and_its_start() -> None:
    cars, robust = row_named("hm/t6/cars/hm-lga-8"), row_named("robust-init/a4/cub/hm-lga-32-init-4")
    with pytest.raises(SettingsError, match="hm/t6/cars/hm-lga-8 is a row for cars, not cub: train on cars, or"):
        check_row(cars, built(cars, "data.name=cub"))
    check_row(cars, built(cars, "data.name=folder"))  # a method may be borrowed
    with pytest.raises(SettingsError, match=r"adversarially trained weights; give yours with weights= .*ε = 4/255"):
        check_row(robust, built(robust, "model.weights=imagenet"))
    plain = row_named("robust-init/a4/cub/hm-lga-32-init-0")
    check_row(plain, built(plain, "model.weights=imagenet"))


# ---------------------------------------------------------------- the command line


def run(capsys: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anchorhold", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.medium
def test_train_by_row(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A set without published rows may borrow the method; what was trained, and after which row, is on record."""
    monkeypatch.chdir(tmp_path)
    quick = ["--set", "train.epochs=1", "--set", "model.dim=8", "--set", "defence.steps=1", "--device", "cpu"]
    code, out, err = run(capsys, monkeypatch, "train", "digits", "--row", "hm/t5/cub/hm-r-m-8", *quick)
    assert code == 0, err
    assert "the paper reports" not in out  # its numbers are of cub
    info = json.loads((tmp_path / "runs/hm-t5-cub-hm-r-m-8-0/run.json").read_text())
    assert (info["row"], info["settings"]["recipe"]) == ("hm/t5/cub/hm-r-m-8", "hm")
    defence = info["settings"]["defence"]
    assert (defence["source"], defence["destination"], defence["steps"]) == ("random", "semihard", 1)


def test_print_stands_beside_what_came_out(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from anchorhold.data import datasets
    from anchorhold.runs.folder import Run
    from anchorhold.training import fit as training

    asked: dict[str, Any] = {}

    def fit(model: None, data: str, recipe: str, out: Path | str, **options: Any) -> Run:
        asked.update(options | {"out": out, "settings": settings_from(recipe, options["overrides"])})
        return Run.create(tmp_path / "run", {})

    monkeypatch.setattr(training, "fit", fit)
    monkeypatch.setattr(datasets, "dataset", lambda name, root, held_out: name)
    code, out, err = run(capsys, monkeypatch, "train", "cub", "--row", "hm/t5/cub/hm-lga-ics-8", "--seed", "3")
    assert code == 0, err
    assert "hm/t6/cub/hm-lga-ics-8: the paper reports R@1 37.2, ERS 33.5\n" in out
    assert asked["row"] == "hm/t6/cub/hm-lga-ics-8"
    assert asked["out"] == Path("runs/hm-t6-cub-hm-lga-ics-8-3")
    assert asked["settings"].defence.ics == 0.5
    run(capsys, monkeypatch, "train", "cub")
    assert (asked["row"], asked["settings"].recipe) == ("", "robust")


def test_a_run_without_a_row_says_so(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--set", "train.epochs=1", "--set", "model.dim=8", "--device", "cpu"]
    assert run(capsys, monkeypatch, "train", "digits", "--recipe", "natural", *quick, "--out", "a")[0] == 0
    assert json.loads((tmp_path / "a/run.json").read_text())["row"] == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cub", "--row", "hm/t6/cub/hm-lga-8", "--recipe", "hm-lga"], "leave out --recipe"),
        (["cub", "--row", "hm/t6/cub/hm-lag-8"], "did you mean hm/t6/cub/hm-lga-8?"),
        (["cub", "--row", "hm/t6/cars/hm-lga-8"], "a row for cars, not cub"),
        (["cub", "--row", "robust-init/a5/cub/hm-lga-8-init-4"], "give yours with --weights"),
        (["cub", "--row", "robust-init/a5/cub/hm-lga-8-init-4", "--weights", "missing.pt"], "--root"),
        (["cub", "--row", "hm/t6/cub/hm-lga-8", "--set", "defence.stps=1"], "did you mean defence.steps?"),
    ],
)
def test_mistakes_with_rows(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, monkeypatch, "train", *arguments)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err, err


def test_rows_are_listed(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "recipes", "rows")
    assert code == 0 and all(f"{row.id} " in out for row in ROWS)
    code, out, _ = run(capsys, monkeypatch, "recipes", "rows", "t5/cub/hm-lga-ics-8")
    assert code == 0 and re.search(r"hm/t6/cub/hm-lga-ics-8 +HM\[S,g_LGA\]&ICS +37\.2 +33\.5\n", out)
    assert "hm-lga-8 " not in out
    code, _, err = run(capsys, monkeypatch, "recipes", "rows", "nothing")
    assert code == 2 and "recipes rows" in err
