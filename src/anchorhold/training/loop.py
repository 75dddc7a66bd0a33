"""The training loop. `train` is the outline; `train_step` takes one batch and makes the optimiser steps.

Every random draw is keyed by (seed, purpose, step). A run that was killed at any step and resumed therefore ends
with the same weights as an uninterrupted one.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from ..config.build import to_dict
from ..console import Advance
from ..defences.settings import Inner
from ..defences.step import Batch
from ..errors import Interrupted
from ..extensions import code_named_in
from ..interface import worded
from ..model.trainable import Trainable
from ..model.weights import digest
from ..model.wrap import fingerprint_of
from ..runs.folder import EXPORT
from ..schedules import learning
from .evaluation import summary
from .safety import check_finite, judge_attacks, judge_canary, stop_on_signal
from .timing import Estimate
from .trainer import Trainer

__all__ = ["canary_due", "train", "train_step"]

CHECK_EVERY = 20  # check for NaN every N steps, because each check waits for the GPU


def train(trainer: Trainer) -> None:
    """Train to the last epoch, then write the model. A signal or a failed check ends the run earlier."""
    with trainer.callbacks.told():
        train_epochs(trainer)
        export(trainer)


def train_epochs(trainer: Trainer) -> None:
    """Train, measure and save, epoch by epoch."""
    at, last = trainer.at, trainer.settings.train.epochs
    # A module of yours may draw from torch: those draws are the run's, and your generators stay as they were.
    cards = [trainer.device] if trainer.device.type == "cuda" else []
    own = torch.random.fork_rng(cards) if draws(trainer) else nullcontext()
    with own, stop_on_signal() as stopping, trainer.report.task("training", trainer.total, at.step) as advance:
        trainer.regime.begin(trainer.run, at, trainer.ranks, lambda note: advance(0, note))
        estimate = Estimate(trainer.report, at.step, trainer.total, trainer.fast)
        while at.epoch < last:
            train_epoch(trainer, estimate, stopping, advance)
            row = evaluate_epoch(trainer)
            trainer.callbacks.epoch(row)
            advance(at.step, summary(row))
            judge_epoch(trainer, row)
            if trainer.checkpoint_due() or at.epoch == last:
                trainer.save()


def train_epoch(trainer: Trainer, estimate: Estimate, stopping: Callable[[], bool], advance: Advance) -> None:
    """Train on the batches that are left of this epoch."""
    at, meters = trainer.at, trainer.meters
    plan = trainer.plan(at.epoch)
    trainer.model.train()
    for batch in batches(trainer, plan):
        train_step(trainer, batch)
        at.index, at.step = at.index + 1, at.step + 1
        if at.step % CHECK_EVERY == 0 or at.index == len(plan):
            check_finite(trainer.run, bool(trainer.finite), at)
            advance(at.step, f"epoch {at.epoch + 1}, {meters.note()}")
        estimate.update(at.step)
        stop_if_asked(trainer, stopping)
        if trainer.checkpoint_due() and at.index < len(plan):
            check_finite(trainer.run, bool(trainer.finite), at)
            trainer.save()
    at.image_steps += meters.total("image_steps")
    at.epoch, at.index = at.epoch + 1, 0


def batches(trainer: Trainer, plan: list[Tensor]) -> Iterator[Batch]:
    """Augmented images of the planned batches, starting at the run's position in this epoch."""
    at, images, left = trainer.at, trainer.images, plan[trainer.at.index :]
    keys = (trainer.key("augment", at.epoch, place) for place in range(at.index, len(plan)))
    for ids, views in zip(left, images.augmented(left, keys)):
        here = ids.to(trainer.device)
        yield Batch(images=views, labels=images.labels[here], ids=here)


def train_step(trainer: Trainer, batch: Batch) -> None:
    """One batch in, one optimiser step for each loss that the defence yields."""
    at, optimiser, defence = trainer.at, trainer.optimiser, trainer.settings.defence
    benign = is_benign(trainer)
    step = trainer.step(
        batch=batch,
        epoch=at.epoch,
        progress=at.step / trainer.total,
        key=trainer.key("step", at.step),
        # A benign batch gets a copy: what a defence remembers must come from perturbed batches only.
        state=dict(trainer.state) if benign else trainer.state,
        canary=canary_due(at.step, trainer.settings.train.canary_every) and trainer.device.type == "cuda",
    )
    set_learning_rate(trainer)
    if draws(trainer):  # dropout draws from torch: a resumed run draws the same
        torch.manual_seed(trainer.key("torch", at.step).value % 2**63)
    for loss in trainer.regime.losses(step, unperturbed(defence) if benign else defence):
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        trainer.ranks.summed(p.grad for group in optimiser.param_groups for p in group["params"])
        optimiser.step()
        trainer.ranks.same(trainer.buffers)
        trainer.average.update(step.progress)
        trainer.finite &= torch.isfinite(loss.detach())
        trainer.meters.add("loss", loss.detach())
        del loss  # frees its graph: a CUDA graph of the next pass cannot be captured while it exists


def draws(trainer: Trainer) -> bool:
    """Whether a pass of the model may draw from torch, as dropout does: a module of yours, or adapters."""
    return isinstance(trainer.model, Trainable) or trainer.settings.model.train == "lora"


def is_benign(trainer: Trainer) -> bool:
    """Whether this step leaves its batch unperturbed: a share `train.benign` of the steps does."""
    share = trainer.settings.train.benign
    return share > 0 and trainer.key("benign").uniform(torch.tensor([trainer.at.step])).item() < share


def unperturbed(defence: Any) -> Any:
    """The settings of the same defence without its attack."""
    return replace(defence, eps=0.0, steps=0) if isinstance(defence, Inner) else defence


def canary_due(step: int, every: int) -> bool:
    """Whether the canary checks this step: one in `every`, each time one step earlier; with 0 never.

    CA-TRIDE alternates between two attacks. A fixed interval of 500 steps would always check the same one.
    """
    return every > 0 and (step + step // every) % every == 0


def set_learning_rate(trainer: Trainer) -> None:
    """Follow the schedule, step by step."""
    chosen = trainer.settings.optimiser
    for group in trainer.optimiser.param_groups:
        group["lr"] = group["base_lr"] * learning(chosen.schedule, trainer.at.step / trainer.total)


def stop_if_asked(trainer: Trainer, stopping: Callable[[], bool]) -> None:
    """After a signal, save and stop. All ranks must stop together, or the others would wait for ever."""
    if trainer.ranks.any(stopping()):
        trainer.save()
        trainer.run.update_json(status="interrupted")
        path, code = str(trainer.run.path), list(dict.fromkeys(code_named_in(to_dict(trainer.settings))))
        raise Interrupted(
            f"stopped and saved at step {trainer.at.step}; to resume: "
            + worded(
                f"anchorhold resume {quote(path)}" + "".join(f" --allow {quote(name)}" for name in code),
                f"ah.resume({path!r}{f', allow={code}' if code else ''})",
            )
        )


def evaluate_epoch(trainer: Trainer) -> dict[str, Any]:
    """Measure the model after an epoch, and append the numbers to metrics.jsonl."""
    at, train = trainer.at, trainer.settings.train
    with trainer.average.lent():
        row: dict[str, Any] = {"step": at.step, "epoch": at.epoch, **trainer.meters.means(), **trainer.regime.signs()}
        if at.epoch % train.evaluate_every == 0 or at.epoch == train.epochs:
            row |= trainer.regime.evaluate()
    trainer.meters.reset()
    row = trainer.ranks.agreed(row)  # ranks may differ in the last bits, but must decide alike
    row["seconds"] = round(trainer.clock.seconds(), 2)
    trainer.run.append(row)
    return row


def judge_epoch(trainer: Trainer, row: dict[str, Any]) -> None:
    """Warn, or stop the run, if the numbers of an epoch show that something is wrong."""
    judge_canary(trainer.run, row, trainer.report)
    trainer.regime.judge(trainer.run, trainer.at, row, trainer.report)


def export(trainer: Trainer) -> None:
    """Write the model and mark the run as done."""
    run, at = trainer.run, trainer.at
    judge_attacks(run, trainer.settings, at, trainer.report)
    if run.writes:
        with trainer.average.lent(), trainer.tuning.merged():
            trainer.model.save(run.path / EXPORT)
            weights = fingerprint_of(trainer.model)
        run.update_json(
            status="done",
            final=run.metrics()[-1] if run.metrics() else {},
            seconds=round(at.seconds, 2),
            image_steps=round(at.image_steps),
            export=digest(run.path / EXPORT),
            weights=weights,  # identifies the model in audits, independent of its path
        )
    trainer.ranks.wait()
