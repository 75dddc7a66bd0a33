"""How fast training and auditing are, as JSON: on a GPU against goals (results/notes/speed.md), on a CPU against loops.

    python benchmarks/speed.py cpu --out speed-cpu.json
    python benchmarks/speed.py gpu --root CUB_200_2011 --weights resnet18_imagenet.safetensors --out speed-gpu.json
    python benchmarks/speed.py gpu … --only ascent,hm,audit-robust

These machines are noisy: what is compared is measured in one run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.batches import pair_batches
from anchorhold.data.store import decode
from anchorhold.defences.hardness import lga, raise_hardness
from anchorhold.geometry import unit
from anchorhold.model.frozen import frozen
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Objective
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from anchorhold.runs.folder import Run
from anchorhold.runs.provenance import provenance
from anchorhold.triplets import SAMPLERS, candidates, mine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests import reference  # the slow truth

from anchorhold.device import computer_of
from anchorhold.perturb.problem import Problem

Found = dict[str, Any]


def seconds(work: Callable[[], object], times: int = 5, before: int = 2) -> float:
    """The mean time of a call, the GPU waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(before):
        work()
    wait()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - begun) / times


# On a CPU ---------------------------------------------------------------------------------------------------


def samplers(count: int = 1024, dim: int = 64) -> Found:
    """Every sampler against plain loops: who may be drawn, for half of `count` embeddings as anchors."""
    labels = torch.arange(count // 2).repeat_interleave(2) % (count // 8)
    embeddings = unit(Key.of(0).normal(torch.arange(count), (dim,)) + 2 * Key.of(1).normal(labels, (dim,)))
    rows, classes = embeddings.tolist(), labels.tolist()
    found: Found = {}
    for name in SAMPLERS:
        begun = time.perf_counter()
        slow = reference.candidate_sets(name, rows, classes)
        plain = time.perf_counter() - begun
        fast = candidates(name, embeddings, labels)
        for sets, mask in zip(slow, fast):
            assert all(set(row.nonzero().flatten().tolist()) == each for row, each in zip(mask, sets)), name
        quick = seconds(partial(mine, name, embeddings, labels, Key.of(2)))  # drawing included
        found[name] = {"loops_s": plain, "fast_s": quick, "ratio": plain / quick}
    return found


def objectives(samples: int = 32, gallery: int = 6000, dim: int = 64) -> Found:
    """What CA and QA climb, against plain loops over the gallery."""
    items = unit(Key.of(3).normal(torch.arange(gallery), (dim,)))
    labels = torch.arange(gallery) % 100
    scene = Scene.of(items, labels)
    ids = torch.arange(samples)
    moved = unit(items[ids] + 0.1 * Key.of(4).normal(ids, (dim,)))
    rows, changed = items.tolist(), moved.tolist()
    found: Found = {}
    for name in ("CA+", "CA-", "QA+", "QA-"):
        goal = goal_named(name, "published")
        targets = goal.targets(scene, ids, Key.of(5))
        assert targets is not None
        objective = goal.objective(scene, ids, targets)
        begun = time.perf_counter()
        slow = []
        for sample, target in zip(range(samples), targets[:, 0].tolist()):
            # CA: the list is the query's, and the candidate moves; QA: the query moves, and its list with it.
            asks = rows[target] if name.startswith("CA") else changed[sample]
            aimed = changed[sample] if name.startswith("CA") else rows[target]
            lists = [[reference.distance(asks, item) for item in rows]]
            slow.append(-reference.hinge([reference.distance(asks, aimed)], lists, name.endswith("+")))
        plain = time.perf_counter() - begun
        fast = objective.value(moved[:, None], ids)
        assert torch.allclose(fast, torch.tensor(slow, dtype=fast.dtype), atol=1e-9), name
        quick = seconds(partial(objective.value, moved[:, None], ids))
        found[name] = {"loops_s": plain, "fast_s": quick, "ratio": plain / quick}
    return found


def hardness_ascent(out: Path, epochs: int = 3) -> Found:
    """HM[S, LGA]'s ascent on digits after some epochs, units leaving, against the loop that keeps all of them."""
    data = ah.dataset("digits")
    run = ah.fit(None, data, "hm-lga", out, overrides={"train": {"epochs": epochs, "evaluate_every": epochs}})
    model, loss = ah.load(run.path).double(), run.metrics()[-1]["loss"]
    settings = settings_from("hm-lga", {"data": {"name": "digits"}}).defence
    assert data.train.images is not None
    plain = quick = steps = kept = 0.0
    for batch in pair_batches(data.train.labels, 64, Key.of(6)):
        images = data.train.images[batch].permute(0, 3, 1, 2).double() / 255
        with frozen(model) as embed:
            with torch.no_grad():
                clean = embed(images)
            chosen = mine("softhard", clean, data.train.labels[batch], Key.of(7))
            rows = torch.stack([chosen.anchor, chosen.positive, chosen.negative], dim=1)
            goal = raise_hardness(lga(torch.tensor(loss, dtype=torch.float64), settings.margin).expand(len(rows)))
            ball, budget = Ball(settings.eps), Budget(settings.steps, settings.alpha)
            begun = time.perf_counter()
            slow = _every_unit(embed, images[rows], goal, ball, budget)
            middle = time.perf_counter()
            fast = ascend(Problem(embed, goal, ball, budget), images[rows], embedded=clean[rows])
            quick, plain = quick + time.perf_counter() - middle, plain + middle - begun
            assert (slow - fast.images).abs().max() * 255 <= 1e-6
            steps, kept = steps + fast.image_steps, kept + budget.steps * rows.numel()
    return {"loops_s": plain, "fast_s": quick, "ratio": plain / quick, "image_steps_share": steps / kept}


def _every_unit(
    embed: Callable[[Tensor], Tensor], units: Tensor, goal: Objective, ball: Ball, budget: Budget
) -> Tensor:
    """The ascent written down plainly: all units in every step, signed steps, projection."""
    x, positions = units.clone(), torch.arange(len(units))
    for _ in range(budget.steps):
        x.requires_grad_(True)
        value = goal.value(embed(x.flatten(0, 1)).unflatten(0, units.shape[:2]), positions)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        x = (x.detach() + budget.alpha * gradient.sign()).clamp(units - ball.eps, units + ball.eps).clamp(0, 1)
    return x.detach()


def cpu(args: argparse.Namespace) -> Found:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        found = {"samplers": samplers(), "objectives": objectives(), "ascent": hardness_ascent(Path(scratch) / "hm")}
    whole = {**provenance(computer_of(torch.device("cpu"))), "speed": found}
    Path(args.out).write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return found


# On a GPU ---------------------------------------------------------------------------------------------------


def ascent(model: ah.Embedder) -> Found:
    """Microseconds of an image-step of which no image is dropped, compiled and not, by batch size."""
    device = torch.device("cuda")
    model = model.to(device).to(memory_format=torch.channels_last)
    found: Found = {}
    for batch in (24, 48, 112, 168, 512):
        images = Key.of(0).uniform(torch.arange(batch, device=device), (3, 224, 224), torch.float32)
        row = {}
        for name, fast in (("plain", False), ("compiled", True)):
            with frozen(model, fast) as embed, torch.autocast("cuda", torch.bfloat16):
                with torch.no_grad():
                    clean = embed(images)
                away = Objective(partial(_away, clean), first=_sum)
                problem = Problem(embed, away, Ball(8 / 255), Budget(32, 3 / 255))
                work = partial(ascend, problem, images[:, None])
                row[name] = 1e6 * seconds(work, 2, 1) / (32 * batch)
        found[str(batch)] = row
    return found


def _away(clean: Tensor, e: Tensor, at: Tensor) -> Tensor:
    return (e[:, 0] - clean[at]).square().sum(1)


def _sum(e: Tensor, at: Tensor) -> Tensor:
    return e[:, 0].sum(1)


def training(data: ah.Dataset, weights: str, recipe: str, out: Path, **defence: Any) -> Found:
    """Milliseconds of a training step, everything included: the mean over the sixth epoch of the recipe's own 75.

    The run is left there. Fewer epochs from the start would be another run: CA-TRIDE's steps grow with their share.
    """
    changes: dict[str, Any] = {
        "model": {"weights": weights},
        "batch": {"pairs": 56},  # the step that the goals are set for
        "train": {"evaluate_every": 100, "compile": "on", "checkpoint_seconds": 1e9},
        "defence": defence,
    }
    run = Run(out)
    with suppress(Enough):
        ah.fit(None, data, recipe, out, overrides=changes, report=Until(run, epochs=6))
    rows = run.metrics()
    fifth, sixth = rows[4], rows[5]
    return {
        "ms": 1000 * (sixth["seconds"] - fifth["seconds"]) / (sixth["step"] - fifth["step"]),
        "epoch_ms": [1000 * (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(rows)],
        "active_first": sixth.get("active_first"),
        "active_last": sixth.get("active_last"),
        "image_steps_a_step": sixth.get("image_steps"),
        "canary_gap": [row["canary_gap"] for row in rows if "canary_gap" in row],
        "settings": {"recipe": recipe, **defence},
    }


class Enough(Exception):
    """So many epochs were wanted."""


class Until(Silent):
    """Ends a run when its record has N epochs."""

    def __init__(self, run: Run, epochs: int) -> None:
        self.run, self.epochs = run, epochs

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
        def advance(done: int, note: str = "") -> None:
            if name == "training" and len(self.run.metrics()) >= self.epochs:
                raise Enough

        yield advance


def in_memory(split: ah.Split) -> ah.Split:
    """The same images decoded, so that several trainings need not do it again."""
    return ah.Split(split.name, split.labels, split.classes, images=decode(split, 256).images)


def auditing(model: str, data: ah.Dataset, batch: int, out: Path | None = None) -> Found:
    """Seconds of `audit --full` in both protocols, from call to result, with images decoded already or not."""
    begun = time.perf_counter()
    found = ah.audit(ah.load(model, "cuda"), data, limit=0, batch=batch, epsilons=(), out=out)
    return {
        "seconds": time.perf_counter() - begun,
        "work_seconds": found.seconds,
        "image_steps": found.image_steps,
        "runs": {run.label: run.seconds for run in found.runs},
        "ers": {name: each.ers.value for name, each in found.protocols.items() if each.ers},
    }


def start(root: str, weights: str, out: Path) -> Found:
    """Seconds from the command to its first training step: decoding, upload, the ascent compiled. And to the 40th.

    No program that was compiled before is used: the cache is an empty folder. The files have been read before.
    """
    command = [sys.executable, "-m", "anchorhold", "train", "cub", "--root", root, "--recipe", "hm-lga"]
    command += ["--weights", weights, "--out", str(out), "--set", "train.compile=on"]
    caches = tempfile.TemporaryDirectory()
    cold = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{caches.name}/a", "TRITON_CACHE_DIR": f"{caches.name}/b"}
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=cold)
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append((time.perf_counter() - begun, line.strip()))
        if line.startswith("about "):  # said after 40 steps: the training pass is compiled at the third
            break
    child.kill()
    child.wait()
    first = [at for at, line in lines if line.startswith("the first step ended")]
    assert first, f"the training did not begin: {lines}"
    later = [at for at, line in lines if line.startswith("about ")]
    return {"to_first_step": first[0], "to_step_40": later[0] if later else None, "lines": lines}


def gpu(args: argparse.Namespace) -> Found:
    only = set(args.only.split(",")) if args.only else set()
    wanted = lambda name: not only or name in only  # noqa: E731
    found: Found = {}
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # past it, everything would silently run uncompiled
    scratch = Path(tempfile.mkdtemp())
    data = ah.dataset("cub", args.root)

    def keep(name: str, value: Found) -> None:
        found[name] = value
        print(name, json.dumps(value), flush=True)
        Path(args.out).write_text(
            json.dumps({**provenance(computer_of(torch.device("cuda"))), "speed": found}, indent=1)
        )

    if wanted("ascent"):
        keep("ascent", ascent(ah.Embedder("resnet18", 512, args.weights)))
    trained: dict[str, tuple[str, Found]] = {
        "hm": ("hm-lga", {}),
        "hm-32": ("hm-lga", {"steps": 32}),
        "tride": ("catride", {}),
    }
    if any(map(wanted, trained)):
        held = ah.Dataset(data.name, in_memory(data.train), in_memory(data.test))
        for name, (recipe, defence) in trained.items():
            if wanted(name):
                keep(name, training(held, args.weights, recipe, scratch / name, **defence))
        del held
    if wanted("audit-robust") and args.robust:
        keep("audit-robust", auditing(args.robust, data, args.batch))
    if wanted("audit-natural") and args.natural:
        keep("audit-natural", auditing(args.natural, data, args.batch))
    if wanted("start"):
        keep("start", start(args.root, args.weights, scratch / "start"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["cpu", "gpu"])
    parser.add_argument("--root", default="CUB_200_2011", help="where CUB lies")
    parser.add_argument("--weights", default="imagenet")
    parser.add_argument("--robust", default="", help="a robust model for the audit")
    parser.add_argument("--natural", default="", help="a naturally trained model for the audit")
    parser.add_argument("--batch", type=int, default=512, help="of the audit")
    parser.add_argument("--only", default="", help="some of the parts, separated by commas")
    parser.add_argument("--out", default="speed.json")
    args = parser.parse_args()
    {"cpu": cpu, "gpu": gpu}[args.where](args)


if __name__ == "__main__":
    main()
