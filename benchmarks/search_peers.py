"""How long metrics and search take beside pytorch-metric-learning and faiss, on a CPU, as JSON.

    python benchmarks/search_peers.py --threads 1 --out search_peers.json
    python benchmarks/search_peers.py --quick                        # small sizes, in seconds

Both sides do the same work with the same number of threads, in turns, and must find the same. `ratio` is our time over
theirs: the median over the turns, of seconds on the clock and (`ratio_cpu`) of processor time, which other work on the
machine disturbs less.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import faiss
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor

from anchorhold.device import computer_of
from anchorhold.geometry import retrieve, unit
from anchorhold.metrics import evaluate
from anchorhold.runs.provenance import provenance

Work = Callable[[], Any]
THEIRS = {"R@1": "precision_at_1", "mAP@R": "mean_average_precision_at_r"}


def embeddings(count: int, dim: int, classes: int) -> tuple[Tensor, Tensor]:
    """Unit vectors around the centres of their classes, so that R@1 is between 0 and 1."""
    torch.manual_seed(0)
    labels = torch.arange(count) % classes
    return unit(torch.randn(count, dim) + 0.35 * torch.randn(classes, dim)[labels]), labels


def metrics(queries: int, gallery: int, dim: int, classes: int) -> tuple[Work, Work]:
    """R@1 and mAP@R: of a set against itself (no queries apart), or of queries against a gallery."""
    e, labels = embeddings(queries + gallery, dim, classes)
    theirs = AccuracyCalculator(include=tuple(THEIRS.values()), k="max_bin_count", device=torch.device("cpu"))
    if not queries:
        return lambda: evaluate(e, labels, metrics=tuple(THEIRS)), lambda: theirs.get_accuracy(e, labels)
    (asked, g), (asked_labels, g_labels) = ((x[:queries], x[queries:]) for x in (e, labels))
    return (
        lambda: evaluate(asked, asked_labels, gallery=g, gallery_labels=g_labels, metrics=tuple(THEIRS)),
        lambda: theirs.get_accuracy(asked, asked_labels, g, g_labels, ref_includes_query=False),
    )


def search(queries: int, gallery: int, dim: int, k: int, kind: str) -> tuple[Work, Work]:
    """The exact k nearest; for unit vectors the inner product has the order of the Euclidean distance."""
    e, _ = embeddings(queries + gallery, dim, 1000)
    asked, searched = e[:queries].contiguous(), e[queries:].contiguous()
    index = {"L2": faiss.IndexFlatL2, "IP": faiss.IndexFlatIP}[kind](dim)
    index.add(searched.numpy())
    return lambda: retrieve(asked, searched, k), lambda: index.search(asked.numpy(), k)


def agree(ours: Any, theirs: Any) -> None:
    """Stop where the two did not find the same."""
    if isinstance(theirs, dict):
        gaps = [abs(ours.percent()[name] / 100 - theirs[other]) for name, other in THEIRS.items()]
        assert max(gaps) < 1e-3, f"{ours.percent()} and {theirs}"
    else:
        same = (ours.ids == torch.from_numpy(theirs[1])).double().mean().item()
        assert same > 0.999, f"only {same:.1%} of the neighbours are the same"


def beside(ours: Work, theirs: Work, turns: int) -> dict[str, float]:
    """Seconds of both, in turns."""
    agree(ours(), theirs())
    times: list[list[float]] = [[] for _ in range(4)]
    for turn in range(turns):
        for place in (0, 1) if turn % 2 else (1, 0):
            clock, processor = time.perf_counter(), time.process_time()
            (ours, theirs)[place]()
            times[place].append(time.perf_counter() - clock)
            times[2 + place].append(time.process_time() - processor)
    wall, cpu = ([a / b for a, b in zip(times[i], times[i + 1])] for i in (0, 2))
    return {
        "ratio": round(statistics.median(wall), 3),
        "ratio_cpu": round(statistics.median(cpu), 3),
        "ours_s": round(statistics.median(times[0]), 4),
        "theirs_s": round(statistics.median(times[1]), 4),
    }


def rows(quick: bool) -> dict[str, Callable[[], tuple[Work, Work]]]:
    """What is measured, by name."""
    small, large, many = (600, 6000, 100) if quick else (6000, 60_000, 1000)
    found: dict[str, Callable[[], tuple[Work, Work]]] = {
        f"metrics, {small:,} x 512": partial(metrics, 0, small, 512, small // 60),
        f"metrics, {many:,} of {large:,} x 512": partial(metrics, many, large, 512, large // 5),
    }
    for kind in ("L2", "IP"):
        found[f"search {kind}, {small:,} of {small:,} x 512"] = partial(search, small, small, 512, 10, kind)
        found[f"search {kind}, {many:,} of {large:,} x 512"] = partial(search, many, large, 512, 10, kind)
    return found


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of both sides")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    faiss.omp_set_num_threads(asked.threads)
    about = provenance(computer_of(torch.device("cpu")))
    about["versions"] |= {name: version(name) for name in ("pytorch-metric-learning", "faiss-cpu")}
    found = {name: beside(*make(), asked.turns) for name, make in rows(asked.quick).items()}
    text = json.dumps({**about, "turns": asked.turns, "peers": found}, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
