"""The budget of an attack, and the papers' budgets by name."""

from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal, get_args

from ..errors import SettingsError, check, nearest
from ..schedules import Schedule, falling

__all__ = ["BUDGETS", "VALUES_ONLY", "Budget", "Keep", "NamedBudget", "Rule", "Start", "check_radius"]

Start = Literal["zero", "random", "tiny"]
Keep = Literal["last", "best"]
Rule = Literal["steepest", "apgd"]
VALUES_ONLY = ("square", "nes")  # methods that take no gradients; their steps are queries


@dataclass(frozen=True)
class Budget:
    """How many steps a unit gets, and of which kind."""

    steps: int = 8
    alpha: float = 1 / 255  # length of a step
    start: Start = "zero"  # tiny: random, just far enough to leave a stationary point
    restarts: int = 1  # later ones start at random and attack unfinished units
    keep: Keep = "last"
    schedule: Schedule = "constant"  # how alpha falls over the steps
    drop: bool = True  # drop finished units; off only to show that it changes nothing
    rule: Rule = "steepest"  # apgd adapts its step length and refuses alpha and schedule; see `rules`

    def __post_init__(self) -> None:
        check(self.steps >= 0, f"steps must not be negative, got {self.steps}")
        check(isinstance(self.alpha, Real), f"alpha is a number such as 1 / 255, not {self.alpha!r}")
        check(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")
        check(self.restarts >= 1, f"restarts must be at least 1, got {self.restarts}")
        for name, kind in (("start", Start), ("keep", Keep), ("schedule", Schedule), ("rule", Rule)):
            word, words = getattr(self, name), get_args(kind)
            check(word in words, f"{name} {word!r}; {nearest(str(word), words)}")
        check(self.rule == "steepest" or self.keep == "best", "APGD keeps its best iterate: set keep = best")
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


@dataclass(frozen=True)
class NamedBudget:
    """The budget of an attacker in a paper."""

    eps: float
    steps: int
    alpha: float | None = None  # None: 2ε/steps, which reaches any point of the ball from any other
    start: Start = "zero"


BUDGETS: dict[str, NamedBudget] = {
    "standard": NamedBudget(8 / 255, 32, 3 / 255),  # all papers but ADML; there .03137 and .011764
    "adml": NamedBudget(0.01, 5, start="random"),  # ADML, section 4.1
}


def check_radius(eps: float, norm: str, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse a radius or norm that is not valid."""
    check(norm in ("linf", "l2"), f"norm {norm!r}; there are: linf, l2")
    check(isinstance(eps, Real), f"ε is a number such as 8 / 255, not {eps!r}")
    check(eps >= 0, f"ε must not be negative, got {eps}")
    check(
        norm != "linf" or eps <= high - low,
        f"ε = {eps:g} is more than a pixel can change, from {low:g} to {high:g}; for 8-bit levels give {eps:g}/255",
    )
