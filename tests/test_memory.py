"""No query × gallery matrix is ever held whole, and no file takes much more memory than it has bytes."""

import pickle
import tarfile
from pathlib import Path

import pytest
import torch

from tests.peak import run_measured

SCRIPT = """
import torch
from anchorhold.geometry import ranks, retrieve
from anchorhold.metrics import evaluate

torch.set_num_threads(1)

def work(count):
    x = torch.nn.functional.normalize(torch.rand(count, 8), dim=1)
    labels, own = torch.arange(count) // 4, torch.arange(count)
    {work}

work(600)
before = peak()
work(8_000)
print((peak() - before) / 2**20)
"""


@pytest.mark.medium
def test_the_memory_of_the_process_that_starts_a_script_is_not_counted() -> None:
    held = bytes(range(256)) * 2**20
    assert float(run_measured("print(peak())").stdout) < len(held) / 2


@pytest.mark.medium
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(
            "retrieve(x, x, 5, query_labels=labels, gallery_labels=labels, exclude=own, chunk=256)",
            marks=pytest.mark.slow,
        ),
        pytest.param("ranks(x, x, own.roll(1), exclude=own, chunk=256)", marks=pytest.mark.slow),
        "evaluate(x, labels, chunk=256)",
    ],
)
def test_memory_grows_with_the_chunk_and_not_with_the_square(work: str) -> None:
    done = run_measured(SCRIPT.format(work=work))
    assert done.returncode == 0, done.stderr
    whole = 8_000**2 * 4 / 2**20  # 244 MiB
    assert float(done.stdout) < whole / 2, done.stdout


@pytest.mark.slow
def test_a_large_gallery_is_searched_by_fewer_queries_at_a_time() -> None:
    work = "retrieve(torch.rand(1024, 8), torch.rand(25 * count, 8), 5)"
    done = run_measured(SCRIPT.format(work=work))
    assert done.returncode == 0, done.stderr
    whole = 1024 * 25 * 8_000 * 4 / 2**20  # 781 MiB
    assert float(done.stdout) < whole / 2, done.stdout


READING = """
import sys
from anchorhold.errors import AnchorholdError
from anchorhold.index.sources import source_at
from anchorhold.model.weights import read_tensors

before = peak()
try:
    {work}
except AnchorholdError as error:
    print(error, file=sys.stderr)
print((peak() - before) / 2**20)
"""
CLAIM = 2**28  # floats, 1 GiB


def grown(work: str, *arguments: str) -> tuple[float, str]:
    """MiB that a process grows by while it reads a file, and what it said."""
    done = run_measured(READING.format(work=work), *arguments, timeout=120)
    assert done.returncode == 0, done.stderr
    return float(done.stdout), done.stderr


def legacy(whole: bytes) -> bytes:
    """A checkpoint in torch's old format around a pickle that no pickler would write."""
    head = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    return b"".join(pickle.dumps(part, 2) for part in head) + b"\x80\x02" + whole + b"." + pickle.dumps([], 2)


def named(value: bytes) -> bytes:
    return b"}X\x01\x00\x00\x00w" + value + b"s"  # {"w": value}


def storage(count: int) -> bytes:
    claim = b"J" + count.to_bytes(4, "little")
    return b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + claim + b"NtQ"


def tensor(held: int, size: int, stride: int = 1) -> bytes:
    shape = b"J" + size.to_bytes(4, "little") + b"\x85K" + bytes([stride]) + b"\x85"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(held) + b"K\x00" + shape + b"\x89NtR"


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole",
    [
        named(tensor(CLAIM, CLAIM)),
        named(tensor(2, CLAIM)),
        named(tensor(2, CLAIM, stride=0)),
    ],
    ids=["storage", "tensor", "repeated"],
)
def test_a_checkpoint_cannot_claim_more_than_it_has(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "small.pth"
    path.write_bytes(legacy(whole))  # without the list of storages, whose data are then not missed
    assert path.stat().st_size < 500
    work = "for t in read_tensors(sys.argv[1]).values(): t.add(1)"  # a tensor that came through is used
    took, said = grown(work, str(path))
    assert took < 300 and "small.pth" in said, (took, said)


@pytest.mark.slow
def test_an_archive_that_unpacks_to_more_is_refused(tmp_path: Path) -> None:
    import zipfile

    torch.save({"w": torch.zeros(2**26)}, tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(tmp_path / "small.pth", "w", 8) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    took, said = grown("read_tensors(sys.argv[1])", str(tmp_path / "small.pth"))
    assert took < 100 and "small.pth" in said, (took, said)


@pytest.mark.slow
def test_a_member_of_a_tar_is_bounded(tmp_path: Path) -> None:
    for name, size in (("a.png", 100 * 2**20), ("b.png", 400 * 2**20)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    with tarfile.open(tmp_path / "p.tgz", "w:gz", compresslevel=1) as tar:
        tar.add(tmp_path / "a.png", "a.png")
        tar.add(tmp_path / "b.png", "b.png")
    work = "for _, f in source_at(sys.argv[1]).read(lambda n: True): print(f and len(f.getbuffer()), file=sys.stderr)"
    took, said = grown(work, str(tmp_path / "p.tgz"))
    assert said.split() == ["104857600", "None"] and took < 250, (took, said)
