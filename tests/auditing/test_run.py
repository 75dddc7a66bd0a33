"""audit(): its numbers against attacks by hand, data in every form, resuming, files, and one line for bad input."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.attacks.run import Attack, Attacked
from anchorhold.auditing import run as run_room
from anchorhold.auditing import standard as sweep_room
from anchorhold.auditing.inputs import sample
from anchorhold.auditing.one_image import attack as attack_one
from anchorhold.auditing.outcomes import RunRows, estimate
from anchorhold.auditing.outcomes import outcome as outcome_of
from anchorhold.auditing.plan import NINE
from anchorhold.auditing.result import Audit
from anchorhold.auditing.run import Evidence
from anchorhold.auditing.showing import scores_of
from anchorhold.console import Silent
from anchorhold.data.splits import Split
from anchorhold.errors import AnchorholdError, DataError, Interrupted, ModelError, RunError, SettingsError
from anchorhold.interface import command_line
from anchorhold.metrics import RANKED, evaluate
from anchorhold.model.embedder import Embedder
from anchorhold.model.frozen import embed_all, frozen
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget, Threat, threat_of
from anchorhold.random import Key
from anchorhold.report.audit_page import UNCHECKED, resistance_of, verdict_of
from anchorhold.runs.schemas import AUDIT_SCHEMA
from tests.attacking import attack, running
from tests.docs.pages import ROOT

pytestmark = pytest.mark.medium

QUICK: dict[str, Any] = {
    "steps": 4,
    "eps": 0.1,
    "alpha": 0.03,
    "limit": 60,
    "batch": 32,
    "device": "cpu",
    "resamples": 99,
    "epsilons": (),
}
FGSM: dict[str, Any] = {"method": "fgsm", "steps": None, "alpha": None}  # it has neither


RUNS = 12  # that the nine attacks take in both protocols: ES, LTM and GTM have two each


@pytest.fixture(scope="module")
def digits() -> Split:
    test = ah.dataset("digits").test
    return test.keep(torch.arange(0, len(test), 4))


@pytest.fixture(scope="module")
def model() -> Embedder:
    return Embedder("small", 16, channels=1, size=8).double()


@pytest.fixture(scope="module")
def audited(model: Embedder, digits: Split) -> Audit:
    return ah.audit(model, digits, **QUICK)


def numbers(audit: Audit) -> dict[str, Any]:
    """Everything but what the clock says."""
    found = audit.to_dict()
    return {name: found[name] for name in ("clean", "protocols", "image_steps", "data", "model")}


# ---------------------------------------------------------------- numbers


def test_the_numbers_are_those_of_attacks_by_hand(audited: Audit, model: Embedder, digits: Split) -> None:
    assert digits.images is not None
    images = (digits.images.double().float() / 255).permute(0, 3, 1, 2).double()
    key = Key.of(0)("audit")
    ids = sample(digits.labels, 60, key("sample"))
    with frozen(model) as embed:
        scene = Scene.of(embed_all(embed, [images]), digits.labels)
        for protocol in ("published", "corrected"):
            columns = audited.protocols[protocol].columns
            for name in NINE:
                goal = goal_named(name, protocol)  # type: ignore[arg-type]
                done = attack(embed, images[ids], scene, goal, ids, Ball(0.1), Budget(4, 0.03), key)
                before = goal.measure(scene, ids, done.targets, scene.queries[ids], scene.queries[ids])
                for column, row in done.measures.items():
                    scale = 1 if column in ("TMA", "ES:D") else 100
                    assert columns[column].value == pytest.approx(scale * estimate(row, protocol), abs=1e-9)
                    initial = scale * estimate(before[column], protocol)
                    assert columns[column].initial == pytest.approx(initial, abs=1e-9)
    clean = evaluate(scene.queries, scene.labels, metrics=(*RANKED, "NMI"), key=key("nmi")).percent()
    for name in ("R@1", "R@2", "mAP", "mAP@R", "mAP@10", "NMI"):
        assert audited.clean[name].value == pytest.approx(clean[name])


def test_published_means_are_over_groups_of_112() -> None:
    row = torch.arange(150, dtype=torch.float64)
    assert estimate(row, "corrected") == 74.5
    assert estimate(row, "published") == (row[:112].mean() + row[112:].mean()) / 2


def test_published_columns_are_such_means(model: Embedder, digits: Split) -> None:
    found = ah.audit(model, digits, **{**QUICK, "attacks": ["GTT"], "limit": 150, "batch": 40})
    published, corrected = (100 * found.runs[0].measures[name]["GTT"] for name in ("published", "corrected"))
    assert torch.equal(published, corrected)  # no duplicates here
    assert found.protocols["published"].columns["GTT"].value == pytest.approx(estimate(published, "published"))
    assert found.protocols["corrected"].columns["GTT"].value == pytest.approx(float(corrected.mean()))
    assert estimate(published, "published") != pytest.approx(float(published.mean()))


def test_scores_are_those_of_the_columns_and_lie_in_their_intervals(audited: Audit) -> None:
    for outcome in audited.protocols.values():
        values = {name: column.value for name, column in outcome.columns.items() if name != "GTT@1"}
        assert outcome.ers is not None and outcome.ers.value == pytest.approx(ah.ers(values))
        clean = outcome.columns["ES:R"].initial
        assert clean is not None
        constants, measured = outcome.ars["constants"], outcome.ars["measured"]
        assert constants is not None and measured is not None and measured.initial is not None
        assert constants.value == pytest.approx(ah.ars(values, clean))
        before = {name: measured.initial[name] for name in measured.terms}
        assert measured.value == pytest.approx(ah.ars(values, clean, before))
        for score in (outcome.ers, constants, measured):
            assert score.low <= score.value <= score.high
        for name, column in outcome.columns.items():
            assert column.low is not None and column.high is not None
            assert column.low - 3 <= column.value <= column.high + 3, name


def test_ars_per_sample_is_the_mean_of_each_sample_s_own_ratio(audited: Audit, tmp_path: Path) -> None:
    written = json.loads((audited.save(tmp_path) / "audit.json").read_text())["protocols"]
    lists = {"published": 224, "corrected": 223}  # published, a query's own image is in its list
    for protocol, outcome in audited.protocols.items():
        score, whole = outcome.ars["per_sample"], outcome.ars["measured"]
        assert score is not None and whole is not None and score.left_out is not None
        runs = {name: run for run in audited.runs for name in run.measures.get(protocol, {})}
        for name in score.terms:
            pairs = zip(*(rows[protocol][name].tolist() for rows in (runs[name].initial, runs[name].measures)))
            goal = 1 - 1 / lists[protocol] if name in ("CA-", "QA-") else 0
            ratios = [(goal - after) / (goal - before) for before, after in pairs if abs(goal - before) > 1e-9]
            assert score.terms[name] == pytest.approx(100 * sum(ratios) / len(ratios)), name
            assert score.left_out[name] == 60 - len(ratios)
        assert score.value == pytest.approx(sum(score.terms.values()) / 8) and score.low <= score.value <= score.high
        assert score.terms["GTT"] == pytest.approx(whole.terms["GTT"])  # every query begins alike
        assert score.terms["CA+"] != pytest.approx(whole.terms["CA+"], abs=1)
        assert score.left_out["ES:R"] == round(60 * (1 - (outcome.columns["ES:R"].initial or 0) / 100))
        assert written[protocol]["ars"]["per_sample"]["left_out"] == score.left_out
        assert f"{score.value:.1f} [{score.low:.1f}, {score.high:.1f}]" in str(audited)
        shown = resistance_of(written[protocol])
        assert shown[-1] == ["ARS", f"{whole.value:.1f}", f"{score.value:.1f}", ""]
        assert [
            "ES:R",
            f"{whole.terms['ES:R']:.1f}",
            f"{score.terms['ES:R']:.1f}",
            f"{score.left_out['ES:R']}",
        ] in shown
        del written[protocol]["ars"]["per_sample"]  # as an older version wrote it
        assert resistance_of(written[protocol]) == []


def test_a_gallery_that_holds_the_queries_elsewhere_has_lists_of_the_same_length(
    audited: Audit, model: Embedder, digits: Split
) -> None:
    apart = {"query": digits, "gallery": replace(digits), "own": torch.arange(len(digits.labels))}
    found = ah.audit(model, apart, **QUICK).protocols
    for protocol, outcome in audited.protocols.items():
        here, there = outcome.ars["per_sample"], found[protocol].ars["per_sample"]
        assert here is not None and there is not None
        for name in ("QA-", "ES:R"):  # CA- perturbs items of the gallery, of which others are drawn
            assert there.terms[name] == pytest.approx(here.terms[name]), (protocol, name)


def test_runs_that_both_protocols_share_are_made_once(audited: Audit) -> None:
    kinds = {goal_named(name, protocol).run for name in NINE for protocol in ("published", "corrected")}
    assert len(audited.runs) == len(kinds) == RUNS
    shared = [run.attack for run in audited.runs if len(run.protocols) == 2]
    assert shared == ["CA+", "CA-", "QA+", "QA-", "TMA", "GTT"]
    assert audited.image_steps == sum(run.image_steps for run in audited.runs) > 0


@pytest.mark.slow
def test_the_batch_size_changes_nothing(audited: Audit, model: Embedder, digits: Split) -> None:
    other = ah.audit(model, digits, **{**QUICK, "batch": 7})
    for protocol, outcome in audited.protocols.items():
        for name, column in outcome.columns.items():
            assert other.protocols[protocol].columns[name].value == pytest.approx(column.value, abs=1e-6)
            assert other.protocols[protocol].columns[name].initial == pytest.approx(column.initial, abs=1e-6)


@pytest.mark.parametrize("still", [{"eps": 0.0}, {"steps": 0}, {"eps": 0.0, **FGSM}])
def test_an_attack_that_may_not_move_gives_the_clean_values(model: Embedder, digits: Split, still: Any) -> None:
    found = ah.audit(model, digits, **{**QUICK, **still})
    for protocol, outcome in found.protocols.items():
        for name, column in outcome.columns.items():
            assert column.value == column.initial, (protocol, name)
        assert outcome.columns["ES:D"].value < 1e-4  # torch's own 1e-6 a coordinate
        measured = outcome.ars["measured"]
        assert measured is not None and measured.value == pytest.approx(100)


@pytest.mark.slow
def test_fgsm_is_one_step_of_the_whole_radius(model: Embedder, digits: Split) -> None:
    chosen = {**QUICK, "attacks": ["TMA"], "protocols": "corrected"}
    one = ah.audit(model, digits, **{**chosen, **FGSM})
    same = ah.audit(model, digits, **{**chosen, "steps": 1, "alpha": 0.1})
    assert numbers(one)["protocols"] == numbers(same)["protocols"]
    assert one.protocols["corrected"].ers is None and "ERS" not in str(one)
    assert "FGSM" in str(one)


def test_published_es_d_is_left_out_where_no_step_is_the_last_but_one(model: Embedder, digits: Split) -> None:
    """C&W keeps its best iterate. One step early it would be the corrected ES:D again, under another name."""
    found = ah.audit(
        model, digits, **{**QUICK, "attacks": ["ES", "TMA"], "method": "cw", "alpha": None, "examine": None}
    )
    published, corrected = (found.protocols[name].columns for name in ("published", "corrected"))
    assert published.keys() == {"ES:R", "TMA"} and corrected.keys() == {"ES:D", "ES:R", "TMA"}
    assert any("ES:D" in note and "C&W" in note for note in found.notes)
    assert found.protocols["published"].ers is None
    plain = ah.audit(model, digits, **{**QUICK, "attacks": ["ES"], "examine": None})
    assert "ES:D" in plain.protocols["published"].columns and not plain.notes
    with pytest.raises(SettingsError, match="C&W keeps its best iterate"):
        attack_one(model, "3", digits, "ES", protocol="published", method="cw", device="cpu")


def test_attacks_take_settings(model: Embedder, digits: Split) -> None:
    found = ah.audit(model, digits, **{**QUICK, "attacks": {"CA+": {"w": 3}}, "protocols": ["corrected"]})
    assert found.runs[0].targets is not None and found.runs[0].targets.shape == (60, 3)
    assert found.to_dict()["runs"][0]["goals"]["corrected"]["w"] == 3
    with pytest.raises(SettingsError, match="CA\\+ has no such settings: v"):
        ah.audit(model, digits, attacks={"CA+": {"v": 3}})


def test_the_model_is_left_as_it_was(digits: Split) -> None:
    model = Embedder("small", 16, channels=1, size=8)
    model.train()
    model.backbone.eval()
    modes = [module.training for module in model.modules()]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    ah.audit(model, digits, **{**QUICK, "attacks": ["CA+", "ES"]})
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize(("change", "cost"), [({}, 60 * (1 + 6 * 4 + 100)), ({"steps": 0}, 0), ({"eps": 0.0}, 0)])
def test_what_the_checks_cost_is_said_before(model: Embedder, digits: Split, change: Any, cost: int) -> None:
    told: list[str] = []

    class Told(Silent):
        def say(self, text: str) -> None:
            told.append(text)

    ah.audit(model, digits, **{**QUICK, "attacks": ["ES"], **change}, report=Told())
    said = [line for line in told if "running sanity checks" in line]
    assert [f"up to {cost:,} image-steps, about " in line for line in said] == ([True] if cost else [])


def test_the_checks_show_progress_and_their_time_counts(
    model: Embedder, digits: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    totals: list[int] = []
    clock = [0.0]

    class Told(Silent):
        @contextmanager
        def task(self, name: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
            checks = name == "sanity checks"
            totals.extend([total] * checks)

            def advance(done: int, note: str = "") -> None:
                made.extend([done] * checks)
                clock[0] += checks  # a second for each step of the checks, and none for the attacks

            yield advance

    monkeypatch.setattr(run_room, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = ah.audit(model, digits, **{**QUICK, "attacks": ["ES"]}, report=Told())
    assert totals == [60 * (1 + 6 * 4 + 100)] and made == sorted(made) and made[-1] == totals[0]
    assert len(made) > 1 + 6 * 4 and max(b - a for a, b in pairwise(made[:-1])) == 60  # at each gradient step
    attacks = sum(run.seconds for run in found.runs)
    assert found.seconds == pytest.approx(attacks + clock[0]) and clock[0] == len(made)


def test_without_checks_every_form_of_the_result_says_so(model: Embedder, digits: Split, tmp_path: Path) -> None:
    quick = {**QUICK, "attacks": ["ES"], "steps": 1, "limit": 8}
    silent, checked = (ah.audit(model, digits, **quick, examine=each) for each in (None, lambda evidence: []))
    for audit, wanted in ((silent, True), (checked, False)):
        page = audit.save(tmp_path / str(wanted)) / "page.html"
        shown = [" ".join(text.split()) for text in (str(audit), audit._repr_html_(), page.read_text(encoding="utf-8"))]
        assert [UNCHECKED in text for text in shown] == [wanted] * 3
        assert ("No flags: the checks found" in shown[2]) != wanted
        assert audit.to_dict()["checked"] == (not wanted) == (not shown[2].count("nothing was checked"))


def test_print_has_the_verdict_of_the_page(audited: Audit, tmp_path: Path) -> None:
    told = str(verdict_of(json.loads((audited.save(tmp_path) / "audit.json").read_text(encoding="utf-8"))))
    assert f"verdict: {told}" in " ".join(str(audited).split()) and len(told) > 60


@pytest.mark.parametrize(("mends", "spoils", "noted"), [(8, 1, True), (3, 0, False), (8, 3, False), (1, 8, False)])
def test_an_attack_that_mends_answers_is_noted(mends: int, spoils: int, noted: bool) -> None:
    """Its name, and both counts; a difference that chance makes is none. 116 queries: a whole and a short group."""
    before = torch.zeros(116, dtype=torch.float64)
    before[mends:] = 1
    after = torch.ones_like(before)
    after[len(after) - spoils :] = 0
    first = {"ES:R": before, "TMA": torch.full_like(before, 0.1), "targeted": before}
    last = {"ES:R": after, "TMA": torch.full_like(before, 0.9), "targeted": after}
    ids = torch.arange(116)
    run = RunRows(
        *("ES", "ES", {"published": {}}, "query", ids, None, ids),
        {"published": last},
        {"published": first},
        {},
        1.0,
        1,
    )
    found = outcome_of("published", [run], Key.of(0), 9, True, 10)
    assert [re.findall(r"ES:R|targeted|\d+", note) for note in found.notes] == ([["ES:R", "8", "1"]] if noted else [])


def test_the_table_has_r1_of_the_attacked_queries(model: Embedder, digits: Split) -> None:
    found = ah.audit(model, digits, **{**QUICK, "attacks": ["GTM", "TMA"], "limit": 7, "steps": 1, "examine": None})
    rows = {line[:16].strip(): line[16:].split() for line in str(found).splitlines()}
    initial = found.protocols["corrected"].columns["GTM"].initial
    assert rows["R@1 clean"] == [f"{initial:.1f}"] * 2 and f"{initial:.1f}" != f"{found.clean['R@1'].value:.1f}"
    assert rows["TMA clean"] == [f"{found.protocols['corrected'].columns['TMA'].initial:.3f}"] * 2


def test_a_bare_module_is_told_that_it_gets_plain_pixels(model: Embedder, digits: Split) -> None:
    """Once in the first lines, and in the result; not where mean and std are said."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    quick = {**QUICK, "attacks": ["ES"], "steps": 1, "limit": 4, "examine": None}
    given = {"bare": net, "sized": ah.wrap(net, size=8), "told": ah.wrap(net, mean=[0.5], std=[0.5]), "own": model}
    for name, module in given.items():
        said: list[str] = []

        class Told(Silent):
            def say(self, text: str) -> None:
                said.append(text)  # noqa: B023

        found = ah.audit(module, digits, **quick, report=Told())
        plain = [text for text in said if "without mean and std" in text]
        assert len(plain) == (name in ("bare", "sized")) and set(plain) <= set(found.notes), name
        attacks = next(at for at, text in enumerate(said) if "attack run" in text)
        assert all(said.index(text) < attacks for text in plain)


def test_flags_come_from_the_hook(model: Embedder, digits: Split) -> None:
    @dataclasses.dataclass
    class Raised:
        name: str
        message: str

    seen: list[Evidence] = []

    def examine(evidence: Evidence) -> list[Raised]:
        seen.append(evidence)
        images, ids = evidence.images(8)
        assert torch.allclose(evidence.subject.embed(images).double(), evidence.subject.scene.queries[ids], atol=1e-6)
        return [Raised("odd", "something is odd")]

    found = ah.audit(model, digits, **{**QUICK, "attacks": ["ES"], "examine": examine})
    assert len(seen) == 1 and "flag odd: something is odd" in str(found)
    assert found.to_dict()["flags"] == [{"name": "odd", "message": "something is odd"}]


# ---------------------------------------------------------------- samples and data


def test_a_sample_is_seeded_and_spread_over_all_classes() -> None:
    labels = torch.tensor([0] * 300 + [1] * 100 + [2] * 2 + [3])
    key = Key.of(0)
    chosen = sample(labels, 40, key)
    assert len(chosen) == 40 and torch.equal(chosen, chosen.unique())
    counts = labels[chosen].bincount(minlength=4)
    assert counts.min() >= 1 and 27 <= counts[0] <= 30 and 9 <= counts[1] <= 10  # in proportion
    assert torch.equal(chosen, sample(labels, 40, key))
    assert not torch.equal(chosen, sample(labels, 40, Key.of(1)))
    for all_of_them in (0, len(labels), 1000):
        assert torch.equal(sample(labels, all_of_them, key), torch.arange(len(labels)))
    assert len(sample(labels, 2, key)) == 2


def test_another_seed_attacks_others_and_the_gallery_stays_whole(
    audited: Audit, model: Embedder, digits: Split
) -> None:
    other = ah.audit(model, digits, **{**QUICK, "attacks": ["QA+"], "seed": 1})
    mine = next(run for run in audited.runs if run.attack == "QA+")
    assert not torch.equal(mine.ids, other.runs[0].ids)
    assert audited.data["images"] == [224, 224] and audited.data["attacked"] == [60, 60]
    assert mine.targets is not None and mine.targets.max() > 60
    assert numbers(other)["clean"]["R@1"]["value"] == numbers(audited)["clean"]["R@1"]["value"]


@pytest.mark.slow
def test_the_same_data_in_every_form(audited: Audit, model: Embedder, digits: Split) -> None:
    assert digits.images is not None
    nhwc = digits.images
    forms: list[Any] = [
        (nhwc, digits.labels),
        (nhwc.permute(0, 3, 1, 2), digits.labels),
        (nhwc.permute(0, 3, 1, 2).float() / 255, digits.labels + 90),
        {"query": (pair := (nhwc, digits.labels)), "gallery": pair},
        {"query": digits, "gallery": digits.keep(torch.arange(len(digits))), "own": torch.arange(len(digits))},
    ]
    wanted = audited.protocols["corrected"].columns["LTM"].value
    for form in forms:
        found = ah.audit(model, form, **{**QUICK, "attacks": ["LTM"], "protocols": ["corrected"]})
        assert found.protocols["corrected"].columns["LTM"].value == pytest.approx(wanted, abs=1e-6)
        assert found.clean["R@1"].value == audited.clean["R@1"].value


@pytest.mark.slow
def test_queries_apart_from_the_gallery(model: Embedder, digits: Split) -> None:
    half = torch.arange(len(digits)) % 2 == 0
    query, gallery = digits.keep(half), digits.keep(~half)
    relabelled = dataclasses.replace(gallery, classes=gallery.classes[::-1], labels=9 - gallery.labels)
    for searched in (gallery, relabelled):  # classes are the same by name
        found = ah.audit(model, {"query": query, "gallery": searched}, **{**QUICK, "limit": 40})
        assert found.data["images"] == [112, 112] and not found.data["same"]
        with frozen(model) as embed:
            q, g = (
                embed_all(embed, [split.images.permute(0, 3, 1, 2) / 255.0])  # type: ignore[union-attr]
                for split in (query, gallery)
            )
        clean = evaluate(q, query.labels, gallery=g, gallery_labels=gallery.labels)
        assert found.clean["R@1"].value == pytest.approx(100 * clean.r1)
        assert {run.attack for run in found.runs if run.side == "gallery"} == {"CA+", "CA-"}
        assert found.protocols["corrected"].ers is not None


def test_files_are_read_and_the_query_finds_its_own(tmp_path: Path) -> None:
    from PIL import Image

    for name in "abc":
        for index in range(4):
            path = tmp_path / "photos" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), (80 * "abc".index(name), 60 * index, 90)).save(path)
    model = Embedder("small", 8, size=8)
    found = ah.audit(model, tmp_path / "photos", **{**QUICK, "attacks": ["ES"]})
    assert found.data["query"]["name"] == "photos" and found.data["images"] == [12, 12]
    both = {"query": str(tmp_path / "photos"), "gallery": tmp_path / "photos"}
    again = ah.audit(model, both, **{**QUICK, "attacks": ["ES"]})  # two objects, the same files
    assert again.clean["R@1"].value == found.clean["R@1"].value
    assert found.save(tmp_path / "out")
    assert str(tmp_path) not in (tmp_path / "out" / "audit.json").read_text()


# ---------------------------------------------------------------- stopping, resuming, files


class _Stop(Exception):
    pass


@pytest.mark.slow
def test_a_stopped_audit_goes_on_and_ends_the_same(
    audited: Audit, model: Embedder, digits: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == 6:
            raise _Stop
        return Attack.run(*arguments, **options)

    monkeypatch.setattr(sweep_room, "Attack", running(failing))
    with pytest.raises(_Stop):
        ah.audit(model, digits, **QUICK, out=tmp_path)
    names = sorted(path.name.split(".")[0::2][1] for path in (tmp_path / "shards").iterdir())
    assert names == ["00000", "all", "all"] and not (tmp_path / "audit.json").exists()
    (tmp_path / "shards" / "CA+.published-corrected.all.safetensors").write_bytes(b"torn")  # is done again
    resumed = ah.audit(model, digits, **QUICK, out=tmp_path)
    assert made == 6 + 2 * RUNS - 5 + 2
    assert numbers(resumed) == numbers(audited)
    again = ah.audit(model, digits, **QUICK, out=tmp_path)
    assert made == 6 + 2 * RUNS - 5 + 2 and numbers(again) == numbers(audited)
    assert again.image_steps == audited.image_steps

    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_room, "Attack", running(interrupted))
    with pytest.raises(Interrupted, match="to resume"):
        ah.audit(model, digits, **{**QUICK, "attacks": [*NINE, "nearest"]}, out=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_batches_may_be_missing_anywhere(
    lost: int, model: Embedder, digits: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks any may have been the last: what is kept need not be the beginning."""
    four = {**QUICK, "attacks": ["TMA"], "batch": 16}
    whole = ah.audit(model, digits, **four)

    def stopped(*_: Any) -> Any:
        raise _Stop

    with monkeypatch.context() as patch, pytest.raises(_Stop):
        patch.setattr(sweep_room, "_joined", stopped)
        ah.audit(model, digits, **four, out=tmp_path)
    shards = sorted((tmp_path / "shards").iterdir())
    assert len(shards) == 4
    shards[lost].unlink()
    shards[2].unlink()
    assert numbers(ah.audit(model, digits, **four, out=tmp_path)) == numbers(whole)


def test_an_audit_is_not_replaced_without_a_word(model: Embedder, digits: Split, tmp_path: Path) -> None:
    small = {**QUICK, "limit": 12, "steps": 1, "protocols": "corrected", "examine": None}
    here = {**small, "attacks": ["ES", "GTM"], "epsilons": (0.05, 0.1), "out": tmp_path / "a"}
    first = ah.audit(model, digits, **here)
    assert numbers(ah.audit(model, digits, **here)) == numbers(first)  # the same again
    written = (tmp_path / "a" / "audit.json").read_bytes()
    other = Embedder("small", 16, channels=1, size=8, seed=1).double()
    others: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, digits, {"attacks": ["GTM"]}, "ES"),
        (model, digits, {"attacks": ["TMA", "GTM"], "limit": 5}, r"ES, its 12 queries \(now 5\)"),
        (model, digits, {"limit": 20}, r"its 12 queries \(now 20\)"),
        (model, digits, {"eps": 0.2, "epsilons": (0.05, 0.1, 0.2)}, r"its ε 0.1 \(now 51/255\)"),
        (model, digits, {"steps": 2}, r"its steps 1 \(now 2\)"),
        (model, digits, {"epsilons": ()}, "R@1 at ε 0.05, 0.1"),
        (model, digits, {"protocols": "published", "epsilons": ()}, "the protocol corrected, R@1 at ε 0.05, 0.1"),
        (other, digits, {}, "the results of another model"),
        (model, digits.keep(torch.arange(100)), {}, "the results of other data"),
    ]
    for net, data, changes, words in others:
        with pytest.raises(RunError, match=f"would lose {words}: give another out=, or replace=True to replace it$"):
            ah.audit(net, data, **{**here, **changes})
    assert (tmp_path / "a" / "audit.json").read_bytes() == written
    more = ah.audit(model, digits, **{**here, "attacks": ["ES", "GTM", "TMA"]})
    assert set(more.protocols["corrected"].columns) > set(first.protocols["corrected"].columns)

    replaced = {**small, "attacks": ["GTM"], "limit": 5, "out": tmp_path / "a"}
    ah.audit(model, digits, **replaced, replace=True)
    assert json.loads((tmp_path / "a" / "audit.json").read_text())["data"]["attacked"][0] == 5
    whole = ah.audit(model, digits, **here, replace=True)  # rows of either are not mixed
    assert numbers(whole) == numbers(first)


def test_replacing_a_strong_audit_deletes_its_receipts(model: Embedder, digits: Split, tmp_path: Path) -> None:
    small = {**QUICK, "limit": 4, "steps": 1, "protocols": "corrected", "attacks": ["TMA"], "examine": None}
    receipts = tmp_path / "receipts"
    receipts.mkdir()
    (receipts / "receipts.json").write_text("{}")
    with pytest.raises(SettingsError, match="or give replace=True"):
        ah.audit(model, digits, **small, out=tmp_path)
    ah.audit(model, digits, **small, out=tmp_path, replace=True)
    assert not receipts.exists()


@pytest.mark.parametrize(("chosen", "words"), [(["GTM"], ""), (["TMA"], ", and margin to the attacks")])
def test_an_audit_without_a_curve_says_so_last(model: Embedder, digits: Split, chosen: Any, words: str) -> None:
    small = {**QUICK, "limit": 4, "steps": 1, "eps": 8 / 255, "examine": None, "attacks": chosen}
    said = "R@1 against ε was not measured; add {}" + words
    found = ah.audit(model, digits, **small)
    assert str(found).endswith(said.format("epsilons=[8/255]"))
    with command_line():
        assert str(found).endswith(said.format("--curve 8/255"))
    if not words:
        assert "not measured" not in str(ah.audit(model, digits, **{**small, "epsilons": [8 / 255]}))
    assert "not measured" not in str(ah.audit(model, digits, **small | {"protocols": "published"}))


def test_the_output_taken_from_several_is_in_a_note(digits: Split) -> None:
    class Several(nn.Module):
        def forward(self, images: Tensor) -> dict[str, Tensor]:
            vectors = images.flatten(1)
            return {"features": vectors, "logits": vectors[:, :10]}

    small = {**QUICK, "limit": 4, "steps": 1, "attacks": ["TMA"], "examine": None}
    assert "vector: output 'features' (64 numbers)" in ah.audit(Several(), digits, **small).notes
    chosen = ah.audit(ah.wrap(Several(), output="logits"), digits, **small)
    assert "vector: output 'logits' (10 numbers)" in chosen.notes


@pytest.mark.slow
def test_rows_of_another_audit_are_refused(model: Embedder, digits: Split, tmp_path: Path) -> None:
    one = {**QUICK, "attacks": ["ES"], "protocols": "corrected", "out": tmp_path / "a"}
    ah.audit(model, digits, **one)
    ah.audit(model, digits, **{**one, "attacks": ["ES", "TMA"], "protocols": ["corrected"]})  # more is welcome
    others: list[tuple[Any, Any, Any, str]] = [
        (model, digits, {"eps": 0.2}, "eps"),
        (model, digits, {"limit": 50}, "limit"),  # of the same data
        (model, digits.keep(torch.arange(100)), {}, "data"),
        (model, dataclasses.replace(digits, images=digits.images.flip(1)), {}, "data"),  # as many, and of the same name
        (Embedder("small", 16, channels=1, size=8, seed=1).double(), digits, {}, "model"),
    ]
    (tmp_path / "a" / "audit.json").unlink()  # as if it had been stopped
    for other, data, changes, words in others:
        with pytest.raises(RunError, match=f"with another {words}.*; give another out=, or replace=True to replace it"):
            ah.audit(other, data, **{**one, **changes})
    ah.audit(model, digits, **{**one, "attacks": {"CA+": {"w": 2}}})
    with pytest.raises(RunError, match="another attack"):
        ah.audit(model, digits, **{**one, "attacks": ["CA+"]})


def test_what_is_saved_repeats_the_numbers(audited: Audit, tmp_path: Path) -> None:
    audited.save(tmp_path / "a")
    found = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert found["schema"] == AUDIT_SCHEMA and found["settings"]["eps"] == 0.1 and found["versions"]["torch"]
    assert not re.search(r'"[^"]*(/home|/tmp|/work)', json.dumps(found))
    for protocol, outcome in found["protocols"].items():
        mine = audited.protocols[protocol]
        values = {name: column["value"] for name, column in outcome["columns"].items()}
        assert values == {name: column.value for name, column in mine.columns.items()}
        values.pop("GTT@1")
        assert outcome["ers"]["value"] == pytest.approx(ah.ers(values))
        assert outcome["ars"]["constants"]["value"] == pytest.approx(
            ah.ars(values, outcome["columns"]["ES:R"]["initial"])
        )
    samples = safetensors.torch.load_file(tmp_path / "a" / "samples.safetensors")
    for protocol, outcome in found["protocols"].items():
        for name, column in outcome["columns"].items():
            scale = 1 if name in ("TMA", "ES:D") else 100
            assert scale * estimate(samples[f"{protocol}/{name}"], protocol) == pytest.approx(column["value"])
    assert 100 * samples["clean/r1"].mean() == pytest.approx(found["clean"]["R@1"]["value"])
    assert {f"{run['label']}/ids" for run in found["runs"]} <= set(samples)


@pytest.mark.parametrize("together", [True, False])
def test_a_query_and_a_gallery_item_of_one_number_are_drawn_as_one_only_where_they_are_one(together: bool) -> None:
    ids, row = torch.arange(40), torch.rand(40, generator=torch.Generator().manual_seed(0)).double()
    runs = [
        RunRows(
            name, name, {}, side, ids, None, row, {"corrected": {name: row}}, {"corrected": {name: row}}, {}, 0.0, 0
        )
        for name, side in (("CA+", "gallery"), ("QA+", "query"))
    ]
    columns = outcome_of("corrected", runs, Key.of(0), 200, together, 90).columns
    assert (columns["CA+"].low == columns["QA+"].low) == together


def test_examples_are_the_worst_the_middle_and_the_best(audited: Audit, digits: Split, tmp_path: Path) -> None:
    audited.save(tmp_path)
    examples = safetensors.torch.load_file(tmp_path / "examples.safetensors")
    assert digits.images is not None
    for run in audited.runs:
        mine = {name: examples[f"{run.label}/{name}"] for name in ("ids", "asked", "before", "after")}
        clean, perturbed = (examples[f"{run.label}/{name}"] for name in ("clean", "perturbed"))
        assert clean.shape == perturbed.shape == (3, 8, 8, 1) and clean.dtype == perturbed.dtype == torch.uint8
        assert torch.equal(clean, digits.images[mine["ids"]])
        assert 0 < (clean.int() - perturbed.int()).abs().max() <= round(0.1 * 255) + 1
        assert mine["before"].shape == mine["after"].shape == (3, 10)
        assert not (mine["before"] == mine["asked"][:, None]).any()  # own image left out
        assert (mine["asked"] == mine["ids"]).all() == (run.side == "query")
    for name in ("CA+", "CA-", "QA+", "QA-", "TMA"):
        run = next(run for run in audited.runs if run.attack == name)
        row = run.measures["corrected"][name] * (1 if name.endswith("+") else -1)  # more is better for the defender
        place = {int(sample): row for row, sample in enumerate(run.ids)}
        worst, middle, best = (float(row[place[int(sample)]]) for sample in run.examples["ids"])
        assert worst == row.min() and best == row.max() and worst <= middle <= best, name


def test_the_kinds_of_ars_have_one_name_each(audited: Audit, tmp_path: Path) -> None:
    """In the table, in frames and on the page, as in the definitions."""
    text = (ROOT / "docs" / "definitions.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| (ARS [a-z ]+) \(`ars\.(\w+)`\)", text, re.M))
    assert len(named) == 3
    heads = [line[:16].strip() for line in str(audited).splitlines() if line.startswith("ARS ")]
    assert sorted(heads) == sorted(named)
    scores = scores_of(audited.protocols["corrected"])
    assert {name: scores[name] for name in named} == {
        n: audited.protocols["corrected"].ars[k] for n, k in named.items()
    }
    assert set(resistance_of(audited.to_dict()["protocols"]["corrected"])[0][1:3]) <= set(named)
    page = (audited.save(tmp_path) / "page.html").read_text(encoding="utf-8")
    assert set(re.findall(r'class="tile">(ARS [a-z ]+), ', page)) == set(named)


def test_the_table_says_what_it_is_about(audited: Audit) -> None:
    text = str(audited)
    for words in ("60 of 224 queries", "published", "corrected", "ERS", "ARS measured", "TMA clean", "seed 0"):
        assert words in text
    assert max(map(len, text.splitlines())) < 100


# ---------------------------------------------------------------- budgets by name, and several random starts

STARTS: dict[str, Any] = {**QUICK, "attacks": ["nearest"], "threat": "adml", "seeds": 3, "examine": None}


@pytest.fixture(scope="module")
def repeated(model: Embedder, digits: Split) -> Audit:
    return ah.audit(model, digits, **STARTS)


def test_a_named_threat_is_that_of_its_paper_and_what_is_said_wins(model: Embedder, digits: Split) -> None:
    adml = threat_of("adml")
    assert (adml.ball, adml.budget) == (Ball(0.01, "linf"), Budget(5, 2 * 0.01 / 5, "random"))
    assert (Threat().ball, Threat().budget) == (Ball(8 / 255), Budget(32, 3 / 255, "zero"))
    assert threat_of("adml", eps=0.1).step == pytest.approx(0.04)  # the step follows ε, as in ADML's table 1
    assert threat_of("adml", steps=10).step == pytest.approx(0.002)
    assert threat_of("adml", alpha=0.5).budget == Budget(5, 0.5, "random")
    assert threat_of("standard", eps=0.08).step == pytest.approx(0.03) and threat_of(Threat(alpha=0.5), 0.1).step == 0.5
    assert Threat(eps=2, norm="l2", steps=5).budget == Budget(5, 1.0) and Threat(2, "l2").ball == Ball(2, "l2")
    for wrong, words in (
        ({"norm": "l2"}, "give its ε"),
        ({"norm": "l1"}, "linf, l2"),
        ({"eps": 8}, "8/255"),
        ({"steps": 1.5}, "steps must be a number"),
        ({"alpha": -1}, "alpha must not be negative"),
    ):
        with pytest.raises(SettingsError, match=words):
            Threat(**wrong)
    with pytest.raises(SettingsError, match=r"ah\.Threat"):
        threat_of(0.1)  # type: ignore[arg-type]
    small = {"attacks": ["nearest"], "limit": 8, "device": "cpu", "resamples": 9, "examine": None}
    said = ah.audit(model, digits, threat="adml", **small).to_dict()["settings"]
    assert [said[name] for name in ("eps", "alpha", "steps", "start", "seeds")] == [0.01, 0.004, 5, "random", 1]
    said = ah.audit(model, digits, **small).to_dict()["settings"]
    assert [said[name] for name in ("eps", "alpha", "steps", "start")] == [8 / 255, 3 / 255, 32, "zero"]


def test_a_random_start_is_anywhere_in_the_ball_for_those_under_attack(model: Embedder, digits: Split) -> None:
    assert digits.images is not None
    images, ids = digits.images.permute(0, 3, 1, 2).double() / 255, torch.arange(len(digits))
    ball, budget = threat_of("adml").ball, threat_of("adml").budget
    still = dataclasses.replace(budget, steps=0)
    with frozen(model) as embed:
        scene = Scene.of(embed_all(embed, [images]), digits.labels)
        done = attack(embed, images, scene, goal_named("nearest", "corrected"), ids, ball, still)
    assert done.targets is not None
    moved, aimed = done.images - images, done.targets >= 0
    assert 0 < int((~aimed).sum()) < len(ids) and not moved[~aimed].any()
    assert moved.abs().max() <= 0.01 + 1e-12 and done.images.min() >= 0 and done.images.max() <= 1
    free = moved[aimed][(images[aimed] > 0.01) & (images[aimed] < 0.99)]  # what [0, 1] cannot clip
    assert abs(float(free.mean())) < 2e-4 and float(free.abs().mean()) == pytest.approx(0.005, abs=2e-4)
    assert (moved[aimed].flatten(1) != 0).any(1).all()


def test_start_seeds_change_the_perturbations_and_nothing_else(
    model: Embedder, digits: Split, repeated: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Attacked] = []

    def seen(*arguments: Any, **options: Any) -> Attacked:
        made.append(Attack.run(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(sweep_room, "Attack", running(seen))
    again = ah.audit(model, digits, **{**STARTS, "batch": 60})
    mine, other = (each.protocols["corrected"].columns["nearest"].seeds for each in (repeated, again))
    assert len(made) == 3 and mine == pytest.approx(other, abs=1e-6)  # whatever the batch
    targets = [each.targets for each in made]
    for one, target in zip(made[1:], targets[1:]):
        assert torch.equal(one.ids, made[0].ids)
        assert target is not None and targets[0] is not None and torch.equal(target, targets[0])
        apart = (one.images - made[0].images).flatten(1).abs().amax(1)
        assert apart[target >= 0].min() > 0 and not apart[target < 0].any()
    assert not torch.equal(made[1].images, made[2].images)
    assert [run.start_seed for run in again.runs] == [0, 1, 2] and len({run.label for run in again.runs}) == 3
    first = ah.audit(model, digits, **{**STARTS, "seeds": 1})
    for protocol, outcome in first.protocols.items():
        for name, column in outcome.columns.items():
            seeds = repeated.protocols[protocol].columns[name].seeds
            assert column.std is column.seeds is None and seeds is not None and seeds[0] == column.value


def test_random_targets_are_the_same_from_every_start(model: Embedder, digits: Split) -> None:
    for name in ("CA+", "TMA"):
        first, second = ah.audit(model, digits, **{**STARTS, "attacks": [name], "seeds": 2}).runs
        assert first.targets is not None and second.targets is not None and torch.equal(first.targets, second.targets)
        assert not torch.equal(first.shift, second.shift)
        initial = first.initial["corrected"][name]
        assert torch.equal(initial, second.initial["corrected"][name])


def test_mean_and_std_are_those_of_the_starts(model: Embedder, digits: Split, tmp_path: Path) -> None:
    found = ah.audit(model, digits, **{**STARTS, "limit": 150})  # more than one published group
    found.save(tmp_path)
    samples = safetensors.torch.load_file(tmp_path / "samples.safetensors")
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["schema"] == "anchorhold.audit/1" and written["settings"]["seeds"] == 3
    assert [run["start_seed"] for run in written["runs"]] == [0, 1, 2]
    for protocol, outcome in written["protocols"].items():
        assert set(outcome["columns"]) == {"nearest", "nearest:mAP@R"}
        for name, column in outcome["columns"].items():
            rows = [run.measures[protocol][name] for run in found.runs]
            values = [100 * estimate(row, protocol) for row in rows]
            assert column["seeds"] == pytest.approx(values) and len(set(values)) > 1
            mean = sum(values) / 3
            assert column["value"] == pytest.approx(mean)
            assert column["std"] == pytest.approx((sum((value - mean) ** 2 for value in values) / 2) ** 0.5)
            assert column["low"] < column["value"] < column["high"] < column["initial"]
            assert torch.equal(samples[f"{protocol}/{name}/seeds"], torch.stack(rows))
            assert 100 * estimate(samples[f"{protocol}/{name}"], protocol) == pytest.approx(column["value"])


def test_the_table_shows_mean_and_std(repeated: Audit, audited: Audit) -> None:
    text = str(repeated)
    column = repeated.protocols["corrected"].columns["nearest:mAP@R"]
    assert f"{column.value:.1f} ± {column.std:.1f} [" in text
    assert "4 steps of 0.03 from 3 random starts" in text and "mean ± std" in text
    assert max(map(len, text.splitlines())) < 100
    assert "±" not in str(audited) and "random" not in str(audited)


def test_scores_of_several_starts_are_those_of_the_means(model: Embedder, digits: Split) -> None:
    found = ah.audit(model, digits, **{**STARTS, "attacks": None, "seeds": 2, "limit": 40, "steps": 2})
    assert len(found.runs) == 2 * RUNS
    for outcome in found.protocols.values():
        values = {name: column.value for name, column in outcome.columns.items() if name != "GTT@1"}
        assert all(column.seeds and len(column.seeds) == 2 for column in outcome.columns.values())
        assert outcome.ers is not None and outcome.ers.value == pytest.approx(ah.ers(values))
        assert outcome.ers.low <= outcome.ers.value <= outcome.ers.high


def test_stopped_between_starts_it_goes_on_and_more_starts_may_be_added(
    model: Embedder, digits: Split, repeated: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == 4:  # two batches a run: the second of the second start
            raise _Stop
        return Attack.run(*arguments, **options)

    monkeypatch.setattr(sweep_room, "Attack", running(failing))
    with pytest.raises(_Stop):
        ah.audit(model, digits, **{**STARTS, "seeds": 2}, out=tmp_path)
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [
        "nearest.published-corrected.all.safetensors",
        "nearest.published-corrected.seed1.00000.safetensors",
    ]
    ah.audit(model, digits, **{**STARTS, "seeds": 2}, out=tmp_path)
    assert made == 5
    whole = ah.audit(model, digits, **STARTS, out=tmp_path)
    assert made == 7 and numbers(whole) == numbers(repeated)
    with pytest.raises(RunError, match=r"its start random \(now zero\)"):
        ah.audit(model, digits, **{**STARTS, "threat": "standard", "seeds": 1}, out=tmp_path)


def test_fgsm_has_one_start_under_any_budget(model: Embedder, digits: Split) -> None:
    quick = {**QUICK, "attacks": ["nearest"], **FGSM, "eps": None, "examine": None}
    one = ah.audit(model, digits, **{**quick, "threat": "adml"})
    same = ah.audit(model, digits, **{**quick, "eps": 0.01})
    assert one.settings == same.settings and one.settings["start"] == "zero"
    assert numbers(one) == numbers(same)


def test_a_measure_that_nothing_has_is_no_number_from_several_starts_either(model: Embedder, digits: Split) -> None:
    labels = digits.labels
    split = {"query": digits.keep(labels == labels.min()), "gallery": digits.keep(labels != labels.min())}
    found = ah.audit(model, split, **{**STARTS, "seeds": 2}).to_dict()["protocols"]["corrected"]["columns"]
    assert found["nearest"]["value"] == 0 and found["nearest"]["std"] == 0
    assert found["nearest:mAP@R"]["value"] is None and found["nearest:mAP@R"]["seeds"] == [None, None]


# ---------------------------------------------------------------- other people's models, and bad input


class _Net(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any] = lambda e: e) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.output = nn.Linear(64, 8), output

    def forward(self, images: Tensor) -> Any:
        return self.output(self.linear(images.flatten(1)))


@pytest.mark.parametrize("output", [lambda e: e, lambda e: (e, 1), lambda e: {"embedding": e, "logits": e[:, :3]}])
def test_models_that_are_not_ours(digits: Split, output: Any) -> None:
    quick = {**QUICK, "attacks": ["ES"]}
    found = ah.audit(_Net(output), digits, **quick)
    assert numbers(found)["protocols"] == numbers(ah.audit(ah.wrap(_Net()), digits, **quick))["protocols"]
    assert any("unit length" in note for note in found.model["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(digits: Split, dtype: torch.dtype) -> None:
    for net in (Embedder("small", 16, channels=1, size=8), _Net()):
        whole = ah.audit(net, digits, **{**QUICK, "attacks": ["ES"]})
        half = ah.audit(net.to(dtype), digits, **{**QUICK, "attacks": ["ES"]})
        assert abs(half.clean["R@1"].value - whole.clean["R@1"].value) < 5
        shift = [found.protocols["corrected"].columns["ES:D"].value for found in (whole, half)]
        assert shift[1] == pytest.approx(shift[0], rel=0.2)


def test_a_model_without_gradient_is_not_hurt_and_does_not_break(digits: Split) -> None:
    found = ah.audit(_Net(lambda e: e.detach()), digits, **{**QUICK, "attacks": ["TMA", "QA-"]})
    for column in found.protocols["corrected"].columns.values():
        assert column.value == pytest.approx(column.initial, abs=1e-6)


def _images(count: int = 40, classes: int = 4) -> tuple[Tensor, Tensor]:
    pixels = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return pixels, torch.arange(count) % classes


@pytest.mark.parametrize(
    ("model", "data", "error", "words"),
    [
        (_Net(), lambda: (_images()[0] * 255, _images()[1]), DataError, "divide by 255"),
        (_Net(), lambda: (_images()[0] * 2 - 1, _images()[1]), DataError, "wrap(model, mean=…, std=…)"),
        (_Net(), lambda: (_images()[0] * torch.nan, _images()[1]), DataError, "not in [0, 1]"),
        (_Net(), lambda: ((_images()[0] * 255).int(), _images()[1]), DataError, "floats in [0, 1], or uint8"),
        (_Net(), lambda: (_images()[0][:, 0, 0], _images()[1]), DataError, "(N, C, H, W)"),
        (_Net(), lambda: (_images()[0], _images()[1][:7]), DataError, "one label for each"),
        (_Net(), lambda: _images(classes=1), DataError, "only one class"),
        (_Net(), lambda: _images(0), DataError, "is empty"),
        (_Net(), lambda: {"query": _images(), "gallery": _images(0)}, DataError, "the gallery is empty"),
        (_Net(), lambda: {"query": _images()}, DataError, "needs query and gallery"),
        (_Net(), lambda: "nowhere", SettingsError, "no data set or folder"),
        (_Net(), lambda: 3, DataError, "cannot read images from int"),
        (_Net(lambda e: {"a": e, "b": e}), _images, ModelError, "output='NAME'"),
        (_Net(lambda e: "nothing"), _images, ModelError, "(B, D)"),
        (_Net(lambda e: e[:, :, None, None].expand(-1, -1, 2, 2)), _images, ModelError, "feature maps"),
        (_Net(lambda e: e.sum(0)), _images, ModelError, "(B, D)"),
        (_Net(lambda e: e * torch.nan), _images, ModelError, "not finite"),
        (Embedder("small", 8, channels=3), _images, ModelError, "(B, 3, H, W)"),
        (nn.Linear(3, 3), _images, ModelError, "the model fails on images of shape"),
        ("resnet18", _images, ModelError, "is the name of a model; load it first"),
    ],
)
def test_bad_input_is_one_clear_line(model: Any, data: Any, error: type[AnchorholdError], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        ah.audit(model, data(), **QUICK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attacks": ["CA"]}, "no attack is called 'CA'"),
        ({"protocols": "print"}, "there are: published, corrected"),
        ({"protocols": ()}, "at least one protocol"),
        ({"eps": 8}, "for 8-bit levels give 8/255"),
        ({"eps": -0.1}, "must not be negative"),
        ({"steps": -1}, "must not be negative"),
        ({"method": "bim"}, "there are: pgd, fgsm, cw"),
        ({"attacks": []}, "attacks is empty: name some, such as CA"),
        ({"attacks": {}}, "attacks is empty"),
        ({"out": __file__}, "is a file, and an audit needs a folder: choose another out="),
        ({"batch": 0}, "at least 1"),
        ({"limit": -1}, "must not be negative"),
        ({"precision": "bf16"}, "needs a GPU"),
        ({"device": "tpu"}, "auto, cpu, cuda"),
        ({"threat": "amdl"}, "no threat is called 'amdl'; did you mean adml?"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"seeds": 2}, "this threat starts at the clean image; leave it out"),
        ({"seeds": 2, "threat": "adml", **FGSM}, "FGSM starts at the clean image; leave it out"),
    ],
)
def test_bad_settings_are_one_clear_line(settings: Any, words: str) -> None:
    with pytest.raises(AnchorholdError, match=re.escape(words)):
        ah.audit(_Net(), _images(), **{**QUICK, **settings})
