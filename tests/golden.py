"""Nothing changed: the numbers of two versions of the project, bit for bit, on this machine.

    PYTHONPATH=../before/src python tests/golden.py record before.json
    PYTHONPATH=src           python tests/golden.py record after.json
    python tests/golden.py diff before.json after.json

A record holds, on digits and one thread: for every recipe the weights after two epochs and what was logged, audits in
both protocols, by other methods and strong, an index and a search, a table of `compare`; besides streamed images, L2
and two processes. It uses the public names and the command line only, so that it runs before and after a redesign.
Numbers depend on the machine and on PyTorch: compare records of one machine.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import anchorhold as ah

TIMES = ("second", "audit s", "commit", "date", "version", "when", "file", "path")  # in names of what may differ
RENAMED: dict[str, str] = {}  # a name before: the same after. For fields that a redesign renames on purpose
EPOCHS = {"train.epochs": 2, "train.collapse_warmup": 9}


def weights(path: Path) -> str:
    """A digest of every tensor in a model's file, whatever else the file says."""
    tensors, digest = load_file(path), hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + str(tensors[name].dtype).encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()[:16]


def numbers(tree: Any, name: str = "") -> dict[str, Any]:
    """Every number of a tree of dicts and lists, by its place; times left out."""
    if any(word in name.rsplit("/", 1)[-1] for word in TIMES):
        return {}
    if isinstance(tree, dict):
        return {key: value for part, sub in tree.items() for key, value in numbers(sub, f"{name}/{part}").items()}
    if isinstance(tree, list | tuple):
        return {key: value for at, sub in enumerate(tree) for key, value in numbers(sub, f"{name}/{at}").items()}
    return {name: tree} if isinstance(tree, int | float) and not isinstance(tree, bool) else {}


def command(*words: str) -> str:
    """What `anchorhold WORDS` prints, in this process."""
    from anchorhold.cli.main import app

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        app(list(words), standalone_mode=False)
    return said.getvalue()


def trained(out: Path, recipe: str, data: Any = None, **overrides: Any) -> dict[str, Any]:
    run = ah.fit(None, data or ah.dataset("digits"), recipe, out, overrides=EPOCHS | overrides, device="cpu")
    return {"weights": weights(out / "model.safetensors"), **numbers(run.metrics(), "log")}


def audited(model: Any, **options: Any) -> dict[str, Any]:
    found = ah.audit(model, ah.dataset("digits"), device="cpu", resamples=50, **options).to_dict()
    kept = {name: found[name] for name in ("clean", "protocols", "curve", "strong") if found.get(name)}
    return {**numbers(kept), "flags": sorted(flag["name"] for flag in found["flags"])}


def photos(root: Path) -> Path:
    """Six classes of eight small images, each class a colour of its own with noise over it."""
    draw = np.random.default_rng(7)
    for label in range(6):
        place = root / f"class{label}"
        place.mkdir(parents=True)
        base = draw.integers(40, 215, 3)
        for number in range(8):
            noise = draw.integers(-40, 40, (20, 20, 3))
            Image.fromarray((base + noise).clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return root


def recipes() -> list[str]:
    """The recipes that train on digits, as `anchorhold recipes` lists them."""
    return [line.split()[0] for line in command("recipes").splitlines() if line[:1].isalpha() and " " in line.strip()]


def streamed(place: Path) -> dict[str, Any]:
    found = {}
    for store in ("resident", "stream"):
        settings = {"data.store": store, "data.workers": 1, "data.resize": 16, "data.crop": 12, "model.weights": ""}
        settings |= {"model.backbone": "small", "model.dim": 16, "batch.pairs": 8, "batch.mining_pairs": 0}
        data = ah.dataset("folder", place / "photos")
        found[store] = trained(place / store, "hm-lga", data, **settings)
    return found


def two_ranks(place: Path) -> dict[str, Any]:
    found = {}
    for recipe in ("hm-lga", "catride", "adml"):
        out = place / f"ranks-{recipe}"
        words = ["train", "digits", "--recipe", recipe, "--epochs", "1", "--device", "cpu", "--out", str(out)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*launch, "-m", "anchorhold", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found[recipe] = weights(out / "model.safetensors")
    return found


def indexed(place: Path) -> dict[str, Any]:
    model = ah.Embedder("small", 16, channels=3, size=(12, 12))
    ah.embed(model, place / "photos", place / "index", batch=8, device="cpu")
    vectors = load_file(place / "index" / "vectors.safetensors")["vectors"]
    hits = ah.search(place / "index", place / "photos" / "class0" / "0.png", 5, model=model, device="cpu").hits
    return {
        "vectors": hashlib.sha256(vectors.numpy().tobytes()).hexdigest()[:16],
        "hits": [[hit.id, hit.distance] for hit in hits],
    }


def compared(place: Path) -> dict[str, Any]:
    command("compare", str(place / "runs"), "--out", str(place / "table.csv"))
    with open(place / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        f"{row['name']}/{RENAMED.get(name, name)}": cell
        for row in rows
        for name, cell in row.items()
        if name and name != "name" and not any(word in name for word in TIMES)
    }


def cases(place: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    photos(place / "photos")
    runs = place / "runs"
    for recipe in recipes():
        yield f"train/{recipe}", lambda recipe=recipe: trained(runs / recipe, recipe)
    for recipe in ("hm-lga", "est", "adml"):
        l2 = {"defence.norm": "l2", "defence.eps": 1.0, **({} if recipe == "adml" else {"defence.alpha": 0.25})}
        yield f"l2/{recipe}", lambda recipe=recipe, l2=l2: trained(place / f"l2-{recipe}", recipe, **l2)
    yield "streamed", lambda: streamed(place)
    yield "ranks", lambda: two_ranks(place)
    model = ah.load(runs / "hm-lga")
    yield (
        "audit",
        lambda: audited(model, limit=60, eps=0.1, steps=8, alpha=0.03, epsilons=(), out=runs / "hm-lga" / "audit"),
    )
    yield "audit/all", lambda: audited(model, limit=30, eps=0.1, steps=4, attacks=["nearest", "margin", "GTT", "ES"])
    yield "audit/adml", lambda: audited(model, limit=40, threat="adml", eps=0.1, seeds=2, epsilons=())
    yield "audit/cw", lambda: audited(model, limit=30, eps=0.1, method="cw", protocols=["corrected"], attacks=["ES"])
    yield "audit/curve", lambda: audited(model, limit=30, eps=0.1, steps=4, epsilons=[0.05, 0.1])
    yield "audit/strong", lambda: audited(model, limit=12, eps=0.1, strength="strong", epsilons=())
    yield "index", lambda: indexed(place)
    yield "compare", lambda: compared(place)


def record(out: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in cases(Path(folder)):
            began = time.monotonic()
            try:
                found[name] = make()
            except ah.AnchorholdError as error:  # what is refused, is part of the record
                found[name] = {"refused": type(error).__name__}
            print(f"{name:24}{len(found[name]):6} numbers {time.monotonic() - began:6.1f} s", flush=True)
    out.write_text(json.dumps({"torch": torch.__version__, "cases": found}, indent=1, sort_keys=True) + "\n")


def diff(before: Path, after: Path) -> int:
    """How many cases differ; each is named with the first number that does."""
    old, new = (json.loads(path.read_text())["cases"] for path in (before, after))
    wrong = 0
    for case in sorted({**old, **new}):
        a, b = (flat({case: side.get(case)}) for side in (old, new))
        a = {RENAMED.get(name, name): value for name, value in a.items()}
        apart = [name for name in sorted({**a, **b}) if a.get(name) != b.get(name)]
        wrong += bool(apart)
        first = f"; {apart[0]}: {a.get(apart[0])} before, {b.get(apart[0])} after" if apart else ""
        print(f"{case:24}{'DIFFERS in ' + str(len(apart)) if apart else 'the same':>14} of {len(a)}{first}")
    return wrong


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {key: value for part, sub in tree.items() for key, value in flat(sub, f"{name}/{part}").items()}
    if isinstance(tree, list):
        return {key: value for at, sub in enumerate(tree) for key, value in flat(sub, f"{name}/{at}").items()}
    return {name: tree}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", out]:
            record(Path(out))
        case ["diff", before, after]:
            sys.exit(diff(Path(before), Path(after)) > 0)
        case _:
            sys.exit(__doc__)
