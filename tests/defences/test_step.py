"""What every defence leans on: the inner attack and its canary, benign batches, the running mean of the weights."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.batches import pair_batches
from anchorhold.data.images import load_images
from anchorhold.defences.hardness import hardness_manipulation, raise_hardness
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.settings import HardnessSettings, Inner
from anchorhold.device import compiles
from anchorhold.errors import RunError, SettingsError
from anchorhold.model.average import Average
from anchorhold.random import Key
from anchorhold.runs.folder import Run
from anchorhold.training import trainer
from anchorhold.training.checkpoint import Meters
from anchorhold.training.evaluation import signs_of_collapse
from anchorhold.training.loop import canary_due
from anchorhold.training.safety import CANARY, judge_canary
from anchorhold.triplets import mine
from tests import reference
from tests.defences.test_hardness import make_step

QUICK: dict[str, Any] = {
    "train": {"epochs": 2, "evaluate_every": 2, "collapse_warmup": 9},
    "batch": {"pairs": 100},
    "model": {"dim": 16},
}


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    return ah.dataset("digits")


def fit(digits: ah.Dataset, out: Path, **changes: Any) -> Run:
    sections = {name: {**QUICK.get(name, {}), **changes.get(name, {})} for name in {*QUICK, *changes}}
    return ah.fit(None, digits, "hm-lga", out, overrides=sections, device="cpu")


def weights(run: Run) -> dict[str, Tensor]:
    return load_file(run.path / "model.safetensors")


def same(a: Run, b: Run) -> bool:
    first, second = weights(a), weights(b)
    return all(torch.equal(first[name], second[name]) for name in first)


# The canary --------------------------------------------------------------------------------------------------


def gap_of(spoil: Any) -> float:
    """What the canary logs when the embeddings that the ascent sees are spoilt."""
    logged: dict[str, float] = {}
    step = make_step(log=lambda name, value, weight=1.0: logged.update({name: float(value)}), canary=True)
    units = step.batch.images[torch.arange(12).reshape(4, 3)]
    goal = raise_hardness(torch.full((4,), 2.0, dtype=torch.float64))
    with step.frozen() as embed:
        step.perturb(lambda x: embed(spoil(x)), units, goal, Inner(eps=0.2, alpha=0.02, steps=8))
    return logged["canary_gap"]


def test_the_canary_tells_how_much_of_the_climb_is_missing() -> None:
    assert abs(gap_of(lambda x: x)) < 1e-9
    assert gap_of(lambda x: x.detach() + 0 * x) == pytest.approx(1, abs=1e-6)  # no gradient: nothing is climbed
    assert 0.05 < gap_of(lambda x: torch.where(torch.arange(8) < 4, x, x.detach())) < 0.95  # half of the pixels


def test_a_gap_is_said_once_an_epoch_and_kept_with_the_run(tmp_path: Path) -> None:
    run, said = Run.create(tmp_path / "run", {"status": "training"}), []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign, assignment]
    judge_canary(run, {"epoch": 3, "canary_gap": CANARY / 2}, report)
    assert not said and "flags" not in run.read_json()
    judge_canary(run, {"epoch": 4, "canary_gap": 0.4}, report)
    (flag,) = run.read_json()["flags"]
    assert flag["name"] == "canary" and flag["value"] == 0.4 and "misses 40 %" in flag["text"] == said[0][9:]


def test_compiling_is_for_long_work_on_a_gpu_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr("anchorhold.device._compiler", lambda: True)
    assert compiles("auto", "auto", gpu, 2e6) and compiles("on", "bf16", gpu, 0)
    assert not any(
        (compiles("auto", "auto", gpu, 1e3), compiles("auto", "fp32", gpu, 2e6), compiles("off", "auto", gpu, 2e6))
    )
    assert not compiles("auto", "auto", cpu, 2e6)
    for wrong in (("on", "auto", cpu), ("on", "fp32", gpu), ("yes", "auto", gpu)):
        with pytest.raises(RunError):
            compiles(*wrong, 0)
    monkeypatch.setattr("anchorhold.device._compiler", lambda: False)
    assert not compiles("auto", "auto", gpu, 2e6)
    with pytest.raises(RunError, match="C compiler"):
        compiles("on", "bf16", gpu, 0)


def test_without_triton_or_a_c_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from anchorhold import device

    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(device.shutil, "which", lambda name: "/bin/clang" if name == "clang" else None)
    assert device._compiler()
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert not device._compiler()


def test_the_canary_checks_both_turns_of_a_defence_that_alternates() -> None:
    every = settings_from("hm-lga").train.canary_every
    checked = [step for step in range(8 * every) if canary_due(step, every)]
    assert 6 <= len(checked) <= 8 and {step % 2 for step in checked} == {0, 1}


@pytest.mark.slow
def test_with_a_companion_the_model_s_own_pass_is_not_replayed(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs hold the embedder's pass; `distil` trains its features, which have another head and no sphere."""
    made: list[nn.Module] = []
    monkeypatch.setattr(trainer, "compiles", lambda *_: True)
    monkeypatch.setattr(trainer, "Graphed", lambda model, precision: made.append(model))
    settings = {"train": {"epochs": 1}, "batch": {"pairs": 300}, "model": {"freeze_batchnorm": True}}
    for recipe in ("distil", "classify", "natural"):
        ah.fit(None, digits, recipe, tmp_path / recipe, overrides=settings, device="cpu")
    assert len(made) == 1


# Benign batches ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_nothing_but_benign_batches_nothing_is_perturbed(digits: ah.Dataset, tmp_path: Path) -> None:
    benign = fit(digits, tmp_path / "benign", train={"benign": 1})
    plain = fit(digits, tmp_path / "plain", defence={"eps": 0, "steps": 0})
    attacked = fit(digits, tmp_path / "attacked")
    assert same(benign, plain) and not same(benign, attacked)
    assert benign.read_json()["image_steps"] == 0 < attacked.read_json()["image_steps"]


@pytest.mark.slow
def test_a_share_of_the_batches_is_benign_and_leaves_no_trace_in_the_state(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float | None]] = []
    defence = DEFENCES["hardness"]

    def spy(step: Any, settings: Any) -> Any:
        before = step.state.get("previous_loss")
        seen.append((settings.eps, None if before is None else float(before)))
        yield from defence(step, settings)

    monkeypatch.setitem(DEFENCES, "hardness", spy)
    fit(digits, tmp_path / "run", train={"benign": 0.5}, batch={"pairs": 16})
    count = sum(eps == 0 for eps, _ in seen)
    assert 0.35 < count / len(seen) < 0.65
    for (eps, before), (_, after) in pairwise(seen):
        assert (before == after) == (eps == 0)


# The running mean of the weights -----------------------------------------------------------------------------


def test_the_mean_is_the_sum_of_all_steps(digits: ah.Dataset) -> None:
    net = nn.Linear(2, 1)
    mean, expected = Average(net, 0.9), net.weight.detach().clone()
    for _ in range(5):
        with torch.no_grad():
            net.weight.add_(1)
        mean.update()
        expected = 0.9 * expected + 0.1 * net.weight.detach()
    own = net.weight.detach().clone()
    with mean.lent():
        assert torch.allclose(net.weight, expected)
    assert torch.equal(net.weight, own)


def test_the_mean_of_late_weights_is_plain_and_can_be_resumed() -> None:
    net = torch.nn.Linear(3, 2)
    mean, seen = Average(net, 0.0, 0.5), []
    for step in range(10):
        with torch.no_grad():
            net.weight += Key.of(step).normal(torch.arange(2), (3,))
        mean.update(step / 10)
        seen.append(net.weight.detach().clone())
        late = seen[5:] or seen[-1:]  # until half of the training: the weights themselves
        assert torch.allclose(mean.tensors["weight"], torch.stack(late).mean(0), atol=1e-6)
        if step == 6:
            again = Average(net, 0.0, 0.5)
            again.tensors |= {name: tensor.clone() for name, tensor in mean.tensors.items()}
            mean = again
    with mean.lent():
        assert torch.allclose(net.weight, torch.stack(seen[5:]).mean(0), atol=1e-6)
    assert torch.equal(net.weight, seen[-1])


@pytest.mark.slow
def test_the_mean_is_what_is_exported(digits: ah.Dataset, tmp_path: Path) -> None:
    whole = fit(digits, tmp_path / "whole", train={"ema": 0.9})
    assert not same(whole, fit(digits, tmp_path / "plain"))


def test_shares_and_decays_that_make_no_sense_are_refused() -> None:
    for wrong in ({"benign": 1.5}, {"benign": -0.1}, {"ema": 1.0}, {"ema": -0.5}, {"canary_every": -1}):
        with pytest.raises(SettingsError):
            settings_from("hm-lga", {"train": wrong})


# Signs of collapse -------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_the_signs_are_those_of_plain_loops(digits: ah.Dataset) -> None:
    model = ah.Embedder("small", dim=16, channels=1, size=8).double()
    settings = settings_from("natural", {"data": {"name": "digits"}})
    images = load_images(digits.train, settings.data, torch.device("cpu"), Silent())
    key = Key.of(5)
    signs = signs_of_collapse(model, images, key)
    ids = pair_batches(digits.train.labels, 256, key)[0]
    with torch.no_grad():
        embeddings = model.eval()(torch.cat(list(images.plain(ids))).double())
    e = embeddings.tolist()
    names, labels = ids.tolist(), digits.train.labels[ids].tolist()
    pairs = [(i, j) for i in range(len(e)) for j in range(i)]
    d = {pair: reference.distance(e[pair[0]], e[pair[1]]) for pair in pairs}
    inner = [d[i, j] for i, j in pairs if labels[i] == labels[j] and names[i] != names[j]]
    outer = [d[i, j] for i, j in pairs if labels[i] != labels[j]]
    mean = sum(d.values()) / len(d)
    assert signs["mean_distance"] == pytest.approx(mean, abs=1e-5)
    assert signs["intra_distance"] == pytest.approx(sum(inner) / len(inner), abs=1e-5)
    assert signs["inter_distance"] == pytest.approx(sum(outer) / len(outer), abs=1e-5)
    cosines = [1 - reference.cosine(e[i], e[j]) for i, j in pairs]
    assert signs["mean_cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    mined = mine("random", embeddings, digits.train.labels[ids], key)
    near, far = (
        [reference.distance(e[i], e[j]) for i, j in zip(mined.anchor.tolist(), others.tolist())]
        for others in (mined.positive, mined.negative)
    )
    h = [x - y for x, y in zip(near, far)]
    hardness = sum(h) / len(h)
    assert signs["hardness"] == pytest.approx(hardness, abs=1e-5)
    assert signs["separability"] == pytest.approx(-hardness / mean, abs=1e-5)
    assert signs["hardness_variance"] == pytest.approx(sum((x - hardness) ** 2 for x in h) / len(h), rel=1e-4)
    sides = []
    for side in (near, far):
        share = [math.exp(-10 * (x - min(side))) for x in side]
        sides.append(sum(w * x for w, x in zip(share, side)) / sum(share))
    assert signs["collapseness"] == pytest.approx(sides[0] - sides[1], abs=1e-5)


def test_the_shift_is_by_the_spread_of_the_clean_batch() -> None:
    meters = Meters({})
    step = make_step(log=meters.add)
    batch = torch.tensor([[0.0], [2.0], [4.0]], dtype=torch.float64)  # mean distance 8/3
    step.log_shift(batch[:2], batch[:2] + 1, 3, batch, torch.tensor([True, True]))
    whole = {"shift_all": 3 / 8, "shift_overall_all": 9 / 8}
    assert meters.means() == pytest.approx(
        whole | {"shift_perturbed": 3 / 8, "shift_overall_perturbed": 9 / 8}, abs=1e-5
    )


def test_triplets_never_touched_do_not_lower_the_mean_of_the_perturbed_ones() -> None:
    """Over an epoch every perturbed triplet counts once, and a batch without any not at all."""
    meters = Meters({})
    step = make_step(log=meters.add)
    batch = torch.tensor([[0.0], [2.0], [4.0]], dtype=torch.float64)
    for moved_by in ([8.0, 0.0, 0.0], [4.0, 4.0, 0.0], [0.0, 0.0, 0.0]):
        by = torch.tensor(moved_by, dtype=torch.float64).unsqueeze(1)
        step.log_shift(batch, batch + by, 1, batch, by[:, 0] > 0)
    assert meters.means() == pytest.approx(
        {
            "shift_all": 16 / 9 * 3 / 8,
            "shift_overall_all": 16 / 9 * 3 / 8,
            "shift_perturbed": 16 / 3 * 3 / 8,
            "shift_overall_perturbed": 16 / 3 * 3 / 8,
        },
        abs=1e-5,
    )
    meters.reset()
    step.log_shift(batch, batch, 1, batch, torch.zeros(3, dtype=torch.bool))
    assert meters.means() == pytest.approx({"shift_all": 0, "shift_overall_all": 0}, abs=1e-5)
    again = Meters(meters.sums())
    assert again.means() == meters.means() and "shift_perturbed" in again.sums()


def test_a_training_step_without_an_inner_attack_climbs_nothing() -> None:
    logged: dict[str, float] = {}
    step = make_step(log=lambda name, value, weight=1.0: logged.update({name: float(value)}))
    list(hardness_manipulation(step, HardnessSettings(destination=2.0, eps=0.0, steps=0)))
    assert logged["image_steps"] == 0 and logged["shift_all"] == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
def test_min_max_really_collapses_and_stops_or_is_flagged(digits: ah.Dataset, tmp_path: Path) -> None:
    """Zhou & Patel 2022, section 3: maximising the loss without end is what brings a model down."""
    sections: dict[str, Any] = {"train": {"epochs": 6, "evaluate_every": 6}, "model": {"dim": 16}}
    with pytest.raises(RunError, match=r"the model collapsed by epoch \d: mean distance"):
        ah.fit(None, digits, "minmax", tmp_path / "stop", overrides=sections, device="cpu")
    info = Run(tmp_path / "stop").read_json()
    assert info["status"] == "stopped" and "collapsed" in info["reason"]
    sections["train"]["on_collapse"] = "warn"
    run = ah.fit(None, digits, "minmax", tmp_path / "warn", overrides=sections, device="cpu")
    assert run.read_json()["status"] == "done" and len(run.metrics()) == 6
    found = ah.audit(ah.load(run.path), digits, limit=20, attacks=["ES"], eps=0.1, steps=2, alpha=0.05, device="cpu")
    assert "collapse" in [flag.name for flag in found.flags]
