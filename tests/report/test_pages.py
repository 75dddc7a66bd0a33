"""What stands in the pages, without a browser: verdicts, bars, cases, commands, sizes."""

import html
import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import anchorhold as ah
from anchorhold.attacks.menu import ATTACKS
from anchorhold.columns import rises
from anchorhold.errors import RunError
from anchorhold.report import charts, gallery
from anchorhold.report.audit_page import MEASURES, UNCHECKED, bars_of, command_of, verdict_of, write_audit_page
from anchorhold.report.charts import Axis, Mark, Point, Series, chart, ticks
from anchorhold.report.collect import collect, flat_since, read_audit, read_run
from anchorhold.report.compare_page import write_compare_page
from anchorhold.report.curve import recall_left, table_of_curve
from anchorhold.report.curve_chart import drawn_curve
from anchorhold.report.gallery import MOST, gallery_of
from anchorhold.report.marks import overlap
from anchorhold.report.pictures import SHOWN, Pictures, load_pictures
from anchorhold.report.training_page import write_training_page
from tests.report.invented import a_run, an_audit, flat_rows
from tests.report.shown import FOLDER, HOSTILE, a_collapsing_run, a_hostile_audit, runs_to_compare


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_hostile_audit(tmp_path_factory.mktemp("audits") / FOLDER)


def columns(**values: tuple[float, float]) -> dict[str, Any]:
    """One protocol with columns by name: initial and value; _ stands for what no keyword may hold."""
    names = {name.replace("_plus", "+").replace("_minus", "-"): pair for name, pair in values.items()}
    return {"columns": {n: {"value": b, "initial": a, "low": b, "high": b} for n, (a, b) in names.items()}}


# ---------------------------------------------------------------- verdict and bars


@pytest.mark.parametrize(
    ("outcome", "flags", "level"),
    [
        (columns(LTM=(50, 45), CA_plus=(50, 40)), [], "good"),
        (columns(LTM=(50, 45), CA_plus=(50, 20)), [], "fair"),  # one that comes 60 % of its way is too much
        (columns(LTM=(50, 30), CA_plus=(50, 20)), [], "fair"),
        (columns(LTM=(50, 5), CA_minus=(2, 80)), [], "bad"),
        (columns(LTM=(50, 49)), ["zero-gradient"], "bad"),  # a good score that cannot be trusted
        (columns(LTM=(50, 49)), ["few-samples"], "good"),
        (columns(LTM=(0, 0)), [], "fair"),
        (columns(TMA=(0.2, 0.95)), [], "bad"),
    ],
)
def test_the_verdict(outcome: dict[str, Any], flags: list[str], level: str) -> None:
    told = [{"name": name, "message": "…"} for name in flags]
    assert verdict_of({"protocols": {"corrected": outcome}, "flags": told}).level == level


@pytest.mark.parametrize(("left", "level"), [(40.0, "good"), (30.0, "fair"), (2.0, "bad")])
def test_the_verdict_counts_what_the_strong_attack_leaves(left: float, level: str) -> None:
    """Columns that hold do not outweigh R@1 that falls; nor do smaller ε, or curves of other attacks."""
    curve = {"eps": [0.0, 0.01, 0.1], "lines": {"R@1": [50.0, 49.0, left]}, "protocol": "strong"}
    audit = {"protocols": {"corrected": columns(LTM=(50, 45))}, "settings": {"eps": 0.1}, "curve": curve}
    found = verdict_of(audit)
    assert found.level == level and f"{left:.1f} of 50.0" in found.text
    assert verdict_of({**audit, "curve": {**curve, "protocol": "corrected"}}).level == "good"


def test_without_checks_nothing_holds() -> None:
    """An audit of an older version does not say, and was checked."""
    held, lost = ({"protocols": {"corrected": columns(LTM=(50, after))}, "flags": []} for after in (49, 1))
    assert [verdict_of({**held, **more}).level for more in ({}, {"checked": True})] == ["good", "good"]
    assert (
        verdict_of({**held, "checked": False}).level == "fair" and verdict_of({**lost, "checked": False}).level == "bad"
    )
    assert all(UNCHECKED in verdict_of({**each, "checked": False}).text for each in (held, lost))


def test_a_model_at_chance_does_not_fail_under_attack() -> None:
    outcome = columns(GTM=(20, 0))
    found = verdict_of({"protocols": {"corrected": outcome}, "flags": [{"name": "near-chance"}]})
    assert (found.level, found.title) == ("fair", "Nothing to attack")
    severe = verdict_of({"protocols": {"corrected": outcome}, "flags": [{"name": "near-chance"}, {"name": "collapse"}]})
    assert severe.level == "bad"


def test_the_verdict_goes_by_the_last_protocol_and_names_the_strongest_attack() -> None:
    mild, hard = columns(LTM=(50, 49), GTM=(50, 49)), columns(LTM=(50, 20), GTM=(50, 1))
    found = verdict_of({"protocols": {"published": mild, "corrected": hard}})
    assert found.level == "bad" and "GTM: clean 50.0 · after 1.0" in found.text and "79 % of the way" in found.text


def test_the_verdict_takes_sinking_as_success_and_items_that_stay_as_no_resistance() -> None:
    sunk = {"SPQA-": {"value": 58.6, "initial": 0.6}, "SPQA-:kept": {"value": 0.4, "initial": 0.3}}
    raised = {"SPQA+": {"value": 10.0, "initial": 50.0}, "SPQA+:kept": {"value": 2.0, "initial": 0.1}}
    bars = {bar.name: bar for bar in bars_of({"columns": {**raised, **sunk}})}
    assert [*bars] == ["SPQA+", "SPQA+:kept", "SPQA-", "SPQA-:kept"]
    assert bars["SPQA-"].way == pytest.approx(58.35, abs=0.01) and bars["SPQA+"].way == 80
    assert bars["SPQA-:kept"].way is None and bars["SPQA-:kept"].place(bars["SPQA-:kept"].measure.goal) is None
    assert "no goal of its own" in bars["SPQA-:kept"].tip
    alone = verdict_of({"protocols": {"corrected": {"columns": sunk}}})
    assert alone.level == "fair" and "come 58 % of the way" in alone.text
    assert verdict_of({"protocols": {"corrected": {"columns": {**sunk, **raised}}}}).level == "bad"
    held = {"SPQA-": {"value": 2.0, "initial": 0.6}, "SPQA-:kept": {"value": 80.0, "initial": 0.0}}
    assert verdict_of({"protocols": {"corrected": {"columns": held}}}).level == "good"


def test_every_attack_has_its_goal_on_the_page() -> None:
    """What a measure of an attack means and where its goal lies is never left to a default."""
    measures = {"ES": ("ES:D", "ES:R"), "GTT": ("GTT", "GTT@1"), "nearest": ("nearest", "nearest:mAP@R")}
    measures |= {name: (name, f"{name}:kept") for name in ("SPQA+", "SPQA-")}
    assert {name for attack in ATTACKS for name in measures.get(attack, (attack,))} == set(MEASURES)
    assert {name for name, each in MEASURES.items() if each.goal == each.top} == {n for n in MEASURES if rises(n)}


def test_an_eps_of_l2_is_no_fraction_of_a_pixel(tmp_path: Path) -> None:
    """0.2, 0.4 and 1 are whole numbers of 255ths, but L2 measures the whole image."""
    curve = {"eps": [0.0, 0.2, 0.4, 1.0], "lines": {"R@1": [50.0, 40.0, 30.0, 20.0]}, "protocol": "strong"}
    settings = {"eps": 1.0, "alpha": 0.2, "steps": 8, "norm": "l2", "epsilons": [0.2, 0.4, 1.0]}
    for norm, shown in (("l2", ("0.2", "0.4", "1")), ("linf", ("51/255", "102/255", "255/255"))):
        path = an_audit(tmp_path / norm, eps=1.0)
        audit = json.loads((path / "audit.json").read_text())
        audit |= {"settings": {**audit["settings"], **settings, "norm": norm}, "curve": curve}
        (path / "audit.json").write_text(json.dumps(audit))
        words = command_of(audit).split()
        assert words[words.index("--eps") + 1] == shown[2] and words[words.index("--alpha") + 1] == shown[0]
        assert words[words.index("--curve") + 1] == ",".join(shown)
        assert table_of_curve(curve, None, 100, norm)[0].split()[-3:] == [*shown]
        drawn = drawn_curve(curve, audit)
        assert drawn is not None and f"at ε = {shown[0]}" in drawn[0]
        page = write_audit_page(path).read_text()
        name = {"l2": "L2 ε", "linf": "ε"}[norm]
        assert f"The strong attack at {name} {shown[2]} leaves" in page and f"R@1 at {name} {shown[1]} (%)" in page
        assert f">{', '.join(shown)}<" in page  # how it was made
        assert norm == "linf" or not re.search(r"\d/255", page)


def test_bars_share_one_scale() -> None:
    found = {bar.name: bar for bar in bars_of(columns(CA_minus=(2, 51), TMA=(0.1, 0.6), GTT=(100, 25)))}
    assert [found["CA-"].place(v) for v in (2.0, 51.0, 100.0)] == [2, 51, 100] and found["CA-"].way == 50
    assert found["TMA"].place(0.6) == 60 and found["TMA"].place(-0.3) == 0 and found["TMA"].measure.goal == 1
    assert found["GTT"].way == 75 and "clean 100.0 · after 25.0 [25.0, 25.0] · goal 0" in found["GTT"].tip
    shift = bars_of({"columns": {"ES:D": {"value": 0.5, "initial": 0.0}}})[0]
    assert shift.place(shift.after) == 25 and shift.way == 25 and "[" not in shift.tip


# ---------------------------------------------------------------- the gallery


def test_cases_are_what_the_examples_hold(audited: Path) -> None:
    found = gallery_of(audited, read_audit(audited))
    examples = safetensors.torch.load_file(audited / "examples.safetensors")
    names = [HOSTILE[number % len(HOSTILE)] for number in range(40)]
    assert found.attacks == ["ES", "QA-", "CA+"] and found.named and found.factor == 15  # 127 over 8 levels
    case = next(each for each in found.cases if each.attack == "QA-" and each.held == "worst")
    (label,) = {key.split("/")[0] for key in examples if key.startswith("QA-")}
    before, after = (examples[f"{label}/{name}"][0].tolist() for name in ("before", "after"))
    own = names[int(examples[f"{label}/ids"][0])]
    assert case.name == own and not case.candidate
    assert [n.name for n in case.before] == [names[i] for i in before[:SHOWN]]
    assert [n.right for n in case.after] == [names[i] == own for i in after[:SHOWN]]
    for one, other, shown in ((before, after, case.before), (after, before, case.after)):
        assert [n.other for n in shown] == [other.index(i) + 1 if i in other else None for i in one[:SHOWN]]
    samples = safetensors.torch.load_file(audited / "samples.safetensors")
    row = samples[f"{label}/ids"].tolist().index(int(examples[f"{label}/ids"][0]))
    assert case.target_name == names[int(samples[f"{label}/targets"][row].flatten()[0])] and case.target is not None
    told = [f"{100 * float(samples[f'corrected/QA-{end}'][row]):.1f} %" for end in ("/initial", "")]
    assert case.measures == [("QA-", *told)]


def test_a_candidate_is_marked_in_the_list_it_was_raised_in(audited: Path) -> None:
    found = gallery_of(audited, read_audit(audited))
    case = next(each for each in found.cases if each.attack == "CA+" and each.held == "worst")
    examples = safetensors.torch.load_file(audited / "examples.safetensors")
    (label,) = {key.split("/")[0] for key in examples if key.startswith("CA+")}
    sample, asked = int(examples[f"{label}/ids"][0]), int(examples[f"{label}/asked"][0])
    assert case.candidate and case.query is not None
    assert case.name == HOSTILE[asked % 5] and case.sample_name == HOSTILE[sample % 5]
    listed = examples[f"{label}/after"][0, :SHOWN].tolist()
    assert [n.attacked for n in case.after] == [item == sample for item in listed]


def test_pictures_come_back_as_they_were(audited: Path, tmp_path: Path) -> None:
    found = load_pictures(audited / "pictures.safetensors")
    assert set(found.images) == {"query", "gallery"} and set(found.classes["query"].values()) <= set(HOSTILE)
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Pictures({"query": {7: image}}, {"query": {7: HOSTILE[2]}}).save(tmp_path / "p.safetensors")
    again = load_pictures(tmp_path / "p.safetensors")
    assert np.array_equal(again.images["query"][7], image) and again.classes == {"query": {7: HOSTILE[2]}}
    (tmp_path / "p.safetensors").write_bytes(b"no")
    with pytest.raises(RunError, match="audit again"):
        load_pictures(tmp_path / "p.safetensors")


@pytest.mark.slow
def test_a_gallery_of_200_queries_stays_under_5_megabytes(tmp_path: Path) -> None:
    """Photographs all of which differ, neighbours included, and rougher than most."""
    draw = torch.Generator().manual_seed(0)

    def photos(count: int) -> torch.Tensor:
        coarse = torch.rand((count, 3, 9, 9), generator=draw)
        smooth = torch.nn.functional.interpolate(coarse, (96, 96), mode="bicubic")
        noisy = smooth + 0.05 * torch.randn(smooth.shape, generator=draw)
        return (255 * noisy).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    an_audit(tmp_path)
    audit = json.loads((tmp_path / "audit.json").read_text())
    examples: dict[str, torch.Tensor] = {}
    runs, total = 67, 201
    pictures = photos(10 * total)
    for run in range(runs):
        clean = photos(3)
        noise = torch.randint(-8, 9, clean.shape, generator=draw)
        ids = torch.arange(30 * run, 30 * run + 30).reshape(3, 10)
        examples |= {
            f"ES.{run}/ids": ids[:, 0].clone(),
            f"ES.{run}/asked": ids[:, 0].clone(),
            f"ES.{run}/before": ids.roll(5, 1),
            f"ES.{run}/after": ids.clone(),
            f"ES.{run}/clean": clean,
            f"ES.{run}/perturbed": (clean.int() + noise).clamp(0, 255).to(torch.uint8),
        }
    audit["runs"] = [{"label": f"ES.{run}", "attack": "ES", "goals": {"corrected": {}}} for run in range(runs)]
    safetensors.torch.save_file(examples, tmp_path / "examples.safetensors")
    known = dict(enumerate(pictures))
    Pictures({"gallery": known, "query": known}, dict.fromkeys(("gallery", "query"), dict.fromkeys(known, "a"))).save(
        tmp_path / "pictures.safetensors"
    )
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    page = write_audit_page(tmp_path)
    text = page.read_text()
    assert text.count("<article") == total and text.count("<image ") == 13 * total
    assert 0.3 * MOST < page.stat().st_size < 5_000_000


# ---------------------------------------------------------------- whole pages


def test_the_audit_writes_its_page_and_report_writes_it_again(audited: Path) -> None:
    page = audited / "page.html"
    text = page.read_text(encoding="utf-8")
    again = write_audit_page(audited).read_text(encoding="utf-8")
    stamp = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
    assert stamp.sub("", text) == stamp.sub("", again)
    assert "<script>alert" not in text and "<img" not in text and text.count("<script") == 1
    for name in HOSTILE:
        assert html.escape(name, quote=False).replace("'", "&#39;").replace('"', "&#34;") in text
    assert re.search(r"(src|href)=\"(?!data:|#p\d)", text) is None and "://" not in text.replace("://www.w3.org", "")


def test_a_page_is_made_from_little(tmp_path: Path) -> None:
    """An audit.json alone, as it lies in a repository: no samples, no examples, no pictures."""
    text = write_audit_page(an_audit(tmp_path)).read_text()
    assert "What each attack does" in text and 'class="case"' not in text
    audit = json.loads((tmp_path / "audit.json").read_text())
    audit["curve"] = {"about": "<i>a</i>", "eps": [0, 0.1], "lines": {"x": [50.0, 7.25]}}
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    text = write_audit_page(tmp_path, tmp_path / "other.html").read_text()
    assert "x: 7.2 at ε = 0.1" in text and "<i>" not in text
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(RunError, match="cannot read"):
        write_audit_page(tmp_path)


def test_the_command_makes_the_same_audit(audited: Path, tmp_path: Path) -> None:
    audit = read_audit(audited)
    said = command_of(audit)
    assert (
        "--data '<b>data</b>'" in said
        and "--limit 12" in said
        and "--steps 2" in said
        and "--eps 8/255 --alpha 3/255" in said
    )
    assert "--attacks ES,CA+,QA-" in said and "--protocol" not in said and "--seeds" not in said
    changed = a_hostile_audit(tmp_path, attacks={"CA+": {"w": 3}}, protocols=["corrected"], threat="adml", limit=0)
    said = command_of(read_audit(changed))
    assert "--attacks CA+:w=3" in said and "--protocol corrected" in said and "--full" in said
    assert "--threat adml" in said
    audit["data"]["query"]["name"] = "cub/train, last 20 classes"
    assert " --data cub --held-out 20 " in command_of(audit)


def test_the_command_has_what_was_typed(audited: Path, tmp_path: Path) -> None:
    audit = read_audit(audited)
    typed = {"model": "models:mine", "data": "my photos", "root": "r", "mean": ".5", "std": ".2", "size": "8"}
    said = command_of(audit | {"command": typed | {"on-bad-image": "skip", "other": "x", "surrogate": 3}})
    assert said.startswith(
        "anchorhold audit models:mine --data 'my photos' --root r --mean .5 --std .2 --size 8 --on-bad-image skip "
    )
    assert "other" not in said and "surrogate" not in said
    second = {"surrogate": "models:b", "surrogate-mean": ".4"}
    said = command_of(audit | {"command": typed | second, "strong": {"surrogate": "0123"}})
    assert " --surrogate models:b --surrogate-mean .4 " in said
    assert " --held-out 5 " in command_of(audit | {"command": typed | {"held-out": "5"}})


@pytest.mark.medium
def test_the_command_of_an_audit_from_python_has_what_is_known(tmp_path: Path) -> None:
    model = ah.wrap(torch.nn.Flatten(), mean=[0.485], std=[0.229], size=6)
    small: dict[str, Any] = {
        "attacks": ["TMA"],
        "limit": 4,
        "steps": 1,
        "resamples": 9,
        "examine": None,
        "device": "cpu",
    }
    found = ah.audit(model, ah.dataset("digits"), **small, out=tmp_path)
    said = command_of(found.to_dict())
    assert said.startswith("anchorhold audit MODEL --data digits --mean 0.485 --std 0.229 --size 6,6 ")
    assert "The model was given in Python." in (tmp_path / "page.html").read_text()


def test_training_marks_the_signs_of_collapse(tmp_path: Path) -> None:
    run = read_run(a_collapsing_run(tmp_path / "run"))
    assert flat_since(run) == ([(8, 12)], 8)
    text = write_training_page(tmp_path / "run").read_text()
    assert text.count('class="band"') == 7 and "epoch 8" in text and "The model has collapsed" in text
    assert "γ = 0.2" in text and "collapse below 0.02" in text and "The run is in progress" in text
    assert "collapse below 0.05" in text
    near = [{**row, "mean_distance": 0.04} for row in flat_rows(5, separability=0.3)]
    assert flat_since(read_run(a_run(tmp_path / "near", near)))[1] == 3  # by distance alone
    fine = write_training_page(a_run(tmp_path / "fine", flat_rows(separability=0.3))).read_text()
    assert "No sign of collapse" in fine and 'class="band"' not in fine
    pretraining = [
        {"epoch": epoch, "loss": 0.1, "drift": 0.3, "features_r1": r1, "features_r1_attacked": 12.3}
        for epoch, r1 in ((1, 65.4), (2, 61.7))
    ]
    text = write_training_page(a_run(tmp_path / "pretraining", pretraining)).read_text()
    assert text.count("R@1 of features (%)") == 1 and "R@1 of the features</" in text
    assert "Backbone ready" in text and "65.4 at the first evaluation, 61.7 at the last" in text
    assert "collapse is not checked" in text and "Separability" not in text.split("<h2>Curves")[0]
    # What counts is where it ended: a dip on the way is none, though training has said so.
    for start, lost in ((123.0, False), (124.0, True)):
        folder = a_run(tmp_path / f"from-{start:.0f}", pretraining, start={"features_r1": start})
        text = write_training_page(folder).read_text()
        told = "fell from 124.0 to 61.7" if lost else "123.0 before training, 61.7 at"
        assert told in text
        assert ("The backbone has lost its features" in text) == lost == ("Backbone ready" not in text)
        assert f"lost below {start / 2:.1f}" in text and "squared drift" in text and "its margin γ" not in text
        assert read_run(folder).status == ("done, features lost" if lost else "done")
    early = write_training_page(a_run(tmp_path / "early", [], status="training")).read_text()
    assert "No epoch has finished yet" in early


def test_a_log_that_is_being_written_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    a_run(tmp_path, flat_rows(3, 0.3), status="training")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 4, "lo')
    assert "epoch 3: training loss" in (text := write_training_page(tmp_path).read_text()) and "epoch 4" not in text


def test_compare_shows_print_in_grey(tmp_path: Path) -> None:
    entries = collect([runs_to_compare(tmp_path)]).entries
    text = write_compare_page(entries, tmp_path / "c.html").read_text()
    assert "published rows" not in text and text.count('role="img" aria-label=') >= 3
    on_cub = [replace(e, info=dict(e.info) | {"data": {"name": "cub"}}, row="hm/t6/cub/hm-lga-8") for e in entries]
    text = write_compare_page(on_cub, tmp_path / "c.html", sort="r1").read_text()
    assert text.count('class="point grey"') > 50 and "the paper reports R@1" in text
    assert text.index(">b</bdi></td>") < text.index(">c</bdi></td>") < text.index(">a</bdi></td>")
    assert html.escape(FOLDER) in text and FOLDER not in text


# ---------------------------------------------------------------- charts


def test_labels_lie_on_no_other_label_or_point() -> None:
    points = [
        (300.0, 200.0, "hm-lga"),
        (290.0, 196.0, "hm-lga-112"),
        (310.0, 204.0, "hm-lga-75"),
        (580.0, 30.0, "natural"),
    ]
    boxes = []
    for (x, y, label), (right, down) in charts._places(points, 600).items():
        begins = x + right - (7.5 * len(label) if right < 0 else 0)
        boxes.append((begins, y + down - 13, begins + 7.5 * len(label), y + down))
        assert begins >= charts._LEFT and boxes[-1][2] <= 600  # and inside the chart
    assert not any(overlap(one, other) for one, other in combinations(boxes, 2))
    others = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in points]
    assert not any(overlap(box, other) for box in boxes for other in others)
    assert charts._places(points[:1], 600) == {points[0]: (7, -7)}  # the first choice, where nothing is near
    crowd = [(300.0, 200.0, f"number {n}") for n in range(30)]
    assert len(charts._places(crowd, 600)) == 30  # more than there is room for: all are there


def test_large_numbers_stay_inside_the_chart() -> None:
    drawn = str(chart([Series("loss", [Point(1, 3e9, "")], 0)], Axis("epoch"), Axis("", (0.0,)), "a loss"))
    ticks = re.findall(r'class="tick end"[^>]*>([^<]*)<', drawn)
    assert len(ticks) > 2 and ticks[-1].endswith("e+09") and max(map(len, ticks)) <= 7


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 7.9), (1e-5, 3e-5), (99.0, 101.0), (5, 5), (0, 1e6)])
def test_ticks_are_round_and_hold_what_they_are_asked_to(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-12 and found[-1] >= high - 1e-12 and 3 <= len(found) <= 8
    steps = {round(b - a, 12) for a, b in pairwise(found)}
    assert len(steps) == 1 and f"{steps.pop():e}"[0] in "125"


def test_points_stand_where_their_numbers_say() -> None:
    drawn = str(
        chart([Series("s", [Point(0, 0, "<a>"), Point(10, 4, "b")])], Axis("x"), Axis("y"), "both", [Mark(2, "m")])
    )
    places = re.findall(r'transform="translate\(([\d.]+) ([\d.]+)\)"', drawn)
    (left, bottom), (right, top) = ((float(x), float(y)) for x, y in places)
    assert left < right and bottom > top and "&lt;a&gt;" in drawn and "<a>" not in drawn
    mark = re.search(r'class="mark"[^>]*y1="([\d.]+)"', drawn)
    assert mark is not None and float(mark[1]) == pytest.approx((top + bottom) / 2)


def test_measures_of_another_kind_are_left_out_of_a_page() -> None:
    rows = {"published/ES:R": np.ones(2), "published/ES:R/initial": np.zeros(2)}
    assert gallery._measures("ES", "published", rows, 0) == [("ES:R", "wrong", "right")]
    rows["published/ES:R"] = np.ones(2, dtype=np.complex64)
    assert gallery._measures("ES", "published", rows, 0) == []


def test_what_the_strong_attack_leaves_comes_from_the_curve_or_from_a_strong_audit() -> None:
    curve = {
        "eps": [0.0, 0.1, 0.2],
        "lines": {"R@1": [50.0, 31.0, 7.0]},
        "intervals": {"R@1": [[45.0, 55.0], [26.0, 36.0], [4.0, 10.0]]},
        "protocol": "strong",
    }
    audit = {"settings": {"eps": 0.1}, "curve": curve}
    assert recall_left(audit) == (31.0, 26.0, 36.0)
    strong = {"protocols": {"strong": {"columns": {"ES:R": {"value": 12.0, "low": 9.0, "high": None}}}}}
    assert recall_left({**strong, "settings": {"eps": 0.1}}) == (12.0, 9.0, None)
    assert recall_left({"settings": {"eps": 0.3}, "curve": curve}) is None  # that ε was not attacked
    assert recall_left({"settings": {"eps": 0.1}, "curve": {**curve, "protocol": "corrected"}}) is None
    assert recall_left(None) is None
