"""fit and resume: what a run leaves behind, and that nothing but the settings decides it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import anchorhold as ah
from anchorhold.config.build import build
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.images import load_images
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.step import Step
from anchorhold.errors import DataError, Interrupted, RunError, SettingsError
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.training.evaluation import retrieval

pytestmark = pytest.mark.medium

TINY: dict[str, Any] = {
    "train": {"epochs": 2, "evaluate_every": 1, "checkpoint_seconds": 0, "collapse_warmup": 9},
    "batch": {"pairs": 32},
    "model": {"dim": 16},
    "data": {"crop": 6, "flip": True},  # so that augmentation counts too
}


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    return ah.dataset("digits")


def with_(**sections: dict[str, Any]) -> dict[str, Any]:
    return {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}


def fit(digits: ah.Dataset, out: Path, recipe: str = "hm-lga", **sections: dict[str, Any]) -> Any:
    return ah.fit(None, digits, recipe, out, overrides=with_(**sections), device="cpu")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# What a run leaves behind -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_folder_holds_everything(digits: ah.Dataset, tmp_path: Path) -> None:
    run = fit(digits, tmp_path / "run", train={"attack_eps": 0.05, "attack_steps": 2, "attack_queries": 50})
    info, rows = run.read_json(), run.metrics()
    assert info["status"] == "done" and info["settings"]["defence"]["name"] == "hardness"
    assert info["data"]["images"] == [901, 896] and info["data"]["train"] == digits.train.fingerprint()
    assert [row["epoch"] for row in rows] == [1, 2] and rows[-1]["step"] == 2 * 29
    for name in (
        "loss",
        "hardness_before",
        "hardness_after",
        "active_first",
        "separability",
        "r1",
        "map_r",
        "r1_attacked",
        "map_r_attacked",
    ):
        assert isinstance(rows[-1][name], float), name
    assert rows[-1]["r1_attacked"] < rows[-1]["r1"] and info["image_steps"] > 0
    assert rows[-1]["hardness_after"] >= rows[-1]["hardness_before"]
    model = ah.load(tmp_path / "run")
    from anchorhold.metrics import evaluate
    from anchorhold.model.frozen import embed_all, frozen

    assert not model.training
    with frozen(model) as embed:
        e = embed_all(embed, [digits.test.images[:, 1:7, 1:7].permute(0, 3, 1, 2) / 255])
    assert 100 * evaluate(e, digits.test.labels).r1 == pytest.approx(rows[-1]["r1"])


@pytest.mark.slow
def test_training_learns(digits: ah.Dataset, tmp_path: Path) -> None:
    run = fit(digits, tmp_path / "run", "natural", train={"epochs": 4}, data={"crop": 0, "flip": False})
    rows = run.metrics()
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"] and rows[-1]["r1"] > 75


@pytest.mark.slow
def test_the_seed_decides_and_nothing_else(digits: ah.Dataset, tmp_path: Path) -> None:
    torch.manual_seed(1)
    fit(digits, tmp_path / "a", train={"epochs": 1})
    torch.manual_seed(2)
    fit(digits, tmp_path / "b", train={"epochs": 1, "checkpoint_seconds": 99, "evaluate_every": 7})
    fit(digits, tmp_path / "c", train={"epochs": 1, "seed": 1})
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")


@pytest.fixture(scope="module")
def unchanged(digits: ah.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An epoch with the settings as they are."""
    return Path(fit(digits, tmp_path_factory.mktemp("runs") / "a", train={"epochs": 1}).path)


@pytest.mark.parametrize(
    "change",
    [
        {"optimiser": {"weight_decay": 0.1}},
        {"optimiser": {"schedule": "linear"}},
        {"batch": {"mining_pairs": 4}},
        {"batch": {"distinct": True}},
        {"data": {"flip": False}},
        {"data": {"crop": 7}},
        {"defence": {"destination": "semihard"}},
    ],
    ids=str,
)
def test_every_setting_reaches_the_training(
    digits: ah.Dataset, unchanged: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    fit(digits, tmp_path / "b", **{"train": {"epochs": 1}, **change})
    assert not same(unchanged, tmp_path / "b")


def test_augmentation_differs_between_epochs_and_batches(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def noting(step: Step, settings: Any) -> Any:
        seen.append(step.batch.images.flatten(1).mean(1)[torch.argsort(step.batch.ids)])
        yield from natural(step, settings)

    natural = DEFENCES["natural"]
    monkeypatch.setitem(DEFENCES, "natural", noting)
    fixed = torch.argsort(digits.train.labels, stable=True)[:64]  # in pair order
    monkeypatch.setattr("anchorhold.training.trainer.Trainer.plan", lambda trainer, epoch: [fixed, fixed])
    fit(digits, tmp_path / "run", "natural")
    assert len(seen) == 4
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_class_batches(digits: ah.Dataset, tmp_path: Path) -> None:
    run = fit(digits, tmp_path / "run", batch={"kind": "classes", "classes": 5, "instances": 8}, train={"epochs": 1})
    assert run.metrics()[-1]["step"] == 901 // 40


def test_a_model_of_your_own(digits: ah.Dataset, tmp_path: Path) -> None:
    model = ah.Embedder("mlp", dim=8, channels=1, size=6)
    before = model.head.weight.clone()
    run = ah.fit(model, digits, "natural", tmp_path / "run", overrides=with_(train={"epochs": 1}), device="cpu")
    assert run.read_json()["settings"]["model"]["backbone"] == "mlp"
    assert not torch.equal(before, model.head.weight)
    with pytest.raises(RunError, match=r"ah\.resume"):
        ah.fit(model, digits, "natural", tmp_path / "run", device="cpu")


def test_a_model_of_your_own_is_resumed_from_its_folder_alone(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(step: Step, settings: Any) -> Any:
        raise ConnectionError
        yield

    model = ah.Embedder("mlp", dim=8, channels=1, size=6, seed=9, mean=[0.3], std=[0.5])
    still = with_(train={"epochs": 1, "checkpoint_seconds": 99}, optimiser={"lr": 1e-30})
    natural = DEFENCES["natural"]
    monkeypatch.setitem(DEFENCES, "natural", breaking)
    with pytest.raises(ConnectionError):
        ah.fit(model, digits, "natural", tmp_path / "run", overrides=still, device="cpu")
    monkeypatch.setitem(DEFENCES, "natural", natural)
    ah.resume(tmp_path / "run", device="cpu")
    found = ah.load(tmp_path / "run")
    assert found.config == model.config and torch.equal(found.head.weight, model.head.weight)
    for name in ("last", "previous"):
        (tmp_path / "run" / f"{name}.safetensors").unlink()
    _run(tmp_path / "run").update_json(status="training")
    with pytest.raises(RunError, match="you built its model"):
        ah.resume(tmp_path / "run", device="cpu")


def test_a_run_that_goes_on_elsewhere_says_so(digits: ah.Dataset, tmp_path: Path) -> None:
    told: list[str] = []

    class Told(Silent):
        def say(self, text: str) -> None:
            told.append(text)

    run = ah.fit(None, digits, "natural", tmp_path / "run", overrides=with_(train={"epochs": 1}), device="cpu")
    for device in (run.read_json()["device"], "cuda: another"):
        run.update_json(status="training", device=device)
        ah.resume(tmp_path / "run", device="cpu", report=Told())
    assert ["begun on cuda: another, resumed on cpu" in text for text in told if "begun on" in text] == [True]


def test_the_learning_rate_of_every_step(digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has all of it and none has nothing; a run that goes on takes up where it was."""
    rates: list[float] = []
    step = torch.optim.Adam.step

    def stepping(adam: torch.optim.Adam, *rest: Any) -> Any:
        if len(rates) == 40:
            rates.append(0.0)
            raise ConnectionError
        rates.append(adam.param_groups[0]["lr"])
        return step(adam, *rest)

    monkeypatch.setattr(torch.optim.Adam, "step", stepping)
    sections = with_(optimiser={"lr": 1e-3, "schedule": "linear"}, train={"epochs": 2, "checkpoint_seconds": 0})
    with pytest.raises(ConnectionError):
        ah.fit(None, digits, "natural", tmp_path / "run", overrides=sections, device="cpu")
    ah.resume(tmp_path / "run", device="cpu")
    del rates[40]  # the one that failed
    assert rates == pytest.approx([1e-3 * (1 - i / 58) for i in range(58)])


def test_the_steps_on_images_are_those_of_all_epochs(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = torch.argsort(digits.train.labels, stable=True)[:64]  # in pair order
    monkeypatch.setattr("anchorhold.training.trainer.Trainer.plan", lambda trainer, epoch: [fixed])
    counts = []
    for epochs in (1, 2):
        run = fit(digits, tmp_path / str(epochs), "act", train={"epochs": epochs}, defence={"steps": 2})
        counts.append(run.read_json()["image_steps"])
    assert 0 < 2 * counts[0] == counts[1]


def test_what_is_measured_is_what_is_exported(digits: ah.Dataset, tmp_path: Path) -> None:
    run = fit(digits, tmp_path / "run", "natural", train={"ema": 0.99}, batch={"pairs": 100})
    test = load_images(digits.test, build(run.read_json()["settings"]).data, torch.device("cpu"), Silent())
    found, _ = retrieval(ah.load(run.path), test)
    assert {name: run.metrics()[-1][name] for name in found} == pytest.approx(found, abs=1e-6)


def test_the_attack_after_an_epoch_has_the_whole_ball_in_reach(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Ball, Budget]] = []

    def spy(model: Any, test: Any, gallery: Any, way: Any, *rest: Any) -> dict[str, float]:
        seen.append((way.ball, way.budget))
        return {"r1": 0.0}

    monkeypatch.setattr("anchorhold.training.evaluation.scores_under_attack", spy)
    attack = {"epochs": 1, "attack_eps": 0.05, "attack_steps": 4}
    fit(digits, tmp_path / "run", "natural", train=attack, batch={"pairs": 300})
    ((ball, budget),) = seen
    assert ball.eps == 0.05 and budget.steps == 4 and budget.alpha == pytest.approx(2.5 * 0.05 / 4)


# Resume -----------------------------------------------------------------------------------------------------


def _run(path: Path) -> Any:
    from anchorhold.runs.folder import Run

    return Run(path)


@pytest.fixture
def listening() -> Any:
    """SIGINT as an interactive program has it; a job in the background starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting_natural(monkeypatch: pytest.MonkeyPatch) -> None:
    natural = DEFENCES["natural"]

    def interrupting(step: Step, settings: Any) -> Any:
        if step.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)
        yield from natural(step, settings)

    monkeypatch.setitem(DEFENCES, "natural", interrupting)


@pytest.mark.slow
@pytest.mark.usefixtures("listening")
def test_ctrl_c_saves_and_says_how_to_go_on(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(digits, tmp_path / "alone", "natural")
    with monkeypatch.context() as patch:
        interrupting_natural(patch)
        with pytest.raises(Interrupted, match=r"step 30; to resume: ah\.resume"):
            fit(digits, tmp_path / "run", "natural", train={"checkpoint_seconds": 999})
    assert _run(tmp_path / "run").read_json()["status"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # handlers are put back
    ah.resume(tmp_path / "run", device="cpu")
    assert same(tmp_path / "alone", tmp_path / "run")


@pytest.mark.usefixtures("listening")
def test_an_ignored_signal_stays_ignored(digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupting_natural(monkeypatch)
    assert fit(digits, tmp_path / "run", "natural").read_json()["status"] == "done"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_run_on_held_out_classes_is_resumed_on_them(digits: ah.Dataset, tmp_path: Path) -> None:
    less = ah.dataset("digits", held_out=2)
    run = fit(less, tmp_path / "run", "natural", train={"epochs": 1})
    info = run.read_json()
    assert info["settings"]["data"]["held_out"] == 2 and info["data"]["images"] == [len(less.train), len(less.test)]
    run.update_json(status="interrupted")
    ah.resume(tmp_path / "run", device="cpu")  # which finds the same classes
    for data, said in ((digits, 2), (less, 0)):
        with pytest.raises(SettingsError, match=r"the data set holds out .*ah\.dataset"):
            fit(data, tmp_path / "other", data={"held_out": said})


def test_resume_refuses_other_data_and_finished_runs_stay(digits: ah.Dataset, tmp_path: Path) -> None:
    run = fit(digits, tmp_path / "run", "natural", train={"epochs": 1})
    stamp = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    ah.resume(tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == stamp
    run.update_json(status="interrupted", data={**run.read_json()["data"], "train": "other"})
    with pytest.raises(RunError, match=r"data of .* changed since"):
        ah.resume(tmp_path / "run", device="cpu")
    with pytest.raises(RunError, match=r"no run\.json"):
        ah.resume(tmp_path / "nowhere")


def test_a_finished_run_that_lost_its_model_writes_it_anew(digits: ah.Dataset, tmp_path: Path) -> None:
    run = fit(digits, tmp_path / "run", "natural", train={"epochs": 1, "ema": 0.9})
    model, before = run.path / "model.safetensors", run.read_json()
    lost = model.rename(tmp_path / "model.safetensors")
    ah.resume(run.path, device="cpu")
    assert same(run.path, tmp_path) and run.read_json() == before
    for path in (model, run.path / "last.safetensors", run.path / "previous.safetensors"):
        path.unlink()
    with pytest.raises(RunError, match="its model and checkpoints are lost or damaged; train again"):
        ah.resume(run.path, device="cpu")
    assert lost.exists() and not model.exists()


def test_flags_of_epochs_that_are_trained_again_are_dropped(digits: ah.Dataset, tmp_path: Path) -> None:
    run = fit(digits, tmp_path / "run", "natural", train={"epochs": 1}, batch={"pairs": 300})
    flags = [{"name": "canary", "epoch": epoch, "text": "", "value": 0.4} for epoch in (1, 2)]
    run.update_json(status="interrupted", flags=flags)
    ah.resume(run.path, device="cpu")
    assert run.read_json()["flags"] == flags[:1]


def test_data_by_name_and_overrides_with_dots(digits: ah.Dataset, tmp_path: Path) -> None:
    dotted = {"train.epochs": 1, "model.dim": 8, "data.flip": True}
    ah.fit(None, "digits", "natural", tmp_path / "a", overrides=dotted, device="cpu")
    sections = {"train": {"epochs": 1}, "model": {"dim": 8}, "data": {"flip": True}}
    ah.fit(None, digits, "natural", tmp_path / "b", overrides=sections, device="cpu")
    assert same(tmp_path / "a", tmp_path / "b")
    with pytest.raises(DataError, match=r"elsewhere/images.txt is missing"):
        ah.fit(None, "cub", "natural", tmp_path / "c", overrides={"data.root": str(tmp_path / "elsewhere")})
    run = ah.fit(None, "digits", "natural", tmp_path / "d", overrides={**dotted, "data.held_out": 2}, device="cpu")
    assert run.read_json()["settings"]["data"]["held_out"] == 2
    with pytest.raises(DataError, match="cannot be read as images with labels"):
        ah.fit(None, (1, 2), "natural", tmp_path / "c")
    with pytest.raises(SettingsError, match="overrides must be a dict"):
        ah.fit(None, digits, overrides=["train.epochs=1"])  # type: ignore[arg-type]


# When to stop -----------------------------------------------------------------------------------------------


def test_nan_stops_and_keeps_the_last_good_checkpoint(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    natural = DEFENCES["natural"]

    def poisoned(step: Step, settings: Any) -> Any:
        for loss in natural(step, settings):
            yield loss * (float("nan") if step.epoch == 1 else 1.0)

    monkeypatch.setitem(DEFENCES, "natural", poisoned)
    with pytest.raises(RunError, match="loss became NaN or infinite in epoch 2"):
        fit(digits, tmp_path / "run", "natural")
    run = _run(tmp_path / "run")
    assert run.read_json()["status"] == "stopped" and "NaN" in run.read_json()["reason"]
    tensors, state = run.load()
    assert state["step"] <= 29 and all(t.isfinite().all() for t in tensors.values())


@pytest.mark.slow
def test_collapse_stops_with_the_reason_or_warns(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collapsing(step: Step, settings: Any) -> Any:
        e = step.embed(step.batch.images)
        yield (e - e.mean(0).detach()).square().sum(1).mean()

    monkeypatch.setitem(DEFENCES, "natural", collapsing)
    setting = {"epochs": 6, "collapse_warmup": 1, "checkpoint_seconds": 0}
    with pytest.raises(
        RunError, match=r"the model collapsed by epoch \d: .*mean distance .* last good checkpoint is kept"
    ):
        fit(digits, tmp_path / "stop", "natural", train=setting, optimiser={"lr": 0.01})
    assert _run(tmp_path / "stop").read_json()["status"] == "stopped"
    run = fit(digits, tmp_path / "warn", "natural", train={**setting, "on_collapse": "warn"}, optimiser={"lr": 0.01})
    assert run.read_json()["status"] == "done" and run.metrics()[-1]["mean_distance"] < 1e-3


def test_precision_needs_its_device(digits: ah.Dataset, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="needs a GPU"):
        fit(digits, tmp_path / "run", train={"precision": "bf16"})
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="CUDA device is not available"):
            ah.fit(None, digits, "natural", tmp_path / "other", device="cuda")


def test_settings_reach_the_defence(digits: ah.Dataset, tmp_path: Path) -> None:
    settings = settings_from("hm-lga", {"data": {"name": "digits"}, "defence": {"destination": "semihard"}})
    assert settings.defence.destination == "semihard"
