"""Run a list of trainings and audits, several at once on one machine, within a limit of seconds.

    python benchmarks/lanes.py benchmarks/jobs/cub.toml --place data=DATA --place weights=WEIGHTS \\
        --lanes 3 --seconds 560 --work runs/lanes --keep OUT

Give the same work folder again to go on: finished jobs are skipped, and those that were cut are resumed. At the limit
Ctrl-C is sent to what still runs, so trainings save a checkpoint and audits keep the rows that they have.

What --keep packs makes the work folder again, on another machine too, so that jobs which need a model find it:

    python benchmarks/lanes.py --join OUT --work runs/lanes

Results and logs are always packed, and the rows of audits that did not end. A model is only packed by name,
--kept catride/model.safetensors, as it was written: a file that is too large for an archive is cut into parts, and put
together again by --join.

A job in the file has a `name`, the estimated `seconds`, and one of `train`, `audit`, `algorithm1` (arguments of that
command, without --out) or `python` (a script). In the arguments {name} is the folder of another job, which has to be
done before, or a place. A script cannot resume, so it only starts if its estimate fits in the time left. The
number `lease` puts jobs into groups, each for one stay on a machine; --lease N runs one of them.
"""

import argparse
import io
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # a checkout need not be installed

from anchorhold.runs.provenance import commit  # noqa: E402

RESUMABLE = ("train", "audit", "algorithm1")
COMMANDS = (*RESUMABLE, "python")
KEPT = (
    "run.json",
    "metrics.jsonl",
    "audit.json",
    "algorithm1.json",
    "samples.safetensors",
)  # the curve is in the audit
AGAIN = ("--root", "--model", "--mean", "--std", "--size", "--allow", "--track", "--device")  # of `train` and `resume`
LARGEST = 15 * 2**20  # bytes of the files in one archive
PART = re.compile(r"(.+)\.part-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Job:
    """One command of the list."""

    name: str
    command: str
    arguments: str
    seconds: float  # as estimated
    lease: int = 0

    @property
    def named(self) -> set[str]:
        """The folders and places in its arguments."""
        return {name for _, name, _, _ in string.Formatter().parse(self.arguments) if name}


def jobs_in(file: Path, places: Mapping[str, str], only: Sequence[str] = (), lease: int = 0) -> list[Job]:
    """The jobs of a file in its order; `only` names some of them, perhaps with *, which bring those that they need.

    So does `lease`, the number of a group; 0 is all.
    """
    jobs: dict[str, Job] = {}
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["job"]:
        commands = [command for command in COMMANDS if command in entry]
        known = {"name", "seconds", *commands} == set(entry) - {"lease"} and len(commands) == 1
        assert known, f"{file}: {entry}: give name, seconds and one of {', '.join(COMMANDS)}, perhaps lease"
        job = Job(entry["name"], commands[0], entry[commands[0]], float(entry["seconds"]), int(entry.get("lease", 0)))
        assert re.fullmatch(r"[\w-]+", job.name) and job.name not in jobs, f"{file}: {job.name!r}: name jobs apart"
        unknown = job.named - {*jobs, *places}
        assert not unknown, f"{file}: {job.name} needs {', '.join(unknown)}: no earlier job, and no --place"
        jobs[job.name] = job
    wanted = [name for name in jobs if not only or any(fnmatch(name, pattern) for pattern in only)]
    wanted = [name for name in wanted if lease in (0, jobs[name].lease)]
    for name in wanted:  # grows while it is read
        wanted += [other for other in jobs if other in jobs[name].named and other not in wanted]
    return [job for job in jobs.values() if job.name in wanted]


@dataclass(eq=False)
class Lanes:
    """The jobs and what became of them, by name: state (left, running, done, cut, failed), seconds, exit, last line."""

    jobs: list[Job]
    work: Path
    places: Mapping[str, str]
    added: Mapping[str, str]  # arguments for every job with this command
    count: int
    least: float  # seconds below which nothing long is started
    end: float  # on the monotonic clock
    status: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, tuple["subprocess.Popen[bytes]", float]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)  # in this call
    others: dict[str, dict[str, Any]] = field(default_factory=dict)  # the status of jobs that this call leaves alone

    def __post_init__(self) -> None:
        known = json.loads(self._file.read_text())["jobs"] if self._file.exists() else {}
        self.others = {name: each for name, each in known.items() if name not in {job.name for job in self.jobs}}
        for job in self.jobs:
            fresh = {"command": f"{job.command} {job.arguments}", "estimate": job.seconds, "state": "left"}
            self.status[job.name] = {"seconds": 0.0, **known.get(job.name, {}), **fresh}
            before = known.get(job.name, fresh)
            if before["state"] != "left":
                changed = f"{job.name} was begun as {before['command']!r}: give another --work, or the file as it was"
                assert before["command"] == fresh["command"], changed
                # What ran when a machine was lost is resumed, what failed is tried again.
                self.status[job.name]["state"] = "done" if before["state"] == "done" else "cut"

    @property
    def _file(self) -> Path:
        return self.work / "status.json"

    def run(self) -> None:
        """Start jobs in their order until all are done or the time is over."""
        try:
            while time.monotonic() < self.end:
                for name, (process, _) in list(self.running.items()):
                    if process.poll() is not None:
                        self._ended(name)
                while len(self.running) < self.count and (job := next(self._ready(), None)):
                    self._start(job)
                if not self.running:
                    break
                time.sleep(0.2)
        finally:
            self._stop()

    def _ready(self) -> Iterator[Job]:
        """The jobs that may start now: what they need is done, and the time suffices or they can be resumed."""
        left = self.end - time.monotonic()
        for job in self.jobs:
            if self.status[job.name]["state"] not in ("left", "cut") or job.name in self.tried:
                continue
            needed = [self.status[name]["state"] for name in job.named & self.status.keys()]
            resumable = job.command in RESUMABLE
            lacking = job.seconds - (self.status[job.name]["seconds"] if resumable else 0)
            if set(needed) <= {"done"} and (lacking <= left or (resumable and left >= self.least)):
                yield job

    def _start(self, job: Job) -> None:
        folder = self.work / job.name
        folders = {name: str(self.work / name) for name in self.status}
        split = shlex.split(f"{job.arguments} {self.added.get(job.command, '')}")
        words = [word.format_map({**self.places, **folders}) for word in split]
        if job.command == "train" and any((folder / f"{name}.safetensors").exists() for name in ("last", "previous")):
            words = ["resume", str(folder), *said_again(words)]
        else:
            words = words if job.command == "python" else [job.command, *words, "--out", str(folder)]
        log = self.work / "logs" / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        program = [] if job.command == "python" else ["-m", "anchorhold"]
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        threads = str(max((os.cpu_count() or 1) // self.count, 1))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
        with log.open("a") as output:
            print("$", shlex.join(words), file=output, flush=True)
            process = subprocess.Popen(
                [sys.executable, *program, *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C of the terminal comes to this script alone
            )
        self.running[job.name] = process, time.monotonic()
        self.tried.add(job.name)
        self._say(job.name, state="running")

    def _ended(self, name: str, cut: bool = False) -> None:
        process, begun = self.running.pop(name)
        code = process.wait()
        lines = (self.work / "logs" / f"{name}.log").read_text(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "")[-300:]
        state = "done" if code == 0 else "cut" if cut else "failed"
        seconds = round(self.status[name]["seconds"] + time.monotonic() - begun, 1)
        self._say(name, state=state, seconds=seconds, exit=code, said=said)

    def _stop(self, grace: float = 30.0) -> None:
        """Ctrl-C for all at once, and an end to what does not stop by it."""
        for process, _ in self.running.values():
            process.send_signal(signal.SIGINT)
        until = time.monotonic() + grace
        for name, (process, _) in list(self.running.items()):
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            self._ended(name, cut=True)

    def unfinished_audits(self) -> list[str]:
        """Where audits that did not end have their rows so far, so that they resume on another machine."""
        ended = {**self.others, **self.status}
        left = [name for name, job in ended.items() if job["command"].startswith("audit ") and job["state"] != "done"]
        return [f"{name}/shards/*.safetensors" for name in left]

    def _say(self, name: str, **news: Any) -> None:
        self.status[name] |= news
        told = " ".join(f"{key} {news[key]}" for key in ("state", "seconds", "exit", "said") if key in news)
        print(f"{max(self.end - time.monotonic(), 0):5.0f} s left  {name}: {told}", flush=True)
        self.write(self._file)

    def write(self, file: Path) -> None:
        """The status as JSON, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".part")
        status = {"commit": commit(), "lanes": self.count, "jobs": {**self.others, **self.status}}
        temporary.write_text(json.dumps(status, indent=1) + "\n")
        temporary.replace(file)


def said_again(words: Sequence[str]) -> list[str]:
    """The options of a training that its `resume` takes too: where the images are, the device, and the like."""
    pairs = [word.split("=", 1) if word.startswith("--") and "=" in word else None for word in words]
    found: list[str] = []
    for place, (word, pair) in enumerate(zip(words, pairs, strict=True)):
        if pair and pair[0] in AGAIN:
            found += pair
        elif word in AGAIN:
            found += words[place : place + 2]
    return found


def keep(work: Path, out: Path, names: Sequence[str]) -> None:
    """Pack the status, logs and the files of these names into archives, none of which is large."""
    files = [*sorted(work.glob("logs/*.log")), *(path for name in names for path in sorted(work.rglob(name)))]
    archives: list[list[tuple[str, bytes]]] = [[]]
    for path in dict.fromkeys(files):
        for name, data in parts_of(path, str(path.relative_to(work))):
            if sum(len(other) for _, other in archives[-1]) + len(data) > LARGEST:
                archives.append([])
            archives[-1].append((name, data))
    out.mkdir(parents=True, exist_ok=True)
    for number, members in enumerate(archives, 1):
        with tarfile.open(out / f"kept-{number}.tar.gz", "w:gz") as archive:
            for name, data in members:
                member = tarfile.TarInfo(name)
                member.size, member.mtime = len(data), int(time.time())
                archive.addfile(member, io.BytesIO(data))


def parts_of(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """A file as its name and bytes, or as the parts in which archives hold it."""
    count = -(-path.stat().st_size // LARGEST)
    with path.open("rb") as file:
        for number in range(1, max(count, 1) + 1):
            yield (name if count <= 1 else f"{name}.part-{number}-of-{count}"), file.read(LARGEST)


def join(kept: Path, work: Path) -> None:
    """Make the work folder again from what `keep` packed; its status too, so that what is done is not run again."""
    work.mkdir(parents=True, exist_ok=True)
    for archive in sorted(kept.glob("kept-*.tar.gz")):
        with tarfile.open(archive) as opened:
            opened.extractall(work, filter="data")
    found: dict[Path, dict[int, tuple[Path, int]]] = {}
    for path in work.rglob("*.part-*-of-*"):
        if cut := PART.fullmatch(path.name):
            found.setdefault(path.with_name(cut[1]), {})[int(cut[2])] = path, int(cut[3])
    for whole, parts in found.items():
        missing = sorted({*range(1, max(count for _, count in parts.values()) + 1)} - {*parts})
        assert not missing, f"{whole}: part {missing[0]} is missing: give the folder with all archives"
        with (temporary := whole.with_name(f"{whole.name}.joined")).open("wb") as file:
            for _, (path, _) in sorted(parts.items()):
                file.write(path.read_bytes())
        temporary.replace(whole)
        for path, _ in parts.values():
            path.unlink()
    if (status := kept / "status.json").exists():
        known = json.loads(other.read_text())["jobs"] if (other := work / "status.json").exists() else {}
        news = json.loads(status.read_text())
        other.write_text(json.dumps({**news, "jobs": {**known, **news["jobs"]}}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="?", help="TOML file of jobs")
    parser.add_argument("--lanes", type=int, default=2, help="jobs at once")
    parser.add_argument("--seconds", type=float, default=560, help="after which all is stopped, within 30 s more")
    parser.add_argument("--work", type=Path, default=Path("runs/lanes"), help="run folders, logs and status")
    parser.add_argument("--keep", type=Path, help="folder for the status and archives of results")
    parser.add_argument(
        "--kept", action="append", default=[], metavar="FILE", help="another to keep: JOB/model.safetensors"
    )
    parser.add_argument("--place", action="append", default=[], metavar="NAME=PATH", help="what {NAME} stands for")
    parser.add_argument("--add", action="append", default=[], metavar="COMMAND=ARGS", help="added to all such jobs")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these jobs and what they need")
    parser.add_argument("--lease", type=int, default=0, metavar="N", help="the jobs of this group; 0 is all")
    parser.add_argument(
        "--join", type=Path, metavar="OUT", help="make the work folder from what --keep packed, and end"
    )
    parser.add_argument("--least", type=float, default=30, help="seconds left below which no long job is started")
    given = parser.parse_args()
    if given.join:
        join(given.join, given.work)
        return
    if given.jobs is None:
        parser.error("give a file of jobs, or --join")
    places, added = (dict(each.split("=", 1) for each in pairs) for pairs in (given.place, given.add))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if commit() is None:
        print("the commit is unknown: set ANCHORHOLD_COMMIT, so that results can be traced")
    jobs = jobs_in(given.jobs, places, given.only, given.lease)
    end = time.monotonic() + given.seconds
    lanes = Lanes(jobs, given.work.resolve(), places, added, given.lanes, given.least, end)
    try:
        lanes.run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
    finally:
        if given.keep:
            lanes.write(given.keep / "status.json")
            keep(lanes.work, given.keep, [*KEPT, *lanes.unfinished_audits(), *given.kept])
    for name, job in lanes.status.items():
        print(f"{job['state']:8} {job['seconds']:7.1f} s of {job['estimate']:.0f}  {name}")


if __name__ == "__main__":
    main()
