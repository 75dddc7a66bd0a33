"""How time and memory grow with steps, triplets, images and gallery, as JSON.

    python benchmarks/scale.py --out scale.json                 # on a GPU where there is one
    python benchmarks/scale.py --device cpu --threads 2 --out scale-cpu.json
    python benchmarks/scale.py --only gallery,search
    python benchmarks/scale.py --device cpu --quick             # small sizes of all, in less than a minute
    python benchmarks/scale.py --only stores --root CUB_200_2011 --weights resnet18_imagenet.safetensors

Every row is measured in a process of its own, so that its peak is its own: `peak_mb` is all that the process ever held
at a time, torch itself included (row `nothing`), `gpu_peak_mb` what was allocated on the GPU. Where a row has a
`limit_mb` that its peak is above, the exit status is 1; the numbers are written all the same.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = dict[str, Any]


# What is measured: each makes its material, then gives the work to be timed --------------------------------


def nothing(device: str) -> Callable[[], Found]:
    """What a process costs that only loads torch."""
    import torch

    return lambda: {"threads": torch.get_num_threads()}


def _embeddings(count: int, dim: int, classes: int, device: str) -> Any:
    """Unit vectors around centres of their classes, so that R@1 is between 0 and 1."""
    import torch

    from anchorhold.geometry import unit

    torch.manual_seed(0)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, dim)
    points = torch.randn(count, dim)
    for part in range(0, count, 2**14):  # in parts: the material must not be what fills the memory
        points[part : part + 2**14] += 0.35 * centres[labels[part : part + 2**14]]
        points[part : part + 2**14] = unit(points[part : part + 2**14])
    return points.to(device), labels.to(device)


def metrics(device: str, count: int, dim: int, classes: int) -> Callable[[], Found]:
    """R@k, mAP and mAP@R of a whole test split against itself."""
    from anchorhold.metrics import evaluate

    e, labels = _embeddings(count, dim, classes, device)
    return lambda: evaluate(e, labels).percent()


def nmi(device: str, count: int, dim: int, classes: int, iterations: int) -> Callable[[], Found]:
    """NMI of the same, as many clusters as classes, after at most N iterations (scores are made with 25).

    k-means ends where nothing changes any more, which on such points in many dimensions may be after the first.
    """
    from anchorhold.metrics import kmeans, normalised_mutual_information
    from anchorhold.random import Key

    e, labels = _embeddings(count, dim, classes, device)
    key = Key.of(0)
    return lambda: {"NMI": 100 * normalised_mutual_information(kmeans(e, classes, key, iterations), labels)}


def gallery(device: str, count: int, dim: int = 512, queries: int = 1000) -> Callable[[], Found]:
    """R@k and mAP of 1,000 queries against a gallery of `count`."""
    from anchorhold.metrics import evaluate

    e, labels = _embeddings(count + queries, dim, count // 5, device)
    asked, searched = slice(0, queries), slice(queries, None)
    return lambda: evaluate(e[asked], labels[asked], gallery=e[searched], gallery_labels=labels[searched]).percent()


def search(device: str, count: int, dim: int = 128, queries: int = 100, k: int = 10) -> Callable[[], Found]:
    """The exact 10 nearest of `count` items for 100 queries."""
    from anchorhold.geometry import retrieve

    e, _ = _embeddings(count, dim, 1000, device)
    return lambda: {"nearest": round(float(retrieve(e[:queries] + 0.01, e, k).distances[:, 0].mean()), 4)}


def training(device: str, steps: int = 8, pairs: int = 56) -> Callable[[], Found]:
    """Milliseconds of a min-max step that drops no triplet: inner `steps` on `pairs` triplets.

    On a GPU ResNet-18 at 224 pixels, on a CPU a small net at 16.
    """
    import torch

    import anchorhold as ah

    gpu = device == "cuda"
    count, side = 2 * max(pairs, 112), 256 if gpu else 16
    torch.manual_seed(0)
    labels = torch.arange(count) % 28
    pixels = torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8)
    split = ah.Split("noise", labels, tuple(map(str, range(28))), images=pixels)
    small = {"model": {"backbone": "small", "dim": 64, "weights": ""}, "data": {"resize": 0, "crop": 0}}
    large = {"model": {"weights": ""}, "data": {"resize": 256, "crop": 224}}
    changes: dict[str, Any] = {
        **(large if gpu else small),
        "train": {
            "epochs": 3,
            "evaluate_every": 99,
            "checkpoint_seconds": 1e9,
            "on_collapse": "warn",
            "compile": "off",
        },
        "batch": {"pairs": pairs},
        "defence": {"steps": steps},
    }

    def work() -> Found:
        with tempfile.TemporaryDirectory() as place:
            data = ah.Dataset("noise", split, split)
            first, second, _ = ah.fit(None, data, "minmax", place, overrides=changes, device=device).metrics()
        spent = second["seconds"] - first["seconds"]
        return {"ms": 1000 * spent / (second["step"] - first["step"]), "image_steps_a_step": second["image_steps"]}

    return work


def images(device: str, count: int, store: str, side: int = 256) -> Callable[[], Found]:
    """Images a second of an epoch from files: decoded into memory first, or streamed."""
    import numpy as np
    import torch
    from PIL import Image

    from anchorhold.console import Silent
    from anchorhold.data.images import load_images
    from anchorhold.data.settings import DataSettings
    from anchorhold.data.splits import Split

    place = tempfile.TemporaryDirectory()
    noise = np.random.default_rng(0)
    own = Path(place.name)
    for number in range(32):  # different files; the others are links to them
        coarse = Image.fromarray(noise.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        coarse.resize((300, 280), Image.Resampling.BILINEAR).save(own / f"{number}.jpg", quality=90)
    for number in range(32, count):
        (own / f"{number}.jpg").symlink_to(own / f"{number % 32}.jpg")
    paths = tuple(own / f"{number}.jpg" for number in range(count))
    split = Split("files", torch.arange(count) % 2, ("a", "b"), paths, root=own)

    def work() -> Found:
        with place:
            begun = time.perf_counter()
            settings = DataSettings(resize=side, crop=0, store=store)  # type: ignore[arg-type]
            held = load_images(split, settings, torch.device(device), Silent()).store
            loaded = time.perf_counter()
            seen = sum(len(frames) for frames in held.frames(torch.randperm(count).split(112)))
            return {"load_s": loaded - begun, "epoch_images_a_second": seen / (time.perf_counter() - loaded)}

    return work


def stores(device: str, root: str, weights: str, store: str) -> Callable[[], Found]:
    """Milliseconds of an HM-LGA step on CUB, its images held in memory or streamed."""
    import anchorhold as ah

    changes: dict[str, Any] = {
        "model": {"weights": weights},
        "data": {"store": store},
        "batch": {"pairs": 56},
        # On a GPU compiled, so that the steps that a store must keep up with are as fast as they come.
        "train": {"epochs": 4, "evaluate_every": 99, "checkpoint_seconds": 1e9, "on_collapse": "warn"}
        | {"compile": "on" if device == "cuda" else "off"},
    }

    def work() -> Found:
        with tempfile.TemporaryDirectory() as place:
            data = ah.dataset("cub", root)
            _, first, second, _ = ah.fit(None, data, "hm-lga", place, overrides=changes, device=device).metrics()
        return {"ms": 1000 * (second["seconds"] - first["seconds"]) / (second["step"] - first["step"])}

    return work


def ranks(device: str, ranks: int) -> Callable[[], Found]:
    """An audit of all test digits by N ranks, with one thread each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]

    def work() -> Found:
        found = json.loads(_run([*torchrun, __file__, "--rank"], {**os.environ, "OMP_NUM_THREADS": "1"}))
        return {"audit_seconds": found["seconds"], "ers": found["ers"]}

    return work


def one_rank() -> None:
    """What each of them does; the first says how long the audit took, from the call to its result."""
    import torch

    import anchorhold as ah
    from anchorhold.distributed import started

    torch.set_num_threads(1)
    data, model = ah.dataset("digits"), ah.Embedder("small", 64, channels=1, size=(8, 8))
    ah.audit(
        model, data, limit=64, steps=1, batch=32, epsilons=(), device="cpu"
    )  # once before: what is loaded is loaded
    begun = time.perf_counter()
    found = ah.audit(model, data, limit=0, batch=64, epsilons=(), device="cpu")
    seconds = time.perf_counter() - begun
    if started()[0] == 0:
        score = found.protocols["corrected"].ers
        print(json.dumps({"seconds": seconds, "ers": score and score.value}), flush=True)
    os._exit(0)


# Which sizes -----------------------------------------------------------------------------------------------

SOP = {"count": 60502, "dim": 512, "classes": 11316}  # the shape of its test split
TENTH = {"count": 6050, "dim": 512, "classes": 1131}
KINDS = ("resident", "stream")
LIMIT_MB = {"search": 2000, "metrics": 4000, "nmi": 4000}  # of host memory, where the CPU computes

# What is measured, at which sizes, and at which with --quick.
PARTS: dict[str, tuple[Callable[..., Any], list[Found], list[Found]]] = {
    "nothing": (nothing, [{}], [{}]),
    "steps": (training, [{"steps": n} for n in (1, 4, 8, 16, 32)], [{"steps": 1}]),
    "triplets": (training, [{"pairs": n} for n in (14, 28, 56, 112, 224)], [{"pairs": 112, "steps": 1}]),
    "images": (
        images,
        [{"count": n, "store": kind} for kind in KINDS for n in (500, 1000, 2000, 4000)],
        [{"count": 200, "store": kind} for kind in KINDS],
    ),
    "gallery": (gallery, [{"count": n} for n in (5_000, 10_000, 20_000, 50_000, 100_000)], [{"count": 5_000}]),
    "search": (search, [{"count": n} for n in (10_000, 100_000, 1_000_000)], [{"count": n} for n in (10_000, 100_000)]),
    "metrics": (metrics, [TENTH, SOP], [TENTH]),
    "nmi": (nmi, [{**SOP, "iterations": n} for n in (1, 25)], [{**TENTH, "iterations": 1}]),
    "ranks": (ranks, [{"ranks": n} for n in (1, 2)], []),  # by CPUs
    "stores": (stores, [{"store": kind} for kind in KINDS], []),  # needs CUB
}


def peak_bytes() -> int:
    """The most memory this process has held. Not `ru_maxrss` on Linux: it begins with the peak of the parent."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measured(part: str, sizes: Found, device: str, threads: int) -> Found:
    """One row, in this process."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    work = PARTS[part][0](device, **sizes)
    gpu = device == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    found = work()
    if gpu:
        torch.cuda.synchronize()
    spent = time.perf_counter() - begun
    peak = peak_bytes() / 1e6
    sizes = {name: size for name, size in sizes.items() if name != "root"}
    row = {**sizes, "seconds": spent, "peak_mb": peak, **found}
    if gpu:
        return row | {"gpu_peak_mb": torch.cuda.max_memory_allocated() / 1e6}
    return row | ({"limit_mb": LIMIT_MB[part]} if part in LIMIT_MB else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves it as it is")
    parser.add_argument("--only", default="", help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small sizes only: less than a minute on two cores")
    parser.add_argument("--root", default="", help="where CUB lies; without it `stores` is left out")
    parser.add_argument("--weights", default="", help="what the model of `stores` starts from")
    parser.add_argument("--out", default="")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)  # what the processes are told
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # and what `ranks` runs
    args = parser.parse_args()
    if args.rank:
        one_rank()
    if args.row:
        print(json.dumps(measured(args.row[0], json.loads(args.row[1]), args.device, args.threads)))
        return
    # The parent stays small: a child starts with the peak of who made it.
    device = args.device if args.device != "auto" else _run([sys.executable, "-c", _ASK])
    parts = args.only.split(",") if args.only else list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no {', '.join(unknown)}; choose some of {', '.join(PARTS)}")
    about = json.loads(_run([sys.executable, "-c", _ABOUT.format(device=device)]))
    about |= {"threads": args.threads, "cores": os.cpu_count(), "quick": args.quick, "load": os.getloadavg()}
    found: dict[str, list[Found]] = {}
    above, text = 0, ""
    print(f"{'what':9} {'size':54} {'seconds':>9} {'peak MB':>9} {'limit MB':>9}", file=sys.stderr)
    for part in parts:
        _, usual, quick = PARTS[part]
        sizes = quick if args.quick else usual
        if part == "stores":
            sizes = [{"root": args.root, "weights": args.weights, **each} for each in sizes if args.root]
        for each in sizes:
            command = [sys.executable, __file__, "--device", device, "--threads", str(args.threads)]
            row = json.loads(_run([*command, "--row", part, json.dumps(each)]))
            found.setdefault(part, []).append(row)
            above += row["peak_mb"] > row.get("limit_mb", float("inf"))
            size = ", ".join(f"{name} {value}" for name, value in each.items() if name not in ("root", "weights"))
            print(
                f"{part:9} {size:54} {row['seconds']:9.2f} {row['peak_mb']:9.0f} {row.get('limit_mb', ''):>9}",
                file=sys.stderr,
                flush=True,
            )
            text = json.dumps({**about, "scale": found}, indent=1)
            if args.out:  # after every row: who stops it keeps what there is
                Path(args.out).write_text(text + "\n", encoding="utf-8")
    print(text)
    if above:
        sys.exit(f"{above} rows took more memory than their limit")


_ASK = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
_ABOUT = """
import json, torch
from anchorhold.device import computer_of
from anchorhold.runs.provenance import provenance
print(json.dumps(provenance(computer_of(torch.device("{device}")))))
"""


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
