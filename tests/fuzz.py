"""Damaged and hostile files, by the thousand: no traceback, no hang, nothing executed.

    python tests/fuzz.py --examples 10000          all targets, with a count of what came of each
    python tests/fuzz.py --examples 500 index pth  some of them

Every example takes files that Anchorhold wrote, changes one of them, and runs a command on them in this process. A
command may succeed, or end with one line and exit code 2. Anything else is a fault: another exception, more than
`SECONDS`, more than `MEMORY`, or code that a file named. `test_fuzz.py` runs a few examples of each target.
"""

import argparse
import builtins
import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SECONDS = 30  # for one example: none needs a tenth of it
MEMORY = 6 * 2**30  # bytes that one example may add
CANARY = "anchorhold_canary"  # a module beside the files; whatever imports or calls it leaves a mark

Target = Callable[[Random, Path], list[str]]
TARGETS: dict[str, Target] = {}


def target(make: Target) -> Target:
    """Add what changes one file in a fresh folder and says which command to run there."""
    TARGETS[make.__name__] = make
    return make


# ---- changes ---------------------------------------------------------------------------------------------

DEEP, LONG = "@deep@", "@long@"  # stand for what no JSON writer writes
_RAW = {DEEP: "[" * 3000 + "]" * 3000, LONG: "7" * 5000}
_CODE = (f"{CANARY}:boom", f"{CANARY}.py:boom", f"timm:{CANARY}:boom", f"{CANARY}:Boom.boom")
_NUMBERS = (0, 1, 2, -1, 0.5, -0.0, 3, 1e-300, 1e300, 1e308, 99999999, 2**31, 2**53, 2**63, -(2**63), 10**30)
_WORDS = ("", "x", "nan", "inf", "../../x", "/dev/zero", "/etc/passwd", "a\0b", "é\ud800", "\x1b[31mred", "x" * 300)
_OTHERS = (None, True, False, [], {}, [[]], [1, 2, 3], {"a": 1}, float("nan"), float("inf"), DEEP, LONG)


def odd(rng: Random) -> Any:
    """A value that nobody expects."""
    return rng.choice(rng.choice((_NUMBERS, _NUMBERS, _WORDS, _OTHERS, _OTHERS, _CODE)))


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every node."""
    yield path
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places(value, (*path, key))


def changed(rng: Random, tree: Any) -> Any:
    """A tree of JSON with one node gone, moved, renamed or replaced."""
    tree = json.loads(json.dumps(tree))
    all_places = list(places(tree))
    path = rng.choice(all_places)
    if not path:
        return odd(rng)
    *above, last = path
    node = tree
    for key in above:
        node = node[key]
    act = rng.choice(("replace", "replace", "replace", "remove", "rename", "copy"))
    if act == "remove":
        del node[last]
    elif act == "rename" and isinstance(node, dict):
        node[rng.choice(("", "x", "__class__", *_CODE))] = node.pop(last)
    elif act == "copy":
        other = tree
        for key in rng.choice(all_places):
            other = other[key]
        node[last] = json.loads(json.dumps(other))
    else:
        node[last] = odd(rng)
    return tree


def written(tree: Any) -> bytes:
    """A tree as JSON, with what no writer would write."""
    text = json.dumps(tree)
    for word, raw in _RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text.encode()


def damaged(rng: Random, data: bytes) -> bytes:
    """Bytes that are cut, flipped, doubled or others."""
    if not data:
        return b"\0"
    at = rng.randrange(len(data))
    if rng.random() < 0.3:
        at = min(at, rng.randrange(256))  # heads matter more
    act = rng.choice(("cut", "flip", "flip", "insert", "zero", "double", "empty", "text"))
    if act == "cut":
        return data[:at]
    if act == "flip":
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if act == "insert":
        return data[:at] + rng.choice((b"\0", b"\xff\xfe", b"[" * 3000, b"9" * 5000, b'"', b"\n")) + data[at:]
    if act == "zero":
        return data[:at] + b"\0" * min(16, len(data) - at) + data[at + 16 :]
    if act == "double":
        return data[:at] + data
    return b"" if act == "empty" else str(odd(rng)).encode("utf-8", "replace")


def changed_json(rng: Random, path: Path) -> None:
    """Damage a file of JSON, mostly in its tree."""
    if rng.random() < 0.15:
        path.write_bytes(damaged(rng, path.read_bytes()))
    else:
        path.write_bytes(written(changed(rng, json.loads(path.read_text()))))


def changed_tensors(rng: Random, path: Path) -> None:
    """Damage a safetensors file: its bytes, its header, the JSON inside its metadata, or its numbers."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    act = rng.choice(("bytes", "header", "about", "about", "about", "dtype", "numbers"))
    inside = [key for key in head.get("__metadata__", {}) if head["__metadata__"][key].startswith("{")]
    if act == "bytes" or (act == "about" and not inside):
        path.write_bytes(damaged(rng, data))
        return
    seal = rng.choice(("kept", "left out", "left out", "left out", "forged", "forged"))
    for key in inside if seal != "kept" else ():
        about = json.loads(head["__metadata__"][key])
        about.pop("sealed", None)
        head["__metadata__"][key] = json.dumps({"sealed": "0" * 64, **about} if seal == "forged" else about)
    if act == "header":
        head = changed(rng, head)
    elif act == "about":
        key = rng.choice(inside)
        head["__metadata__"][key] = written(changed(rng, json.loads(head["__metadata__"][key]))).decode()
    else:
        names = [name for name in head if name != "__metadata__"]
        for name in names if rng.random() < 0.5 else [rng.choice(names)]:
            begin, end = head[name]["data_offsets"]
            if act == "numbers":  # NaN, infinity, the largest number
                word = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f"))
                body = body[:begin] + (word * (end - begin))[: end - begin] + body[end:]
            else:
                kind, wide = rng.choice((("BOOL", 1), ("F64", 8), ("I64", 8), ("F16", 2), ("U8", 1), ("C64", 8)))
                head[name] |= {"dtype": kind, "shape": _fitting(head[name]["shape"], (end - begin) // wide)}
    text = written(head)
    data = struct.pack("<Q", len(text)) + text + body
    if seal == "forged":
        data = data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)
    path.write_bytes(data)


def _fitting(shape: list[int], count: int) -> list[int]:
    """The shape itself where so many numbers fill it, else a flat one."""
    filled = 1
    for side in shape:
        filled *= side
    return shape if filled == count else [count]


def changed_lines(rng: Random, path: Path, separator: str) -> None:
    """Damage a list: a field, a line or the bytes."""
    if rng.random() < 0.3:
        path.write_bytes(damaged(rng, path.read_bytes()))
        return
    lines = [line.split(separator) for line in path.read_text().splitlines()]
    line = rng.choice(lines)
    act = rng.choice(("field", "field", "drop", "more", "twice"))
    if act == "field":
        line[rng.randrange(len(line))] = _plain(odd(rng))
    elif act == "drop":
        line.pop()
    elif act == "more":
        line.append(_plain(odd(rng)))
    else:
        lines.append(line)
    text = "\n".join(separator.join(each) for each in lines)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _plain(value: Any) -> str:
    """As it stands on a command line or in a list."""
    return _RAW.get(value, value) if isinstance(value, str) else str(value)


# ---- what is changed -------------------------------------------------------------------------------------


def photographs(folder: Path) -> None:
    """Twenty small images of five classes, in the formats that are read."""
    from PIL import Image

    endings = ("png", "jpg", "gif", "bmp", "webp", "tiff")
    for place, name in enumerate("abcde"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            pixels = bytes((37 * place + 11 * number + 5 * at) % 256 for at in range(8 * 8 * 3))
            kind = endings[(4 * place + number) % len(endings)]
            Image.frombytes("RGB", (8, 8), pixels).save(folder / name / f"{number}.{kind}")


RECIPE = """about = "one epoch"
extends = "natural"
[data]
resize = 8
crop = 8
flip = false
[batch]
pairs = 4
mining_pairs = 0
[model]
backbone = "mlp"
dim = 4
weights = ""
freeze_batchnorm = true
[optimiser]
lr = 1e-3
[train]
epochs = 1
seed = 3
attack_eps = 0.1
attack_steps = 1
attack_queries = 2
[defence]
name = "natural"
sampler = "random"
[on.folder.train]
evaluate_every = 1
"""


@dataclass
class Stock:
    """Files as Anchorhold writes them, made once; `copy` puts some of them into a fresh folder."""

    root: Path

    def copy(self, to: Path, *names: str) -> None:
        for name in names:
            source, place = self.root / name, to / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, place)
            else:
                shutil.copy2(source, place)

    def make(self) -> None:
        """Train, embed and audit, as small as can be."""
        import torch

        photographs(self.root / "photos")
        (self.root / f"{CANARY}.py").write_text(_CANARY)
        (self.root / "recipe.toml").write_text(RECIPE)
        with contextlib.chdir(self.root):
            must("train", "photos", "--recipe", "recipe.toml", "--out", "run")
            must("embed", "run", "photos", "--out", "index")
            with mock.patch("anchorhold.index.unfinished.remove_parts"):
                must("embed", "run", "photos", "--batch", "2", "--out", "begun")
            must("audit", "run", *AUDIT)
            shutil.copytree("run", "half")
            files = sorted(Path("photos").rglob("*.*"))
            Path("list.csv").write_text("path,label\n" + "".join(f"{file},{file.parent.name}\n" for file in files))
            with tarfile.open("photos.tar", "w") as tar:
                tar.add("photos")
            with tarfile.open("photos.tgz", "w:gz") as tar:
                tar.add("photos")
            tensors = _state("run/model.safetensors")
            torch.save({"state_dict": tensors, "epoch": 3}, "weights.pth")
            torch.save(tensors, "old.pth", _use_new_zipfile_serialization=False)
        for name in ("index.json", "ids.csv", "vectors.safetensors"):
            (self.root / "begun" / name).unlink()
        half = json.loads((self.root / "half/run.json").read_text())
        half["settings"]["train"]["epochs"] = 2
        (self.root / "half/run.json").write_text(json.dumps(half | {"status": "training"}))
        (self.root / "half/model.safetensors").unlink()
        official(self.root)


_CANARY = """import builtins
builtins.anchorhold_canary = "imported"
def boom(*arguments, **options):
    builtins.anchorhold_canary = "called"
class Boom:
    boom = boom
"""
AUDIT = ["--data", "photos", "--limit", "2", "--steps", "1", "--strength", "strong", "--batch", "8", "--curve", "none"]
AUDIT += ["--attacks", "CA+,ES,TMA", "--out", "audit"]


def _state(path: str) -> Any:
    from safetensors.torch import load_file

    return {key.removeprefix("backbone."): value for key, value in load_file(path).items() if "backbone" in key}


def official(root: Path) -> None:
    """The papers' sets, four images each."""
    from PIL import Image

    lists = {
        "cub/images.txt": "1 001.A/a.png\n2 001.A/b.png\n3 002.B/a.png\n4 150.C/a.png\n5 150.C/b.png\n6 160.D/a.png\n",
        "cub/image_class_labels.txt": "1 1\n2 1\n3 2\n4 150\n5 150\n6 160\n",
        "cub/classes.txt": "".join(f"{n} {n:03d}.X\n" for n in range(1, 201)),
        "cars/cars_annos.csv": "relative_im_path,class,class_name\na.png,1,A\nb.png,2,B\nc.png,100,C\nd.png,101,D\n",
        "sop/Ebay_train.txt": "image_id class_id super_class_id path\n1 1 1 a_final/a.png\n2 2 1 a_final/b.png\n",
        "sop/Ebay_test.txt": "image_id class_id super_class_id path\n3 11 1 a_final/c.png\n4 12 1 a_final/d.png\n",
        "inshop/list_eval_partition.txt": "5\nimage_name item_id evaluation_status\n"
        "a.png id_1 train\nb.png id_2 train\nc.png id_3 query\nd.png id_3 gallery\ne.png id_4 gallery\n",
    }
    for name, text in lists.items():
        (root / "sets" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sets" / name).write_text(text)
    images = ["cub/images/001.A/a", "cub/images/001.A/b", "cub/images/002.B/a", "cub/images/150.C/a"]
    images += ["cub/images/150.C/b", "cub/images/160.D/a", *(f"cars/{n}" for n in "abcd")]
    images += [*(f"sop/a_final/{n}" for n in "abcd"), *(f"inshop/{n}" for n in "abcde")]
    for name in images:
        (root / "sets" / f"{name}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (len(name) * 9 % 256, 40, 90)).save(root / "sets" / f"{name}.png")


# ---- targets ---------------------------------------------------------------------------------------------

STOCK: Stock


@target
def recipe(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "recipe.toml")
    if rng.random() < 0.3:
        (at / "recipe.toml").write_bytes(damaged(rng, (at / "recipe.toml").read_bytes()))
    else:
        lines = RECIPE.splitlines()
        number = rng.randrange(len(lines))
        key = lines[number].partition(" = ")[0]
        lines[number] = f"{key} = {_toml(odd(rng))}" if " = " in lines[number] else f"[{_plain(odd(rng))}]"
        (at / "recipe.toml").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    return ["train", "photos", "--recipe", "recipe.toml", "--out", "out"]


def _toml(value: Any) -> str:
    if value is None or isinstance(value, dict):
        return "{ a = 1 }"
    return (
        _RAW.get(value, json.dumps(value)) if isinstance(value, str) else json.dumps(value).replace("Infinity", "inf")
    )


@target
def setting(rng: Random, at: Path) -> list[str]:
    from anchorhold.config.build import build, to_dict
    from anchorhold.config.settings import DEFENCE_SETTINGS

    STOCK.copy(at, "photos", "recipe.toml")
    name = rng.choice(sorted(set(DEFENCE_SETTINGS) - {"distil"}))  # which wants a teacher
    alone = RECIPE.replace('extends = "natural"\n', "").replace('"natural"\nsampler = "random"', f'"{name}"')
    (at / "recipe.toml").write_text(alone)
    whole = to_dict(build({"defence": {"name": name}}))
    keys = [f"{section}.{key}" for section, own in whole.items() if isinstance(own, dict) for key in own]
    words = ["--recipe", "recipe.toml", "--out", "out"]
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(keys) if rng.random() < 0.95 else _plain(odd(rng))
        usual = ("1/0", "1e999999999", "8/255", "true", "random", "softhard", "classes", "8", "-8/255")
        value = _plain(rng.choice((odd(rng), *(rng.choice(_NUMBERS) for _ in range(3)), rng.choice(usual)))).replace(
            "\0", ""
        )
        words += ["--set", f"{key}={value}"]
    return ["train", "photos", *words]


@target
def run_record(rng: Random, at: Path) -> list[str]:
    folder, act = rng.choice(
        (
            ("half", "resume"),
            ("half", "resume"),
            ("run", "resume"),
            ("run", "report"),
            ("run", "compare"),
            ("run", "audit"),
        )
    )
    STOCK.copy(at, "photos", folder, *(["audit"] if act == "compare" else []))
    name = rng.choice(("run.json", "run.json", "run.json", "metrics.jsonl"))
    if name == "run.json":
        changed_json(rng, at / folder / name)
    else:
        rows = [json.loads(line) for line in (at / folder / name).read_text().splitlines()]
        (at / folder / name).write_bytes(b"\n".join(written(changed(rng, row)) for row in rows))
    if act == "audit":
        return ["audit", folder, "--data", "photos", "--limit", "2", "--steps", "1", "--attacks", "ES", "--out", "out"]
    return [act, folder]


@target
def checkpoint(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "half")
    name = rng.choice([file.name for file in sorted((at / "half").glob("*.safetensors"))])
    changed_tensors(rng, at / "half" / name)
    return ["resume", "half"]


@target
def weights(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "run/model.safetensors", "photos", "recipe.toml")
    changed_tensors(rng, at / "run/model.safetensors")
    return rng.choice((
        ["embed", "run/model.safetensors", "photos", "--out", "out"],
        ["embed", "mlp=run/model.safetensors", "photos", "--size", "8", "--out", "out"],
        ["train", "photos", "--recipe", "recipe.toml", "--weights", "run/model.safetensors", "--out", "out"],
    ))  # fmt: skip


@target
def pth(rng: Random, at: Path) -> list[str]:
    import pickle

    name = rng.choice(("weights.pth", "old.pth"))
    STOCK.copy(at, name, "photos")
    data = (at / name).read_bytes()
    if rng.random() < 0.2:
        data = pickle.dumps({"state_dict": _Bomb()}, rng.choice((0, 2, 4)))
    else:
        for _ in range(rng.choice((1, 1, 4))):
            data = damaged(rng, data)
    (at / name).write_bytes(data)
    return ["embed", f"mlp={name}", "photos", "--size", "8", "--out", "out"]


class _Bomb:
    def __reduce__(self) -> Any:
        return eval, (f"__import__('{CANARY}').boom()",)


@target
def image(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "run/model.safetensors", "index", "recipe.toml")
    file = rng.choice(sorted((at / "photos").rglob("*.*")))
    for _ in range(rng.choice((1, 3, 9))):
        file.write_bytes(damaged(rng, file.read_bytes()))
    return rng.choice((
        ["embed", "run", "photos", "--out", "out", "--on-bad-image", rng.choice(("fail", "skip"))],
        ["search", "index", str(file.relative_to(at)), "--model", "run"],
        ["train", "photos", "--recipe", "recipe.toml", "--out", "out", "--on-bad-image", rng.choice(("fail", "skip"))],
    ))  # fmt: skip


@target
def table(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "list.csv", "run/model.safetensors", "recipe.toml")
    changed_lines(rng, at / "list.csv", ",")
    return rng.choice((
        ["embed", "run", "list.csv", "--out", "out"],
        ["train", "list.csv", "--recipe", "recipe.toml", "--out", "out"],
    ))  # fmt: skip


@target
def tar(rng: Random, at: Path) -> list[str]:
    name = rng.choice(("photos.tar", "photos.tgz"))
    STOCK.copy(at, name, "run/model.safetensors")
    for _ in range(rng.choice((1, 1, 3))):
        (at / name).write_bytes(damaged(rng, (at / name).read_bytes()))
    return ["embed", "run", name, "--out", "out", "--on-bad-image", rng.choice(("fail", "skip"))]


@target
def index(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "index", "run/model.safetensors", f"{CANARY}.py")
    name = rng.choice(("index.json", "index.json", "index.json", "ids.csv", "vectors.safetensors"))
    if name == "index.json":
        told = json.loads((at / "index/index.json").read_text())
        told["model"]["named"]["spec"] = str(at / "run")
        if rng.random() < 0.1:
            told["model"]["named"]["spec"] = rng.choice(_CODE)
            (at / "index/index.json").write_text(json.dumps(told))
        else:
            (at / "index/index.json").write_text(json.dumps(told))
            changed_json(rng, at / "index/index.json")
    elif name == "ids.csv":
        changed_lines(rng, at / "index" / name, ",")
    else:
        changed_tensors(rng, at / "index" / name)
    given = ["--model", "run"] if rng.random() < 0.3 else []
    return rng.choice((
        ["search", "index", "photos/a/0.png", *given],
        ["search", "index", "photos/a/0.png", *given],
        ["embed", "run", "photos", "--out", "index"],
    ))  # fmt: skip


@target
def part(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "begun", "run/model.safetensors")
    changed_tensors(rng, rng.choice(sorted((at / "begun/.anchorhold-parts").glob("*.safetensors"))))
    return ["embed", "run", "photos", "--batch", "2", "--out", "begun"]


@target
def audit_record(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "audit", "run")
    files = sorted((at / "audit").glob("*.safetensors"))
    if rng.random() < 0.6:
        changed_json(rng, at / "audit/audit.json")
    else:
        changed_tensors(rng, rng.choice(files))
    return rng.choice(
        (
            ["report", "audit"],
            ["compare", "audit", "run"],
            ["compare", "audit", "--table", "strong"],
            ["compare", "audit", "run", "--table", "columns"],
            ["audit", "run", *AUDIT],
        )
    )


@target
def shard(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "audit", "run")
    changed_tensors(rng, rng.choice(sorted((at / "audit/shards").glob("*.safetensors"))))
    return ["audit", "run", *AUDIT]


@target
def receipt(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "audit", "run")
    place = at / "audit/receipts"
    if rng.random() < 0.7:
        changed_json(rng, place / "receipts.json")
    else:
        file = rng.choice(sorted(place.rglob("*.png")))
        file.write_bytes(damaged(rng, file.read_bytes()))
    if rng.random() < 0.3:
        changed_json(rng, at / "audit/audit.json")
    return ["verify", "audit", "--model", "run", "--data", "photos"]


@target
def rows_file(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "run")
    text = b'run = "hm/t6/cub/hm-lga-8"\n'
    value = _toml(odd(rng)).encode("utf-8", "replace")
    (at / "rows.toml").write_bytes(damaged(rng, text) if rng.random() < 0.5 else b"run = " + value)
    return ["compare", "."]


@target
def official_list(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "sets", "recipe.toml")
    file = rng.choice([each for each in sorted((at / "sets").rglob("*")) if each.suffix in (".txt", ".csv")])
    changed_lines(rng, file, "," if file.suffix == ".csv" else " ")
    return ["train", file.parent.name, "--root", str(file.parent), "--recipe", "recipe.toml", "--out", "out"]


@target
def environment(rng: Random, at: Path) -> list[str]:
    STOCK.copy(at, "photos", "recipe.toml")
    name = rng.choice(("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    value = rng.choice(("abc", "", "-1", "0", "1.5", "²", "1e3", "9" * 5000, " 1", "None"))
    return [f"{name}={value}", *rng.choice((["recipes"], ["train", "photos", "--recipe", "recipe.toml", "--out", "o"]))]


# ---- one example -----------------------------------------------------------------------------------------


class Hang(BaseException):
    """An example took too long."""


@dataclass
class Watch:
    """What the process does while an example runs: programs, connections, the canary."""

    armed: bool = False
    seen: list[str] = field(default_factory=list)
    FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn", "socket.connect")

    def __call__(self, event: str, arguments: Any) -> None:
        if self.armed and (event in self.FORBIDDEN or (event == "import" and arguments[0].startswith(CANARY))):
            self.seen.append(f"{event} {str(arguments)[:80]}")


WATCH = Watch()
sys.addaudithook(WATCH)  # for good: Python takes none away


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A limit on time, one on memory where the system has it, and the watch."""

    def late(*_: Any) -> None:
        raise Hang

    before = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # Linux says how much is taken; elsewhere there is no limit
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    WATCH.armed, WATCH.seen = True, []
    builtins.anchorhold_canary = ""  # type: ignore[attr-defined]
    try:
        yield
    finally:
        WATCH.armed = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
        sys.modules.pop(CANARY, None)


def command(*words: str) -> tuple[int, str]:
    """Run the command line in this process: its exit code and what it said on standard error."""
    from anchorhold.cli import main as cli

    where = [] if words[0] in ("recipes", "report", "compare") else ["--device", "cpu"]
    error = io.StringIO()

    def leave(code: int) -> None:
        raise SystemExit(code)

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(error),
        mock.patch.object(sys, "argv", ["anchorhold", *words, *where]),
        mock.patch.object(os, "_exit", leave),
    ):
        out = sys.stdout
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0), error.getvalue()
        finally:
            sys.stdout = out  # ranks after the first have none
    return 0, error.getvalue()


def must(*words: str) -> None:
    code, said = command(*words)
    assert code == 0, (words, said)


def tried(words: list[str]) -> str:
    """ok, refused, or what is wrong."""
    surroundings = dict(word.split("=", 1) for word in words[:1] if "=" in word)
    try:
        with mock.patch.dict(os.environ, surroundings), bounded():
            code, said = command(*words[len(surroundings) :])
    except Hang:
        return f"hang: {words[0]}"
    except Exception as error:
        return f"{type(error).__name__} at {_place(error)}"
    mark = builtins.anchorhold_canary  # type: ignore[attr-defined]
    if mark or WATCH.seen:
        return f"executed: {mark or WATCH.seen[0]}"
    if code == 0:
        return "ok"
    if code != 2:
        return f"exit code {code}: {said.strip().splitlines()[-1:]}"
    lines = said.rstrip("\n").split("\n")
    single = lines[-1].startswith("error") or "Usage:" in said
    if not single or not said.replace("\n", "").isprintable():
        return f"not one printable line: {said[-200:]!r}"
    return "refused"


def _place(error: BaseException) -> str:
    """The innermost line of Anchorhold that an exception came through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "anchorhold/" in each.filename]
    if not frames:
        return "outside"
    return f"{frames[-1].filename.rpartition('anchorhold/')[2]} {frames[-1].name}"


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """The files that examples start from, in a folder that goes away."""
    global STOCK
    import torch

    quiet = {"HF_HUB_OFFLINE": "1", "ANCHORHOLD_COMMIT": "none", "ANCHORHOLD_DEBUG": "", "COLUMNS": "10000"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="anchorhold-fuzz") as root, mock.patch.dict(os.environ, quiet):
        STOCK = Stock(Path(root).resolve())
        STOCK.make()
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def example(name: str, rng: Random) -> tuple[str, list[str]]:
    """Change something, run a command on it, and say what came of it."""
    with tempfile.TemporaryDirectory(prefix="anchorhold-fuzz") as folder:
        at = Path(folder).resolve()
        words = TARGETS[name](rng, at)
        with contextlib.chdir(at):
            return tried(words), words


def run_target(name: str, count: int, keep: Callable[[str, list[str]], None], again: bool = False) -> None:
    """So many examples of one target, each handed to `keep`; with `again` they are the same at every call."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=again,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def one(rng: Random) -> None:
        keep(*example(name, rng))

    one()


def main() -> int:
    """By hand: many examples, and a count of what came of them."""
    global SECONDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument("--examples", type=int, default=1000, help="of all targets together")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="after which an example hangs")
    options = parser.parse_args()
    SECONDS = options.seconds
    names = options.targets or list(TARGETS)
    kinds: Counter[str] = Counter()
    with prepared():
        for name in names:
            kinds += counted(name, -(-options.examples // len(names)))
    print(summary("all", kinds))
    return 0 if set(kinds) <= {"ok", "refused"} else 1


def counted(name: str, count: int) -> Counter[str]:
    """Run one target and print what came of it, each kind of fault with the first command that showed it."""
    kinds: Counter[str] = Counter()
    first: dict[str, list[str]] = {}

    def keep(outcome: str, words: list[str]) -> None:
        kinds[outcome] += 1
        first.setdefault(outcome, words)

    begun = time.monotonic()
    run_target(name, count, keep)
    print(f"{summary(name, kinds)}, {time.monotonic() - begun:.0f} s", flush=True)
    for kind, number in kinds.most_common():
        if kind not in ("ok", "refused"):
            print(f"    {number:5} {kind}   {' '.join(first[kind])[:100]!r}", flush=True)
    return kinds


def summary(name: str, kinds: Counter[str]) -> str:
    """How many examples ended in which way."""
    faults = kinds.total() - kinds["ok"] - kinds["refused"]
    ends = f"{kinds['ok']:5} succeed, {kinds['refused']:5} refused, {faults:5} faults"
    return f"{name:14} {kinds.total():6} examples, {ends} of {len(kinds.keys() - {'ok', 'refused'})} kinds"


if __name__ == "__main__":
    sys.exit(main())
