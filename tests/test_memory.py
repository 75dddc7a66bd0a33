"""No query × gallery matrix is ever held whole."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from anchorhold.geometry import ranks, retrieve
from anchorhold.metrics import evaluate

torch.set_num_threads(1)
unit = 1 if sys.platform == "darwin" else 1024

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def work(count):
    x = torch.nn.functional.normalize(torch.rand(count, 8), dim=1)
    labels, own = torch.arange(count) // 4, torch.arange(count)
    {work}

work(600)
before = peak()
work(8_000)
print((peak() - before) / 2**20)
"""


@pytest.mark.parametrize(
    "work",
    [
        "retrieve(x, x, 5, query_labels=labels, gallery_labels=labels, exclude=own, chunk=256)",
        "ranks(x, x, own.roll(1), exclude=own, chunk=256)",
        "evaluate(x, labels, chunk=256)",
    ],
)
def test_memory_grows_with_the_chunk_and_not_with_the_square(work: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(work=work)], capture_output=True, text=True, check=True)
    whole = 8_000**2 * 4 / 2**20  # 244 MiB
    assert float(done.stdout) < whole / 2, done.stdout


def test_a_large_gallery_is_searched_by_fewer_queries_at_a_time() -> None:
    work = "retrieve(torch.rand(1024, 8), torch.rand(25 * count, 8), 5)"
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(work=work)], capture_output=True, text=True, check=True)
    whole = 1024 * 25 * 8_000 * 4 / 2**20  # 781 MiB
    assert float(done.stdout) < whole / 2, done.stdout
