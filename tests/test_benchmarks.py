"""The benchmarks run: numbers in docs/ must be there to be made again."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.data.splits import Dataset, Split
from anchorhold.reproduce.rows import check_row, row_named, row_settings
from tests.docs.test_snippets import check_command

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.slow
def test_scale_measures_a_training_step_and_a_search(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    done = run("scale.py", "--device", "cpu", "--threads", "1", "--quick", "--only", "steps,search", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["scale"]
    assert found["steps"][0]["ms"] > 0 and found["steps"][0]["image_steps_a_step"] == 3 * 56
    assert [row["count"] for row in found["search"]] == [10_000, 100_000]


@pytest.mark.slow
def test_peers_find_the_same(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    out = tmp_path / "peers.json"
    done = run("search_peers.py", "--quick", "--turns", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found["peers"]) == 6 and all(row["ratio"] > 0 for row in found["peers"].values())
    assert found["commit"] and found["versions"]["faiss-cpu"]


@pytest.mark.slow
def test_peers_attack_what_the_strong_audit_leaves(tmp_path: Path) -> None:
    ah.fit(None, "digits", "natural", tmp_path / "run", overrides={"train.epochs": 1}, device="cpu")
    out, options = tmp_path / "peers.json", ["--threats", "linf:0.02,l2:0.1", "--limit", "6", "--only", "mine"]
    done = run("peers.py", "--models", str(tmp_path / "run"), *options, "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    for row in found["models"]["run"]:
        assert 0 < len(row["strong"]["left"]) <= row["right"] <= 6
        assert all(set(peer["turned"]) <= set(row["strong"]["left"]) for peer in row["peers"].values())
    assert found["most"]["percent"] == max(p["percent"] for r in found["models"]["run"] for p in r["peers"].values())


@pytest.mark.slow
def test_members_are_measured_and_a_second_call_goes_on(tmp_path: Path) -> None:
    ah.fit(None, "digits", "natural", tmp_path / "natural", overrides={"train.epochs": 1}, device="cpu")
    out, options = tmp_path / "members.json", ["--runs", str(tmp_path), "--threats", "linf:0.02,l2:0.1", "--limit", "6"]
    for only in ("natural, l2:0.1", "natural, *"):
        done = run("members.py", *options, "--only", only, "--out", str(out))
        assert done.returncode == 0, done.stderr
    assert "l2:0.1" not in done.stdout and "linf:0.02" in done.stdout
    found = json.loads(out.read_text())["settings"]
    assert set(found) == {"natural, linf:0.02", "natural, l2:0.1"}
    for row in found.values():
        assert list(row["members"]) == ["starts", "adam", "momentum", "refine", "square"]
        first = "".join(each["in_turn"]["turned"] for each in row["members"].values())
        assert first.count("1") + row["left"] == len(row["ids"].split()) <= 6
        assert row["members"]["starts"]["alone"] == row["members"]["starts"]["in_turn"]  # nobody was before it


@pytest.mark.slow
def test_what_the_strong_audit_costs_is_compared_with_another_commit(tmp_path: Path) -> None:
    """Here with itself: the same image-steps, and as many right answers left."""
    ah.fit(None, "digits", "natural", tmp_path / "natural", overrides={"train.epochs": 1}, device="cpu")
    out, options = tmp_path / "cost.json", ["--models", str(tmp_path / "natural"), "--limit", "4", "--turns", "1"]
    done = run("strong_cost.py", "--before", str(ROOT), *options, "--kinds", "neighbour", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["cost"]["natural: neighbour"]
    assert found["ratio"]["image_steps"] == 1 and found["before"][0]["left"] == found["after"][0]["left"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name != "parts.py")
)
def test_every_benchmark_says_what_it_does(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0 and name in done.stdout


@pytest.mark.slow
def test_kills_are_counted_and_leave_the_same_index(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    done = run("kills.py", "--kills", "3", "--only", "embed", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["kills"] == 3 and found["equal"] == found["trials"] > 0


LANES = """
[[job]]
name = "long"
train = "digits --recipe natural --epochs 60 --device cpu"
seconds = 30
[[job]]
name = "wrong"
train = "digits --recipe nosuch"
seconds = 5
[[job]]
name = "of-wrong"
audit = "{wrong} --data digits"
seconds = 5
[[job]]
name = "audit"
audit = "{long} --data digits --limit 8 --attacks ES --curve none --device cpu"
seconds = 10
"""


def states(work: Path) -> dict[str, Any]:
    found = json.loads((work / "status.json").read_text())["jobs"]
    return {name: job["state"] for name, job in found.items()}


@pytest.mark.slow
def test_lanes_resume_what_was_cut_and_keep_results(tmp_path: Path) -> None:
    work, jobs = tmp_path / "work", tmp_path / "jobs.toml"
    jobs.write_text(LANES)
    command = [str(ROOT / "benchmarks" / "lanes.py"), str(jobs), "--work", str(work), "--seconds", "500"]
    environment = {**os.environ, "ANCHORHOLD_COMMIT": "abc1234"}
    first = subprocess.Popen([sys.executable, *command], env=environment)
    for _ in range(2400):
        logged = work / "long" / "metrics.jsonl"
        if logged.exists() and logged.stat().st_size and states(work)["wrong"] == "failed":
            break
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    first.wait(60)
    assert states(work) == {"long": "cut", "wrong": "failed", "of-wrong": "left", "audit": "left"}
    cut = len((work / "long" / "metrics.jsonl").read_text().splitlines())
    assert 1 <= cut < 60
    subprocess.run(
        [sys.executable, *command, "--keep", str(tmp_path / "out")], env=environment, check=True, timeout=300
    )
    assert states(work) == {"long": "done", "wrong": "failed", "of-wrong": "left", "audit": "done"}
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["commit"] == "abc1234" and status["jobs"]["wrong"]["exit"] == 2
    assert "no recipe 'nosuch'" in status["jobs"]["wrong"]["said"]
    with tarfile.open(tmp_path / "out" / "kept-1.tar.gz") as archive:
        kept = set(archive.getnames())
        archive.extractall(tmp_path / "got", filter="data")
    assert {"long/run.json", "audit/audit.json", "audit/samples.safetensors", "logs/wrong.log"} <= kept
    assert not any(name.endswith("model.safetensors") for name in kept)
    rows = [json.loads(line) for line in (tmp_path / "got" / "long" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, 61))
    assert "$ resume" in (work / "logs" / "long.log").read_text()


def test_lanes_end_with_their_time_and_start_no_script_that_cannot_finish(tmp_path: Path) -> None:
    work, jobs = tmp_path / "work", tmp_path / "jobs.toml"
    (tmp_path / "waits.py").write_text("import sys, time; print('here', flush=True); time.sleep(float(sys.argv[1]))")
    entries = {"waits": ("600", 1), "too-long": ("0", 1000), "second": ("0", 1), "third": ("0 {second}", 1)}
    lines = [f'[[job]]\nname = "{n}"\npython = "{{s}}/waits.py {a}"\nseconds = {e}' for n, (a, e) in entries.items()]
    jobs.write_text("\n".join(lines))
    given = [str(jobs), "--work", str(work), "--place", f"s={tmp_path}"]
    begun = time.monotonic()
    done = run("lanes.py", *given, "--seconds", "5")
    assert done.returncode == 0 and 5 <= time.monotonic() - begun < 60, done.stdout + done.stderr
    assert states(work) == {"waits": "cut", "too-long": "left", "second": "done", "third": "done"}
    assert run("lanes.py", *given, "--seconds", "5", "--only", "thi*").stdout.count("done") == 2  # it and its need
    jobs.write_text(jobs.read_text().replace("waits.py 0 {second}", "waits.py 1 {second}"))
    assert "third was begun as" in run("lanes.py", *given).stderr
    jobs.write_text(jobs.read_text().replace("{second}", "{none}"))
    assert "third needs none" in run("lanes.py", *given).stderr


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "jobs").glob("*.toml")), ids=lambda path: path.stem)
def test_jobs_have_options_and_settings_that_exist(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    jobs = importlib.import_module("lanes").jobs_in(file, {"data": "data", "weights": "weights"})
    runs = {job.name: job for job in jobs if job.command == "train"}
    for job in jobs:
        words = f"anchorhold {job.command} {job.arguments} --out run"
        check_command(words)
        assert not re.search(r"[= ]/", words), "no path of a machine"
        if job.command == "train" and "--row" in words:
            row = row_named(words.split("--row ")[1].split()[0])
            changes = [after for before, after in pairwise(words.split()) if before == "--set"]
            tree = row_settings(row, changes) | {"data": {"name": words.split()[2]}}
            weights = {"model": {**tree.get("model", {}), "weights": words.split("--weights ")[1].split()[0]}}
            check_row(row, settings_from(row.recipe, tree | weights))
        held_out = [
            re.findall(r"held.out[= ](\d+)", each.arguments) for each in (job, *map(runs.get, job.named)) if each
        ]
        assert all(each == held_out[0] for each in held_out), f"{job.name}: another split than its run's"


def finished(jobs: list[Any], lanes: int = 3) -> dict[str, float]:
    """When each job ends if all take the seconds that were estimated, by the rule of lanes.py."""
    ends: dict[str, float] = {}
    names, left, now = {job.name for job in jobs}, list(jobs), 0.0
    while left:
        running = [end for end in ends.values() if end > now]
        done = {name for name, end in ends.items() if end <= now}
        ready = [job for job in left if (job.named & names) <= done]
        if len(running) < lanes and ready:
            ends[ready[0].name] = now + ready[0].seconds
            left.remove(ready[0])
        else:
            now = min(running)
    return ends


def test_a_lease_ends_within_25_minutes_with_the_audits_of_its_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    file = ROOT / "benchmarks" / "jobs" / "cub-and-cars.toml"
    jobs = importlib.import_module("lanes").jobs_in(file, {"data": "data", "weights": "weights"})
    text, leases = file.read_text(), sorted({job.lease for job in jobs} - {0})  # 0: models that leases need
    assert leases == list(range(1, len(leases) + 1)) == [int(n) for n in re.findall(r"^# Lease (\d+)\.", text, re.M)]
    for lease in leases:
        own = [job for job in jobs if job.lease == lease]
        ends = finished(own)
        about = " ".join(text.split(f"# Lease {lease}.")[1].split("[[job]]")[0].split())
        if "--lanes" not in about and "longer than a lease" not in about:  # their comments say why
            assert max(ends.values()) <= 25 * 60, (lease, ends)
        for job in own:
            if job.command == "train":
                assert any(job.name in each.named for each in own if each.command != "train"), job.name
    by = {job.name: job for job in jobs}
    assert all(any(job.name in each.named for each in jobs) for job in jobs if not job.lease)
    assert all(by[name].lease <= job.lease for job in jobs for name in job.named & by.keys())


def test_lanes_keep_large_files_in_parts_and_join_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    lanes = importlib.import_module("lanes")
    monkeypatch.setattr(lanes, "LARGEST", 100)
    work, out = tmp_path / "work", tmp_path / "out"
    for name, size in (("a", 60), ("b", 70), ("c", 250), ("d", 0)):
        (work / name).mkdir(parents=True)
        (work / name / "run.json").write_bytes(bytes(range(size)))
    (work / "c" / "model.safetensors").write_text("not asked for")
    lanes.keep(work, out, ["run.json", "c/run.json"])
    held = []
    for archive in sorted(out.glob("kept-*.tar.gz")):
        with tarfile.open(archive) as opened:
            assert sum(member.size for member in opened.getmembers()) <= 100
            held.append(opened.getnames())
    parts = [[f"c/run.json.part-{n}-of-3"] for n in (1, 2)]
    assert held == [["a/run.json"], ["b/run.json"], *parts, ["c/run.json.part-3-of-3", "d/run.json"]]
    (out / "status.json").write_text(json.dumps({"commit": "abc", "jobs": {"a": {"state": "done"}}}))
    again = tmp_path / "again"
    for _ in range(2):
        lanes.join(out, again)
        for name in "abcd":
            assert (again / name / "run.json").read_bytes() == (work / name / "run.json").read_bytes()
        assert len(list(again.rglob("*"))) == 4 * 2 + 1 and states(again) == {"a": "done"}
    (out / "kept-4.tar.gz").unlink()
    with pytest.raises(AssertionError, match=r"part 2 is missing"):
        lanes.join(out, tmp_path / "lost")


def test_lanes_keep_the_rows_of_an_audit_that_was_cut(tmp_path: Path) -> None:
    """On another machine it resumes: only what was not finished is attacked there."""
    work, out, again, file = (tmp_path / name for name in ("work", "out", "again", "jobs.toml"))
    model = tmp_path / "model"
    ah.fit(None, "digits", "natural", model, overrides={"train.epochs": 1}, device="cpu")
    audit = "{model} --data digits --limit 16 --attacks CA+,ES --steps 2 --curve none --device cpu"
    other = '[[job]]\nname = "other"\ntrain = "digits"\nseconds = 9\n'
    file.write_text(f'[[job]]\nname = "audit"\naudit = "{audit}"\nseconds = 9\n{other}')
    given = [str(file), "--place", f"model={model}", "--only"]
    assert run("lanes.py", *given, "audit", "--work", str(work)).returncode == 0
    whole = json.loads((work / "audit" / "audit.json").read_text())
    first, *others = sorted((work / "audit" / "shards").glob("*.safetensors"))
    for path in (*others, *(work / "audit").glob("*.json")):  # as if it had been cut after the first attack
        path.unlink()
    status = json.loads((work / "status.json").read_text())
    status["jobs"]["audit"]["state"] = "cut"
    (work / "status.json").write_text(json.dumps(status))
    # Also by a call that leaves this audit alone.
    assert run("lanes.py", *given, "other", "--work", str(work), "--seconds", "0", "--keep", str(out)).returncode == 0
    assert run("lanes.py", "--join", str(out), "--work", str(again)).returncode == 0
    assert [path.name for path in again.rglob("shards/*")] == [first.name] and states(again)["audit"] == "cut"
    before = (again / "audit" / "shards" / first.name).stat().st_mtime_ns
    assert run("lanes.py", *given, "audit", "--work", str(again), "--keep", str(out)).returncode == 0
    assert states(again)["audit"] == "done"
    assert (again / "audit" / "shards" / first.name).stat().st_mtime_ns == before
    assert json.loads((again / "audit" / "audit.json").read_text())["protocols"] == whole["protocols"]
    with tarfile.open(out / "kept-1.tar.gz") as archive:
        assert not any("shards" in name for name in archive.getnames())


def test_lanes_run_on_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """Without site-packages: the script brings the package, and needs nothing else."""
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-I", "-S", str(ROOT / "benchmarks" / "lanes.py"), "--join", str(tmp_path / "out")]
    done = subprocess.run([*command, "--work", str(tmp_path / "work")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_lanes_remember_jobs_that_a_call_leaves_alone(tmp_path: Path) -> None:
    work, jobs = tmp_path / "work", tmp_path / "jobs.toml"
    (tmp_path / "counts.py").write_text("import sys; open(sys.argv[1], 'a').write('x')")
    entries = [
        f'[[job]]\nname = "{n}"\nlease = {i}\npython = "{{s}}/counts.py {{s}}/{n}"\nseconds = 1'
        for i, n in enumerate("abc", 1)
    ]
    jobs.write_text("\n".join(entries))
    given = [str(jobs), "--work", str(work), "--place", f"s={tmp_path}", "--seconds", "60"]
    for only in (["--only", "a"], ["--lease", "2"], []):
        assert run("lanes.py", *given, *only).returncode == 0
    assert states(work) == dict.fromkeys("abc", "done")
    assert [(tmp_path / name).read_text() for name in "abc"] == ["x"] * 3


def test_a_resumed_training_gets_its_place_and_device_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    again = importlib.import_module("lanes").said_again
    words = [
        "cub",
        "--root",
        "d/CUB",
        "--recipe",
        "robust",
        "--set",
        "data.held_out=20",
        "--device=cuda:1",
        "--epochs",
        "3",
    ]
    assert again(words) == ["--root", "d/CUB", "--device", "cuda:1"]


def test_a_difference_after_a_kill_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kills = importlib.import_module("kills")
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0000001)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor([value])}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "seconds": len(name)}) + "\n")
    a, b, c = (kills.facts(tmp_path / name) for name in "abc")
    assert not list(kills.differing(a, b)) and len(list(kills.differing(a, c))) == 1
    (tmp_path / "b" / ".x.part").mkdir()
    assert len(list(kills.differing(a, kills.facts(tmp_path / "b")))) == 1
    assert sum(kills.shares(100, [*"abcd", "torchrun"]).values()) == 100


def test_parts_of_one_file_are_made_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parts = importlib.import_module("parts")
    file = str(tmp_path / "parts.json")
    one, other = (parts.Parts(file, "found", {"commit": "abc", "epochs": 3}) for _ in range(2))
    one.keep("a", 1), other.keep("b", 2)
    assert json.loads(Path(file).read_text()) == {"commit": "abc", "epochs": 3, "found": {"a": 1, "b": 2}}
    assert one.read(file, "found") == {"a": 1, "b": 2} and one.read(tmp_path / "none.json", "found") == {}
    with pytest.raises(AssertionError, match=r"made with \{'epochs': 3\}"):
        parts.Parts(file, "found", {"commit": "abc", "epochs": 75})


def images_of_noise() -> Split:
    noise = torch.rand(4, 256, 256, 3, generator=torch.Generator().manual_seed(0))
    images = (noise * torch.linspace(0, 255, 256)[:, None, None]).to(torch.uint8)
    return Split("noise", torch.tensor([0, 0, 1, 1]), ["one", "other"], images=images)


def test_images_are_stored_again_at_the_quality_of_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sensitivity = importlib.import_module("sensitivity")
    split = images_of_noise()
    assert split.images is not None
    data = Dataset("noise", split, split)
    for name, quality in (("webp", 33), ("webp-55", 55)):
        made, weights = sensitivity.changed(name, data, "w", tmp_path)
        wanted = [sensitivity.again(image.numpy(), quality) for image in split.images]
        assert weights == "w" and all((a.numpy() == b).all() for a, b in zip(made.test.images, wanted, strict=True))
    assert sensitivity.changed("as-is", data, "w", tmp_path) == (data, "w")


def test_distortion_compares_the_file_with_the_image_and_with_what_is_stored_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sensitivity = importlib.import_module("sensitivity")
    found = sensitivity.distortion(images_of_noise())
    assert found["files"] > 0 and 0 < found["webp-55"] < found["webp"]
    monkeypatch.setattr(sensitivity, "again", lambda pixels, quality: pixels * 0 + quality)
    found = sensitivity.distortion(images_of_noise())
    assert (found["webp"], found["webp-55"]) == ((75 - 33) ** 2, (75 - 55) ** 2)


def test_variances_of_the_last_stage_alone_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sensitivity = importlib.import_module("sensitivity")
    names = ("layer4.0.bn1.running_var", "layer4.0.bn1.running_mean", "layer3.0.bn1.running_var")
    save_file({name: torch.ones(1000) for name in names}, tmp_path / "w")
    alike = load_file(sensitivity.moved(str(tmp_path / "w"), tmp_path / "alike", 0.7))
    each = load_file(sensitivity.moved(str(tmp_path / "w"), tmp_path / "each"))
    assert all((made[name] == 1).all() for made in (alike, each) for name in names[1:])
    assert (alike[names[0]] == 0.7).all() and abs(each[names[0]].log().std() - 0.15) < 0.01


def test_a_mixture_of_weights_lies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    starts = importlib.import_module("starts")
    one = {"w": torch.tensor([1.0, 2.0]).half(), "count": torch.tensor(7), "fc": torch.zeros(1)}
    other = {"w": torch.tensor([3.0, 6.0]).half(), "count": torch.tensor(9)}
    for share, wanted in ((0.0, [1.0, 2.0]), (0.25, [1.5, 3.0]), (1.0, [3.0, 6.0])):
        made = starts.mixed(one, other, share)
        assert made["w"].tolist() == wanted and made["w"].dtype == torch.float32
        assert made["count"] == 7 and made.keys() == {"w", "count"}
