"""What an audit is asked for: its settings, and the attack runs that they come to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..attacks import Goal, fgsm, goal_named
from ..perturb.ascend import Budget, Start
from ..perturb.ball import Ball
from ..perturb.methods import METHODS, Find
from ..perturb.minnorm import CW_STEPS
from ..settings import check
from .sweep import AttackRun

__all__ = ["NINE", "AuditSettings", "runs_of"]

NINE = ("CA+", "CA-", "QA+", "QA-", "TMA", "ES", "LTM", "GTM", "GTT")  # the runs behind ERS's ten columns


@dataclass(frozen=True)
class AuditSettings:
    """What the numbers of an audit depend on, besides model and data."""

    protocols: tuple[str, ...] = ("published", "corrected")
    attacks: tuple[str, ...] = NINE
    limit: int = 1000
    eps: float = 8 / 255
    alpha: float = 3 / 255
    steps: int = 32
    method: Literal["pgd", "fgsm", "cw"] = "pgd"
    seed: int = 0
    batch: int = 128
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    resize: int | None = None
    crop: int | None = None
    resamples: int = 1000
    start: Start = "zero"
    seeds: int = 1  # of the random starts
    strength: Literal["standard", "strong"] = "standard"
    epsilons: tuple[float, ...] = ()  # of a curve; eps belongs to it anyway

    def __post_init__(self) -> None:
        check(bool(self.protocols) and bool(self.attacks), "an audit needs at least one protocol and one attack")
        check(self.method in ("pgd", "fgsm", "cw"), f"method {self.method!r}; there are: pgd, fgsm, cw")
        check(self.strength in ("standard", "strong"), f"strength {self.strength!r}; there are: standard, strong")
        check(all(0 < e <= 1 for e in self.epsilons), "the ε of a curve lie above 0 and at most at 1: 8/255 is .031")
        plain = self.strength == "standard" and not self.epsilons
        check(
            plain or ("corrected" in self.protocols and self.method == "pgd"),
            "the strong audit and curves begin with PGD in the corrected protocol: leave method and protocols alone",
        )
        check(self.precision in ("auto", "fp32", "bf16"), f"precision {self.precision!r}; there are: auto, fp32, bf16")
        check(self.limit >= 0, f"limit must not be negative, got {self.limit}; 0 attacks all")
        check(self.batch >= 1, f"batch must be at least 1, got {self.batch}")
        check(self.resamples >= 1, f"resamples must be at least 1, got {self.resamples}")
        check(self.seeds >= 1, f"seeds must be at least 1, got {self.seeds}")
        _, start = self.ball, self.budget.start  # they check the rest
        who = f"{self.method.upper()} starts" if self.method != "pgd" else "this budget starts"
        check(
            self.seeds == 1 or start == "random",
            f"nothing is random that seeds = {self.seeds} could repeat: {who} at the clean image; leave seeds out, "
            "or use PGD with a random start, such as the budget adml",
        )

    @property
    def ball(self) -> Ball:
        # Without steps nothing may move, not even to the tiny start of ES.
        return Ball(self.eps if self.steps or self.method == "fgsm" else 0.0)

    @property
    def find(self) -> Find:
        return METHODS["cw" if self.method == "cw" else "pgd"]

    @property
    def budget(self) -> Budget:
        if self.method == "cw":
            return Budget(CW_STEPS if self.steps else 0)
        return fgsm(self.ball) if self.method == "fgsm" else Budget(self.steps, self.alpha, self.start)


def runs_of(settings: AuditSettings, chosen: Mapping[str, Mapping[str, Any]]) -> list[AttackRun]:
    """The runs that attack with these names and changes: goals of both protocols that move alike share one."""
    runs: list[AttackRun] = []
    for name, changes in chosen.items():
        together: dict[tuple[object, ...], list[Goal]] = {}
        for protocol in dict.fromkeys(settings.protocols):
            try:
                goal = goal_named(name, protocol, **changes)  # type: ignore[arg-type]  # it checks the name
            except TypeError:
                check(False, f"{name} has no such settings: {', '.join(changes)}")
                raise
            together.setdefault(goal.run, []).append(goal)
        runs += [AttackRun(name, tuple(g), start) for g in together.values() for start in range(settings.seeds)]
    return runs
