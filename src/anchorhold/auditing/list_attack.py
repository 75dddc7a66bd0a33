"""attack_list(): R@1 against the number of queries, for an attacker who sees only the returned list.

found = ah.attack_list(model, ah.dataset("digits"), k=10, queries=1000)
found = ah.attack_list(service, {"query": mine, "gallery": theirs}, names=names)   # service(images) -> ids (B, k)
print(found); found.curve
"""

import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attacks.listed import ListGoal, Lists, Search, attack_lists
from ..columns import radius
from ..console import Report, Silent
from ..device import computer_of, device_named, living_on
from ..errors import AnchorholdError, DataError, ModelError, check, lacks_memory
from ..extensions import kind_of, reason_of
from ..geometry import retrieve
from ..interface import argument
from ..model.chunked import chunked
from ..model.frozen import embed_images, frozen
from ..model.preprocessing import preprocessing_of
from ..model.wrap import Victim, as_victim, fingerprint_of, hub_of
from ..perturb.settings import Threat, threat_of
from ..random import Key
from ..runs.provenance import provenance
from ..runs.schemas import LIST_SCHEMA
from ..runs.writing import atomic
from .classes import Classes, part_of
from .inputs import Data, Material, prepare, sample

__all__ = ["ListAttack", "attack_list"]


@dataclass(frozen=True, eq=False)
class ListAttack:
    """The result of an attack on returned lists; `print` it, or `save` it.

    Attributes:
        r1: R@1 in percent after 1, 2, … queries for each image.
        spent: (N,) queries of each image, the clean one included.
        ids: (N,) positions of the attacked queries.
        images: (N, C, H, W) perturbed.
        right: (N,) whether the first id is right in the end.
        settings: goal, ε, length of the lists and so on.
        about: model, data, versions, device and commit.
    """

    r1: tuple[float, ...]
    spent: Tensor
    ids: Tensor
    images: Tensor
    right: Tensor
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def queries(self) -> int:
        """Images sent in all."""
        return int(self.spent.sum())

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(queries, R@1 in percent) at 1, 2, 5, 10, 20, 50 … and at the end; 1 is the clean image."""
        places = [first * 10**power for power in range(9) for first in (1, 2, 5) if first * 10**power < len(self.r1)]
        return [(place, self.r1[place - 1]) for place in (*places, len(self.r1))]

    def to_dict(self) -> dict[str, Any]:
        """Settings, curve, and what the numbers are from, for JSON."""
        found = {"curve": self.curve, "images": len(self.ids), "queries": self.queries}
        return {"schema": LIST_SCHEMA, "settings": self.settings, **self.about, **found}

    def save(self, path: str | Path) -> Path:
        """Write `to_dict` as JSON."""
        path = Path(path)
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def __str__(self) -> str:
        s = self.settings
        head = f"{len(self.ids):,} images, lists of {s['k']}, goal {s['goal']}, {radius(s['eps'], s['norm'])}"
        lines = [head, f"{'queries':>10}{'R@1':>8}", *(f"{queries:>10,}{r1:>8.1f}" for queries, r1 in self.curve)]
        return "\n".join([*lines, f"{self.queries:,} queries in all"])


def attack_list(
    search: nn.Module | Callable[[Tensor], Any],
    data: Data,
    *,
    k: int = 10,
    queries: int = 1000,
    threat: Threat | str = "standard",
    eps: float | None = None,
    goal: ListGoal = "recall",
    limit: int = 100,
    names: Sequence[Hashable] | None = None,
    seed: int = 0,
    batch: int = 128,
    device: str = "auto",
    resize: int | None = None,
    crop: int | None = None,
    classes: Classes = "unseen",
    report: Report | None = None,
) -> ListAttack:
    """Attack with nothing but returned lists, and tell R@1 against the number of queries.

    Args:
        search: a function from images (B, C, H, W) in [0, 1], on the CPU, to ids (B, k), the nearest first. Or a model,
            whose gallery is then searched by vectors.
        data: as in `audit`; it says which images ask, and the classes of the gallery.
        k: length of the lists.
        queries: most images sent for each attacked one, the clean one included.
        threat: how far an image may change, `ah.Threat(eps=8/255)`; this attack takes queries, and no steps.
        eps: overrides the threat's.
        goal: recall, a wrong first id; overlap, other ids than in the clean list; order, its first ids in reverse.
        limit: number of attacked queries, a seeded sample over all classes; 0 is all.
        names: the ids that the function returns, one for each gallery image; by default they are positions from 0.
        seed: of all random draws.
        batch: images in one call.
        device: of a model: auto, cpu, cuda or cuda:N.
        resize: resize files to this square before the crop, instead of the model's; encoders resize the shorter side.
        crop: the side of the square that the model sees, instead of the model's.
        classes: unseen or all, of data without a test split that a model was trained on.
        report: receives progress messages.

    >>> from anchorhold import Embedder, dataset
    >>> model = Embedder("small", 8, channels=1, size=8)
    >>> found = attack_list(model, dataset("digits"), k=5, queries=20, limit=4, eps=0.1, device="cpu")
    >>> found.curve[0][0], found.curve[-1][0] <= 20
    (1, True)
    """
    check(k >= 1, f"{argument('k')} must be at least 1, got {k}")
    check(queries >= 1, f"{argument('queries')} must be at least 1, got {queries}")
    check(batch >= 1, f"batch must be at least 1, got {batch}")
    check(limit >= 0, f"{argument('limit')} must not be negative, got {limit}; 0 attacks all")
    chosen = threat_of(threat, eps)
    check(
        not isinstance(threat, Threat) or (threat.steps is None and threat.alpha is None and threat.start == "zero"),
        "an attack on lists takes queries, no steps: leave steps, alpha and start out of the threat",
    )
    ball, report, key = chosen.ball, report or Silent(), Key.of(seed)("list attack")
    model = as_victim(search) if isinstance(search, nn.Module) else None
    if model is None and not callable(search):
        raise ModelError(f"search is {kind_of(search)}; give a model, or a function from images to ids (B, k)")
    where = device_named(device) if model is not None else torch.device("cpu")
    check(classes == "unseen" or model is not None, "classes are of a model and its training: leave classes out")
    attacked = ""
    if model is not None:  # as in an audit: classes of a folder that the model was trained on are left out
        part = part_of(data, (model,), classes, preprocessing_of(model).told(resize, crop).for_pictures)
        data, attacked = part.data, part.recorded
        for note in (f"attacked: {part.recorded}", *part.notes):
            report.say(note)
    material = prepare(data, model or nn.Identity(), where, report, resize, crop)
    size = len(material.gallery_labels)
    alone = bool((material.own >= 0).any())
    check(k > alone, f"the gallery holds the queries' own images, which do not count: set {argument('k')} to 2 or more")
    check(k <= size, f"k = {k} is more than the {size} images of the gallery")
    ids = sample(material.labels, limit, key("sample"))
    settings = {
        "k": k,
        "queries": queries,
        "eps": ball.eps,
        "norm": ball.norm,
        "goal": goal,
        "limit": limit,
        "seed": seed,
        "resize": resize,
        "crop": crop,
        "classes": classes,
    }
    with ExitStack() as stack:
        asked: Search
        if model is not None:
            check(names is None, "names are for a search function; a model's ids are positions in the gallery")
            asked = _by_vectors(model, material, k, batch, stack, where)
        else:
            asked = _Checked(search, k, size, names)
        parts = []
        with report.task("attacking lists", len(ids)) as advance:
            for at in ids.split(batch):
                (images,) = material.query.plain(at, batch=len(at))
                rows = at.to(where)
                known = Lists(material.labels[rows], material.gallery_labels, material.own[rows])
                parts.append(attack_lists(asked, images, known, ball, queries, goal, key("moves"), rows))
                advance(sum(len(part.queries) for part in parts), "")
    after = torch.stack([part.after for part in parts]).sum(0)
    return ListAttack(
        tuple((100 * after.double() / len(ids)).tolist()),
        torch.cat([part.queries for part in parts]).cpu(),
        ids,
        torch.cat([part.images for part in parts]).cpu(),
        torch.cat([part.right for part in parts]).cpu(),
        settings,
        {
            "model": _described(search if model is None else model),
            "data": material.describe() | ({"part": attacked} if attacked else {}),
            **provenance(computer_of(where)),
        },
    )


def _described(search: Any) -> dict[str, Any]:
    """A model by its class and weights, a search function by its name."""
    if not isinstance(search, nn.Module):
        return {"search": getattr(search, "__name__", type(search).__name__)}
    inner = search.module if isinstance(search, Victim) else search
    return {"kind": type(inner).__name__, "weights": fingerprint_of(search), **hub_of(search)}


def _by_vectors(
    model: nn.Module, material: Material, k: int, batch: int, stack: ExitStack, where: torch.device
) -> Search:
    """The lists of a model: the nearest gallery images, of which the attacker sees only the ids."""
    stack.enter_context(living_on(model, where))
    embed = chunked(stack.enter_context(frozen(model)), batch)
    gallery = embed_images(embed, material.gallery, batch)

    def search(images: Tensor) -> Tensor:
        with torch.no_grad():
            return retrieve(embed(images), gallery, k).ids

    return search


class _Checked:
    """A search function of yours, with its answers checked and its ids as positions in the gallery."""

    def __init__(
        self, function: Callable[[Tensor], Any], k: int, size: int, names: Sequence[Hashable] | None = None
    ) -> None:
        if names is not None and (len(names) != size or len(set(names)) != size):
            raise DataError(f"names has {len(set(names))} different ids for {size} gallery images; give one for each")
        self._function, self._k, self._size = function, k, size
        self._places = None if names is None else {name: place for place, name in enumerate(names)}

    def __call__(self, images: Tensor) -> Tensor:
        try:
            out = self._function(images.detach().cpu().contiguous())
        except (Exception, SystemExit) as error:  # user code may raise anything
            if isinstance(error, AnchorholdError) or lacks_memory(error):
                raise
            shape = tuple(images.shape)
            raise ModelError(f"the search function fails on images of shape {shape} ({reason_of(error)})") from error
        rows = _rows(out)
        if len(rows) != len(images):
            raise ModelError(
                f"the search function returns {len(rows)} lists for {len(images)} images; return (B, k) ids"
            )
        short = min((len(row) for row in rows), default=self._k)
        if short < self._k:
            raise ModelError(
                f"the search function returns a list of {short} ids, not {self._k}; set k = {short} or less"
            )
        return torch.tensor([[self._place(each) for each in row[: self._k]] for row in rows], device=images.device)

    def _place(self, each: Any) -> int:
        if self._places is not None:
            place = self._places.get(each)
        else:
            place = int(each) if isinstance(each, int | np.integer) and 0 <= each < self._size else None
        if place is None:
            known = f"a position from 0 to {self._size - 1}, or give names" if self._places is None else "one of names"
            raise ModelError(f"the search function returns the id {each!r}, which is not {known}")
        return place


def _rows(out: Any) -> list[list[Any]]:
    """What a search function returned, as lists."""
    if isinstance(out, Tensor | np.ndarray):
        out = out.tolist()
    if not isinstance(out, list | tuple) or not all(isinstance(row, list | tuple | Tensor | np.ndarray) for row in out):
        raise ModelError(f"the search function returns {kind_of(out)}; return ids (B, k), a list for each image")
    return [row.tolist() if isinstance(row, Tensor | np.ndarray) else list(row) for row in out]
