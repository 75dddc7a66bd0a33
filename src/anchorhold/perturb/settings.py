"""What an attacker may do: the threat, its budget of steps, and the papers' threats by name."""

from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import SettingsError, check, nearest
from ..interface import argument
from ..schedules import Schedule, falling

if TYPE_CHECKING:
    from .ball import Ball

__all__ = [
    "THREATS",
    "VALUES_ONLY",
    "Budget",
    "Keep",
    "Norm",
    "Rule",
    "Start",
    "Threat",
    "check_l2",
    "check_radius",
    "threat_of",
]

Norm = Literal["linf", "l2"]
Start = Literal["zero", "random", "tiny"]
Keep = Literal["last", "best"]
Rule = Literal["steepest", "apgd", "adam", "momentum"]
VALUES_ONLY = ("square", "nes")  # methods that take no gradients; their steps are queries


@dataclass(frozen=True)
class Budget:
    """How many steps a unit gets, and of which kind.

    Args:
        steps: number of steps.
        alpha: length of a step.
        start: zero (the clean image), random, or tiny: random, just far enough to leave a stationary point.
        restarts: number of starts; later ones start at random and attack unfinished units.
        keep: the last iterate, or the best one.
        schedule: how alpha falls over the steps: constant, linear or cosine.
        drop: drop finished units; off only to show that it changes nothing.
        rule: steepest, apgd, adam or momentum. APGD adapts its step length and refuses alpha and schedule.

    >>> budget = Budget(steps=4, alpha=0.1, schedule="linear")
    >>> [round(budget.length(step), 3) for step in range(4)]
    [0.1, 0.075, 0.05, 0.025]
    """

    steps: int = 8
    alpha: float = 1 / 255
    start: Start = "zero"
    restarts: int = 1
    keep: Keep = "last"
    schedule: Schedule = "constant"
    drop: bool = True
    rule: Rule = "steepest"

    def __post_init__(self) -> None:
        check(self.steps >= 0, f"steps must not be negative, got {self.steps}")
        check(isinstance(self.alpha, Real), f"alpha is a number such as 1 / 255, not {self.alpha!r}")
        check(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")
        check(self.restarts >= 1, f"restarts must be at least 1, got {self.restarts}")
        for name, kind in (("start", Start), ("keep", Keep), ("schedule", Schedule), ("rule", Rule)):
            word, words = getattr(self, name), get_args(kind)
            check(word in words, f"{name} {word!r}; {nearest(str(word), words)}")
        check(self.rule == "steepest" or self.keep == "best", f"{self.rule} keeps its best iterate: set keep = best")
        if self.rule == "apgd":
            self.read_by("APGD", "steps", "start", "restarts", "drop", "rule")

    def read_by(self, method: str, *names: str) -> None:
        """Refuse fields that are set but that `method` does not read. It reads `names` and keeps its best iterate."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in names and value != each.default and (each.name, value) != ("keep", "best"):
                raise SettingsError(f"{method} does not use {each.name} = {value}: leave it out")

    @property
    def weighs(self) -> bool:
        """Whether iterates are compared, so the last one must be measured too."""
        return self.keep == "best" or self.restarts > 1

    def length(self, step: int) -> float:
        """The length of a step; linear and cosine fall from alpha towards 0."""
        return self.alpha * falling(self.schedule, step / max(self.steps, 1))


def check_radius(eps: float, norm: str, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse a radius or norm that is not valid."""
    check(norm in ("linf", "l2"), f"{argument('norm')} cannot be {norm!r}; there are: linf, l2")
    check(isinstance(eps, Real), f"ε is a number such as 8 / 255, not {eps!r}")
    check(eps >= 0, f"ε must not be negative, got {eps}")
    check(
        norm != "linf" or eps <= high - low,
        f"ε = {eps:g} is more than a pixel can change, from {low:g} to {high:g}; for 8-bit levels give {eps:g}/255",
    )


def check_l2(eps: float, norm: str) -> None:
    """Refuse the usual ε of Linf in L2, where it is no attack at all."""
    check(
        norm != "l2" or eps != LINF_EPS,
        "8/255 is the usual ε of Linf; L2 measures the whole image: give its ε, such as 0.5 for small images",
    )


LINF_EPS, STEPS = 8 / 255, 32  # of all papers but ADML


@dataclass(frozen=True)
class Threat:
    """What an attacker may do to an image: how far it may change, in which norm, and with how many steps.

    Args:
        eps: the radius: the maximum change of a pixel (Linf, 8/255 by default) or of the whole image (L2).
        norm: linf or l2. L2 has no usual radius, so give one.
        steps: of each attack, 32 by default. A training keeps its recipe's number.
        alpha: length of a step. By default 3/8 of ε for Linf, as in the papers, and 2.5 ε/steps for L2.
        start: zero (the clean image), random, or tiny (random, very near).

    >>> Threat().eps == 8 / 255, Threat(eps=0.5, norm="l2").step
    (True, 0.0390625)
    """

    eps: float = LINF_EPS
    norm: Norm = "linf"
    steps: int | None = None
    alpha: float | None = None
    start: Start = "zero"

    def __post_init__(self) -> None:
        check_radius(self.eps, self.norm)
        check_l2(self.eps, self.norm)
        words = get_args(Start)
        check(self.start in words, f"start {self.start!r}; {nearest(str(self.start), words)}")
        for name in ("steps", "alpha"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            fits = value is None or whole or (name == "alpha" and isinstance(value, Real))
            check(fits, f"{name} must be a number, got {value!r}")
            check(value is None or value >= 0, f"{name} must not be negative, got {value}")

    @property
    def step(self) -> float:
        """The length of a step."""
        if self.alpha is not None:
            return self.alpha
        return 3 / 8 * self.eps if self.norm == "linf" else 2.5 * self.eps / max(self.budget_steps, 1)

    @property
    def budget_steps(self) -> int:
        """The number of steps of an attack."""
        return STEPS if self.steps is None else self.steps

    @property
    def ball(self) -> "Ball":
        """Where a perturbed image may lie."""
        from .ball import Ball  # here, so that settings load without torch

        return Ball(self.eps, self.norm)

    @property
    def budget(self) -> Budget:
        """The steps of a standard attack."""
        return Budget(self.budget_steps, self.step, self.start)


THREATS: dict[str, Threat] = {
    "standard": Threat(),  # all papers but ADML; there .03137 and .011764
    "adml": Threat(0.01, steps=5, alpha=0.004, start="random"),  # ADML, section 4.1
}


def threat_of(
    threat: Threat | str, eps: float | None = None, alpha: float | None = None, steps: int | None = None
) -> Threat:
    """A threat, or the one of that name, with changes; the length of a step follows them unless it was given.

    >>> changed = threat_of("adml", eps=0.05)
    >>> changed.eps, changed.steps, changed.step, changed.start
    (0.05, 5, 0.02, 'random')
    """
    if isinstance(threat, str):
        check(threat in THREATS, f"no threat is called {threat!r}; {nearest(threat, THREATS)}")
        if threat == "adml" and alpha is None:  # 2ε/steps reaches any point of the ball from any other
            wide, many = (THREATS["adml"].eps if eps is None else eps), (5 if steps is None else steps)
            alpha = 2 * wide / max(many, 1)
        threat = THREATS[threat]
    check(isinstance(threat, Threat), f"threat must be an ah.Threat or the name of one, got {threat!r}")
    given: dict[str, Any] = {"eps": eps, "alpha": alpha, "steps": steps}
    return replace(threat, **{name: value for name, value in given.items() if value is not None})
