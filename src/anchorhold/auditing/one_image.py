"""Attack one image against a gallery and show the list before and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..attacks.goal import Goal, ProtocolName, Scene
from ..attacks.label import LabelAttack
from ..attacks.own import maker_of
from ..attacks.run import Attack
from ..columns import radius
from ..console import Report, Silent
from ..data.decode import Square, shape_of
from ..data.splits import Split
from ..data.store import centre_crop, decode
from ..device import device_named, living_on
from ..errors import DataError, check
from ..geometry import Retrieved
from ..interface import option
from ..model.chunked import chunked
from ..model.frozen import Embed, embed_all, frozen
from ..model.no_gradients import gives_gradients
from ..model.wrap import as_victim
from ..perturb.settings import Threat
from ..random import Key
from ..runs.writing import atomic
from .black_box import usable
from .draws import on_draws, still
from .inputs import Data, Material, prepare
from .plan import AuditSettings, effort
from .realisable import to_bytes
from .standard import NEIGHBOURS, shown_lists
from .subject import climbed

__all__ = ["Reading", "Single", "Stage", "attack", "staged", "write_png"]

_RIGHT_OR_WRONG = ("ES:R", "LTM", "GTM", "nearest", "margin")  # measures that are 1 or 0


@dataclass(frozen=True, eq=False)
class Single:
    """The effect of an attack on one image on one list.

    Attributes:
        about: the attacked image, and the query whose list is shown.
        measures: before and after, as measured: fractions, a cosine, a distance.
        before: class, name and distance of the nearest items, before the attack.
        after: the same after it.
        image: the perturbed image, uint8 (H, W, C).
        unknown: measures that need the class of the image, which is not known.
    """

    about: str
    measures: dict[str, tuple[float, float]]
    before: list[tuple[str, str, float]]
    after: list[tuple[str, str, float]]
    image: Tensor
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.about, *(f"{name}: {_change(name, *pair)}" for name, pair in self.measures.items())]
        lines += [
            f"{name}: –, needs the class of the image: give {option('label', command='class')}" for name in self.unknown
        ]
        for when, items in (("before", self.before), ("after", self.after)):
            lines += ["", f"{when:>6}  {'class':24}  {'distance':>8}  file"]
            lines += [f"{rank:>6}  {c[:24]:24}  {d:>8.4f}  {name}" for rank, (c, name, d) in enumerate(items, start=1)]
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Write the perturbed image as PNG, without loss."""
        return write_png(self.image, path)


def write_png(image: Tensor, path: str | Path) -> Path:
    """Write an image, uint8 (H, W, C), as PNG."""
    from PIL import Image

    path, pixels = Path(path), image.numpy()
    check(path.suffix.lower() == ".png", f"{path.name}: only PNG has no loss; end the name in .png")
    with atomic(path) as temporary:
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(temporary, format="PNG")
    return path


def attack(
    model: nn.Module,
    image: str | Path,
    data: Data,
    goal: str = "ES",
    *,
    protocol: ProtocolName = "corrected",
    label: str = "",
    threat: Threat | str = "standard",
    eps: float | None = None,
    alpha: float | None = None,
    steps: int | None = None,
    method: Literal["pgd", "fgsm", "cw", "square", "nes"] = "pgd",
    seed: int = 0,
    count: int = NEIGHBOURS,
    batch: int = 128,
    device: str = "auto",
    resize: int | None = None,
    crop: int | None = None,
    report: Report | None = None,
) -> Single:
    """Attack one image, and show which images the model finds for it before and after.

    Args:
        model: the victim, any module from images to vectors, as in `audit`.
        image: a file, or the number of an image in the data, such as "3".
        data: the images that are searched, as in `audit`.
        goal: what the attacker wants: CA+, CA-, QA+, QA-, TMA, ES, LTM, GTM, GTT, nearest, margin, untargeted,
            targeted, SP-QA, or `module:thing`.
        protocol: corrected, as the papers describe the attack, or published, as their evaluator runs it.
        label: the class of an image file that is not in the data; some goals need it.
        threat: what the attacker may do, an `ah.Threat`, or "standard" or "adml".
        eps: maximum change of a pixel, instead of the threat's.
        alpha: length of a step, instead of the threat's.
        steps: number of steps, instead of the threat's.
        method: pgd, fgsm, cw, square or nes.
        seed: determines targets and random starts.
        count: images in each list.
        batch: images at a time while the data are embedded.
        device: auto, cpu, cuda or cuda:N.
        resize: resize files to this square before the crop, instead of the model's; encoders resize the shorter side.
        crop: side of the centre crop, instead of the model's.
        report: receives progress and messages, such as `ah.Console()`; None is silent.

    >>> from anchorhold import Embedder
    >>> found = attack(Embedder("small", 8, channels=1, size=8), "3", "digits", steps=2, count=4, device="cpu")
    >>> len(found.before), len(found.after), sorted(found.measures)
    (4, 4, ['ES:D', 'ES:R'])
    """
    way = usable(model, method)
    threat = effort(way, threat, eps, alpha, steps)
    settings = AuditSettings(
        eps=threat.eps,
        alpha=threat.step,
        steps=threat.budget_steps,
        method=way,  # type: ignore[arg-type]  # checked by the settings
        seed=seed,
        batch=batch,
        start=threat.start,
        norm=threat.norm,
    )
    wish = maker_of(goal)(protocol)
    opened = staged(model, image, data, wish, label, Reading(batch, device, resize, crop, report, seed))
    with opened as (embed, scene, ids, pixels, material, name, number, label):
        key = Key.of(seed)("audit")
        done = Attack(embed, scene, wish, settings.ball, settings.budget, key, settings.find).run(pixels, ids)
    clean = scene.clean(wish.side)[ids]
    start = wish.measure(scene, ids, done.targets, clean, clean)
    asked, before, after = shown_lists(wish, scene, ids, done.targets, done.embeddings, count)
    about = f"{goal} ({protocol}) on {name}, {radius(threat.eps, threat.norm)}"
    if wish.side == "gallery":
        about += f"; the list of {material.query.split.sample(int(asked[0]))}"
    elif done.targets is not None and not isinstance(wish, LabelAttack) and int(done.targets.flatten()[0]) >= 0:
        about += f"; aimed at {material.gallery.split.sample(int(done.targets.flatten()[0]))}"
    # ES does not need a class, but its measure ES:R does.
    unknown = ("ES:R",) if goal == "ES" and number is None and not label else ()
    return Single(
        about,
        {name: (float(start[name][0]), float(row[0])) for name, row in done.measures.items() if name not in unknown},
        _listed(before, material.gallery.split),
        _listed(after, material.gallery.split),
        to_bytes(done.images)[0].cpu().contiguous(),
        unknown,
    )


class Reading(NamedTuple):
    """How images are read and embedded; arguments of `attack`."""

    batch: int = 128
    device: str = "auto"
    resize: int | None = None
    crop: int | None = None
    report: Report | None = None
    seed: int = 0


class Stage(NamedTuple):
    """One image, ready to be attacked."""

    embed: Embed  # of a random model the mean over its draws
    scene: Scene
    ids: Tensor  # (1,) its position on the goal's side of the scene
    pixels: Tensor  # (1, C, H, W)
    material: Material
    name: str
    number: int | None  # its position in the data; None for another file
    label: str  # its class, where it was given or is known from the gallery


@contextmanager
def staged(
    model: nn.Module,
    image: str | Path,
    data: Data,
    wish: Goal,
    label: str,
    by: Reading,
) -> Iterator[Stage]:
    """Find the image, embed the data, and hold the model still while the image is attacked; arguments of `attack`.

    `wish` is the goal. It says on which side the image is.
    """
    batch, where, victim = by.batch, device_named(by.device), as_victim(model)
    material = prepare(data, victim, where, by.report or Silent(), by.resize, by.crop)
    query, gallery, name = _find(str(image), material, wish.side)
    with living_on(victim, where), still(where, by.seed), frozen(victim) as view:
        embed, draws = chunked(view, batch), 1
        if gives_gradients(victim):
            embed, draws = climbed(embed, material)
        if draws > 1 and by.report is not None:
            by.report.say(on_draws(draws))
        items = embed_all(embed, material.gallery.plain(batch=batch))
        side = material.side(wish.side)
        number = query if wish.side == "query" else gallery
        if number is None:
            pixels = _read(Path(image).expanduser(), material).to(where)
            classes = material.gallery.split.classes
            if gallery is not None and not label:  # an image of the gallery has a class and is never its own match
                label = classes[int(material.gallery.split.labels[gallery])]
            check(
                bool(label) or wish.name not in ("LTM", "GTM", "nearest", "margin"),
                f"{wish.name} needs the class of {name}: give it with {option('label', command='class')}",
            )
            check(not label or label in classes, f"the gallery has no class {label!r}; it has {', '.join(classes[:8])}")
            labels = torch.tensor([classes.index(label) if label else -1], device=where)
            own = torch.tensor([-1 if gallery is None else gallery], device=where)
            queries, ids = embed_all(embed, [pixels]), torch.tensor([0], device=where)
            scene = Scene(items, material.gallery_labels, queries, labels, own)
        else:
            (pixels,) = side.plain(torch.tensor([number]), batch=1)
            queries = items if material.same else embed_all(embed, material.query.plain(batch=batch))
            scene, ids = material.scene(queries, items), torch.tensor([number], device=where)
        yield Stage(embed, scene, ids, pixels.to(scene.gallery.dtype), material, name, number, label)


def _find(image: str, material: Material, side: str) -> tuple[int | None, int | None, str]:
    """Its positions among queries and gallery, and its name."""
    path = Path(image).expanduser()
    sides = {"query": material.query.split, "gallery": material.gallery.split}
    if image.isdecimal() and not path.exists():
        number, split = int(image), sides[side]
        if number >= len(split):
            raise DataError(f"{split.name} has no image {number}: give a number from 0 to {len(split) - 1}")
        return number, number, split.sample(number)
    if not path.is_file():
        raise DataError(f"there is no image {image}; give a file, or the number of one in the data")
    found: dict[str, int | None] = {}
    for name, split in sides.items():
        places = {each.resolve(): at for at, each in enumerate(split.paths or ())}
        found[name] = places.get(path.resolve())
    if side == "gallery" and found["gallery"] is None:
        raise DataError(f"{path.name} is not in the gallery, and CA perturbs gallery images: choose one of those")
    return found["query"], found["gallery"], path.name


def _read(path: Path, material: Material) -> Tensor:
    """A file, prepared as the gallery's images: same size, crop and channels."""
    (frame,) = material.gallery.store.frames([torch.zeros(1, dtype=torch.long)])
    height, width, channels = frame.shape[1:]
    how = material.gallery.square
    known = isinstance(how, Square) and shape_of(how) == (height, width)
    check(known or height == width, f"images of {height}×{width} are not square; put {path.name} into the data")
    # Twice, since a split needs two classes; only one is used.
    split = Split(path.name, torch.tensor([0, 1]), ("a", "b"), paths=(path, path))
    pixels = centre_crop(decode(split, how or height, workers=1).images[:1], material.gallery.crop)
    return pixels.mean(1, keepdim=True) if channels == 1 else pixels


def _change(name: str, before: float, after: float) -> str:
    """A measure before and after the attack; measures of right answers in words."""
    if name in _RIGHT_OR_WRONG:
        words = ["wrong" if value < 0.5 else "right" for value in (before, after)]
        return "wrong before the attack too" if words == ["wrong", "wrong"] else f"{words[0]} before, {words[1]} after"
    return f"{before:.3f} before, {after:.3f} after"


def _listed(found: Retrieved, split: Split) -> list[tuple[str, str, float]]:
    rows = zip(found.ids[0].tolist(), found.distances[0].tolist())
    return [(split.classes[int(split.labels[item])], split.sample(item), distance) for item, distance in rows]
