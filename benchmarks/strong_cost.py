"""How much more does today's strong audit cost than that of an earlier commit? Both in turns in one command, as JSON.

    git worktree add ../before 925594a                                 # before `starts`, `adam`, `momentum`, `refine`
    python benchmarks/strong_cost.py --before ../before --models runs/natural,runs/hm-lga --out cost.json

Models are trained on digits, with one thread. Each audit runs in a process of its own, as both codes cannot be loaded
together. `seconds` are of the call; `cpu` is the processor's time in it, which other work on the machine changes less.
The attacks and how much of the curve they climb are those of `KINDS`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from parts import Parts

import anchorhold as ah

EPS = 0.06
CURVE = (0.0075, 0.015, 0.03, 0.06)  # those of an audit at 0.06
NEIGHBOUR = ("LTM", "GTM")  # ES would add the distance that it is after
KINDS: Mapping[str, Mapping[str, Any]] = {
    "neighbour": {"attacks": NEIGHBOUR, "epsilons": ()},  # a wrong nearest neighbour, whose members have changed
    "neighbour, curve": {"attacks": NEIGHBOUR, "epsilons": CURVE},
    "all": {"attacks": None, "epsilons": ()},  # the nine attacks of ERS
}
COSTS = ("seconds", "cpu", "image_steps")


def audited(model: str, kind: str, limit: int) -> dict[str, Any]:
    """One strong audit, by the code that this process loaded. It calls only what both commits have."""
    torch.set_num_threads(1)
    loaded, data = ah.load(model), ah.dataset("digits")
    begun, spent = time.monotonic(), time.process_time()
    found = ah.audit(
        loaded,
        data,
        protocols=("corrected",),
        eps=EPS,
        strength="strong",
        limit=limit,
        device="cpu",
        examine=None,
        **KINDS[kind],
    )
    seconds, cpu = time.monotonic() - begun, time.process_time() - spent
    left = found.protocols["strong"].columns["GTM"].value  # what any attack on a neighbour left
    cost = {"seconds": round(seconds, 2), "cpu": round(cpu, 2), "image_steps": found.image_steps}
    return cost | {"left": left, "queries": limit, "commit": found.provenance["commit"]}


def apart(code: Path, model: str, kind: str, limit: int) -> dict[str, Any]:
    """The same in a process of its own, with the code of this folder."""
    command = [sys.executable, __file__, "--one", kind, "--models", model, "--limit", str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(code.resolve() / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many times as much the later audits cost, in all turns together.

    >>> ratios([{"seconds": 2, "cpu": 1, "image_steps": 10}], [{"seconds": 3, "cpu": 2, "image_steps": 15}])
    {'seconds': 1.5, 'cpu': 2.0, 'image_steps': 1.5}
    """
    return {cost: sum(each[cost] for each in after) / sum(each[cost] for each in before) for cost in COSTS}


def compared(codes: Mapping[str, Path], model: str, kind: str, limit: int, turns: int) -> dict[str, Any]:
    """Both codes on one model, in turns; the second turn begins with the other one."""
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in codes}
    for turn in range(turns):
        for name in list(codes)[:: -1 if turn % 2 else 1]:
            made[name].append(apart(codes[name], model, kind, limit))
            print(name, model, kind, made[name][-1], flush=True)
    return {**made, "ratio": ratios(made["before"], made["after"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a working tree of the earlier commit")
    parser.add_argument("--models", required=True, help="run folders of models trained on digits, separated by commas")
    parser.add_argument("--kinds", default="neighbour;neighbour, curve;all", help="separated by semicolons")
    parser.add_argument("--limit", type=int, default=160, help="queries")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", default="cost.json")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not (asked.before or asked.one):
        parser.error("name a working tree of the earlier commit: --before FOLDER")
    if asked.one:
        print(json.dumps(audited(asked.models, asked.one, asked.limit)))
        return
    from anchorhold.device import computer_of
    from anchorhold.runs.provenance import provenance

    torch.set_num_threads(1)
    about = provenance(computer_of(torch.device("cpu")))
    made = Parts(asked.out, "cost", {"schema": "anchorhold.strong-cost/1", **about, "eps": EPS, "curve": list(CURVE)})
    codes = {"before": asked.before, "after": Path(__file__).parents[1]}
    for kind in asked.kinds.split(";"):
        for model in asked.models.split(","):
            made.keep(f"{Path(model).name}: {kind}", compared(codes, model, kind, asked.limit, asked.turns))


if __name__ == "__main__":
    main()
