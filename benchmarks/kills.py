"""Kill commands at random moments, resume them, and compare the result bit for bit with an undisturbed run.

    python benchmarks/kills.py --kills 100 --out results/kills.json

Every defence and pretraining, training by torchrun with two ranks, an audit, a strong audit, an index and a sweep, on
digits and tiny images, on a CPU with one thread. Some kills come at a moment drawn over the measured duration of the
command, the others inside a write: with half of a file written, before or after it is renamed, between the two renames
of a checkpoint, or with half a line of metrics.jsonl. A command is killed up to three times, then left to its end.

Weights, checkpoints, metrics, rows of audits, receipts and vectors have to be equal; times may differ. Nothing that a
killed process left may lie in the folder at the end. Torch is imported once: each command is a fork of this process.
"""

import argparse
import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, and for the processes of torchrun

import torch
from PIL import Image
from safetensors import safe_open

import anchorhold as ah
from anchorhold.config.build import to_dict
from anchorhold.config.recipes import settings_from
from anchorhold.config.settings import DEFENCE_SETTINGS
from anchorhold.device import computer_of
from anchorhold.index.embedding import embed
from anchorhold.runs import folder as record
from anchorhold.runs.provenance import provenance
from anchorhold.runs.writing import appended
from anchorhold.training.fit import resume
from anchorhold.training.sweeping import sweep

Work = Callable[[Path], object]

RECIPES = (
    *("natural", "hm-lga", "hm-free", "act", "est", "ses", "rest", "catride", "adml", "madry", "trades"),
    *("proxy-minmax", "proxy-trades", "classify", "distil", "distil-logits"),
)
SMALL: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"backbone": "small", "dim": 8, "weights": "", "freeze_batchnorm": False},
    "train": {"epochs": 2, "precision": "fp32", "checkpoint_seconds": 0.0},  # a checkpoint after every step
}
BATCHES = {
    "pairs": {"pairs": 56, "mining_pairs": 0},
    "classes": {"classes": 5, "instances": 20},
    "images": {"images": 112},
}
AUDIT: dict[str, Any] = {"limit": 24, "batch": 8, "steps": 2, "resamples": 20, "device": "cpu"}
PARTS = ("half", "before", "after", "line")  # where in a write a kill may come
MOST = 3  # kills of one command
LONGEST = 600  # seconds that a command may take
TIMES = ("seconds", "minutes", "hours", "made", "cost", "sealed")  # a checkpoint's seal is a hash of its times too


# The commands ------------------------------------------------------------------------------------------------


def changes(recipe: str) -> dict[str, Any]:
    """Settings that make a few steps of a recipe, with two steps of its attack."""
    whole = to_dict(settings_from(recipe, {"data": {"name": "digits"}}))
    batch = BATCHES[whole["batch"]["kind"]]
    defence = {"steps": 2} if "steps" in whole["defence"] else {}
    return {**SMALL, "batch": batch, "defence": defence}


def train(recipe: str, data: ah.Dataset, folder: Path) -> object:
    """Begin a training, or go on with it."""
    if (folder / "run.json").exists():
        return resume(folder, data=data, device="cpu")
    return ah.fit(None, data, recipe, folder, overrides=changes(recipe), device="cpu")


def audit(data: ah.Dataset, strength: Any, attacks: list[str], folder: Path) -> object:
    model = ah.Embedder("small", 8, channels=1, size=8)
    return ah.audit(model, data.test, attacks=attacks, strength=strength, out=folder, **AUDIT)


def index(photos: Path, folder: Path) -> object:
    return embed(ah.Embedder("small", 8, size=8), photos, folder, batch=1, device="cpu")


def swept(data: ah.Dataset, folder: Path) -> object:
    audited = {name: value for name, value in AUDIT.items() if name not in ("batch", "device")}
    audited |= {"attacks": ("ES", "TMA"), "limit": 8}
    vary = {"train.seed": ["1", "2"]}
    return sweep(data, "natural", vary, folder, overrides=changes("natural"), audited=audited, device="cpu")


def cases(scratch: Path) -> dict[str, Work]:
    """Every command by name, to be called with a folder: again and again until it ends."""
    digits = ah.dataset("digits")
    covered = {to_dict(settings_from(recipe, {}))["defence"]["name"] for recipe in RECIPES}
    assert covered == set(DEFENCE_SETTINGS), f"no recipe of {set(DEFENCE_SETTINGS) - covered} is killed"
    photos = scratch / "photos"
    photos.mkdir()
    for number in range(60):
        Image.new("RGB", (8, 8), (4 * number, 255 - 4 * number, 99)).save(photos / f"{number:02d}.png")
    found: dict[str, Work] = {f"train {recipe}": partial(train, recipe, digits) for recipe in RECIPES}
    return found | {
        "audit": partial(audit, digits, "standard", ["CA+", "ES", "TMA"]),
        "strong audit": partial(audit, digits, "strong", ["ES"]),
        "embed": partial(index, photos),
        "sweep": partial(swept, digits),
    }


# A kill inside a write -----------------------------------------------------------------------------------------


class Writes:
    """Counts the moments of writing in this process, and kills it at one of them."""

    def __init__(self, part: str = "", at: int = 0) -> None:
        self.part, self.at = part, at
        self.counts = dict.fromkeys(PARTS, 0)
        self._fsync, self._replace, self._append = os.fsync, os.replace, appended

    def _passed(self, part: str) -> bool:
        self.counts[part] += 1
        return part == self.part and self.counts[part] == self.at

    def fsync(self, file: int) -> None:
        if self._passed("half"):
            length = os.fstat(file).st_size
            with suppress(OSError):  # the file is open for reading; its name is known to the system
                os.truncate(f"/dev/fd/{file}", length // 2)
            die()
        self._fsync(file)

    def replace(self, old: Any, new: Any) -> None:
        if self._passed("before"):
            die()
        self._replace(old, new)
        if self._passed("after"):
            die()

    def append(self, path: Path, line: str) -> None:
        if self._passed("line"):
            self._append(path, line[: len(line) // 2])
            die()
        self._append(path, line)

    def watched(self) -> ExitStack:
        """A context in which every write of this process passes by here."""
        stack = ExitStack()
        for place, name, own in (
            (os, "fsync", self.fsync),
            (os, "replace", self.replace),
            (record, "appended", self.append),
        ):
            stack.enter_context(mock.patch.object(place, name, own))
        return stack


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Work, folder: Path, writes: Writes, counts: Path, log: Path) -> int:
    """A child that does the work; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        with writes.watched():
            work(folder)
        counts.write_text(json.dumps(writes.counts))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def ended(child: int, kill_after: float | None) -> int:
    """Wait for a child, and kill it after some seconds; how it ended, as in `subprocess`."""
    begun = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        spent = time.monotonic() - begun
        if kill_after is not None and spent >= kill_after:
            os.kill(child, signal.SIGKILL)
            kill_after = None
        if spent > LONGEST:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise SystemExit(f"a command hangs: process {child}")
        time.sleep(0.002)


# Two ranks -----------------------------------------------------------------------------------------------------


def launched(folder: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Two ranks that begin a training or go on with it."""
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "anchorhold"]
    if (folder / "run.json").exists():
        job += ["resume", str(folder), "--device", "cpu"]
    else:
        assigned = {f"{part}.{name}": value for part, own in changes("hm-lga").items() for name, value in own.items()}
        assigned.pop("data.name")
        sets = [word for name, value in assigned.items() for word in ("--set", f"{name}={value}")]
        job += ["train", "digits", "--recipe", "hm-lga", "--out", str(folder), "--device", "cpu", *sets]
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with open(log, "w") as file:
        return subprocess.Popen(job, env=outer, stdout=file, stderr=file)


def torchrun(folder: Path, log: Path, kill_after: float | None, chance: random.Random) -> tuple[bool, bool]:
    """Whether the job came to its end, and whether a rank was killed; time is counted from its first checkpoint on."""
    begins = time.time()
    job = launched(folder, log)
    killed, begun = False, None
    deadline = time.monotonic() + LONGEST
    while job.poll() is None:
        if begun is None and _touched(folder, begins):
            begun = time.monotonic()
        if kill_after is not None and begun is not None and time.monotonic() - begun >= kill_after:
            ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
            if ranks:
                with suppress(ProcessLookupError):
                    os.kill(int(chance.choice(ranks)), signal.SIGKILL)
                    killed = True
            kill_after = None
        if time.monotonic() > deadline:
            job.terminate()
            raise SystemExit("torchrun hangs")
        time.sleep(0.01)
    return job.returncode == 0, killed and job.returncode != 0


def _touched(folder: Path, since: float) -> bool:
    """Whether the ranks have begun to write."""
    return any((folder / name).exists() and (folder / name).stat().st_mtime >= since for name in ("run.json",))


# What has to be equal --------------------------------------------------------------------------------------------


def facts(folder: Path) -> dict[str, Any]:
    """Everything in a folder that must not depend on kills, by file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name.endswith(".part") or path.name == ".anchorhold-lock":
            found[name] = "left behind"
        elif "shards" in path.parts or path.is_dir() or path.name == "previous.safetensors":
            continue
        elif path.suffix == ".safetensors":
            found[name] = _tensors(path)
        elif path.suffix == ".json":
            found[name] = _untimed(json.loads(path.read_text().replace(str(folder), "FOLDER")))
        elif path.suffix == ".jsonl":
            found[name] = [_untimed(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".csv":
            with open(path, newline="") as file:
                found[name] = [_untimed(row) for row in csv.DictReader(file)]
        elif path.suffix == ".png" and "receipts" in path.parts:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _tensors(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        found: dict[str, Any] = {}
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            mark = hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            found[name] = [str(tensor.dtype), list(tensor.shape), mark]
        if "state" in (file.metadata() or {}):
            found["state"] = _untimed(json.loads(file.metadata()["state"]))
    return found


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if not any(word in str(k).lower() for word in TIMES)}
    return [_untimed(each) for each in value] if isinstance(value, list) else value


def differing(wanted: Any, found: Any, place: str = "") -> Iterator[str]:
    """Where two results differ."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted({*wanted, *found}, key=str):
            yield from differing(wanted.get(key), found.get(key), f"{place}/{key}")
    elif wanted != found:
        yield f"{place}: {str(wanted)[:80]} and {str(found)[:80]}"


# Killing -----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of one command."""

    kills: int = 0
    inside_writes: int = 0
    trials: int = 0
    equal: int = 0
    seconds_undisturbed: float = 0.0
    inside: dict[str, int] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)

    def compare(self, name: str, wanted: dict[str, Any], folder: Path) -> None:
        self.trials += 1
        wrong = list(differing(wanted, facts(folder)))
        self.equal += not wrong
        self.differ += wrong[:5]
        print(f"{name}: {self.kills} kills so far, {'equal' if not wrong else wrong[:5]}", flush=True)


def killed(name: str, work: Work, wanted_kills: int, chance: random.Random, scratch: Path) -> Tally:
    """Kill a command that many times, over as many trials as that takes."""
    tally, counts, log = Tally(), scratch / "counts.json", scratch / "log"
    begun = time.monotonic()
    _check(ended(forked(work, scratch / "undisturbed", Writes(), counts, log), None), name, log)
    tally.seconds_undisturbed = round(time.monotonic() - begun, 2)
    wanted, moments = facts(scratch / "undisturbed"), json.loads(counts.read_text())
    parts = [part for part in PARTS if moments[part]]
    while tally.kills < wanted_kills:
        folder = scratch / f"trial-{tally.trials}"
        for _ in range(min(chance.randint(1, MOST), wanted_kills - tally.kills)):
            part = chance.choice(parts) if chance.random() < 0.5 else ""
            writes = Writes(part, chance.randint(1, moments[part]) if part else 0)
            after = None if part else chance.uniform(0, tally.seconds_undisturbed)
            code = ended(forked(work, folder, writes, counts, log), after)
            if code != -signal.SIGKILL:
                _check(code, name, log)
                break  # it was quicker
            tally.kills += 1
            tally.inside_writes += bool(part)
            if part:
                tally.inside[part] = tally.inside.get(part, 0) + 1
        _check(ended(forked(work, folder, Writes(), counts, log), None), name, log)
        tally.compare(name, wanted, folder)
    return tally


def killed_ranks(wanted_kills: int, chance: random.Random, scratch: Path) -> Tally:
    """Kill one of two ranks that many times: torchrun then ends the other."""
    tally, log = Tally(), scratch / "log"
    begun = time.monotonic()
    done, _ = torchrun(scratch / "undisturbed", log, None, chance)
    _check(not done, "torchrun", log)
    tally.seconds_undisturbed = round(time.monotonic() - begun, 2)
    wanted = facts(scratch / "undisturbed")
    trained = max(row["seconds"] for row in record.Run(scratch / "undisturbed").metrics())
    while tally.kills < wanted_kills:
        folder = scratch / f"trial-{tally.trials}"
        for _ in range(min(chance.randint(1, MOST), wanted_kills - tally.kills)):
            done, dead = torchrun(folder, log, chance.uniform(0, trained), chance)
            tally.kills += dead
            if not dead:
                _check(not done, "torchrun", log)
                break
        done, _ = torchrun(folder, log, None, chance)
        _check(not done, "torchrun", log)
        tally.compare("torchrun", wanted, folder)
    return tally


def _check(code: int, name: str, log: Path) -> None:
    if code:
        raise SystemExit(f"{name} ended with {code} without being killed:\n{log.read_text()[-3000:]}")


def shares(kills: int, names: list[str]) -> dict[str, int]:
    """How many kills each command gets: audits, indexes and sweeps more than a defence, torchrun fewer in all."""
    weights = {name: 5 if name.startswith("train") else 6 if name == "torchrun" else 11 for name in names}
    total, given, passed = sum(weights.values()), {}, 0
    for name, weight in weights.items():
        before, passed = passed, passed + weight
        given[name] = kills * passed // total - kills * before // total
    return given


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kills.py", description=__doc__, formatter_class=about)
    parser.add_argument("--kills", type=int, default=100, help="how many in all")
    parser.add_argument("--only", default="", help="commands, such as 'train natural,embed'; by default all")
    parser.add_argument("--seed", type=int, default=0, help="another seed kills at other moments")
    parser.add_argument("--out", default="", help="the JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        works = cases(Path(place))
        known = [*works, "torchrun"]
        names = [name.strip() for name in args.only.split(",")] if args.only else known
        if unknown := sorted({*names} - {*known}):
            raise SystemExit(f"there is no {unknown[0]!r}; choose from {', '.join(known)}")
        found = {}
        for name, count in shares(args.kills, names).items():
            scratch = Path(place) / name.replace(" ", "-")
            scratch.mkdir()
            chance = random.Random(f"{args.seed} {name}")
            tally = (
                killed_ranks(count, chance, scratch)
                if name == "torchrun"
                else killed(name, works[name], count, chance, scratch)
            )
            found[name] = vars(tally)
    whole = {
        "schema": "anchorhold.kills/1",
        "seed": args.seed,
        "kills": sum(tally["kills"] for tally in found.values()),
        "inside_writes": sum(tally["inside_writes"] for tally in found.values()),
        "trials": sum(tally["trials"] for tally in found.values()),
        "equal": sum(tally["equal"] for tally in found.values()),
        "seconds": round(time.monotonic() - begun, 1),
        **provenance(computer_of(torch.device("cpu"))),
        "commands": found,
    }
    text = json.dumps(whole, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")
    if whole["equal"] != whole["trials"]:
        raise SystemExit("a command that was killed and resumed ended differently")


if __name__ == "__main__":
    main()
