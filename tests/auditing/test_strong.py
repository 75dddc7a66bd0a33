"""The strong audit: never weaker than the standard one, not fooled by what hides gradients, and receipts that hold."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.attacks.run import Attack
from anchorhold.auditing import ensemble, run
from anchorhold.auditing import standard as sweep
from anchorhold.auditing.adml_table import algorithm1
from anchorhold.auditing.curves import worst_classes
from anchorhold.auditing.doubts import overstated
from anchorhold.auditing.ensemble import steps_at_most, tasks
from anchorhold.auditing.flags import strong_below_standard
from anchorhold.auditing.members import MEMBERS, SQUARE_QUERIES, Member, most_steps
from anchorhold.auditing.outcomes import ColumnValue, Outcome, Score
from anchorhold.auditing.plan import AttackRun
from anchorhold.auditing.realisable import FILE_FORMS, in_8_bits, levels_within, through_jpeg
from anchorhold.auditing.result import Audit
from anchorhold.auditing.sample_size import check_until
from anchorhold.cli.strong import print_tables, second_model
from anchorhold.columns import rises
from anchorhold.data.splits import Split
from anchorhold.errors import RunError, SettingsError
from anchorhold.model.embedder import Embedder
from anchorhold.perturb.ball import Ball
from anchorhold.random import Key
from anchorhold.report.strong import tables_of
from tests.attacking import running
from tests.cli.test_main import run as cli

pytestmark = pytest.mark.medium

QUICK: dict[str, Any] = {"steps": 4, "eps": 16 / 255, "alpha": 5 / 255, "limit": 12, "batch": 12, "device": "cpu"}
QUICK |= {"resamples": 49, "examine": None}


def shorter(steps: int = 5, queries: int = 8) -> tuple[Member, ...]:
    """The ensemble with little work in it."""

    def less(member: Member) -> Member:
        budget, most = member.budget, queries if member.kind == "black" else steps
        return replace(member, budget=lambda eps: replace(budget(eps), steps=most, restarts=1))

    return tuple(less(member) for member in MEMBERS)


@pytest.fixture(scope="module", autouse=True)
def quick_ensemble() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "MEMBERS", shorter())
        yield


@pytest.fixture(scope="module")
def digits() -> Split:
    test = ah.dataset("digits").test
    return test.keep(torch.arange(0, len(test), 4))


@pytest.fixture(scope="module")
def model() -> Embedder:
    return Embedder("small", 16, channels=1, size=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audits") / "strong"


@pytest.fixture(scope="module")
def strong(model: Embedder, digits: Split, place: Path) -> Audit:
    return ah.audit(model, digits, strength="strong", epsilons=[4 / 255, 24 / 255], out=place, **QUICK)


# ---------------------------------------------------------------- never weaker


def rows_of(audit: Audit, protocol: str) -> dict[str, Tensor]:
    return {name: row for each in audit.runs for name, row in each.measures.get(protocol, {}).items()}


def test_strong_never_leaves_more_than_standard_sample_by_sample(strong: Audit) -> None:
    before, after = rows_of(strong, "corrected"), rows_of(strong, "strong")
    assert (
        set(after) == set(before) == {"CA+", "CA-", "QA+", "QA-", "TMA", "ES:D", "ES:R", "LTM", "GTM", "GTT", "GTT@1"}
    )
    for name, row in after.items():
        assert ((row >= before[name]) if rises(name) else (row <= before[name])).all(), name
    assert any((after[name] != before[name]).any() for name in ("CA+", "CA-", "QA+", "QA-"))
    initial = {name: row for each in strong.runs for name, row in each.initial.get("strong", {}).items()}
    for name, row in after.items():  # nor more than no attack at all
        assert ((row >= initial[name]) if rises(name) else (row <= initial[name])).all(), name


def test_the_standard_runs_are_its_first_members(strong: Audit) -> None:
    """Made again inside the ensemble they are the same, so what counts needs no correction."""
    assert strong.strong is not None
    columns, after = strong.protocols["corrected"].columns, strong.strong["after"]
    for name in ("CA-", "QA-", "TMA"):
        worst = torch.maximum(rows_of(strong, "corrected")[name], initial_of(strong, name)).mean()
        assert after[name]["standard"] == pytest.approx(float(worst) * (1 if name == "TMA" else 100), abs=1e-6)
    both = torch.stack([rows_of(strong, "corrected")[name] for name in ("ES:R", "LTM", "GTM")]).amin(0)
    assert after["recall"]["standard"] == pytest.approx(100 * float(both.minimum(initial_of(strong, "ES:R")).mean()))
    assert columns["ES:D"].value == pytest.approx(after["ES"]["standard"])
    for name, members in after.items():  # a wrong neighbour has members of its own
        own = ["starts", "adam", "momentum", "refine"] if name == "recall" else ["pgd", "apgd", "apgd-free", "cw"]
        assert list(members) == ["standard", *own, "square"]


def initial_of(audit: Audit, name: str) -> Tensor:
    return next(each.initial["strong"][name] for each in audit.runs if name in each.initial.get("strong", {}))


def test_the_three_recall_columns_are_one_number(strong: Audit) -> None:
    rows = rows_of(strong, "strong")
    assert torch.equal(rows["ES:R"], rows["LTM"]) and torch.equal(rows["ES:R"], rows["GTM"])
    score = strong.protocols["strong"].ers
    assert score is not None and score.value < strong.protocols["corrected"].ers.value  # type: ignore[union-attr]
    assert ["published", "corrected", "strong"] in [line.split() for line in str(strong).splitlines()]


def test_the_order_of_members_can_only_help_the_attacker(strong: Audit) -> None:
    assert strong.strong is not None
    for name, after in strong.strong["after"].items():
        values = list(after.values())
        assert values == sorted(values, reverse=not rises(name) and name != "ES"), name


def test_batches_change_nothing(strong: Audit, model: Embedder, digits: Split) -> None:
    double = Embedder("small", 16, channels=1, size=8).double()
    settings = {**QUICK, "attacks": ["QA+", "GTM"], "limit": 10, "strength": "strong"}
    one = ah.audit(double, digits, **{**settings, "batch": 10})
    two = ah.audit(double, digits, **{**settings, "batch": 4})
    for name, row in rows_of(one, "strong").items():
        assert torch.allclose(row, rows_of(two, "strong")[name], atol=1e-9)


def test_a_stopped_audit_goes_on(strong: Audit, model: Embedder, digits: Split, place: Path) -> None:
    again = ah.audit(model, digits, strength="strong", epsilons=[4 / 255, 24 / 255], out=place, **QUICK)
    assert again.to_dict()["protocols"] == strong.to_dict()["protocols"] and again.curve == strong.curve
    with pytest.raises(RunError, match="would lose R@1 at ε 4/255, 24/255"):
        ah.audit(model, digits, strength="strong", epsilons=[5 / 255], out=place, **QUICK)


@pytest.mark.parametrize("what", ["LAYOUT", "REVISION"])
def test_rows_of_another_layout_or_of_older_members_are_not_read(
    what: str, model: Embedder, digits: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**QUICK, "attacks": ["GTM"], "limit": 4, "epsilons": [4 / 255], "out": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr(f"anchorhold.auditing.ladder.{what}", 1)
        ah.audit(model, digits, **options)
    with pytest.raises(RunError, match="another attack"):
        ah.audit(model, digits, **options)


# ---------------------------------------------------------------- curves, files


def test_the_curve_falls_and_meets_the_table(strong: Audit, place: Path) -> None:
    assert strong.curve is not None
    assert strong.curve["eps"] == [0.0, 4 / 255, 16 / 255, 24 / 255]
    assert set(strong.curve["lines"]) == {"R@1"}  # the other goals are attacked at the audit's ε alone
    line = strong.curve["lines"]["R@1"]
    assert line == sorted(line, reverse=True) and line[0] > line[-1]
    assert line[2] == pytest.approx(strong.protocols["strong"].columns["GTM"].value)
    assert json.loads((place / "audit.json").read_text())["curve"]["lines"]["R@1"] == line


def test_a_standard_audit_has_the_curve_of_the_strong_one(strong: Audit, model: Embedder, digits: Split) -> None:
    """The same numbers, whatever else is attacked; and each query's answer only falls."""
    found = ah.audit(model, digits, epsilons=[4 / 255, 24 / 255], attacks=["ES", "LTM", "GTM"], **QUICK)
    assert found.curve is not None and strong.curve is not None
    assert "strong" not in found.protocols and found.receipts is None and found.strong is None
    assert found.curve["lines"] == strong.curve["lines"] and found.curve["intervals"] == strong.curve["intervals"]
    kept = found.curve_rows["R@1"]
    assert kept.shape == (4, 12) and set(kept.unique().tolist()) <= {0.0, 1.0}
    assert bool((kept[:-1] >= kept[1:]).all())
    assert (100 * kept.mean(1)).tolist() == pytest.approx(found.curve["lines"]["R@1"])
    assert found.image_steps > sum(run.image_steps for run in found.runs)  # the curve's own are counted


@pytest.mark.slow
def test_a_point_of_the_curve_is_what_an_audit_at_that_eps_finds(model: Embedder, digits: Split) -> None:
    """But for the starts that it inherits; and the points are far apart, so that none can stand for another."""
    options = {**QUICK, "limit": 40, "batch": 40, "attacks": ["GTM"]}
    found = ah.audit(model, digits, epsilons=[2 / 255, 8 / 255, 60 / 255], **options)
    line = dict(zip(found.curve["eps"], found.curve["lines"]["R@1"]))  # type: ignore[index]
    assert line[2 / 255] > line[8 / 255] + 5 > line[16 / 255] + 10 and line[16 / 255] > line[60 / 255]
    for eps in (2 / 255, 8 / 255, 60 / 255):
        alone = ah.audit(model, digits, strength="strong", **options | {"eps": eps, "alpha": 5 / 16 * eps})
        assert line[eps] == pytest.approx(alone.protocols["strong"].columns["GTM"].value, abs=7.6), eps


@pytest.mark.slow
def test_the_default_curve(model: Embedder, digits: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MEMBERS", shorter(2, 5))
    few = {**QUICK, "limit": 6, "resamples": 20, "examine": None}
    found = ah.audit(model, digits, **few)
    assert found.curve is not None
    assert found.curve["eps"] == [0.0, 2 / 255, 4 / 255, 8 / 255, 16 / 255]
    for without in ({"attacks": ["GTM"]}, {"epsilons": ()}, {"method": "fgsm", "steps": None, "alpha": None}):
        assert ah.audit(model, digits, **few | without).curve is None
    with pytest.raises(SettingsError, match="add margin"):
        ah.audit(model, digits, attacks=["QA+"], epsilons=[0.1], **few)


def test_the_spread_over_classes_by_hand() -> None:
    """Chosen on one half of each class's queries and measured on the other, both ways; the mean of the two."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 40, (900,), generator=generator) * 7
    kept = torch.rand(900, generator=generator).round().double()
    value, counted = worst_classes(kept, labels)
    found = []
    for one in (0, 1):
        means = {int(name): [float(kept[labels == name][at::2].mean()) for at in (0, 1)] for name in labels.unique()}
        chosen = sorted(means, key=lambda name: means[name][one])[:4]
        found.append(sum(means[name][1 - one] for name in chosen) / 4)
    assert counted == 4 and value == pytest.approx(min(50 * sum(found), 100 * float(kept.mean())))
    nobody = worst_classes(torch.tensor([1.0, float("nan")]), torch.tensor([5, 6]))
    assert nobody[1] == 0 and nobody[0] != nobody[0]


def test_alike_classes_have_no_worst_ones_and_a_bad_class_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(100).repeat_interleave(10)
    alike = [worst_classes((torch.rand(1000, generator=generator) < 0.7).double(), labels)[0] for _ in range(40)]
    assert 66 < sum(alike) / 40 < 70  # chosen and measured on the same queries it would be 44
    bad = torch.where(labels < 10, 0.0, 1.0).double()
    assert worst_classes(bad, labels) == (0.0, 10)


def test_where_all_queries_agree_the_interval_is_the_exact_one(model: Embedder, digits: Split) -> None:
    hard = {**QUICK, "limit": 20, "eps": 1.0, "strength": "strong"}
    found = ah.audit(model, digits, attacks=["ES", "margin"], epsilons=[1.0], **hard)
    assert found.curve is not None and found.curve["lines"]["R@1"][-1] == 0.0
    width = 100 * (1 - 0.025 ** (1 / 20))
    assert found.curve["intervals"]["R@1"][-1] == pytest.approx([0.0, width])
    column = found.protocols["strong"].columns["margin"]
    assert column.value == 0.0 and (column.low, column.high) == pytest.approx((0.0, width))


@pytest.mark.slow
def test_a_curve_is_shown_with_its_attacks_and_its_queries(model: Embedder, digits: Split, tmp_path: Path) -> None:
    few = {**QUICK, "limit": 50}
    found = ah.audit(model, digits, epsilons=[4 / 255], attacks=["ES", "GTM", "QA+"], out=tmp_path, **few)
    assert found.curve is not None
    curve, table = found.curve, str(found)
    assert curve["protocol"] == "strong" and curve["queries"] == 50 < len(digits)
    wanted = [member.name for member in run.MEMBERS if member.wants(goal_named("margin", "corrected"))]
    assert curve["attacks"] == {"R@1": ["ES", "GTM", *(name for name in wanted if name != "transfer")]}
    # ε = 0 is of the attacked queries, like every other point, and the clean R@1 of all of them is beside it.
    clean = found.protocols["corrected"].columns["ES:R"].initial
    assert curve["lines"]["R@1"][0] == pytest.approx(clean)
    lines = table.splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("R@1 "))
    assert [float(cell) for cell in lines[at].split()[1:]] == pytest.approx(curve["lines"]["R@1"], abs=0.05)
    ends = [float(cell.strip("[,]")) for cell in lines[at + 1].split()]
    assert ends == pytest.approx([end for span in curve["intervals"]["R@1"] for end in span], abs=0.05)
    assert [float(cell) for cell in lines[at + 2].split()[-3:]] == pytest.approx(curve["classes"]["worst"], abs=0.05)
    assert lines[at - 1].split()[2:] == ["0", "(clean)", "4/255", "16/255"]
    assert at < next(place for place, line in enumerate(lines) if "corrected" in line and "published" in line)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index("R@1 against ε") < page.index("What each attack does")
    for text in (table, page):
        assert "ES, GTM, starts" in text and f"{found.clean['R@1'].value:.1f}" in text
    rows = load_file(tmp_path / "samples.safetensors")
    assert torch.equal(rows["curve/R@1"], found.curve_rows["R@1"].cpu()) and len(rows["curve/ids"]) == 50


def test_each_eps_starts_where_the_one_before_ended(
    model: Embedder, digits: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the audit's own ε downwards among the beaten, and upwards among those that withstand."""
    begun: list[tuple[float, int, float]] = []

    def spy(self: Attack, images: Tensor, ids: Tensor, *others: Any, **more: Any) -> Any:
        starts = more.get("starts")
        if starts is not None:
            begun.append((self.ball.eps, len(ids), float((starts - images).abs().max())))
        return Attack.run(self, images, ids, *others, **more)

    monkeypatch.setattr(ensemble, "Attack", running(spy))
    monkeypatch.setattr(run, "MEMBERS", ())
    levels = [4 / 255, 8 / 255, 24 / 255]
    found = ah.audit(model, digits, epsilons=levels, attacks=["GTM"], **QUICK)
    kept = found.curve_rows["R@1"] > 0.5
    clean, first, second, own, above = kept
    assert 0 < int(own.sum()) < int(clean.sum())  # both directions are asked
    wanted = {8 / 255: int((clean & ~own).sum()), 4 / 255: int((clean & ~second).sum()), 24 / 255: int(own.sum())}
    for eps, count, far in begun:
        assert count <= wanted[eps] and far <= eps + 1e-6
    assert {eps for eps, count, _ in begun} == {eps for eps, count in wanted.items() if count}
    assert bool((first >= second).all()) and bool((own >= above).all())


def test_scores_as_files(strong: Audit) -> None:
    assert strong.strong is not None
    for form in ("8 bits", "JPEG 90"):
        kept = strong.strong["realisable"][form]
        assert set(kept["columns"]) == set(strong.protocols["strong"].columns) and kept["ers"] is not None
    bits, jpeg = (strong.strong["realisable"][form]["ers"] for form in ("8 bits", "JPEG 90"))
    score = strong.protocols["strong"].ers
    assert score is not None and abs(bits - score.value) < 3 and jpeg > score.value
    # Receipts hold the same 8-bit images, here of all samples: the means of what they state are the columns.
    assert strong.receipts is not None
    mains = {"recall": strong.strong["realisable"]["8 bits"]["columns"]["GTM"]}
    mains |= {
        name: strong.strong["realisable"]["8 bits"]["columns"][name] for name in ("CA+", "CA-", "QA+", "QA-", "GTT")
    }
    for name, column in mains.items():
        told = strong.receipts.goals[name]
        assert len(told["ids"]) == 12 and column == pytest.approx(100 * float(told["measure"].mean())), name


def test_what_is_rounded_stays_within_an_eps_between_two_levels() -> None:
    clean = in_8_bits(torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    moved = (clean + 0.01).clamp(0, 1)  # 2.55 levels
    assert ((FILE_FORMS["8 bits"](moved, clean, Ball(0.01)) - clean) * 255).round().max() == 2


def test_levels_stay_within_eps_and_jpeg_changes_images() -> None:
    clean = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = (clean + 0.04 * torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    images = torch.minimum(torch.maximum(images, clean - 0.05), clean + 0.05)
    levels = levels_within(images, clean, Ball(0.05))
    assert ((levels.double() / 255 - clean.double()).abs() <= 0.05 + 1e-6).all()
    assert ((levels.double() / 255 - images.double()).abs() <= 1 / 255).all()
    held = in_8_bits(clean.clamp(0.1, 0.9))
    for shift, nearest in ((0.4, 0), (0.6, 1)):
        moved = levels_within(held.double() + shift / 255, held, Ball(0.05))
        assert torch.equal(moved.int(), (255 * held).round().int() + nearest)
    assert torch.equal(levels_within(in_8_bits(clean), in_8_bits(clean), Ball(0.0)).float() / 255, in_8_bits(clean))
    colour = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for each in (images, colour):
        back = through_jpeg(each)
        assert back.shape == each.shape and not torch.equal(back, each)
        assert torch.equal(back, in_8_bits(back))
    assert (through_jpeg(images) - images).abs().mean() < 0.02  # at 75 it would be .03


# ---------------------------------------------------------------- precision


def on_a_circle(x: Tensor) -> Tensor:
    """The angle is 4 (mean − ½); under autocast it lies, and says the opposite."""
    angle = 4 * (x.flatten(1).mean(1) - 0.5)
    angle = -angle if torch.is_autocast_enabled("cpu") else angle
    return torch.stack([angle.cos(), angle.sin()], 1)


def two_classes() -> tuple[Tensor, Scene]:
    images = (0.5 + 0.03 * torch.tensor([-2.0, -1.5, -1.0, 1.0, 1.5, 2.0]))[:, None, None, None].expand(6, 1, 2, 2)
    return images.clone(), Scene.of(on_a_circle(images), torch.tensor([0, 0, 0, 1, 1, 1]))


@pytest.mark.parametrize("name", ["adam", "momentum", "apgd", "apgd-free", "cw"])
def test_who_seems_beaten_in_coarse_precision_is_attacked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images, scene = two_classes()
    task = ensemble.Task("recall", goal_named("margin", "corrected"), (), {"margin": "margin"})
    member = next(each for each in MEMBERS if each.name == name)
    member = replace(member, wants=lambda goal: True)  # the last three attack other goals, where nothing is known

    def left(coarse: bool) -> tuple[list[int], int]:
        contest = ensemble.Contest(task, on_a_circle, images, scene, torch.arange(6), Key.of(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=coarse):
            contest.enter(member, Ball(0.1), None)
        assert (contest.images - images).abs().max() <= 0.1 + 1e-6
        return contest.left().tolist(), contest.steps

    exact, steps = left(coarse=False)
    again, more = left(coarse=True)
    assert again == exact and steps < more <= steps + 12 * member.rounds  # what was wasted on the lie
    monkeypatch.setattr(ensemble.Contest, "_met", lambda *_: None)
    assert len(left(coarse=True)[0]) >= 4 > len(exact) and left(coarse=False)[0] == exact


def test_refining_starts_from_the_image_that_came_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    images, scene = two_classes()
    task = ensemble.Task("recall", goal_named("margin", "corrected"), (), {"margin": "margin"})
    contest = ensemble.Contest(task, on_a_circle, images, scene, torch.arange(6), Key.of(0))
    side = torch.tensor([1.0, 1, 1, -1, -1, -1])[:, None, None, None]  # towards the other class
    rows = torch.tensor([0, 1, 3])
    tried = [(images + move * side)[rows] for move in (0.005, 0.01, -0.01, 0.002)]
    for each in tried:
        contest.offer(each, rows)
    climbed = task.goal.objective(scene, rows, None)
    heights = torch.stack([climbed.value(on_a_circle(each)[:, None], torch.arange(3)) for each in tried])
    best = torch.stack(tried)[heights.argmax(0), torch.arange(3)]
    assert len(set(heights.argmax(0).tolist())) > 1  # not always the last, nor the first
    assert torch.equal(contest.nearest[rows], best)
    assert len(contest.left()) == 6 and torch.equal(contest.found()[rows], best)  # starts for a larger ε too
    assert torch.equal(contest.nearest[[2, 4, 5]], images[[2, 4, 5]])
    began: list[Tensor] = []

    def spy(*arguments: Any, **options: Any) -> Any:
        began.append(options["starts"])
        return Attack.run(*arguments, **options)

    monkeypatch.setattr(ensemble, "Attack", running(spy))
    refine = next(member for member in MEMBERS if member.name == "refine")
    contest.enter(refine, Ball(0.1), None)
    assert torch.equal(began[0], torch.stack([best[0], best[1], images[2], best[2], images[4], images[5]]))
    assert len(contest.left()) < 6


def test_square_asks_in_half_precision_only_where_that_is_finite() -> None:
    """A faked fp16, which overflows in bright images."""
    inside: list[str] = []

    @contextmanager
    def half() -> Iterator[None]:
        inside.append("half")
        yield
        inside.pop()

    def embed(x: Tensor) -> Tensor:
        e = x.flatten(1)
        return torch.where(e > 0.8, torch.inf, e) if inside else e

    dark, bright = torch.full((2, 1, 2, 2), 0.5), torch.full((2, 1, 2, 2), 0.75)
    with ensemble.for_queries(embed, dark, 0.1, half):
        assert inside == ["half"]
    for eps in (0.1, -0.1):  # the images themselves are finite, an end of the ball is not
        with ensemble.for_queries(embed, bright, eps, half):
            assert inside == []
    with ensemble.for_queries(embed, 0.9 + 0 * dark, 0.0, half):
        assert inside == []
    before = torch.is_autocast_enabled("cuda")
    with ensemble.for_queries(embed, dark, 0.1):  # on a CPU
        assert inside == [] and not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_enabled("cuda") == before


# ---------------------------------------------------------------- what is shown


def test_tables_say_what_members_left_and_what_files_keep(strong: Audit, place: Path, capsys: Any) -> None:
    found = tables_of(strong.to_dict())
    assert strong.strong is not None
    head, *rows = found["After each member"]
    own = ["starts", "adam", "momentum", "refine"]
    assert head == ["goal", "standard", "pgd", *own, "apgd", "apgd-free", "cw", "square"]
    assert {row[0] for row in rows} == {"R@1", "CA+", "CA-", "QA+", "QA-", "TMA", "ES:D", "GTT"}
    recall = next(row for row in rows if row[0] == "R@1")
    after = strong.strong["after"]["recall"]
    assert recall[1:] == [f"{after[name]:.1f}" if name in after else "–" for name in head[1:]]
    head, *rows = found["As files"]
    assert head == ["column", "as found", "8 bits", "JPEG 90"] and rows[-1][0] == "ERS"
    assert (
        rows[-1][1:]
        == [
            f"{value:.1f}"
            for value in (
                strong.protocols["strong"].ers.value,  # type: ignore[union-attr]
                *(strong.strong["realisable"][form]["ers"] for form in head[2:]),
            )
        ]
    )
    assert tables_of({"protocols": {}}) == {}
    print_tables(strong.to_dict())
    printed, page = capsys.readouterr().out, (place / "page.html").read_text(encoding="utf-8")
    for title, table in found.items():
        assert title in printed and title in page
        for row in table:
            assert any(line.split() == " ".join(row).split() for line in printed.splitlines()), row
            assert all(f">{cell}</t" in page for cell in row)


def test_a_second_model_has_its_own_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "second_of_mine.py").write_text("from torch import nn\n\ndef make():\n    return nn.Flatten()\n")
    monkeypatch.chdir(tmp_path)
    Embedder("small", 4, channels=1, size=8, mean=[0.25], std=[0.5]).save("own.safetensors")

    def statistics(spec: str, own: tuple[str, str], size: str = "") -> tuple[float, float] | None:
        found = second_model(spec, own, (".1", ".2"), size)
        found = getattr(found, "module", found) if spec.endswith("safetensors") else found
        return None if found.mean is None else (round(float(found.mean), 3), round(float(found.std), 3))

    assert statistics("second_of_mine:make", (".3", ".4")) == (0.3, 0.4)
    assert statistics("second_of_mine:make", ("", "")) == (0.1, 0.2)  # it knows none: the victim's
    assert statistics("own.safetensors", ("", "")) == (0.25, 0.5)
    assert statistics("own.safetensors", ("", ""), "16") == (0.25, 0.5)
    assert second_model("second_of_mine:make", ("", ""), ("", ""), "").mean is None
    with pytest.raises(SettingsError, match="--surrogate-mean needs a number"):
        statistics("second_of_mine:make", ("x", ""))


# ---------------------------------------------------------------- what hides gradients


class Rounded(nn.Module):
    """A step without a derivative in front of a sound model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x * 12).round() / 12)  # type: ignore[no-any-return]


class Saturated(nn.Module):
    """Signs by a steep tanh: fp32 rounds its slope to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(1e4 * (x.flatten(1) - 0.3) @ self.weight.T)


@pytest.mark.parametrize("kind", ["rounded", "saturated"])
def test_hidden_gradients_fool_the_standard_audit_only(
    kind: str, digits: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MEMBERS", shorter(6, 120))
    torch.manual_seed(0)
    net = Rounded(Embedder("small", 16, channels=1, size=8)) if kind == "rounded" else Saturated()
    settings = {**QUICK, "examine": run.flags_of, "eps": 0.1, "alpha": 0.03, "attacks": ["ES", "LTM", "GTM"]}
    found = ah.audit(net, digits, strength="strong", **settings)
    before, after = (found.protocols[name].columns for name in ("corrected", "strong"))
    clean = before["GTM"].initial
    assert clean is not None and clean > 60
    assert min(before[name].value for name in ("ES:R", "LTM", "GTM")) > clean - 10  # standard says: robust
    assert after["GTM"].value < clean / 2  # strong does not
    flags = {flag.name: flag.message for flag in found.flags}
    assert {"zero-gradient", "black-box-beats-white-box", "strong-below-standard"} <= set(flags)
    assert "Square" in flags["black-box-beats-white-box"]
    assert "those overstate by" in flags["strong-below-standard"]
    assert flags["strong-below-standard"].split(" is ")[0] in ("ES:R", "LTM", "GTM", "100·ES:D")


@pytest.mark.parametrize("name", ["ERS", "GTM", "ES:D"])
def test_the_difference_is_that_of_the_numbers_as_they_are_printed(name: str) -> None:
    scale = 100 if name == "ES:D" else 1
    ends = {"corrected": 78.04 / scale, "strong": 69.36 / scale}
    outcomes = {}
    for protocol, value in ends.items():
        score = Score(value, value, value, {}, value, value) if name == "ERS" else None
        outcomes[protocol] = Outcome({name: ColumnValue(value, None, None)}, score, {})
    flag = strong_below_standard(SimpleNamespace(strong=overstated(outcomes)))  # type: ignore[arg-type]
    assert flag is not None
    assert "is 69.4 under strong attacks and 78.0 under standard ones: those overstate by 8.6 points" in flag.message


@pytest.mark.slow
def test_a_curve_does_not_hide_who_beat_whom(digits: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MEMBERS", shorter(6, 120))
    torch.manual_seed(0)
    net = Rounded(Embedder("small", 16, channels=1, size=8))
    settings = {**QUICK, "examine": run.flags_of, "eps": 0.1, "alpha": 0.03, "attacks": ["GTM"]}
    found = ah.audit(net, digits, strength="strong", epsilons=[0.05, 0.08, 0.095], **settings)
    assert "black-box-beats-white-box" in {flag.name for flag in found.flags}


def test_the_curve_of_a_standard_audit_raises_the_flag_too(digits: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MEMBERS", shorter(6, 120))
    torch.manual_seed(0)
    net = Rounded(Embedder("small", 16, channels=1, size=8))
    settings = {**QUICK, "examine": run.flags_of, "eps": 0.1, "alpha": 0.03, "attacks": ["GTM"]}
    found = ah.audit(net, digits, epsilons=[0.1], **settings)
    assert found.strong is None and "black-box-beats-white-box" in {flag.name for flag in found.flags}


def test_transfer_sees_what_the_models_own_gradients_do_not(digits: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MEMBERS", shorter(20, 1))
    net = Embedder("small", 16, channels=1, size=8)
    settings = {**QUICK, "examine": run.flags_of, "eps": 0.1, "attacks": ["GTM"], "strength": "strong"}
    found = ah.audit(Rounded(net), digits, surrogate=net, **settings)
    assert found.strong is not None and found.strong["surrogate"]
    after = found.strong["after"]["recall"]
    assert after["transfer"] < after["refine"] - 20
    assert "transfer-beats-white-box" in {flag.name for flag in found.flags}


def test_a_sound_model_raises_no_flag_of_the_black_box(strong: Audit) -> None:
    assert strong.strong is not None and strong.strong["doubts"]["black"] <= 5


# ---------------------------------------------------------------- until, algorithm 1, settings


def test_until_goes_on_to_the_interval_asked_for(
    model: Embedder, digits: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**QUICK, "limit": 12, "steps": 1, "batch": 64, "epsilons": ()}
    first = ah.audit(model, digits, **settings).protocols["corrected"].ers
    assert first is not None
    half = (first.high - first.low) / 2
    found = ah.audit(model, digits, until=0.7 * half, out=tmp_path / "u", **settings)
    score = found.protocols["corrected"].ers
    assert score is not None and (score.high - score.low) / 2 <= 0.7 * half and found.data["attacked"][0] < len(digits)
    assert found.data["attacked"][0] > 12 and (tmp_path / "u" / "audit.json").is_file()
    left = {path.name for path in (tmp_path / "u").iterdir()}
    assert "shards" in left and not any(name.startswith("queries") for name in left)
    made: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "Attack", running(lambda *others, **more: made.append(others)))
        again = ah.audit(model, digits, out=tmp_path / "u", **{**settings, "limit": found.data["attacked"][0]})
    assert not made and again.to_dict()["protocols"] == found.to_dict()["protocols"]  # all rows are there
    once_more = ah.audit(model, digits, until=0.7 * half, out=tmp_path / "u", **settings)  # the same command
    assert once_more.to_dict()["protocols"] == found.to_dict()["protocols"]
    with pytest.raises(RunError, match=r"would lose its \d+ queries \(now 12\): give another out="):
        ah.audit(model, digits, until=2 * half, out=tmp_path / "u", **settings)
    ah.audit(model, digits, until=2 * half, out=tmp_path / "u", replace=True, **settings)
    assert {path.name for path in (tmp_path / "u").iterdir()} == left
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "Attack", running(lambda *others, **more: made.append(others)))
        ah.audit(model, digits, out=tmp_path / "u", **settings)
    assert not made  # the rows there are those of the last one
    with pytest.raises(SettingsError, match="needs ERS and so all nine"):
        ah.audit(model, digits, until=1.0, attacks=["GTT"], **settings)


def test_until_checks_the_attacks_before_anything_else(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_until(1.0, None)
    check_until(1.0, [*run.NINE, "margin"])
    check_until(None, ["GTT"])
    with pytest.raises(SettingsError, match="all nine attacks; QA- is missing"):
        check_until(1.0, [name for name in run.NINE if name != "QA-"])
    code, _, err = cli(capsys, monkeypatch, "audit", "nowhere", "--data", "digits", "--until", "1", "--attacks", "GTT")
    assert code == 2 and "needs ERS and so all nine attacks" in err


def test_algorithm_1_of_two_models_with_three_methods(model: Embedder, digits: Split, tmp_path: Path) -> None:
    other = Embedder("small", 8, channels=1, size=8)
    options = {"limit": 30, "device": "cpu", "resamples": 9, "seeds": 2, "out": tmp_path}
    table = algorithm1({"natural": model, "robust": other}, digits, eps=0.08, **options)
    for rows in table.values.values():
        assert list(rows) == ["benign", "fgsm", "cw", "pgd"]
        assert all(rows[name]["R@1"] < rows["benign"]["R@1"] for name in ("fgsm", "cw", "pgd"))  # type: ignore[operator]
        assert rows["pgd"]["R@1 std"] is not None and rows["cw"]["R@1 std"] is None
    alone = ah.audit(model, digits, attacks=["nearest"], threat="adml", eps=0.08, method="cw", limit=30, device="cpu")
    assert alone.protocols["corrected"].columns["nearest"].value == table.values["natural"]["cw"]["R@1"]
    text = str(table)
    assert "C&W" in text and "natural" in text and "±" in text
    assert json.loads((tmp_path / "algorithm1.json").read_text())["eps"] == 0.08


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strength": "stark"}, "there are: standard, strong"),
        ({"strength": "strong", "protocols": "published"}, "corrected protocol"),
        ({"strength": "strong", "method": "fgsm"}, "start with PGD"),
        ({"epsilons": [8]}, "at most 1"),
        ({"epsilons": [0.1], "eps": 0}, "there is no curve"),
        ({"epsilons": [0.1], "steps": 0}, "there is no curve"),
        ({"until": 0.0}, "above 0"),
        ({"surrogate": nn.Identity()}, "strength='strong'"),
    ],
)
def test_bad_settings_are_one_clear_line(model: Embedder, digits: Split, settings: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ah.audit(model, digits, **{"device": "cpu", **settings})


def test_the_ensemble_is_what_the_page_says() -> None:
    assert most_steps(goal_named("CA+", "corrected")) == 150 + 100 + 100 + 50
    assert most_steps(goal_named("margin", "corrected")) == 15 * 25 + 7 * 2 + 200 + 500 + 300 == 1389
    assert MEMBERS[-1].budget(0.1).steps == SQUARE_QUERIES == 1000
    for member in MEMBERS:  # climbs from one image differ by their objective alone
        assert not member.refines or member.rounds == len(set(member.objectives))
    page = (Path(__file__).resolve().parents[2] / "docs" / "audit" / "threats.md").read_text(encoding="utf-8")
    for words in ("1,000", "400", "1,389", *(f"`{member.name}`" for member in MEMBERS)):
        assert words in page, words


@pytest.mark.slow
def test_a_sample_that_withstands_all_costs_what_was_said(
    model: Embedder, digits: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At two ε that turn nothing: no member is left out, and none ends early."""
    monkeypatch.setattr(run, "MEMBERS", MEMBERS)
    settings: dict[str, Any] = {**QUICK, "eps": 1e-7, "alpha": 1e-7, "limit": 6, "strength": "strong"}
    found = ah.audit(model, digits, attacks=["GTM"], epsilons=[1e-7, 2e-7], **settings)
    (climbed,) = (each for each in found.runs if each.label == "recall.strong")
    right, usual = int((found.curve_rows["R@1"][0] > 0.5).sum()), settings["steps"]
    (task,) = tasks([AttackRun("GTM", (goal_named("GTM", "corrected"),))])
    told = right * steps_at_most(task, 2, usual)
    # Queries that are wrong anyway are attacked by the standard run of the first ε, and by nothing else.
    assert right > 2 and bool((found.curve_rows["R@1"] == found.curve_rows["R@1"][0]).all())
    assert told <= climbed.image_steps <= told + (6 - right) * usual
