"""Several ranks are one: whatever their number, the same losses, weights and audits. Over gloo, one thread a rank."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file

from anchorhold.distributed import Ranks
from anchorhold.errors import DataError
from anchorhold.perturb.problem import Objective

from .job import LONG, RECIPES

JOB = str(Path(__file__).with_name("job.py"))


def launch(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Start so many ranks on this machine and wait for their end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*torchrun, *words], env=environment(), capture_output=True, text=True, timeout=600)


def environment() -> dict[str, str]:
    """Without a rank of its own, as where these tests themselves run under torchrun."""
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**outer, "OMP_NUM_THREADS": "1"}


def each_to_its_end(place: Path, ranks: int, *words: str) -> list[subprocess.CompletedProcess[str]]:
    """Start the ranks without torchrun, and return how each ended; its output is kept in `place`.

    When one rank fails, torchrun ends the others, often before they have said anything. Here each ends by itself. The
    store by which they find each other lies in this process, so its port is taken and it outlives every rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    files = [(place / f"rank{rank}.out", place / f"rank{rank}.err") for rank in range(ranks)]
    with ExitStack() as stack:
        running = []
        for rank, paths in enumerate(files):
            given = environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out, err = (stack.enter_context(open(path, "w")) for path in paths)
            running.append(subprocess.Popen([sys.executable, *words], env=given, stdout=out, stderr=err))
            stack.callback(running[-1].kill)  # does nothing to one that has ended
        codes = [process.wait(timeout=600) for process in running]
    texts = [[path.read_text() for path in paths] for paths in files]
    return [subprocess.CompletedProcess(words, code, *text) for code, text in zip(codes, texts)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank of a job of one, two and three found."""
    results, photos = {}, tmp_path_factory.mktemp("photos")
    for number in range(42):
        Image.new("RGB", (8, 8), (6 * number, 255 - 6 * number, 99)).save(photos / f"{number:02d}.png")
    for count in (1, 2, 3):
        out = tmp_path_factory.mktemp(f"ranks{count}")
        done = launch(count, JOB, str(out), str(photos))
        assert done.returncode == 0, done.stderr[-3000:]
        results[count] = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(count)]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_number_of_ranks_does_not_change_a_training(found: dict[int, list[dict[str, Any]]], recipe: str) -> None:
    alone = found[1][0][recipe]
    assert alone["metrics"]["step"] == (38 if recipe == "few" else 5)
    for count in (2, 3):
        first = found[count][0][recipe]
        for name, value in alone["metrics"].items():
            if name != "seconds":
                assert first["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), (count, name)
        for number, rank in enumerate(found[count]):
            for name, value in alone["weights"].items():
                if number and "proxies" in name:  # the first rank writes them
                    continue
                assert rank[recipe]["weights"][name] == pytest.approx(value, rel=1e-8, abs=1e-8), (count, name)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LONG)
def test_in_float64_every_weight_stays_the_same_for_many_steps(
    found: dict[int, list[dict[str, Any]]], recipe: str
) -> None:
    """A choice made by one rank's share would show; in fp32 signed steps make large differences of rounding."""
    alone = torch.tensor(found[1][0]["long"][recipe], dtype=torch.float64)
    assert len(alone) > 1000 and alone.abs().max() > 0.1
    for count in (2, 3):
        for rank in found[count]:
            apart = (torch.tensor(rank["long"][recipe], dtype=torch.float64) - alone).abs().max()
            assert apart < 1e-11, (count, float(apart))


@pytest.mark.slow
def test_the_number_of_ranks_does_not_change_an_audit(found: dict[int, list[dict[str, Any]]]) -> None:
    alone = found[1][0]["audit"]
    assert len(alone["ids"]) == 12
    for count in (2, 3):
        for rank in found[count]:
            assert rank["audit"] == alone


@pytest.mark.slow
def test_the_number_of_ranks_does_not_change_an_index(found: dict[int, list[dict[str, Any]]]) -> None:
    assert len({rank["embed"] for ranks in found.values() for rank in ranks}) == 1


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job_with_a_message_and_resume_goes_on(tmp_path: Path) -> None:
    words = ["train", "digits", "--recipe", "catride", "--epochs", "1", "--set", "train.checkpoint_seconds=0"]
    left, died = each_to_its_end(tmp_path, 2, JOB, "die", *words, "--out", str(tmp_path / "died"))
    assert died.returncode == 7, died.stderr[-3000:]
    assert left.returncode == 2 and "error: rank 0 lost the other ranks" in left.stderr, left.stderr[-3000:]
    info = json.loads((tmp_path / "died/run.json").read_text())
    assert info["status"] == "training"
    resumed = launch(2, "-m", "anchorhold", "resume", str(tmp_path / "died"))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert resumed.stdout.count("run folder:") == 1  # one rank speaks for all
    left_alone = launch(2, "-m", "anchorhold", *words, "--out", str(tmp_path / "whole"))
    assert left_alone.returncode == 0, left_alone.stderr[-3000:]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("died", "whole"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_an_error_is_said_on_every_rank_and_nobody_waits(tmp_path: Path) -> None:
    for rank, done in enumerate(each_to_its_end(tmp_path, 2, "-m", "anchorhold", "resume", str(tmp_path / "nothing"))):
        assert done.returncode == 2, done.stderr[-3000:]
        assert f"error{' on rank 1' * rank}: " in done.stderr and "is not a run folder" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ranks_that_do_not_have_the_same_say_so(tmp_path: Path) -> None:
    done = launch(2, JOB, "differ", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "rank 1 has other weights or another checkpoint than rank 0" in done.stderr


@pytest.mark.slow
def test_only_what_ranks_can_do_together_runs_under_torchrun() -> None:
    done = launch(2, "-m", "anchorhold", "demo")
    # Of either rank: who ends first has the other ended by torchrun.
    assert done.returncode != 0 and ": demo runs in one process; use torchrun only for train, resume" in done.stderr


def test_shares_are_in_order_and_leave_nothing_out() -> None:
    for size in range(1, 6):
        for count in range(20):
            shares = [Ranks(rank, size).share(count) for rank in range(size)]
            if count < 2 * size:  # too few to share: every rank does them all
                assert shares == [slice(0, count)] * size
                continue
            assert [i for share in shares for i in range(share.start, share.stop)] == list(range(count))
            sizes = [share.stop - share.start for share in shares]
            assert max(sizes) - min(sizes) <= 1


def test_one_process_is_the_whole() -> None:
    ranks, rows = Ranks(), torch.arange(6.0).reshape(3, 2)
    assert ranks.gathered(rows, 3) is rows
    assert ranks.spread([0, 1], lambda items: rows[list(items)], [1, 1]).equal(rows[:2])
    assert ranks.sums(3, 1, 2.5) == [1.0, 2.5]
    assert ranks.agreed("this") == "this" and ranks.collected(4) == [4] and ranks.any(True) and not ranks.any(False)
    objective = Objective(lambda e, at: e)
    assert objective.shared(ranks, 3) is objective
    with pytest.raises(DataError, match="mine"):
        ranks.once(_fails)


def _fails() -> None:
    raise DataError("mine")
