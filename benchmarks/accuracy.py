"""What speed costs in strength, as JSON: the fast path beside a slow one that takes no liberties, on CUB and one GPU.

    python benchmarks/accuracy.py --root CUB_200_2011 --weights resnet18_imagenet.safetensors \\
        --checkpoint cub-hm-lga --out accuracy.json
    python benchmarks/accuracy.py … --only slow-0,fast-0        # parts may be run apart, into the same file

`slow-SEED` trains HM[S, LGA] in TF32, not compiled, with every unit kept for all its steps; `fast-SEED` as recipes do.
Both are then audited alike. `terms` attacks one checkpoint, with the same targets, in fp32 and on the fast path.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from parts import Parts

import anchorhold as ah
from anchorhold.defences.settings import Inner
from anchorhold.device import computer_of
from anchorhold.runs.provenance import provenance

Found = dict[str, Any]
ARMS: dict[str, Found] = {"slow": {"precision": "tf32", "compile": "off"}, "fast": {"compile": "on"}}


@contextmanager
def every_unit_kept() -> Iterator[None]:
    """Inner attacks of training that drop no triplet, not even one that met its goal."""
    usual = vars(Inner)["budget"].fget
    with mock.patch.object(Inner, "budget", property(lambda inner: replace(usual(inner), drop=False))):
        yield


def trained(arm: str, seed: int, data: ah.Dataset, args: argparse.Namespace) -> Found:
    """R@1 and ERS after N pair-epochs, trained the slow or the fast way and audited the same way."""
    changes = {
        "model": {"weights": args.weights},
        "train": {"epochs": args.epochs, "seed": seed, "evaluate_every": args.epochs, **ARMS[arm]},
    }
    with tempfile.TemporaryDirectory() as place:
        fit = partial(ah.fit, None, data, "hm-lga", place, overrides=changes, device="cuda")
        with every_unit_kept() if arm == "slow" else nullcontext():
            run = fit()
        rows = run.metrics()
        found = ah.audit(
            ah.load(run.path, "cuda"), data, limit=args.queries, batch=512, compile="on", epsilons=(), examine=None
        )
    scores = {name: each.ers for name, each in found.protocols.items()}
    return {
        "r1": rows[-1]["r1"],
        "ers": {
            name: score and {"value": score.value, "low": score.low, "high": score.high}
            for name, score in scores.items()
        },
        "seconds": rows[-1]["seconds"],
        "image_steps_a_step": [row["image_steps"] for row in rows],
        "loss": [row["loss"] for row in rows],
        "canary_gap": [row["canary_gap"] for row in rows if "canary_gap" in row],
    }


def terms(data: ah.Dataset, args: argparse.Namespace) -> Found:
    """Every term of ERS of one checkpoint, by an audit in fp32 and by a fast one; a larger term is a weaker attack."""
    ways: dict[str, Found] = {"fp32": {"precision": "fp32", "compile": "off"}, "fast": {"compile": "on"}}
    found: Found = {"queries": args.queries}
    for name, way in ways.items():
        begun = time.perf_counter()
        model = ah.load(args.checkpoint, "cuda")
        seen = ah.audit(model, data, limit=args.queries, batch=512, epsilons=(), examine=None, **way)
        found[name] = {"seconds": time.perf_counter() - begun}
        for protocol, outcome in seen.protocols.items():
            assert outcome.ers is not None
            found[name][protocol] = {"ers": outcome.ers.value, "terms": outcome.ers.terms}
    found["weaker_by"] = {
        protocol: {
            name: value - found["fp32"][protocol]["terms"][name]
            for name, value in found["fast"][protocol]["terms"].items()
        }
        for protocol in ("published", "corrected")
    }
    found["weaker_by_at_most"] = max(max(terms.values()) for terms in found["weaker_by"].values())  # 0.5 is the limit
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="CUB_200_2011", help="where CUB lies")
    parser.add_argument("--weights", default="imagenet")
    parser.add_argument("--checkpoint", default="", help="the model of `terms`; without one it is left out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--only", default="", help="some of the parts, separated by commas")
    parser.add_argument("--out", default="accuracy.json")
    args = parser.parse_args()
    data = ah.dataset("cub", args.root)
    parts: dict[str, Callable[[], Found]] = {
        f"{arm}-{seed}": partial(trained, arm, seed, data, args) for arm in ARMS for seed in (0, 1)
    }
    if args.checkpoint:
        parts["terms"] = partial(terms, data, args)
    chosen = args.only.split(",") if args.only else list(parts)
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"there is no {', '.join(unknown)}; choose some of {', '.join(parts)}")
    checkpoint = Path(args.checkpoint).name if args.checkpoint else None
    about = {
        **provenance(computer_of(torch.device("cuda"))),
        "epochs": args.epochs,
        "queries": args.queries,
        "model": checkpoint,
    }
    made = Parts(args.out, "accuracy", about)
    for name in chosen:
        made.keep(name, parts[name]())


if __name__ == "__main__":
    main()
