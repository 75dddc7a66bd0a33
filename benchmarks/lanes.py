"""Run a list of trainings and audits, several at once on one machine, within a limit of seconds.

    python benchmarks/lanes.py benchmarks/jobs/cub.toml --place data=DATA --place weights=WEIGHTS \\
        --lanes 3 --seconds 560 --work runs/lanes --keep OUT

Give the same work folder again to go on: finished jobs are skipped, and those that were cut are resumed. At the limit
Ctrl-C is sent to what still runs, so trainings save a checkpoint and audits keep the rows that they have.

A job in the file has a `name`, the estimated `seconds`, and one of `train`, `audit`, `algorithm1` (arguments of that
command, without --out) or `python` (a script). In the arguments {name} is the folder of another job, which has to be
done before, or a place. A script cannot resume, so it only starts if its estimate fits in the time left.
"""

import argparse
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

from anchorhold.runs.provenance import commit

SOURCE = Path(__file__).resolve().parents[1] / "src"
RESUMABLE = ("train", "audit", "algorithm1")
COMMANDS = (*RESUMABLE, "python")
KEPT = (
    "run.json",
    "metrics.jsonl",
    "audit.json",
    "algorithm1.json",
    "samples.safetensors",
)  # the curve is in the audit
LARGEST = 15 * 2**20  # bytes of a file, and of the files in one archive


@dataclass(frozen=True)
class Job:
    """One command of the list."""

    name: str
    command: str
    arguments: str
    seconds: float  # as estimated

    @property
    def named(self) -> set[str]:
        """The folders and places in its arguments."""
        return {name for _, name, _, _ in string.Formatter().parse(self.arguments) if name}


def jobs_in(file: Path, places: Mapping[str, str], only: Sequence[str] = ()) -> list[Job]:
    """The jobs of a file in its order; `only` names some of them, perhaps with *, which bring those that they need."""
    jobs: dict[str, Job] = {}
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["job"]:
        commands = [command for command in COMMANDS if command in entry]
        known = {"name", "seconds", *commands} == set(entry) and len(commands) == 1
        assert known, f"{file}: {entry}: give name, seconds and one of {', '.join(COMMANDS)}, nothing else"
        job = Job(entry["name"], commands[0], entry[commands[0]], float(entry["seconds"]))
        assert re.fullmatch(r"[\w-]+", job.name) and job.name not in jobs, f"{file}: {job.name!r}: name jobs apart"
        unknown = job.named - {*jobs, *places}
        assert not unknown, f"{file}: {job.name} needs {', '.join(unknown)}: no earlier job, and no --place"
        jobs[job.name] = job
    wanted = [name for name in jobs if not only or any(fnmatch(name, pattern) for pattern in only)]
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

    def __post_init__(self) -> None:
        known = json.loads(self._file.read_text())["jobs"] if self._file.exists() else {}
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
        if job.command == "train" and any((folder / f"{name}.safetensors").exists() for name in ("last", "previous")):
            words = ["resume", str(folder)]
        else:
            folders = {name: str(self.work / name) for name in self.status}
            split = shlex.split(f"{job.arguments} {self.added.get(job.command, '')}")
            words = [word.format_map({**self.places, **folders}) for word in split]
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

    def _say(self, name: str, **news: Any) -> None:
        self.status[name] |= news
        told = " ".join(f"{key} {news[key]}" for key in ("state", "seconds", "exit", "said") if key in news)
        print(f"{max(self.end - time.monotonic(), 0):5.0f} s left  {name}: {told}", flush=True)
        self.write(self._file)

    def write(self, file: Path) -> None:
        """The status as JSON, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".part")
        status = {"commit": commit(), "lanes": self.count, "jobs": self.status}
        temporary.write_text(json.dumps(status, indent=1) + "\n")
        temporary.replace(file)


def keep(work: Path, out: Path, names: Sequence[str]) -> None:
    """Pack logs and the files of these names into archives, none of which is large."""
    found = [*sorted(work.glob("logs/*.log")), *sorted(path for name in names for path in work.rglob(name))]
    archives: list[list[Path]] = [[]]
    for path in found:
        if (size := path.stat().st_size) > LARGEST:
            print(f"not kept: {path}, {size / 2**20:.0f} MiB")
            continue
        if sum(other.stat().st_size for other in archives[-1]) + size > LARGEST:
            archives.append([])
        archives[-1].append(path)
    out.mkdir(parents=True, exist_ok=True)
    for number, paths in enumerate(archives, 1):
        with tarfile.open(out / f"kept-{number}.tar.gz", "w:gz") as archive:
            for path in paths:
                archive.add(path, str(path.relative_to(work)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, help="TOML file of jobs")
    parser.add_argument("--lanes", type=int, default=2, help="jobs at once")
    parser.add_argument("--seconds", type=float, default=560, help="after which all is stopped, within 30 s more")
    parser.add_argument("--work", type=Path, default=Path("runs/lanes"), help="run folders, logs and status")
    parser.add_argument("--keep", type=Path, help="folder for the status and archives of results")
    parser.add_argument(
        "--kept", action="append", default=[], metavar="FILE", help="another to keep: model.safetensors"
    )
    parser.add_argument("--place", action="append", default=[], metavar="NAME=PATH", help="what {NAME} stands for")
    parser.add_argument("--add", action="append", default=[], metavar="COMMAND=ARGS", help="added to all such jobs")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these jobs and what they need")
    parser.add_argument("--least", type=float, default=60, help="seconds left below which no long job is started")
    given = parser.parse_args()
    places, added = (dict(each.split("=", 1) for each in pairs) for pairs in (given.place, given.add))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if commit() is None:
        print("the commit is unknown: set ANCHORHOLD_COMMIT, so that results can be traced")
    jobs = jobs_in(given.jobs, places, given.only)
    end = time.monotonic() + given.seconds
    lanes = Lanes(jobs, given.work.resolve(), places, added, given.lanes, given.least, end)
    try:
        lanes.run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
    finally:
        if given.keep:
            lanes.write(given.keep / "status.json")
            keep(lanes.work, given.keep, [*KEPT, *given.kept])
    for name, job in lanes.status.items():
        print(f"{job['state']:8} {job['seconds']:7.1f} s of {job['estimate']:.0f}  {name}")


if __name__ == "__main__":
    main()
