"""The smallest perturbation of one image that reaches a goal: equations 5 and 6 of ADML, and other goals likewise."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from ..attacks.goal import ProtocolName
from ..attacks.label import LabelAttack
from ..attacks.own import maker_of
from ..attacks.recall import EmbeddingShift
from ..attacks.run import Attack
from ..attacks.smallest import smallest_attacks
from ..columns import pixel_fraction
from ..console import Report
from ..errors import check
from ..interface import option
from ..model.frozen import embed_all
from ..perturb.methods import METHODS
from ..perturb.settings import VALUES_ONLY, Budget, Threat
from ..random import Key
from .black_box import usable
from .inputs import Data
from .one_image import Reading, staged, write_png
from .plan import effort
from .realisable import to_bytes

__all__ = ["HIGHEST", "SmallestPerturbation", "smallest_perturbation"]

HIGHEST = 64 / 255  # upper end of a search in Linf
_NEED_CLASS = ("ES", "LTM", "GTM", "nearest", "margin")


@dataclass(frozen=True, eq=False)
class SmallestPerturbation:
    """The smallest ε at which an attack on one image succeeded.

    Attributes:
        about: the image and the goal, in words.
        eps: the smallest ε; inf where the attack failed at every ε, 0 where the clean image meets the goal.
        failed: the largest ε below it that was tried and failed.
        highest: the upper end of the search.
        norm: linf or l2.
        size: ‖δ‖ of the image found.
        checked: whether the image, embedded anew in full precision, meets the goal.
        saved: whether it still does, rounded to the 8 bits of a file.
        image: the perturbed image, uint8 (H, W, C).
        image_steps: forward and backward passes.
        queries: forward passes of attacks without gradients.
    """

    about: str
    eps: float
    failed: float
    highest: float
    norm: str
    size: float
    checked: bool
    saved: bool
    image: Tensor
    image_steps: int
    queries: int

    @property
    def found(self) -> bool:
        """Whether the attack succeeded at some ε."""
        return math.isfinite(self.eps)

    def __str__(self) -> str:
        unit = "L2 ε" if self.norm == "l2" else "ε"
        if not self.found:  # the search goes down from its upper end only
            return f"{self.about}\nnot reached at {unit} {_shown(self.highest, self.norm)}, the upper end of the search"
        if not self.eps:
            return f"{self.about}\nthe clean image meets the goal already: {unit} 0"
        lines = [
            self.about,
            f"smallest {unit} found: {_shown(self.eps, self.norm)}",
            f"bracket: failed at {_shown(self.failed, self.norm)}, succeeded at {_shown(self.eps, self.norm)}",
            f"change of the image found: {_shown(self.size, self.norm)}",
            "embedded anew in full precision: " + ("succeeds" if self.checked else "no longer succeeds"),
            "rounded to 8 bits, as a file has it: " + ("succeeds" if self.saved else "no longer succeeds"),
        ]
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Write the perturbed image as PNG. Its 8 bits may undo a small perturbation: see `saved`."""
        return write_png(self.image, path)


def smallest_perturbation(
    model: nn.Module,
    image: str | Path,
    data: Data,
    goal: str = "untargeted",
    *,
    protocol: ProtocolName = "corrected",
    label: str = "",
    threat: Threat | str = "standard",
    eps: float | None = None,
    alpha: float | None = None,
    steps: int | None = None,
    method: Literal["pgd", "fgsm", "cw", "square", "nes"] = "pgd",
    searches: int = 10,
    seed: int = 0,
    batch: int = 128,
    device: str = "auto",
    resize: int | None = None,
    crop: int | None = None,
    report: Report | None = None,
) -> SmallestPerturbation:
    """Search for the smallest ε at which the attack on one image succeeds (ADML, eqs. 5 and 6), by bisection.

    Args:
        model: as in `attack`.
        image: as in `attack`.
        data: as in `attack`.
        goal: untargeted (eq. 5), targeted (eq. 6), or any goal that can be reached: ES, LTM, GTM, GTT, nearest, margin.
        protocol: as in `attack`.
        label: as in `attack`.
        threat: gives norm, steps and start. The length of a step keeps its share of ε.
        eps: the upper end of the search; for Linf 64/255 by default.
        alpha: length of a step at that upper end.
        steps: of each attack.
        method: as in `attack`.
        searches: halvings; the bracket is eps/2^searches wide.
        seed: as in `attack`.
        batch: as in `attack`.
        device: as in `attack`.
        resize: as in `attack`.
        crop: as in `attack`.
        report: as in `attack`.

    >>> from anchorhold import Embedder
    >>> model = Embedder("small", 8, channels=1, size=8)
    >>> found = smallest_perturbation(model, "3", "digits", steps=4, searches=3, eps=0.5, device="cpu")
    >>> found.failed < found.eps or found.eps == 0
    True
    """
    way = usable(model, method)
    linf = not isinstance(threat, Threat) or threat.norm == "linf"
    threat = effort(way, threat, HIGHEST if eps is None and linf else eps, alpha, steps)
    share, many = threat.step / threat.eps if threat.eps else 0.0, threat.budget_steps
    check(many > 0, f"without steps no attack succeeds: leave out {option('steps')}, or give 1 or more")

    def budget_at(radius: float) -> Budget:
        if way in ("cw", *VALUES_ONLY):
            return Budget(many)
        return Budget(many, share * radius, "zero" if way == "fgsm" else threat.start)

    wish = maker_of(goal)(protocol)
    if isinstance(wish, EmbeddingShift):  # only ES:R can be reached, and methods that keep their best have no ES:D
        wish = replace(wish, distance=False)
    with staged(model, image, data, wish, label, Reading(batch, device, resize, crop, report, seed)) as there:
        if there.number is None:
            known = bool(there.label) or wish.name not in _NEED_CLASS
            check(
                known, f"{wish.name} needs the class of {there.name}: give it with {option('label', command='class')}"
            )
        key, find = Key.of(seed)("audit"), METHODS["pgd" if way == "fgsm" else way]
        attack = Attack(
            there.embed, there.scene, wish, threat.ball, budget_at(threat.eps), key, find, look_back=wish.looks_back
        )
        ids, pixels = there.ids, there.pixels
        found = smallest_attacks(attack, pixels, ids, budget_at=budget_at, highest=threat.eps, searches=searches)
        rounded = to_bytes(found.images)
        again = (rounded.permute(0, 3, 1, 2) / 255).to(pixels)
        targets = wish.targets(there.scene, ids, key)
        e = embed_all(there.embed, [again])
        kept = wish.success(wish.measure(there.scene, ids, targets, e, e))
    about = f"{wish.name} ({protocol}) on {there.name}, {way}, {many} {'queries' if way in VALUES_ONLY else 'steps'}"
    if isinstance(wish, LabelAttack) and wish.targeted and targets is not None:
        about += f"; towards class {there.material.gallery.split.classes[int(targets[0])]}"
    return SmallestPerturbation(
        about,
        float(found.eps[0]),
        float(found.failed[0]),
        threat.eps,
        threat.norm,
        float(found.norms[0]),
        bool(found.checked[0]),
        kept is not None and bool(kept[0]),
        rounded[0].cpu().contiguous(),
        found.image_steps,
        found.queries,
    )


def _shown(size: float, norm: str) -> str:
    """A size: of a pixel also in 255ths, of an image as it is."""
    if norm == "l2":
        return f"{size:.4g}"
    short = pixel_fraction(size)
    return short if short.endswith("/255") else f"{size:.4g} ({255 * size:.3g}/255)"
