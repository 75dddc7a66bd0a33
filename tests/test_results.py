"""The numbers in results/notes are those of the JSON files they name, and the tables are what compare makes."""

import importlib
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import anchorhold
from anchorhold.attacks.menu import goal_named
from anchorhold.auditing.flags import NARROW
from anchorhold.auditing.members import MEMBERS, most_steps
from anchorhold.config.build import build, to_dict
from anchorhold.config.recipes import parse_assignments, settings_from
from anchorhold.report.collect import collect
from anchorhold.report.curve import table_of_curve
from anchorhold.report.insert import regenerated
from anchorhold.report.scatter import drawn
from anchorhold.reproduce.comparison import departures, rerun_of, row_of
from anchorhold.reproduce.rows import row_named, rows

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / "results" / "notes"
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (*sorted(NOTES.glob("*.md")), ROOT / "docs" / "reproduce" / "results.md")
    if path.name not in ("speed.md", "scale.md")  # they have tests of their own
}
PAGE = "\n".join(text for path, text in PAGES.items() if path.parent == NOTES)
CUB_STRONG = ROOT / "results" / "cub-strong"
CUB = sorted((ROOT / "results" / "cub").glob("*/run.json"))
ENTRIES = collect([ROOT / "results" / "cub"]).entries
RUNS = {entry.name: entry for entry in ENTRIES}
FOLDERS = [Path("results")]


def tables() -> dict[str, list[dict[str, str]]]:
    """Every table that compare wrote into the page, by what it was asked for: its lines, by head."""
    found = {}
    for asked, block in re.findall(r"^<!-- compare ([^\n]*) -->\n(.*?)^<!-- end -->$", PAGE, re.M | re.S):
        head, _, *lines = [line for line in block.splitlines() if line.startswith("|")]
        names = [cell.strip() for cell in head.strip("|").split("|")]
        found[asked] = [dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")))) for line in lines]
    return found


NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def says(text: str, sentence: str) -> bool:
    """Whether the numbers of the sentence stand at one place of the text, in this order, with no other between them.

    A single number may stand anywhere, so a sentence needs its neighbours too. The words may differ.
    """
    wanted, found = NUMBER.findall(sentence), NUMBER.findall(text)
    assert len(wanted) > 1, f"too few numbers to find their place by in {sentence!r}"
    places = [at for at in range(len(found)) if found[at : at + len(wanted)] == wanted]
    assert len(places) < 2, f"the numbers of {sentence!r} stand at {len(places)} places; add their neighbours"
    return bool(places)


def test_numbers_are_looked_for_at_their_place() -> None:
    text = "R@1 36.6 and ERS 38.0; without it 36.9 and 31.8."
    assert says(text, "36.6, 38.0") and says(text, "1, 36.6") and says(text, "36.9 / 31.8")
    assert not says(text, "36.6 and 31.8") and not says(text, "38.0, 36.6")
    for wrong, why in ((text, "36.6"), (text + text, "36.6, 38.0")):
        with pytest.raises(AssertionError, match=r"too few|2 places"):
            says(wrong, why)


def name_in(line: dict[str, str]) -> str:
    return line["run"].split("]")[0].removeprefix("[")


def target(cell: str) -> Path:
    (way,) = re.findall(r"\]\((.*)\)$", cell)
    return (NOTES / way).resolve()


@pytest.mark.parametrize("path", [path for path, text in PAGES.items() if "<!-- compare" in text], ids=lambda p: p.name)
def test_a_page_is_what_compare_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new run: anchorhold compare results/ --into results/notes, and --into docs/reproduce."""
    monkeypatch.chdir(ROOT)
    made, count, problems = regenerated(PAGES[path], path.parent, FOLDERS)
    assert made == PAGES[path] and count == PAGES[path].count("<!-- end -->") and not problems


@pytest.mark.slow
def test_one_changed_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(tables()) >= 2
    for place, table in tables().items():
        (page,) = [path for path, text in PAGES.items() if path.parent == NOTES and f"<!-- compare {place} -->" in text]
        text = PAGES[page]
        for line in (table[0], table[-1]):
            cells = " ".join(list(line.values())[1:])
            number = [*re.findall(r"\b\d+\b", cells), *re.findall(r"\d+\.\d", cells)][-1]
            spoilt = text.split("\n")
            at = next(at for at, each in enumerate(spoilt) if line["run"] in each and number in each)
            spoilt[at] = spoilt[at].replace(number, f"{float(number) + 0.1:.1f}", 1)
            changed = "\n".join(spoilt)
            assert changed != text and regenerated(changed, page.parent, FOLDERS)[0] == text, place


def test_every_run_has_its_line_and_repeats_its_json() -> None:
    """Without the renderer: what stands on the page, against the files it leads to."""
    runs = {target(line["run"]): line for line in tables()["results/cub"]}
    assert set(runs) == set(CUB)
    for path, line in runs.items():
        run = json.loads(path.read_text())
        assert run["commit"] == line["commit"] and "dirty" not in run["commit"]
        if run["status"] == "stopped":
            assert line["ERS publ."] == line["paper's row"].replace("–", "collapse") == "collapse"
            continue
        final = run["final"]
        assert run["status"] == "done"
        assert int(line["epochs"]) == final["epoch"] == run["settings"]["train"]["epochs"]
        assert int(line["seed"]) == run["settings"]["train"]["seed"]
        assert line["batch"] == f"{run['settings']['batch']['pairs']} pairs"
        assert [line[head].split()[0] for head in ("R@1", "R@2", "mAP@R")] == [
            f"{final[name]:.1f}" for name in ("r1", "r2", "map_r")
        ]
        assert line["seconds"] == f"{run['seconds']:,.0f}" and line["image-steps"] == f"{run['image_steps']:,}"
        if not path.with_name("audit.json").exists():
            assert line["ERS publ."] == line["ERS corr."] == "–" and line["paper's row"] != "reproduced"
            continue
        if line["ERS publ."] == "collapse":
            assert run["settings"]["train"]["on_collapse"] == "warn"
            continue
        audit = json.loads(path.with_name("audit.json").read_text())
        assert line["audit s"] == f"{audit['seconds']:,.0f}"
        clean = audit["clean"]["R@1"]
        assert line["R@1"] == f"{clean['value']:.1f} [{clean['low']:.1f}, {clean['high']:.1f}]"
        for head, protocol in (("ERS publ.", "published"), ("ERS corr.", "corrected")):
            score = audit["protocols"][protocol]["ers"]
            assert line[head] == f"{score['value']:.1f} [{score['low']:.1f}, {score['high']:.1f}]"


def test_reproduced_means_in_the_band_with_the_settings_of_the_row() -> None:
    for line in tables()["results/cub"]:
        if line["paper's row"] not in ("reproduced", "within", "outside") or line["ERS publ."] == "–":
            continue
        r1, ers = (float(line[head].split()[0]) for head in ("R@1", "ERS publ."))
        pairs = [(line[f"R@1 {whose}"], line[f"ERS {whose}"]) for whose in ("paper", "rerun")]
        near = [abs(r1 - float(a)) <= 3.001 and abs(ers - float(b)) <= 5.001 for a, b in pairs if "–" not in (a, b)]
        assert any(near) == (line["paper's row"] != "outside")
        assert line["epochs"] == "75" or line["paper's row"] != "reproduced"


@pytest.mark.parametrize(
    ("picture", "cost"), [(ROOT / "docs" / "pictures" / "cub-rows.png", False), (NOTES / "cub-cost.png", True)]
)
def test_the_pictures_are_there_small_and_of_these_runs(picture: Path, cost: bool) -> None:
    """After a new run the commands in results/notes/README.md draw them anew."""
    folders = [ROOT / "results" / "cub", *([ROOT / "results" / "cub-own"] if cost else [])]
    told = drawn(collect(folders).entries, cost)
    assert not cost or ("own 3365238 8" in told and "None" not in told)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 250_000
    assert picture.relative_to(ROOT).as_posix() in PAGE and f"{picture.name})" in PAGE
    with Image.open(picture) as file:
        assert file.info["Description"] == told


def test_the_digits_table_repeats_the_demos() -> None:
    paths = sorted((ROOT / "results" / "demo").glob("seed-*.json"))
    assert len(paths) == 6
    for path in paths:
        result = json.loads(path.read_text())
        for name in ("natural", "robust"):
            values = [result[name]["clean"], *result[name]["attacked"]]
            row = " | ".join([str(result["seed"]), name, *(f"{value:.1f}" for value in values)])
            assert f"| {row} |" in PAGE


def test_an_audit_line_repeats_its_audit() -> None:
    names = ["CA+", "CA-", "QA+", "QA-", "TMA", "ES:D", "ES:R", "LTM", "GTM", "GTT"]
    lines = tables()["results/cub --table columns"]
    audits = {path.with_name("audit.json") for path in CUB if path.with_name("audit.json").exists()}
    assert {target(line["run"]) for line in lines} >= audits and len(lines) >= 2 * len(audits) >= 4
    for line in lines:
        found = json.loads(target(line["run"]).read_text())
        outcome = found["protocols"][line["protocol"]]
        values = {name: outcome["columns"][name]["value"] for name in names}
        assert found["commit"] and "dirty" not in found["commit"]
        assert line["queries"] == f"{found['data']['attacked'][0]:,}"
        for name, value in values.items():
            assert line[name] == f"{value:.{3 if name in ('TMA', 'ES:D') else 1}f}"
        if line["ERS"] == "collapse":
            continue
        score = outcome["ers"]
        assert line["ERS"] == f"{score['value']:.1f} [{score['low']:.1f}, {score['high']:.1f}]"
        assert anchorhold.ers(values) == pytest.approx(score["value"])
        kind = "constants" if line["protocol"] == "published" else "measured"
        assert line["ARS"] == f"{outcome['ars'][kind]['value']:.1f}"
        if line["protocol"] == "published":
            above = score["value"] - found["protocols"]["corrected"]["ers"]["value"]
            assert line["ERS overstated by"] == f"{above:.1f}"


def test_every_number_of_the_readmes_results_is_that_of_its_file() -> None:
    (results,) = re.findall(r"^## Results\n(.*?)^\[All results\]", (ROOT / "README.md").read_text(), re.M | re.S)
    head, *points = results.split("\n- ")
    assert NUMBER.findall(head) == ["200", "2011", "18", "0"]  # CUB-200-2011, ResNet-18, near 0

    def ers(name: str, *protocols: str) -> list[str]:
        found = json.loads((ROOT / "results" / "cub" / name / "audit.json").read_text())["protocols"]
        return [f"{found[protocol]['ers']['value']:.1f}" for protocol in protocols]

    published, both, speed = "published", ("published", "corrected"), benchmark("gpu")["speed"]
    hm = row_named("hm/t6/cub/hm-lga-8").published["ERS"]
    audits = [json.loads((CUB_STRONG / name / "audit.json").read_text()) for name in ("hm-lga-112", "natural-112")]
    hm_curve, natural_curve = ([f"{left:.1f}" for left in audit["curve"]["lines"]["R@1"]] for audit in audits)
    strong = ["1,000", "1", hm_curve[2], hm_curve[0], "2", "255", hm_curve[3], "4", "255", hm_curve[4], "8", "255"]
    strong += ["8", "255", *ers("../cub-strong/hm-lga-112", "strong"), natural_curve[1], "1", "255"]
    times = f"{speed['hm']['ms']:.0f}", f"{speed['audit-robust']['seconds']:.0f}"
    told = [
        ["1", nearness("R@1"), nearness("ERS")],
        [*ers("natural-112", *both), *ers("hm-lga-112", published), f"{hm}", *ers("hm-lga-112", "corrected")],
        strong,
        ["1", *ers("own", *both)],
        ["200", times[0], times[1], "1024"],
        [],
    ]
    assert [NUMBER.findall(point) for point in points] == told


def nearness(name: str) -> str:
    """How far the reproduced rows are at most from the paper's R@1 or ERS."""
    # Those with the settings of their row, and seed 0: of others the verdict is `within` at best.
    meant = {e.name: row.id for e in ENTRIES if (row := row_of(e)) and not departures(e, row)}
    meant = {name: row for name, row in meant.items() if not RUNS[name].setting("train.seed")}
    lines = [line for line in tables()["results/cub --table published"] if name_in(line) in meant]
    found = [line for line in lines if line["paper's row"] == "reproduced"]
    # A row that was run twice, in fp32 too, is one row.
    assert {meant[name_in(line)] for line in lines if line not in found}.isdisjoint(
        meant[name_in(line)] for line in found
    )
    head = {"R@1": "R@1", "ERS": "ERS publ."}[name]
    return f"{max(abs(float(line[head]) - float(line[f'{name} paper'])) for line in found):.1f}"


def test_no_result_names_a_path_of_a_machine() -> None:
    paths = list((ROOT / "results").rglob("*.json*"))
    assert len(paths) > 50
    for path in paths:
        for value in re.findall(r"""(?:^|[\s"':=(])(/\w[^"]*)""", path.read_text(), re.M):
            pytest.fail(f"{path}: {value}")


def test_the_page_on_speed_repeats_the_benchmark() -> None:
    page = (NOTES / "speed.md").read_text()
    found = json.loads((ROOT / "results" / "speed" / "cpu.json").read_text())
    speed = found["speed"]
    assert found["commit"] and "dirty" not in found["commit"]
    parts = [*speed["samplers"].items(), *speed["objectives"].items(), ("HM[S, LGA]'s ascent", speed["ascent"])]
    for name, row in parts:
        cells = f"| {row['loops_s']:.3g} | {row['fast_s']:.3g} | {row['ratio']:.1f} |"
        assert re.search(rf"\| [^|]*{re.escape(name)}[^|]* {re.escape(cells)}", page), name
    assert min(row["ratio"] for _, row in parts[:-1]) >= 20 and speed["ascent"]["ratio"] >= 1.5


def benchmark(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "speed" / f"{name}.json").read_text())
    assert found["commit"] and "dirty" not in found["commit"] and "H200" in found["device"]
    return found


def test_the_page_on_speed_repeats_the_gpu() -> None:
    lines = (NOTES / "speed.md").read_text().splitlines()
    (head,) = [line for line in lines if line.startswith("| work | RobRank |")]
    for column, name in ((5, "gpu-before"), (7, "gpu")):
        found = benchmark(name)
        assert head.split("|")[column].strip().startswith(f"[{found['commit'][:7]}]")
        speed = found["speed"]
        at = {size: f"{row['compiled']:.1f}" for size, row in speed["ascent"].items()}
        told = {
            "HM[S, LGA] training step": f"{speed['hm']['ms']:.1f} ms",
            "the same with 32 steps": f"{speed['hm-32']['ms']:.1f} ms",
            "CA-TRIDE training step": f"{speed['tride']['ms']:.1f} ms",
            "audit `--full` of a robust": f"{speed['audit-robust']['seconds']:.1f} s",
            "the same of a natural": f"{speed['audit-natural']['seconds']:.1f} s",
            "one image-step": f"{at['112']} µs",
            "batch 168, batch 512": f"{at['168']}, {at['512']} µs",
            "from command to first": f"{speed['start']['to_first_step']:.1f} s",
        }
        for work, number in told.items():
            (line,) = [line for line in lines if line.startswith(f"| {work}")]
            assert line.split("|")[column].strip(" *") == number, (work, name)


def test_the_page_on_speed_repeats_the_accuracy() -> None:
    page, found = (NOTES / "speed.md").read_text(), benchmark("accuracy")
    assert found["commit"] == benchmark("gpu")["commit"]
    parts = found["accuracy"]
    for arm in ("slow", "fast"):
        zero, one = (parts[f"{arm}-{seed}"] for seed in (0, 1))
        ers = [f"{zero['ers'][p]['value']:.1f} / {one['ers'][p]['value']:.1f}" for p in ("published", "corrected")]
        assert f"| {arm} | {zero['r1']:.1f} / {one['r1']:.1f} | {' | '.join(ers)} | " in page
    means = {}
    for key, most in (("r1", 0.35), ("ers", 0.06)):
        value = {
            name: part["ers"]["published"]["value"] if key == "ers" else part[key]
            for name, part in parts.items()
            if name != "terms"
        }
        apart = abs(sum(value[f"slow-{s}"] - value[f"fast-{s}"] for s in (0, 1))) / 2
        seeds = max(abs(value[f"{arm}-0"] - value[f"{arm}-1"]) for arm in ("slow", "fast"))
        assert apart <= seeds and f"{seeds:.2f}" == f"{most:.2f}"
        means[key] = apart
    assert says(page, f"differ by {means['r1']:.2f} in R@1, {means['ers']:.2f} in ERS published")
    weaker = parts["terms"]["weaker_by"]
    assert max(max(terms.values()) for terms in weaker.values()) <= 0.5 + 1e-9
    assert f"{max(weaker['published'].values()):.2f}" == "0.06" and f"{weaker['corrected']['ES:R']:.1f}" == "0.5"


def test_the_page_says_what_natural_training_depends_on() -> None:
    folder = ROOT / "results" / "cub"
    files = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("sensitivity", "sensitivity-55")}
    estimate = json.loads((folder / "distortion.json").read_text())
    assert all(file["commit"] and "dirty" not in file["commit"] for file in (*files.values(), estimate))
    looks = {"as it is": log_of("natural-112")}
    looks |= {name: log_of(name) for name in ("natural-112-1", "natural-fp32", "natural-s")}
    for file in files.values():
        looks |= file["sensitivity"]
    words = {
        "as it is": "as it is",
        "natural-112-1": "with seed 1",
        "natural-fp32": "in fp32",
        "natural-s": "with softhard triplets",
        "variances": "the variances that are",
        "webp-55": "images stored once more, as WebP of quality 55",
        "webp": "images stored once more, as WebP of quality 33",
    }
    r1 = {}
    for name, start in words.items():
        values = [look["r1"] for look in looks[name] if "r1" in look]
        r1[name] = (values[-1], max(values), sum(values) / len(values))
        (line,) = re.findall(rf"^\| {start}[^|]*\|(.*)\|$", PAGE, re.M)
        assert [cell.strip() for cell in line.split("|")] == [f"{value:.1f}" for value in r1[name]]
    page = " ".join(PAGE.split())
    random = {name: r1[key][0] for name, key in (("natural-112", "as it is"), ("natural-112-1", "natural-112-1"))}
    random["natural-fp32"] = r1["natural-fp32"][0]
    lack = [53.9 - value for value in random.values()]
    assert says(page, f"three runs end {min(lack):.1f} to {max(lack):.1f} points under the paper's 53.9, so")
    assert says(page, f"so {min(lack) - 3:.1f} to {max(lack) - 3:.1f} under the band")
    (line,) = [line for line in tables()["results/cub --table published"] if name_in(line) == "natural-s"]
    under = [float(line[f"{name} paper"]) - float(line[head]) for name, head in (("R@1", "R@1"), ("ERS", "ERS publ."))]
    assert says(
        page, "reproduces the softhard row**, {:.1f} points of R@1 and {:.1f} of ERS under the paper".format(*under)
    )
    told = f"the softhard row lacks {under[0]:.1f} points and the random one with seed 1 lacks {lack[1]:.1f}."
    assert says(page, told)
    assert abs(lack[2] - lack[0]) < abs(lack[1] - lack[0])
    assert all(file["commit"] in page for file in files.values())
    error = estimate["sensitivity"]["distortion"]
    assert says(page, f"a mean squared error of {error['files']:.0f}, in levels of 255")
    assert says(page, f"takes {error['webp-55']:.0f} at quality 55 and {error['webp']:.0f} at quality 33")
    lost = {name: [a - b for a, b in zip(r1["as it is"], values)] for name, values in r1.items()}
    assert says(page, f"these two cost {lost['webp-55'][2]:.1f} and {lost['webp'][2]:.1f} points")
    end, best, mean = (error["files"] / error["webp-55"] * each for each in lost["webp-55"])
    assert says(page, f"{mean:.1f} points over the looks, {end:.1f} at the end and {best:.1f} at the best look")
    # a e + b e², with the files' own error below both
    own = error["files"]
    added = torch.tensor([error["webp-55"], error["webp"]], dtype=torch.float64)
    system = torch.stack([added, (own + added) ** 2 - own**2], 1)
    bent = torch.linalg.solve(system, torch.tensor([lost["webp-55"], lost["webp"]], dtype=torch.float64))
    end_bent, best_bent, mean_bent = (torch.tensor([own, own**2], dtype=torch.float64) @ bent).tolist()
    assert says(page, f"a parabola through both it is {mean_bent:.1f}, {end_bent:.1f} and {best_bent:.1f}")
    spans = {name: f"from {last + end_bent:.1f} to {last + mean:.1f}" for name, last in random.items()}
    told = "natural-112 would then end somewhere {natural-112}, natural-112-1 {natural-112-1} and natural-fp32"
    assert says(page, f"{told} {{natural-fp32}}; the band begins at {53.9 - 3:.1f}.".format(**spans))
    assert random["natural-112-1"] + end_bent > 50.9
    assert says(page, f"of natural-112's {lack[0]:.1f} points a tenth to a half.")
    assert 0.05 < end_bent / lack[0] < 0.15 and 0.45 < mean / lack[0] < 0.55
    left = [min(lack) - mean, max(lack) - end_bent]
    assert [round(value) for value in left] == [1, 4]


def test_the_page_says_what_the_features_depend_on() -> None:
    file = json.loads((ROOT / "results" / "cub" / "features.json").read_text())
    found, page = file["sensitivity"]["features"], " ".join(PAGE.split())
    assert "dirty" not in file["commit"]
    alike = [found[f"variances * {factor}"] for factor in (0.7, 0.85, 1.15, 1.3)]
    told = "is {:.1f}, with all of them times 0.7, 0.85, 1.15 and 1.3 it is {:.1f}, {:.1f}, {:.1f} and {:.1f}, so"
    assert says(page, told.format(found["as-is"], *alike))
    assert says(
        page,
        f"would bring {max(alike) - found['as-is']:.1f} points; moved at random they give {found['variances']:.1f}.",
    )
    again = [found["as-is"] - found[name] for name in ("webp-55", "webp")]
    assert says(page, "features {:.1f} points at quality 55 and {:.1f} at 33".format(*again))
    file = json.loads((ROOT / "results" / "cub" / "models.json").read_text())
    assert "dirty" not in file["commit"]
    models = [file["sensitivity"]["models"][f"cub-{name}"] for name in ("natural-112", "hm-lga-112")]
    lost = [found["as-is"] - found[name] for found in models for name in ("webp-55", "webp")]
    told = "natural-112 loses {:.1f} points of R@1 at quality 55 and {:.1f} at 33, hm-lga-112 {:.1f} and {:.1f} ("
    assert says(page, told.format(*lost))


def test_the_page_says_how_much_the_published_protocol_overstates() -> None:
    ers, ars, scores = [], [], []
    for path in CUB:
        if path.parent.name.startswith("natural") or not path.with_name("audit.json").exists():
            continue
        found = json.loads(path.with_name("audit.json").read_text())["protocols"]
        if found["published"]["ers"]["value"] < 20:  # a row that is not robust, such as EST's, has little to lose
            continue
        ers.append(found["published"]["ers"]["value"] - found["corrected"]["ers"]["value"])
        ars.append(found["published"]["ars"]["constants"]["value"] - found["corrected"]["ars"]["measured"]["value"])
        scores.append([found[protocol]["ers"]["value"] for protocol in ("published", "corrected")])
    assert all((a < c) == (b < d) or abs(a - c) < 0.7 for (a, b), (c, d) in combinations(scores, 2))
    assert says(PAGE, f"{min(ers):.1f} to {max(ers):.1f} points of ERS and {min(ars):.1f} to {max(ars):.1f} of ARS")
    strong = {name_in(line): line["ERS overstated by"] for line in tables()["results/cub-strong --table strong"]}
    assert set(strong) == {"natural-112", "hm-lga-112"}
    told = f"{min(ers):.1f} to {max(ers):.1f} points lower than as published. Of 1,000 it loses {strong['hm-lga-112']}"
    assert says(PAGE, f"ERS of robust models is {told}")


def test_the_page_says_how_near_the_columns_come() -> None:
    names = ["CA+", "CA-", "QA+", "QA-", "ES:R", "LTM", "GTT"]
    apart = dict.fromkeys((*names, "TMA", "ES:D"), 0.0)
    gtm: dict[str, list[str]] = {"here": [], "published": [], "rerun": []}
    for line in tables()["results/cub --table published"]:
        entry = RUNS[name_in(line)]
        if line["paper's row"] != "reproduced" or entry.setting("train.seed") or not line["method"].startswith("HM"):
            continue
        row = row_of(entry)
        assert entry.audit and row
        again = rerun_of(row)
        assert again
        own = {name: column["value"] for name, column in entry.audit["protocols"]["published"]["columns"].items()}
        apart = {name: max(gap, abs(own[name] - row.published[name])) for name, gap in apart.items()}
        for whose, columns in (("here", own), ("published", row.published), ("rerun", again.published)):
            gtm[whose].append(f"{columns['GTM']:.1f}")
    page = " ".join(PAGE.split())
    wider = f"(TMA within {apart['TMA']:.3f}, ES:D within {apart['ES:D']:.3f})".replace("0.0", ".0")
    assert says(page, f"within {max(apart[name] for name in names):.1f} points of hm in all three {wider}")
    told = {whose: "{}, {} and {}".format(*values) for whose, values in gtm.items()}
    assert says(page, f"leaves {told['here']} here and {told['published']} in hm, but {told['rerun']} in the rerun")
    lines = {name_in(line): line for line in tables()["results/cub --table published"]}
    seeds = [[lines[name][head] for name in ("hm-lga-ics", "hm-lga-ics-1")] for head in ("R@1", "ERS publ.")]
    r1, ers = (f"{abs(float(first) - float(second)):.1f}" for first, second in seeds)
    assert says(page, f"(with a second seed too, {r1} points of R@1 and {ers} of ERS apart)")


def log_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / "cub" / name / "metrics.jsonl").read_text().splitlines()]


def short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".")


def test_the_page_says_what_larger_batches_do_to_catride() -> None:
    lines = {name_in(line): line for line in tables()["results/cub --table published"]}
    page = " ".join(PAGE.split())
    for name, words in (
        ("catride-112", "falls further, to {}, and ERS stays at {}"),
        ("catride-112-1", "with another seed {} and {}."),
    ):
        assert says(page, words.format(lines[name]["R@1"], lines[name]["ERS publ."]))
    few, again, *many = map(log_of, ("catride", "catride-1", "catride-112", "catride-112-1"))
    reached = [row["hardness_after"] for log in many for row in log[1:5]]
    assert says(page, f"attack takes H to {short(min(reached))} to {short(max(reached))} with 112 pairs")
    apart = [short(log[4]["mean_distance"]) for log in (many[0], few)]
    assert says(page, "mean distance of embeddings is {} with 112 and {} with 56".format(*apart))
    look = {row["epoch"]: row for row in few if "r1" in row}
    assert says(page, f"is {look[40]['r1']:.1f} already after {look[40]['step']:,} steps, at the 40th")
    assert says(page, f"the 25th and the 30th pair-epoch ({look[25]['r1']:.1f}, {look[30]['r1']:.1f})")
    assert all(30 <= look[epoch]["r1"] < 31.05 for epoch in range(50, 80, 5))
    missed = [100 * max(row.get("canary_gap", 0) for row in log) for log in (few, again, *many)]
    assert says(page, f"misses in bf16 {min(missed):.0f} to {max(missed):.0f} % of what it finds in fp32")
    flagged = [path.parent.name for path in CUB if json.loads(path.read_text()).get("flags")]
    assert {"catride", "catride-1", "catride-112", "catride-112-1"} <= set(flagged)


def test_the_page_says_how_the_forms_of_catride_differ_from_the_paper() -> None:
    page, columns = " ".join(PAGE.split()), ["CA+", "CA-", "QA+", "QA-", "TMA", "ES:D", "ES:R", "LTM", "GTM", "GTT"]
    found: dict[str, dict[str, float]] = {}
    for name, label in (
        ("catride", "constant weights (catride)"),
        ("catride-1", "constant weights, seed 1 (catride-1)"),
        ("catride-distinct", "constant weights, no image with itself (catride-distinct)"),
        ("catride-literal", "by its equations (catride-literal)"),
        ("catride-code", "code's form (catride-code)"),
    ):
        entry = RUNS[name]
        row = row_of(entry)
        assert entry.audit and row
        own = entry.audit["protocols"]["published"]
        found["published"] = {key: row.published[key] for key in ("R@1", "ERS", "ARS", *columns)}
        found[name] = {"R@1": entry.audit["clean"]["R@1"]["value"], "ERS": own["ers"]["value"]}
        found[name] |= {"ARS": own["ars"]["constants"]["value"]} | {
            key: own["columns"][key]["value"] for key in columns
        }
        cells = [f"{value:.{3 if key in ('TMA', 'ES:D') else 1}f}" for key, value in found[name].items()]
        assert f"| {label} | {' | '.join(cells)} |" in PAGE
    cells = [f"{value:.{2 if key in ('TMA', 'ES:D') else 1}f}" for key, value in found["published"].items()]
    assert f"| published | {' | '.join(cells)} |" in PAGE
    printed, equations, distinct, code = (
        found[n] for n in ("published", "catride", "catride-distinct", "catride-code")
    )
    literal, log = found["catride-literal"], log_of("catride-literal")
    gap = [abs(literal[key] - equations[key]) for key in ("ERS", "R@1")]
    assert (
        says(page, "cost ERS {:.1f} points and bring {:.1f} of R@1".format(*gap)) and literal["R@1"] > equations["R@1"]
    )
    moved = [short(log[4][f"{what}_{when}"]) for what in ("collapseness", "hardness") for when in ("before", "after")]
    assert says(page, "after five epochs C goes from {} to {} while H stays at {} and {}".format(*moved))
    apart = [[run[key] - printed[key] for run in (equations, found["catride-1"])] for key in ("R@1", "ERS")]
    assert [[round(value) for value in pair] for pair in apart] == [[-4, -4], [2, 2]]
    over, under = code["R@1"] - printed["R@1"], printed["ERS"] - code["ERS"]
    told = f"code's form ends {over:.1f} points above the paper's; its ERS is {under:.1f} under"
    assert says(page, f"{told}, and ARS {printed['ARS'] - code['ARS']:.1f}.")
    assert all(abs(equations[key] - printed[key]) < abs(code[key] - printed[key]) for key in ("ERS", "ARS"))
    for key in columns[:4]:
        assert min(code[key], equations[key]) < printed[key] < max(code[key], equations[key])
    for key in ("TMA", "ES:D"):
        assert abs(code[key] - printed[key]) < min(abs(run[key] - printed[key]) for run in (equations, distinct))
    runs = [entry for entry in ENTRIES if entry.audit and "catride" in entry.name]
    for key in ("ES:R", "LTM", "GTM"):
        assert all(entry.audit["protocols"]["published"]["columns"][key]["value"] < printed[key] for entry in runs)
    coded, ours = (log_of(name) for name in ("catride-code", "catride"))
    ends = [
        short(end(row[f"hardness_{when}"] for row in log[1:5]))
        for log in (coded, ours)
        for when in ("before", "after")
        for end in (min, max)
    ]
    told = "H is {} to {} before it and {} to {} after it, by the equations {} to {} and {} to {}."
    assert says(page, told.format(*ends))
    assert says(page, f"near 0 ({short(coded[39]['hardness_after'])}, {short(ours[39]['hardness_after'])})")
    assert max(abs(a["shift_overall"] / b["shift_overall"] - 1) for a, b in zip(coded[1:5], ours[1:5])) < 0.2
    looks = [{row["epoch"]: row["r1"] for row in log_of(n) if "r1" in row} for n in ("catride", "catride-distinct")]
    gaps = [looks[1][epoch] - looks[0][epoch] for epoch in looks[0]]
    assert min(gaps) > 0 and len(gaps) == 15
    told = f"looks, by {sum(gaps) / 15:.1f} points on average, but by {gaps[-1]:.1f} at the end"
    assert says(page, f"{told}, and ERS is {equations['ERS'] - distinct['ERS']:.1f} lower")


def test_the_page_compares_the_starts_from_robust_weights() -> None:
    starts = {"robust_photos_linf4": "-photos", "robust_linf4": "-robust", "plain ImageNet": "-112"}
    for start, ending in starts.items():
        cells = []
        for name in ("natural", "hm-lga"):
            audit = RUNS[f"{name}{ending}"].audit
            assert audit
            ers = [audit["protocols"][protocol]["ers"]["value"] for protocol in ("published", "corrected")]
            cells.append("{:.1f} / {:.1f} ({:.1f})".format(audit["clean"]["R@1"]["value"], *ers))
        (line,) = re.findall(rf"^\| \S*{start} \| (.*) \|$", PAGE, re.M)
        assert line == " | ".join(cells)


def test_image_steps_of_a_triplet_are_those_of_the_runs() -> None:
    """An epoch has 5,864 anchors. Act's attack never ends early, so its number has to be exact."""
    found = json.loads((ROOT / "results" / "cub" / "cost.json").read_text())["cost"]
    moved = {"act-r": 2 * 8, "catride": (2 + 1) / 2 * 16, "hm-lga-112": 3 * 8, "hm-lga-ics-32": 3 * 32}
    for name, possible in moved.items():
        run = RUNS[name].info
        assert found[name]["taken"] == run["image_steps"] / (5864 * 75) <= found[name]["possible"] == possible
    assert found["act-r"]["taken"] == 16
    assert [round(found[name]["taken"], 1) for name in ("catride", "hm-lga-ics-32")] == [19.4, 9.3]


def test_the_page_says_what_twins_do_to_collapseness() -> None:
    found = {}
    for name in ("samplers-56", "samplers-56-distinct", "samplers-112", "samplers-112-distinct"):
        table = json.loads((ROOT / "results" / "cub" / f"{name}.json").read_text())
        assert "dirty" not in table["commit"] and table["settings"]["batch"]["distinct"] == ("distinct" in name)
        (row,) = [row for row in table["rows"] if row["sampler"] == "semihard"]
        found[name] = {key: f"{float(row[key]):.3f}".replace("0.", ".") for key in ("mean", "c", "c_coded")}
    page = " ".join(PAGE.split())
    twins, distinct, more, none = found.values()
    assert says(page, f"such a one, C = {more['c']} (samplers-112), and {none['c']} without (")
    assert says(page, f"have H = {twins['mean']} and C = {twins['c']} (")
    assert says(page, f"H = {distinct['mean']} and C = {distinct['c']} (")
    assert says(page, f"with and without them, {twins['c_coded']} and {distinct['c_coded']}")


def test_the_page_says_what_the_starts_are_worth() -> None:
    found = json.loads((ROOT / "results" / "cub" / "starts.json").read_text())
    assert found["commit"] in PAGE and "dirty" not in found["commit"]
    starts, page = found["starts"], " ".join(PAGE.split())
    natural, robust = (f"{starts[f'{name}, test classes']['r1']:.1f}" for name in ("natural", "robust"))
    assert says(page, f"features is {robust} on the test classes, that of the ImageNet weights {natural}. From")
    for share in ("0", "0.25", "0.5", "0.75", "1"):
        assert f"| {share} | {starts[share]['r1']:.1f} | {starts[share]['r1_attacked']:.1f} |" in PAGE
    metrics = (ROOT / "results" / "cub" / "hm-lga-robust" / "metrics.jsonl").read_text().splitlines()
    looks = [look["r1"] for look in map(json.loads, metrics) if "r1" in look]
    assert says(page, f"R@1 is {looks[0]:.1f} after five epochs of HM[S, LGA], never more than {max(looks):.1f}")
    (line,) = [line for line in tables()["results/cub --table published"] if name_in(line) == "hm-lga-robust"]
    came = f"comes to **{line['R@1']} / {line['ERS publ.']}** (corrected {line['ERS corr.']})"
    here, *print_s = re.findall(r"([-+][\d.]+) / ([-+][\d.]+) (?:over|in) ", PAGE.split("gain: hm-lga-robust")[1])[:3]
    r1, ers = ([gain[which].lstrip("+-") for gain in (here, *print_s)] for which in (0, 1))
    assert says(page, f"{came}: ERS gains {ers[0]} points and R@1 loses {r1[0]}")
    assert says(page, f"ERS gains {ers[1]} or {ers[2]} (the row is given twice) and R@1 {r1[1]} or {r1[2]}")


def test_the_page_says_what_robust_weights_bring_without_a_defence() -> None:
    page = " ".join(PAGE.split())
    lines = {name_in(line): line for line in tables()["results/cub --table published"]}
    natural = lines["natural-robust"]
    told = f"comes to {natural['R@1 paper']} / {natural['ERS paper']} (table A3), from those at hand to"
    assert says(page, f"{told} {natural['R@1']} / {natural['ERS publ.']}.")
    pairs = re.findall(r"-([\d.]+) / \+([\d.]+) (?:over|in) ", PAGE.split("gain: natural-robust")[1])[:2]
    (r1, ers), (paper_r1, paper_ers) = pairs
    told = f"{paper_r1} points of R@1 lost in the papers and {r1} here, and {paper_ers} points of ERS gained and {ers}"
    assert says(page, told)
    values = []
    for name in ("hm-lga-robust", "natural-robust"):
        entry = RUNS[name]
        assert entry.audit
        values.append((entry.audit["clean"]["R@1"]["value"], entry.audit["protocols"]["published"]["ers"]["value"]))
    over = [defended - undefended for defended, undefended in zip(*values)]
    start = row_named("robust-init/a3/cub/natural-r-init-4").published
    twice = [row_named(f"robust-init/{table}/cub/hm-lga-8-init-4").published for table in ("a5", "a2")]
    first, second = ([row[key] - start[key] for key in ("R@1", "ERS")] for row in twice)
    told = "changes R@1 by {:.1f} and ERS by {:+.1f}, in the paper by {:.1f} and {:+.1f}, or {:.1f} and {:+.1f}."
    assert says(page, told.format(*over, *first, *second))
    lacks = [
        [row[key] - value for row in (start, *twice) for key, value in (("R@1", r1), ("ERS", ers))]
        for r1, ers in values
    ]
    told = "training lacks {:.1f} points of R@1 and {:.1f} of ERS, and hardness manipulation {:.1f} or {:.1f} and"
    assert says(page, told.format(*lacks[1][:2], lacks[0][2], lacks[0][4]))
    assert says(page, f"and {lacks[0][3]:.1f} or {lacks[0][5]:.1f}. **Most")
    plain = float(lines["natural-112"]["R@1 paper"]) - float(lines["natural-112"]["R@1"])
    assert says(page, f"but for {plain:.1f} points of R@1 that natural training lacks from plain weights too")
    rerun = row_named("robust-init/a5/cub/hm-lga-8-init-0").published["ERS"]
    assert says(page, f"the plain run has {lines['hm-lga-112']['ERS publ.']} here and {rerun} in robust-init")


def test_the_page_says_what_robust_features_bring_to_classes_that_were_held_out() -> None:
    page, folder = " ".join(PAGE.split()), ROOT / "results" / "cub-held-out"
    runs = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/run.json")}
    audits = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/audit.json")}
    assert all(run["settings"]["data"]["held_out"] == 20 and "dirty" not in run["commit"] for run in runs.values())
    assert all(
        audit["data"]["images"] == [1192, 1192] and audit["data"]["attacked"][0] == 400 for audit in audits.values()
    )
    assert all(
        run["settings"]["train"] | {"epochs": 0, "collapse_distance": 0, "attack_eps": 0.0314, "attack_queries": 400}
        == runs["hm"]["settings"]["train"] | {"epochs": 0, "collapse_distance": 0}
        for run in runs.values()
    )
    logs = {
        name: [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()] for name in runs
    }
    r1 = {name: audit["clean"]["R@1"]["value"] for name, audit in audits.items()}
    ers = {p: {n: audit["protocols"][p]["ers"] for n, audit in audits.items()} for p in ("published", "corrected")}
    values = {name: score["value"] for name, score in ers["published"].items()}

    def both(name: str) -> str:
        return f"{r1[name]:.1f} / {values[name]:.1f}"

    for protocol in ers:  # it is what was chosen
        assert max(ers[protocol], key=lambda name: ers[protocol][name]["value"]) == "t248-hm"
    own = json.loads((ROOT / "results" / "cub" / "own" / "audit.json").read_text())["protocols"]["published"]["ers"]
    told = f"What was {values['t248-hm']:.1f} there (t248-hm) is {own['value']:.1f} on the test classes;"
    part = f"{ers['published']['t248-hm']['recall']:.1f} on the mean and are {own['recall']:.1f}."
    assert says(page, f"{told} most of that is recall under attack, four of the ten terms, which were {part}")
    assert max((name for name in r1 if name.startswith("t")), key=lambda name: r1[name]) == "t2c-hm"
    # Four terms of ten, and more than half of what is lost.
    assert 0.4 * (ers["published"]["t248-hm"]["recall"] - own["recall"]) > 0.5 * (values["t248-hm"] - own["value"])
    for head, names in (("natural-s", ("t2c", "t24", "t248")), ("ImageNet", ("d2c", "d24", "d248"))):
        ends = [runs[name]["final"] for name in names]
        cells = [f"{end['features_r1']:.1f}, {end['features_r1_attacked']:.2f}" for end in ends]
        assert f"| {head} ({', '.join(names)}) | {' | '.join(cells)} |" in PAGE
    corrected = ers["corrected"]["t248"]["value"]
    assert says(page, f"t248, with a head that was never trained, has {both('t248')} (corrected {corrected:.1f}), and")
    gain, cost = values["t248-hm"] - values["t248"], r1["t248"] - r1["t248-hm"]
    assert says(page, f"Ten epochs of HM bring {gain:.1f} points of ERS and cost {cost:.1f} of R@1.")
    assert says(page, f"in twice the epochs: {both('t24-hm')} from t24 and {both('t2c-hm')} from t2c.")
    columns = [audits[name]["protocols"]["published"]["columns"] for name in ("t248", "t248-hm")]
    left = ["{:.1f} and {:.1f}", "{:.3f} and {:.3f}", "{:.3f} and {:.3f}"]
    pairs = [[each[name]["value"] for each in columns] for name in ("ES:R", "ES:D", "TMA")]
    recall, shift, mimicry = (text.format(*pair) for text, pair in zip(left, pairs))
    assert says(page, f"left under ES than after HM, {recall}.") and says(
        page, f"helps ES:D, {shift}, and hurts TMA, {mimicry}."
    )
    assert says(page, f"HM alone has {both('hm')} after forty.") and says(
        page, f"HM (distil2-hm): {both('distil2-hm')}."
    )
    assert says(page, f"own features (d248) R@1 is {r1['t248'] - r1['d248']:.1f} points lower at the same ERS")
    assert audits["d248"]["clean"]["R@1"]["high"] > audits["t248"]["clean"]["R@1"]["low"]
    assert abs(values["d248"] - values["t248"]) < 0.1
    looks = {n: {row["epoch"]: row for row in log if "features_r1" in row} for n, log in logs.items()}
    lost = [f"{looks['t4c'][epoch]['features_r1']:.1f}" for epoch in (5, 10)]
    assert says(page, "their R@1 was {} after five epochs and {} after ten, where the run was stopped.".format(*lost))
    lost = [f"{looks[name][5]['features_r1']:.1f}" for name in ("d2a", "d4a")]
    assert says(page, "(d2a, {} after five epochs; d4a, at 4/255, {}).".format(*lost))
    for name, eps, lr, least in (
        ("t4c", 4, 1e-4, 0),
        ("d2a", 2, 3e-4, 0.25),
        ("d4a", 4, 3e-4, 0.25),
        ("d2b", 2, 1e-4, 0.5),
    ):
        settings = runs[name]["settings"]
        assert runs[name]["status"] == "interrupted" and settings["data"]["crop_least"] == least
        assert settings["defence"]["eps"] == pytest.approx(eps / 255) and settings["optimiser"]["lr"] == lr
    drifts = [looks[name][15]["drift_attacked"] for name in ("d2b", "d2c")]
    assert says(page, "drift under attack {:.3f} after fifteen epochs, {:.3f} without.".format(*drifts))
    far, eps = runs["teach"]["final"]["drift"], 255 * runs["teach"]["settings"]["defence"]["eps"]
    assert says(page, f"teach, {eps:.0f}/255: features of clean images lay {far:.2f} of their length away.")
    end = runs["teach-hm"]["final"]
    assert says(
        page, f"to {short(end['mean_distance'])} on the mean, and its loss stays at the margin, {short(end['loss'])};"
    )
    wrong = [
        json.loads((folder / name / "audit-test.json").read_text())["clean"]["R@1"]["value"]
        for name in ("natural", "teach", "teach-hm")
    ]
    assert says(page, "audit-test.json)): R@1 {:.1f}, {:.1f} and {:.1f}. Nothing was chosen by it.".format(*wrong))


def test_the_page_says_what_our_own_recipe_gives() -> None:
    page, entry = " ".join(PAGE.split()), RUNS["own"]
    stages = {
        path.parent.name: json.loads(path.read_text()) for path in (ROOT / "results" / "cub-own").glob("*/run.json")
    }
    chain = ["own-natural", "own-start", "own-4", "own-8"]
    assert sorted(stages) == sorted(chain) and all("dirty" not in run["commit"] for run in stages.values())
    runs = [*(stages[name] for name in chain), entry.info]
    starts = [run["model"]["weights"]["source"] for run in runs]
    assert starts == ["resnet18_imagenet.safetensors", *(f"{name}/model.safetensors" for name in chain)]
    # What the commands on the page ask for is what these runs had.
    for name, run in zip([*chain, "own"], runs):
        (command,) = re.findall(rf"^anchorhold train cub (.*) --out {name}$", PAGE, re.M)
        words = command.split()
        assert words[words.index("--weights") + 1] == run["settings"]["model"]["weights"]
        sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        sets += [f"train.epochs={words[words.index('--epochs') + 1]}"] if "--epochs" in words else []
        asked = to_dict(settings_from(words[words.index("--recipe") + 1], parse_assignments(sets)))
        had = to_dict(build(run["settings"]))  # as read today: settings that came later have their defaults
        for part in ("defence", "optimiser", "batch", "train"):
            assert asked[part] == had[part], (name, part)
            assert run["settings"][part].items() <= had[part].items()
    found = {}
    for name in ("own", "hm-lga-112", "hm-lga-75", "hm-lga-robust"):
        audit = RUNS[name].audit
        assert audit
        ers = [audit["protocols"][protocol]["ers"]["value"] for protocol in ("published", "corrected")]
        found[name] = (audit["clean"]["R@1"]["value"], *ers)
    own, plain, longer, robust = found.values()
    assert says(page, "**R@1 {:.1f}, ERS {:.1f} published, {:.1f} corrected.**".format(*own))
    better = [row for row in rows() if row.data == "cub" and {"R@1", "ERS"} <= {*row.published}]
    better = [r for r in better if r.published["R@1"] >= round(own[0], 1) and r.published["ERS"] >= round(own[1], 1)]
    assert len(better) == 20
    assert all(row.published.get("init") for row in better)
    assert min(own[0], own[1]) < 45
    told = "R@1 is the same, {:.1f} and {:.1f}, and ERS {:.1f} points higher, corrected {:.1f}.**"
    assert says(page, told.format(own[0], plain[0], own[1] - plain[1], own[2] - plain[2]))
    audit = RUNS["hm-lga-112"].audit
    assert audit and audit["clean"]["R@1"]["low"] < own[0] and round(own[1] - plain[1]) == 6
    work, steps = sum(run["image_steps"] for run in runs), sum(run["final"]["step"] for run in runs)
    others = {name: RUNS[name].info for name in ("hm-lga-112", "hm-lga-75")}
    times = work / others["hm-lga-112"]["image_steps"], others["hm-lga-75"]["image_steps"] / work
    ends = [info["final"]["step"] for info in others.values()]
    told = (
        f"took {times[0]:.1f} times its image-steps (natural training has none), but {steps:,} optimiser steps instead"
    )
    assert says(page, f"{told} of {ends[0]:,}, and those of `distil` at ten times the learning rate.")
    rates = [run["settings"]["optimiser"]["lr"] for run in (*runs, *others.values())]
    assert rates == pytest.approx([1e-5, 1e-4, 1e-4, 1e-4, 1e-5, 1e-5, 1e-5])
    told = (
        f"hm-lga-75, with {ends[1]:,} steps of half as many pairs and {times[1]:.1f} times the image-steps of ours, has"
    )
    more = [a - b for a, b in zip(own, longer)]
    assert says(page, f"{told} {longer[0]:.1f} / {longer[1]:.1f}, so that ours is")
    assert says(page, "{:.1f} points of R@1 and {:.1f} of ERS better, corrected {:.1f}.".format(*more))
    assert says(page, f"six points of ERS more, or {more[1]:.1f} and better R@1 than HM[S, LGA] trained as long;")
    terms = [
        {p: RUNS[name].audit["protocols"][p]["ers"]["terms"] for p in ("published", "corrected")}  # type: ignore[index]
        for name in ("own", "hm-lga-112")
    ]
    gains = {p: {key: value - terms[1][p][key] for key, value in terms[0][p].items()} for p in terms[0]}
    told = "QA- gains {QA-:.1f}, CA- {CA-:.1f}, QA+ {QA+:.1f}, ES:D {ES:D:.1f} and CA+ {CA+:.1f}, but ES:R {ES:R:.1f}, "
    told += "GTM {GTM:.1f} and GTT {GTT:.1f} (published); LTM gains {LTM:.1f},"
    for key, value in gains["published"].items():
        told = told.replace(f"{{{key}:.1f}}", f"{value:.1f}")
    assert says(page, f"{told} corrected {gains['corrected']['LTM']:.1f}; TMA loses {-gains['published']['TMA']:.1f}.")
    told = f"ERS is {robust[1] - own[1]:.1f} points higher and R@1 {own[0] - robust[0]:.1f} lower."
    assert says(page, f"(hm-lga-robust) {told}")
    features = [stages[name]["final"]["features_r1"] for name in chain[1:]]
    told = (
        "is {:.1f} on the test classes after the first stage, {:.1f} after the second and {:.1f} after the third. (The"
    )
    told += " natural model had {:.1f} before and the last one has {:.1f}, both through a head.)"
    assert says(page, told.format(*features, stages["own-natural"]["final"]["r1"], own[0]))
    gaps = []
    for path in [*(ROOT / "results").glob("cub-own/*/run.json"), *(ROOT / "results").glob("cub-held-out/*/run.json")]:
        run, log = json.loads(path.read_text()), path.with_name("metrics.jsonl").read_text().splitlines()
        found = [100 * row["canary_gap"] for row in map(json.loads, log) if "canary_gap" in row]
        gaps += [found] if run["settings"]["defence"]["name"] == "distil" and found else []
    begin, later = [gap[0] for gap in gaps], [each for gap in gaps for each in gap[1:]]
    noisy = f"{min(begin):.1f} to {max(begin):.1f} %"
    (flagged,) = [name for name, run in stages.items() if run.get("flags")]
    told = f"canary finds {noisy} missing in thirteen runs of `distil`; {flagged} was flagged."
    assert says(page, f"{told} Later it is at most {max(later):.1f} %.") and len(gaps) == 13
    assert says((NOTES / "speed.md").read_text(), noisy)
    strong = json.loads((ROOT / "results" / "cub" / "own" / "strong" / "audit.json").read_text())
    left, kept = strong["protocols"]["strong"]["ers"]["value"], strong["strong"]["after"]["recall"]["square"]
    assert strong["data"]["attacked"][0] == 200 and kept == 0.5
    assert says(page, f"leaves {left:.1f} of its ERS on 200 queries, it keeps {kept} % of R@1.")
    after = strong["strong"]["after"].values()
    assert all(abs(goal["square"] - goal["apgd-free"]) < 1e-3 for goal in after)


def test_embeddings_of_trained_models_do_not_share_a_cap() -> None:
    """The flag `narrow` is far below the mean distance of every model that was trained with success."""
    ends = []
    for path in (ROOT / "results").rglob("metrics.jsonl"):
        last = json.loads(path.read_text().splitlines()[-1]).get("mean_distance")
        if path.parent.name != "teach-hm" and last is not None:
            ends.append(last)
    assert len(ends) > 20 and min(ends) > 5 * NARROW


def test_with_ics_eight_steps_are_enough_for_thirteen_epochs() -> None:
    few, many = (
        [json.loads(line) for line in (ROOT / "results" / "cub" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("hm-lga-ics", "hm-lga-ics-32")
    )
    work = {"seconds", "image_steps", "active_last"}
    alike = [all(a[name] == b[name] for name in a.keys() - work) for a, b in zip(few, many)]
    assert alike.index(False) == 13


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


@pytest.mark.parametrize("name", ["digits-held-out", "digits-held-out-both"])
def test_the_tables_of_trials_are_what_the_benchmark_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recipes = importlib.import_module("recipes")
    found = json.loads((ROOT / "results" / "recipes" / f"{name}.json").read_text())
    assert found["commit"] and "dirty" not in found["commit"] and found["held_out"] == 2
    assert recipes.table(found) in (NOTES / "digits-trials.md").read_text()
    for key, trial in found["trials"].items():
        label = key.rsplit("/", 1)[0]
        recipe, changes = recipes.TRIALS.get(label, (label, {}))
        assert trial["queries"] == found["queries"] and trial["recipe"] == recipe
        assert trial["changes"] == dict(changes), key


def test_the_gaussians_repeat_their_runs() -> None:
    paths = sorted((ROOT / "results" / "gaussians").glob("seed-*.json"))
    assert len(paths) == 2
    for path in paths:
        found = json.loads(path.read_text())
        assert found["commit"] and "dirty" not in found["commit"]
        for name in ("natural", "robust"):
            row = found[name]
            numbers = f"{row['clean']:.1f} | {row['attacked']['nearest']:.1f} | {row['attacked']['margin']:.1f}"
            assert f"| {found['seed']} | {name} | {numbers} | {row['shift']:.3f} |" in PAGE


def test_the_page_on_scale_repeats_the_benchmark() -> None:
    page = (NOTES / "scale.md").read_text()
    cpu, gpu = (json.loads((ROOT / "results" / "scale" / f"{name}.json").read_text()) for name in ("cpu", "gpu"))
    for found in (cpu, gpu):
        assert found["commit"] and "dirty" not in found["commit"]
    for part, at in (("metrics", -1), ("nmi", -1), ("search", -1), ("gallery", 0), ("gallery", -1)):
        a, b = (found["scale"][part][at] for found in (cpu, gpu))
        assert a["count"] == b["count"]
        cells = f"| {a['seconds']:.2f} | {a['peak_mb']:,.0f} | {b['seconds']:.2f} | {b['gpu_peak_mb']:,.0f} |"
        assert cells in page, part
        assert a["peak_mb"] <= a.get("limit_mb", 1e9)
    one, two = cpu["scale"]["ranks"]
    told = f"by one rank {one['audit_seconds']:.1f} s, by two {two['audit_seconds']:.1f} s"
    assert says(page, told) and one["ers"] == two["ers"]
    assert two["audit_seconds"] <= 0.6 * one["audit_seconds"]
    stores = json.loads((ROOT / "results" / "scale" / "stores.json").read_text())
    held, streamed = stores["scale"]["stores"]
    assert stores["commit"] and (held["store"], streamed["store"]) == ("resident", "stream")
    assert says(page, f"{streamed['ms']:.1f} ms on the H200, {held['ms']:.1f} ms from memory")
    assert streamed["ms"] <= 1.2 * held["ms"]


def test_the_page_says_what_the_strong_audits_on_cub_found() -> None:
    names = "natural-112", "hm-lga-112"
    audits = {name: json.loads((CUB_STRONG / name / "audit.json").read_text()) for name in names}
    assert all("dirty" not in audit["commit"] and audit["data"]["attacked"][0] == 1000 for audit in audits.values())
    assert audits["natural-112"]["curve"]["attacks"]["R@1"] == ["ES", "LTM", "GTM", *members_of_the_ensemble()]
    found, page = audits["hm-lga-112"], (NOTES / "cub-attacks.md").read_text()
    ers = {
        name: [f"{audit['protocols'][protocol]['ers']['value']:.1f}" for protocol in ("corrected", "strong")]
        for name, audit in audits.items()
    }
    line = found["curve"]["lines"]["R@1"]
    kept = [f"{100 * left / line[0]:.0f} % at {eps}/255" for eps, left in zip((1, 2, 4), line[1:])]
    assert says(page, f"of its right answers {', '.join(kept)}, next to none at 8/255")
    recall = found["strong"]["after"]["recall"]
    standard = [f"{found['protocols']['corrected']['columns'][name]['value']:.1f}" for name in ("ES:R", "LTM", "GTM")]
    told = [*ers["hm-lga-112"], *standard, *(f"{recall[name]:.1f}" for name in ("standard", "starts", "refine"))]
    assert says(page, " ".join(told)) and recall["transfer"] == recall["square"] == recall["refine"]
    assert found["strong"]["doubts"] | {"black": 0.0, "transfer": 0.0} == found["strong"]["doubts"]
    bits, jpeg = (found["strong"]["realisable"][form] for form in ("8 bits", "JPEG 90"))
    told = [f"{recall['square']:.1f}", f"{bits['columns']['ES:R']:.1f}", ers["hm-lga-112"][1], f"{bits['ers']:.1f}"]
    natural = "the natural model falls from {} to {}.".format(*ers["natural-112"])
    assert says(page, f"{natural} 8 bits change R@1 {' '.join(told)}, JPEG at quality 90: {jpeg['ers']:.1f}")
    minutes = [f"{audits[name]['seconds'] / 60:.1f}" for name in audits]
    assert max(audit["seconds"] for audit in audits.values()) < 600, "the aim for an audit of 1,000 queries"
    assert says(page, " ".join([*minutes, *(f"{audits[name]['image_steps'] / 1e6:.1f}" for name in audits)]))
    for name, audit in audits.items():
        told = (CUB_STRONG / name / "verified.txt").read_text()
        assert audit["commit"] in told and "256 images of 8 goals verified" in told


def test_the_example_of_a_curve_is_that_of_its_json() -> None:
    found = json.loads((ROOT / "results" / "strong" / "digits-hm-lga.json").read_text())
    assert "dirty" not in found["commit"]
    page = (ROOT / "docs" / "audit" / "threats.md").read_text()
    assert "\n".join(table_of_curve(found["curve"], None, 0)[:4]) in page
    goal = goal_named("margin", "corrected")
    members = [member.name for member in MEMBERS if member.wants(goal) and member.kind != "transfer"]
    assert found["curve"]["attacks"]["R@1"] == ["ES", "LTM", "GTM", *members], "of another ensemble: audit it again"


def test_the_page_of_results_has_the_rows_with_their_own_settings() -> None:
    page = (ROOT / "docs" / "reproduce" / "results.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| \{repo\}`(\S+) <results/cub/", page, re.M)
    exact = {e.name for e in ENTRIES if e.audit and (row := row_of(e)) and not departures(e, row)}
    assert set(names) == exact and len(names) == len(exact) >= 10
    assert len(page.split()) < 1000
    reproduced = re.findall(r"^\| \{repo\}`\S+ <.*\| reproduced \|$", page, re.M)
    assert len({meant for line in reproduced if (meant := re.sub(r"-1$", "", line.split("`")[1].split()[0]))}) == 6


def test_no_peer_turns_many_of_the_queries_that_the_strong_audit_leaves() -> None:
    found = json.loads((ROOT / "results" / "strong" / "peers.json").read_text())
    assert "dirty" not in found["commit"]
    rows = [row for rows in found["models"].values() for row in rows]
    shares = [100 * len(peer["turned"]) / row["right"] for row in rows for peer in row["peers"].values()]
    assert len(rows) == 10 and {(row["norm"], row["eps"]) for row in rows} == {
        ("linf", 0.03),
        ("linf", 0.06),
        ("linf", 0.1),
        ("l2", 0.25),
        ("l2", 0.5),
    }
    steps = most_steps(goal_named("margin", "corrected")) + 32  # of today's ensemble, beside the standard run
    assert all(row["strong"]["steps_at_most"] == steps for row in rows)
    assert max(shares) == pytest.approx(found["most"]["percent"]) and max(shares) <= 0.5


STRONG = ROOT / "results" / "strong"


def test_the_page_says_what_peers_found_on_other_models() -> None:
    before, after = (json.loads((STRONG / f"peers-others{when}.json").read_text()) for when in ("-before", ""))
    assert all("dirty" not in found["commit"] and found["most"]["percent"] for found in (before, after))
    rows = [row for rows in after["models"].values() for row in rows]
    assert len(rows) == 6 and all(row["queries"] == 300 for row in rows)
    assert max(len(peer["turned"]) for row in rows for peer in row["peers"].values()) == 1
    first = {row["norm"]: row for row in before["models"]["robust5"]}
    second = {row["norm"]: row for row in after["models"]["robust5"]}
    turned = [len(peer["turned"]) for peer in first["l2"]["peers"].values() if peer["turned"]]
    assert set(turned) == {1, 2} and not any(peer["turned"] for peer in first["linf"]["peers"].values())
    left = [len(rows[norm]["strong"]["left"]) for norm in ("l2", "linf") for rows in (second, first)]
    page = (NOTES / "strong.md").read_text()
    most = f"{before['most']['percent']:.2f}"
    assert len(turned) == 8 and says(page, f"of {first['l2']['right']} queries, at most {most} %")
    assert says(page, f"leaves {left[0]} in L2, {left[1]}, {left[2]} {left[3]}, {after['most']['percent']:.2f} %")


MEMBERS_OF_GRADIENTS = ("refine", "starts", "momentum", "adam")  # as the page names their prices


def members_of_the_ensemble() -> list[str]:
    goal = goal_named("margin", "corrected")
    return [member.name for member in MEMBERS if member.wants(goal) and member.kind != "transfer"]


def test_the_tables_of_the_members_are_those_of_their_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new run: python benchmarks/members.py --out results/strong/members-refine.json --into results/notes."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("members")
    found = json.loads((STRONG / "members-refine.json").read_text())
    assert found["commit"] and "dirty" not in found["commit"]
    assert list(found["settings"]) and set(found["settings"]) == {name for name, _ in made.settings(made.THREATS)}
    rows = made.in_order(found["settings"])
    for row in rows:
        assert list(row["members"]) == members_of_the_ensemble(), "of another ensemble: measure it again"
        right, left = len(row["ids"].split()), set(range(len(row["ids"].split())))
        for each in row["members"].values():
            first = made.turned(each["in_turn"]["turned"])
            assert first <= left and len(each["alone"]["turned"]) == right <= row["queries"] == 200
            left -= first
        assert len(left) == row["left"]
    assert len({(row["model"], row["weights"]) for row in rows}) == 2
    page = (NOTES / "strong.md").read_text()
    told, more = made.tally(rows), made.instead(rows)
    prices = [f"{told[name]['image_steps'] / told[name]['needed']:,.0f}" for name in MEMBERS_OF_GRADIENTS]
    refine, at = told["refine"], "Over all 20 settings `refine` turns"
    assert says(page, f"{at} {refine['first']}, {refine['needed']}. {more['more']}, of which {more['more_needed']}.")
    plain, masked = (made.instead([row for row in rows if bool(row["mask"]) == hides]) for hides in (False, True))
    counted = [f"{one['refine']} against {one['more']}" for one in (plain, masked)]
    assert says(page, f"without a mask {counted[0]}, with one {counted[1]}. {prices[0]}")
    assert says(page, " and ".join(prices))
    hidden = made.tally([row for row in rows if row["mask"] in ("rounded", "quantised")])
    assert not hidden["refine"]["first"]
    assert says(page, f"{hidden['refine']['image_steps']:,} image-steps. `square` finds {hidden['square']['first']}")
    counts = [len(row["ids"].split()) for row in rows]
    assert says(page, f"200 queries are attacked: {min(counts)} to {max(counts)} by model.")
    assert min(MEMBERS_OF_GRADIENTS, key=lambda name: told[name]["needed"]) == "adam"
    assert says(page, f"`adam` or `momentum`: {told['adam']['needed']} and {told['momentum']['needed']} need them")
    assert made.written(page, rows) == page and page.count("<!-- members ") == len(made.tables(rows))


def test_what_the_strong_audit_costs_beside_the_first_ensemble() -> None:
    found = json.loads((STRONG / "cost.json").read_text())
    assert found["commit"] and "dirty" not in found["commit"]
    for each in found["cost"].values():
        assert {one["commit"] for one in each["after"]} == {found["commit"]}
        assert len({one["commit"] for one in each["before"]}) == 1 and each["before"][0]["queries"] >= 160
        for cost, ratio in each["ratio"].items():
            before, after = (sum(one[cost] for one in each[when]) for when in ("before", "after"))
            assert ratio == pytest.approx(after / before)
    page, told = (NOTES / "strong.md").read_text(), found["cost"]
    assert {kind for _, kind in (name.split(": ") for name in told)} == {"neighbour", "neighbour, curve", "all"}
    for kind in ("neighbour", "neighbour, curve", "all"):
        cells = []
        for model in ("natural", "hm-lga"):
            each = told[f"{model}: {kind}"]
            for cost, form in (("cpu", ".1f"), ("image_steps", ",.0f")):
                means = [sum(one[cost] for one in each[when]) / len(each[when]) for when in ("before", "after")]
                cells.append(f"{means[0]:{form}} → {means[1]:{form}} {each['ratio'][cost]:.2f}")
        assert says(page, " | ".join(cells)), cells
    twice = told["hm-lga: neighbour"]["ratio"]
    assert says(page, f"{twice['cpu']:.3f} times the processor time, and {twice['seconds']:.2f} times the seconds")
    left = [told[f"{m}: neighbour"][when][0]["left"] for m in ("natural", "hm-lga") for when in ("after", "before")]
    assert says(page, " ".join(f"{share:.1f}" for share in left))
    others = [each["ratio"]["cpu"] for name, each in told.items() if name != "hm-lga: neighbour"]
    assert max(others) < 2
