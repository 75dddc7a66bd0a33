"""The gallery of an audit's page: examples as cases, with pictures as data URIs.

A picture is encoded once and referenced by number. If there are many, all are shrunk to fit.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ..errors import RunError
from ..runs.fields import dig
from .pictures import AIMED, SHOWN, SHOWN_CHANNELS, Array, Pictures, load_pictures

__all__ = ["Case", "Gallery", "Neighbour", "gallery_of"]

MOST = 3_500_000  # bytes of all pictures: the page must stay under 5 MB
_LARGE, _SMALL = 144, 96  # sides of a query and of a neighbour, pixels
_SCALES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3)
_TRIED = 40  # pictures encoded to estimate the total size
_TINY = 32  # images up to this size are stored without loss
_ORDER = ("ES", "LTM", "GTM", "GTT", "nearest", "margin", "TMA", "QA+", "QA-", "CA+", "CA-")  # simplest first
_AXES = (("ids", 1), ("asked", 1), ("before", 2), ("after", 2), ("clean", 4), ("perturbed", 4))
_WHEN = ("worst", "median", "best")
_RIGHT_OR_WRONG = ("ES:R", "LTM", "GTM", "nearest", "margin")
_KEPT_OR_LOST = ("GTT", "GTT@1", "untargeted", "targeted")


@dataclass(frozen=True)
class Picture:
    """An image of the page, by number."""

    number: int
    width: int
    height: int


@dataclass(frozen=True)
class Neighbour:
    """One item of a list; `other` is its rank in the other list, None where it is not in the stored part."""

    rank: int
    picture: Picture | None
    name: str
    right: bool | None  # of the query's class; None where classes are unknown
    other: int | None
    attacked: bool  # whether it is the perturbed candidate itself


@dataclass(frozen=True)
class Case:
    """A sample, its perturbation, and one list before and after."""

    attack: str
    protocols: str
    held: str  # worst, median or best
    candidate: bool  # whether a gallery item was perturbed
    name: str  # the class of the query of the lists
    query: Picture | None
    sample_name: str
    clean: Picture
    perturbed: Picture
    noise: Picture
    target: Picture | None
    target_name: str
    before: list[Neighbour]
    after: list[Neighbour]
    kept: int  # length of the stored lists
    measures: list[tuple[str, str, str]]  # name, before, after


@dataclass
class Gallery:
    """All cases of an audit and their pictures: (data URI, width, height), by number."""

    cases: list[Case] = field(default_factory=list)
    uris: list[tuple[str, int, int]] = field(default_factory=list)
    factor: int = 1  # by which perturbations are amplified
    named: bool = True  # whether names and pictures of neighbours are stored

    @property
    def attacks(self) -> list[str]:
        return list(dict.fromkeys(case.attack for case in self.cases))

    @property
    def classes(self) -> list[str]:
        return sorted({case.name for case in self.cases if case.name})


def gallery_of(folder: Path, audit: Mapping[str, Any]) -> Gallery:
    """The worst, median and best example of every attack; empty without files."""
    if not (folder / "examples.safetensors").is_file():
        return Gallery()
    examples, samples = (_tensors(folder / f"{name}.safetensors") for name in ("examples", "samples"))
    known = folder / "pictures.safetensors"
    pictures = load_pictures(known) if known.is_file() else Pictures({}, {})
    eps = float(dig(audit, "settings", "eps") or 0)
    # In L2 single pixels may move further than ε divided among all of them; a fixed factor shows the pattern.
    eps = eps if dig(audit, "settings", "norm") in (None, "linf") else 8 / 255
    factor = max(1, int(127 / max(1.0, 255 * eps)))
    album = _Album(factor)
    cases = []
    for run in sorted(audit.get("runs") or [], key=_place):
        if not run.get("start_seed") and _pictured(examples, run["label"]):
            cases += _cases(run, examples, samples, pictures, album)
    return Gallery(cases, album.encoded(), factor, known.is_file())


def _pictured(examples: Mapping[str, Array], label: str) -> bool:
    """Whether there are examples of a run; images of 2, 4 or more channels are left out."""
    clean = examples.get(f"{label}/clean")
    return f"{label}/ids" in examples and (clean is None or clean.ndim != 4 or clean.shape[3] in SHOWN_CHANNELS)


def _place(run: Mapping[str, Any]) -> tuple[int, bool]:
    attack = run["attack"]
    return _ORDER.index(attack) if attack in _ORDER else len(_ORDER), "corrected" not in run["label"]


def _tensors(path: Path) -> dict[str, Array]:
    try:
        return dict(safetensors.numpy.load_file(path)) if path.is_file() else {}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}; audit again, or delete it for a page without pictures") from None


def _cases(
    run: Mapping[str, Any],
    examples: Mapping[str, Array],
    samples: Mapping[str, Array],
    pictures: Pictures,
    album: "_Album",
) -> list[Case]:
    label, attack = run["label"], run["attack"]
    found = {name: examples[f"{label}/{name}"] for name, _ in _AXES}
    _check(found)
    side = run.get("side") or ("gallery" if attack in ("CA+", "CA-") else "query")  # older audits lack this field
    protocols = list(run.get("goals") or {}) or ["corrected"]
    classes = {name: pictures.classes.get(name, {}) for name in ("query", "gallery")}
    images = {name: pictures.images.get(name, {}) for name in ("query", "gallery")}
    rows = {sample: row for row, sample in enumerate(samples.get(f"{label}/ids", np.empty(0)).tolist())}
    cases = []
    seen: set[int] = set()
    for place, when in enumerate(_WHEN[: len(found["ids"])]):
        sample, asked = int(found["ids"][place]), int(found["asked"][place])
        if sample in seen:  # with one or two samples, examples coincide
            continue
        seen.add(sample)
        lists = {name: found[name][place].tolist() for name in ("before", "after")}
        name = classes["query"].get(asked, "")
        target = _target(samples.get(f"{label}/targets"), rows.get(sample)) if attack in AIMED else None

        own = sample if side == "gallery" else None
        clean, perturbed = found["clean"][place], found["perturbed"][place]
        cases.append(
            Case(
                attack,
                " and ".join(protocols),
                when,
                side == "gallery",
                name,
                album.small(images["query"].get(asked)) if side == "gallery" else None,
                classes[side].get(sample, ""),
                album.large(clean),
                album.large(perturbed),
                album.noise(clean, perturbed),
                album.small(None if target is None else images["gallery"].get(target)),
                "" if target is None else classes["gallery"].get(target, ""),
                _neighbours(lists["before"], lists["after"], name, own, pictures, album),
                _neighbours(lists["after"], lists["before"], name, own, pictures, album),
                len(lists["before"]),
                _measures(attack, protocols[-1], samples, rows.get(sample)),
            )
        )
    return cases


def _neighbours(
    items: Sequence[int], others: Sequence[int], name: str, own: int | None, pictures: Pictures, album: "_Album"
) -> list[Neighbour]:
    """The first items of a list, with their ranks in the other list; `own` is the perturbed item, if it may be here."""
    classes, images = pictures.classes.get("gallery", {}), pictures.images.get("gallery", {})
    ranks = {item: rank for rank, item in enumerate(others, 1)}
    return [
        Neighbour(
            rank,
            album.small(images.get(item)),
            classes.get(item, ""),
            classes[item] == name if item in classes else None,
            ranks.get(item),
            item == own,
        )
        for rank, item in enumerate(items[:SHOWN], 1)
    ]


def _check(found: Mapping[str, Array]) -> None:
    """Refuse inconsistent examples: files may be damaged."""
    count = len(found["ids"]) if found["ids"].ndim else -1
    odd = [name for name, axes in _AXES if found[name].ndim != axes or len(found[name]) != count]
    odd += [name for name in ("clean", "perturbed") if name not in odd and count and not _is_picture(found[name][0])]
    if odd or found["clean"].shape != found["perturbed"].shape:
        raise RunError(
            f"examples.safetensors is damaged ({', '.join(odd) or 'clean and perturbed differ'}); audit again"
        )


def _is_picture(image: Array) -> bool:
    return image.ndim == 3 and image.dtype == np.uint8 and image.shape[2] in SHOWN_CHANNELS and bool(image.size)


def _target(targets: Array | None, row: int | None) -> int | None:
    if targets is None or row is None or row >= len(targets) or not targets[row].size:
        return None
    first = int(targets[row].flatten()[0])
    return None if first < 0 else first


def _measures(attack: str, protocol: str, samples: Mapping[str, Array], row: int | None) -> list[tuple[str, str, str]]:
    """The measures of the sample before and after, as words where they are right or wrong."""
    told = []
    for key in samples:
        name = key.removeprefix(f"{protocol}/")
        first = samples.get(f"{key}/initial")
        if row is None or first is None or name == key or name.replace("@", ":").split(":")[0] != attack:
            continue
        last = samples[key]
        if not (first.ndim == last.ndim == 1 and row < len(first) == len(last)) or np.iscomplexobj(first + last):
            continue  # damaged
        before, after = float(first[row]), float(last[row])
        if name in _RIGHT_OR_WRONG:
            words = ("right", "wrong")[before < 0.5], ("right", "wrong")[after < 0.5]
        elif name in _KEPT_OR_LOST:
            words = ("kept", "lost")[before < 0.5], ("kept", "lost")[after < 0.5]
        elif name in ("TMA", "ES:D"):
            words = f"{before:.2f}", f"{after:.2f}"
        else:
            words = f"{100 * before:.1f} %", f"{100 * after:.1f} %"
        told.append((name, *words))
    return told


class _Album:
    """Collects pictures; equal ones are stored once."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.numbers: dict[bytes, int] = {}
        self.images: list[tuple[Array, int, bool]] = []

    def small(self, image: Array | None) -> Picture | None:
        return None if image is None or not _is_picture(image) else self._add(image, _SMALL)

    def large(self, image: Array) -> Picture:
        return self._add(image, _LARGE)

    def noise(self, clean: Array, perturbed: Array) -> Picture:
        """The perturbation, amplified around grey."""
        grown = 128 + self.factor * (perturbed.astype(np.int32) - clean.astype(np.int32))
        return self._add(grown.clip(0, 255).astype(np.uint8), _LARGE, rough=True)

    def _add(self, image: Array, side: int, rough: bool = False) -> Picture:
        known = json.dumps([side, rough, *image.shape]).encode() + image.tobytes()
        number = self.numbers.setdefault(known, len(self.images))
        if number == len(self.images):
            self.images.append((image, side, rough))
        return Picture(number, image.shape[1], image.shape[0])

    def encoded(self) -> list[tuple[str, int, int]]:
        """All as data URIs, as large as the limit allows."""
        some = self.images[:: max(1, len(self.images) // _TRIED)]
        made: list[str] = []
        for scale in _SCALES:
            guess = sum(len(_uri(*each, scale)) for each in some) * len(self.images) / max(1, len(some))
            if guess > MOST and scale != _SCALES[-1]:
                continue
            made = [_uri(*each, scale) for each in self.images]
            if sum(map(len, made)) <= MOST:
                break
        return [(uri, image.shape[1], image.shape[0]) for uri, (image, _, _) in zip(made, self.images)]


def _uri(image: Array, side: int, rough: bool, scale: float) -> str:
    from PIL import Image, features

    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    out = io.BytesIO()
    if max(picture.size) <= _TINY:
        picture.save(out, "PNG", optimize=True)
        return _data("png", out)
    wide = min(1.0, side * scale / max(picture.size))
    size = max(1, round(picture.width * wide)), max(1, round(picture.height * wide))
    # Averaging pixels would cancel a perturbation that alternates in sign.
    picture = picture.convert("RGB").resize(size, Image.Resampling.NEAREST if rough else Image.Resampling.LANCZOS)
    quality = round((45 if rough else 72) * (0.6 + 0.4 * scale))
    kind = "webp" if features.check("webp") else "jpeg"
    picture.save(out, kind.upper(), quality=quality)
    return _data(kind, out)


def _data(kind: str, out: io.BytesIO) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
