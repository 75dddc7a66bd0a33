"""How fast training and auditing are, as JSON: on a GPU against the goals of docs/speed.md, on a CPU against loops.

    python benchmarks/speed.py cpu --out speed-cpu.json
    python benchmarks/speed.py gpu --root CUB_200_2011 --weights resnet18_imagenet.safetensors --out speed-gpu.json
    python benchmarks/speed.py gpu … --only ascent,hm,audit-robust

These machines are noisy: what is compared is measured in one run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anchorhold as ah
from anchorhold.model.frozen import frozen
from anchorhold.perturb.ascend import Budget, Objective, ascend
from anchorhold.perturb.ball import Ball
from anchorhold.random import Key
from anchorhold.record import provenance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.reference, the slow truth

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


# On a GPU ---------------------------------------------------------------------------------------------------


def ascent(model: ah.Embedder) -> Found:
    """Microseconds of an image-step that nobody leaves, compiled and not, by batch size."""
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
                away = Objective(lambda e, at, clean=clean: (e[:, 0] - clean[at]).square().sum(1), first=_sum)
                work = lambda: ascend(embed, images[:, None], away, Ball(8 / 255), Budget(32, 3 / 255))  # noqa: B023, E731
                row[name] = 1e6 * seconds(work, 2, 1) / (32 * batch)
        found[str(batch)] = row
    limit = torch._dynamo.utils.counters["stats"].get("recompile_limit", 0)
    assert not limit, "the compiler met its limit of recompilations, so some of this ran uncompiled"
    return found


def _sum(e: Tensor, at: Tensor) -> Tensor:
    return e[:, 0].sum(1)


def training(data: ah.Dataset, weights: str, recipe: str, out: Path, **defence: Any) -> Found:
    """Milliseconds of a training step, everything included: the mean over the sixth epoch."""
    changes: dict[str, Any] = {
        "model": {"weights": weights},
        "train": {"epochs": 7, "evaluate_every": 100, "compile": "on", "checkpoint_seconds": 1e9},
        "defence": defence,
    }
    run = ah.fit(None, data, recipe, out, overrides=changes)
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


def auditing(model: str, data: ah.Dataset, batch: int, out: Path | None = None) -> Found:
    """Seconds of `audit --full` in both protocols, from call to result, with images decoded already or not."""
    begun = time.perf_counter()
    found = ah.audit(ah.load(model, "cuda"), data, limit=0, batch=batch, out=out)
    return {
        "seconds": time.perf_counter() - begun,
        "work_seconds": found.seconds,
        "image_steps": found.image_steps,
        "runs": {run.label: run.seconds for run in found.runs},
        "ers": {name: each.ers.value for name, each in found.protocols.items() if each.ers},
    }


def start(root: str, weights: str, out: Path) -> Found:
    """Seconds from the command to its first training step, decoding, upload and compilation included."""
    command = [sys.executable, "-m", "anchorhold", "train", "cub", "--root", root, "--recipe", "hm-lga"]
    command += ["--weights", weights, "--out", str(out), "--set", "train.compile=on"]
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append((time.perf_counter() - begun, line.strip()))
        if line.startswith("about "):  # said after the first 20 steps
            break
    child.terminate()
    child.wait()
    return {"to_step_20": lines[-1][0] if lines else None, "lines": lines}


def gpu(args: argparse.Namespace) -> Found:
    only = set(args.only.split(",")) if args.only else set()
    wanted = lambda name: not only or name in only  # noqa: E731
    found: Found = {}
    scratch = Path(tempfile.mkdtemp())
    data = ah.dataset("cub", args.root)

    def keep(name: str, value: Found) -> None:
        found[name] = value
        print(name, json.dumps(value), flush=True)
        Path(args.out).write_text(json.dumps({**provenance(torch.device("cuda")), "speed": found}, indent=1))

    if wanted("ascent"):
        keep("ascent", ascent(ah.Embedder("resnet18", 512, args.weights)))
    if wanted("hm"):
        keep("hm", training(data, args.weights, "hm-lga", scratch / "hm"))
    if wanted("hm-32"):
        keep("hm-32", training(data, args.weights, "hm-lga", scratch / "hm32", steps=32))
    if wanted("tride"):
        keep("tride", training(data, args.weights, "catride", scratch / "tride"))
    if wanted("audit-robust"):
        keep("audit-robust", auditing(args.robust or str(scratch / "hm"), data, args.batch))
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
    parser.add_argument("--robust", default="", help="a trained model for the audit; by default the one trained here")
    parser.add_argument("--natural", default="", help="a naturally trained model for the audit")
    parser.add_argument("--batch", type=int, default=512, help="of the audit")
    parser.add_argument("--only", default="", help="some of the parts, separated by commas")
    parser.add_argument("--out", default="speed.json")
    args = parser.parse_args()
    gpu(args)


if __name__ == "__main__":
    main()
