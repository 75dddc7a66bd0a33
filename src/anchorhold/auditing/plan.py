"""The settings of an audit, and the attack runs that follow from them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Literal

from ..attacks.goal import Goal
from ..attacks.menu import ATTACKS, check_protocol
from ..attacks.own import maker_of
from ..attacks.recall import EmbeddingShift
from ..attacks.run import fgsm
from ..errors import check
from ..interface import argument, option
from ..perturb.ball import Ball
from ..perturb.cw import CW_STEPS
from ..perturb.methods import METHODS, Method
from ..perturb.settings import VALUES_ONLY, Budget, Norm, Start, Threat, threat_of

__all__ = ["NINE", "AttackRun", "AuditSettings", "curve_levels", "effort", "runs_of"]

QUERIES = 1000  # of Square and NES for one image and goal, where no number is given
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the threat's ε, where a curve has its points: 1, 2, 4 and 8 of 8/255
NINE = ("CA+", "CA-", "QA+", "QA-", "TMA", "ES", "LTM", "GTM", "GTT")  # the runs behind ERS's ten columns


@dataclass(frozen=True)
class AttackRun:
    """Goals that make the same perturbations."""

    attack: str
    goals: tuple[Goal, ...]
    start_seed: int = 0  # the same samples and targets with other random starts

    @property
    def made_by(self) -> str:
        """What the perturbations depend on, as their shards have it; of an attack of yours, all of its fields."""
        goal = self.goals[0]
        if self.attack in ATTACKS:
            return str(goal.run)
        kind, fields = type(goal), {name: value for name, value in asdict(goal).items() if name != "protocol"}
        return f"{goal.run} {kind.__module__}.{kind.__qualname__} {fields}"

    @property
    def label(self) -> str:
        again = f".seed{self.start_seed}" if self.start_seed else ""
        return f"{self.attack}.{'-'.join(goal.protocol for goal in self.goals)}{again}"


@dataclass(frozen=True)
class AuditSettings:
    """Everything besides model and data that determines the numbers of an audit."""

    protocols: tuple[str, ...] = ("published", "corrected")
    attacks: tuple[str, ...] = NINE
    limit: int = 1000
    eps: float = 8 / 255
    alpha: float = 3 / 255
    steps: int = 32  # of PGD, iterations of C&W, or queries of square and nes
    method: Literal["pgd", "fgsm", "cw", "square", "nes"] = "pgd"
    seed: int = 0
    batch: int = 128
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    resize: int | None = None
    crop: int | None = None
    resamples: int = 1000
    start: Start = "zero"
    seeds: int = 1  # number of random starts
    strength: Literal["standard", "strong"] = "standard"
    epsilons: tuple[float, ...] = ()  # of the curve of R@1; eps is always part of it
    classes: Literal["unseen", "all"] = "unseen"  # of a folder or CSV that the model was trained on
    norm: Norm = "linf"

    def __post_init__(self) -> None:
        check(bool(self.protocols) and bool(self.attacks), "an audit needs at least one protocol and one attack")
        for protocol in self.protocols:
            check_protocol(protocol, argument("protocols", "protocol"))
        methods = ("pgd", "fgsm", "cw", *VALUES_ONLY)
        check(
            self.method in methods,
            f"{argument('method')} cannot be {self.method!r}; there are: {', '.join(methods)}",
        )
        check(
            self.strength in ("standard", "strong"),
            f"{argument('strength')} cannot be {self.strength!r}; there are: standard, strong",
        )
        most = 1.0 if self.norm == "linf" else math.inf
        check(
            not self.epsilons or self.ball.eps > 0,
            f"without ε or steps there is no curve: leave out {option('epsilons', command='curve')}",
        )
        check(
            all(0 < e <= most for e in self.epsilons),
            f"each ε of {argument('epsilons', 'curve')} must be above 0 and, for Linf, at most 1",
        )
        check(
            (self.strength == "standard" and not self.epsilons)
            or ("corrected" in self.protocols and self.method in ("pgd", *VALUES_ONLY)),
            "the strong audit and curves start with PGD in the corrected protocol: "
            f"leave out {option('method')} and {option('protocols', command='protocol')}",
        )
        twofold = [name for name in self.attacks if name in ("SPQA+", "SPQA-")]
        check(
            self.strength == "standard" or not twofold,
            f"{', '.join(twofold)}: the strong audit keeps the worst of one measure, and this attack has two aims; "
            "leave it out there",
        )
        check(
            self.precision in ("auto", "fp32", "bf16"),
            f"{argument('precision')} cannot be {self.precision!r}; there are: auto, fp32, bf16",
        )
        check(self.limit >= 0, f"{argument('limit')} must not be negative, got {self.limit}; 0 attacks all")
        check(self.batch >= 1, f"{argument('batch')} must be at least 1, got {self.batch}")
        check(self.resamples >= 1, f"resamples must be at least 1, got {self.resamples}")
        check(self.seeds >= 1, f"{argument('seeds')} must be at least 1, got {self.seeds}")
        _, start = self.ball, self.budget.start  # they check the rest
        who = f"{self.method.upper()} starts" if self.method != "pgd" else "this threat starts"
        check(
            self.seeds == 1 or start == "random",
            f"{option('seeds', self.seeds)} needs a random start, but {who} at the clean image; leave it out, "
            f"or use PGD with a random start, such as {option('threat', 'adml')}",
        )

    @property
    def ball(self) -> Ball:
        # Without steps nothing may change, not even by the tiny start of ES.
        return Ball(self.eps if self.steps or self.method == "fgsm" else 0.0, self.norm)

    @property
    def find(self) -> Method:
        return METHODS["pgd" if self.method == "fgsm" else self.method]

    @property
    def steps_back(self) -> bool:
        """Whether the step before the last can be measured: other methods keep their best iterate instead."""
        return self.method in ("pgd", "fgsm")

    @property
    def budget(self) -> Budget:
        if self.method in ("cw", *VALUES_ONLY):
            return Budget(self.steps)
        return fgsm(self.ball) if self.method == "fgsm" else Budget(self.steps, self.alpha, self.start)


def effort(method: str, threat: Threat | str, eps: float | None, alpha: float | None, steps: int | None) -> Threat:
    """The threat as a method carries it out; what the method does not use is refused.

    C&W takes `steps` iterations, 50 as in ADML unless they are given; Square and NES take queries, 1,000 by default.
    None of them has a step size. FGSM is one step of ε.
    """
    named = {"cw": "C&W", "fgsm": "FGSM", "square": "Square", "nes": "NES"}.get(method)
    if named is None:
        return threat_of(threat, eps, alpha, steps)
    if isinstance(threat, Threat):
        alpha, steps = threat.alpha if alpha is None else alpha, threat.steps if steps is None else steps
    check(alpha is None, f"{named} has no step size: leave out {option('alpha')}, or use {option('method', 'pgd')}")
    check(
        method != "fgsm" or steps in (None, 1),
        f"FGSM is one step of length ε: leave out {option('steps')}, or use {option('method', 'pgd')}",
    )
    known = replace(threat_of(threat, eps), start="zero")
    if method == "fgsm":
        return replace(known, steps=1, alpha=known.eps)
    usual = CW_STEPS if method == "cw" else QUERIES
    return replace(known, steps=usual if steps is None else steps, alpha=0.0)


def curve_levels(
    epsilons: Sequence[float] | float | None, threat: Threat, method: str, protocols: Sequence[str], usual: bool
) -> tuple[float, ...]:
    """Each ε of the curve of R@1, the smallest first; a single number is one ε.

    None asks for the default: an eighth, a quarter, a half and all of the threat's ε. An audit has it unless you chose
    its attacks, another method than PGD, or the published protocol alone.
    """
    if epsilons is None:
        able = usual and method == "pgd" and "corrected" in protocols  # queries to a service may cost
        return tuple(threat.eps * share for share in SHARES) if able and threat.eps and threat.budget_steps else ()
    several = isinstance(epsilons, Iterable) and not isinstance(epsilons, str)
    every: list[Any] = [*epsilons] if several else [epsilons]  # type: ignore[misc]
    for each in every:
        known = hasattr(each, "__float__") and not isinstance(each, bool)
        check(known, f"each ε of {argument('epsilons', 'curve')} is a number such as 8 / 255, not {each!r}")
    return tuple(sorted(set(every)))


def _takes(goal: Goal) -> str:
    """The end of an error about the settings of an attack: those that are numbers."""
    values = asdict(goal) if is_dataclass(goal) and not isinstance(goal, type) else {}
    numbers = [key for key, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    return f"it has {', '.join(numbers)}" if numbers else "leave them out"


def runs_of(
    settings: AuditSettings, chosen: Mapping[str, Mapping[str, Any]], own: Mapping[str, Goal] | None = None
) -> list[AttackRun]:
    """The runs of these attacks and changes. Goals of both protocols that make the same perturbations share a run."""
    runs: list[AttackRun] = []
    for name, changes in chosen.items():
        make = maker_of((own or {}).get(name, name))
        together: dict[tuple[object, ...], list[Goal]] = {}
        for protocol in dict.fromkeys(settings.protocols):
            try:
                goal = make(protocol, **changes)
            except TypeError:
                check(False, f"{name} has no such settings: {', '.join(changes)}; {_takes(make(protocol))}")
                raise
            if isinstance(goal, EmbeddingShift) and goal.looks_back and not settings.steps_back:
                goal = replace(goal, distance=False)
            together.setdefault(goal.run, []).append(goal)
        # Rows of an attack of yours are called by its own name, however you named it.
        called = next(iter(together.values()))[0].name if ":" in name else name
        check(all(run.attack != called for run in runs), f"two attacks are called {called}: give one, or rename yours")
        runs += [AttackRun(called, tuple(g), start) for g in together.values() for start in range(settings.seeds)]
    return runs
