"""The page of an audit: a verdict, the effect of each attack, examples, and the command to repeat it."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from ..attacks.settings import usual_settings
from ..columns import ARS_COLUMNS, NOT_PERCENT, goal_of, length, radius
from ..runs.audits import attack_in_words
from ..runs.fields import dig, number
from .collect import read_audit
from .curve import headline_of, recall_left
from .curve_chart import drawn_curve
from .gallery import gallery_of
from .page import fixed, place, write_page
from .strong import tables_of

__all__ = ["Bar", "Verdict", "bars_of", "command_of", "resistance_of", "verdict_of", "write_audit_page"]

# With these flags a score is imprecise, not wrong; the last is about the standard score of a strong audit.
MILD = ("near-chance", "few-samples", "small-gallery", "not-8-bit", "strong-below-standard")
FIRM, SOME = 70.0, 40.0  # mean resistance in percent: at least FIRM holds, at least SOME gives way
HALF = 50.0  # percent of the way to its goal; a model holds only if no attack gets farther
UNCHECKED = "Nothing was checked for masked gradients: the attacks may have failed."


@dataclass(frozen=True)
class Measure:
    """The meaning of a column: the attack, the measure, its range and the attack's goal, None where it has none."""

    wish: str
    unit: str
    goal: float | None = 0.0
    top: float = 100.0


_RANK, _LEFT = "rank in % of the list, 0 is the top", "R@1 in % of the attacked queries"
_STAYS = "The same run as {}: the rank of the first items of the list, which the attack tries to leave in place."
_MEANING = {
    "CA+": ("A perturbed candidate rises in the list of a random query.", _RANK),
    "CA-": ("A perturbed candidate near the top of a query's list sinks.", _RANK),
    "QA+": ("A perturbed query raises a random candidate in its list.", _RANK),
    "QA-": ("A perturbed query sinks a candidate near the top of its list.", _RANK),
    "SPQA+": ("A perturbed query raises a random candidate and keeps the first items of its list.", _RANK),
    "SPQA+:kept": (_STAYS.format("SPQA+"), _RANK),
    "SPQA-": ("A perturbed query sinks a candidate near the top and keeps the other first items of its list.", _RANK),
    "SPQA-:kept": (_STAYS.format("SPQA-"), _RANK),
    "TMA": ("A perturbed query gets the embedding of another image.", "cosine to that image"),
    "ES:D": ("The embedding moves as far as possible.", "distance from the clean embedding, 0 to 2"),
    "ES:R": ("The embedding moves as far as possible.", _LEFT),
    "LTM": ("Images of other classes come nearer than images of the query's class.", _LEFT),
    "GTM": ("The nearest image of another class comes first.", _LEFT),
    "GTT": ("The nearest image drops out of the top 4.", "% of queries where it stays"),
    "GTT@1": ("The same run as GTT: the nearest image is no longer first.", "% of queries where it stays"),
    "nearest": ("The query moves away from its nearest image, if that has its class (ADML, algorithm 1).", _LEFT),
    "nearest:mAP@R": ("The same run as nearest.", "mAP@R in %"),
    "margin": ("Any image of another class comes first (untargeted).", _LEFT),
    "untargeted": ("The nearest image has another label than before (ADML, eq. 5).", "% that keep it"),
    "targeted": ("The nearest image has a random label (ADML, eq. 6).", "% without it"),
}
_TOPS = {"TMA": 1.0, "ES:D": 2.0}
MEASURES = {name: Measure(wish, unit, goal_of(name), _TOPS.get(name, 100.0)) for name, (wish, unit) in _MEANING.items()}
_OTHER = Measure("See the documentation of this attack.", "%")


@dataclass(frozen=True)
class Bar:
    """One attack on a common scale: 0 … 100 is the whole range of its measure."""

    name: str
    measure: Measure
    clean: float | None
    after: float
    low: float | None
    high: float | None
    digits: int

    @property
    def way(self) -> float | None:
        """How far the attack came from the clean value to its goal, percent."""
        goal = self.measure.goal
        if self.clean is None or goal is None or abs(goal - self.clean) < 1e-9:
            return None
        return 100 * (self.after - self.clean) / (goal - self.clean)

    def place(self, value: float | None) -> float | None:
        """A value on the scale."""
        return None if value is None else round(min(100.0, max(0.0, 100 * value / self.measure.top)), 2)

    @property
    def tip(self) -> str:
        span = "" if self.low is None or self.high is None else f" [{self._said(self.low)}, {self._said(self.high)}]"
        way = "" if self.way is None else f" · {self.way:z.0f} % of the way"
        clean = "" if self.clean is None else f"clean {self._said(self.clean)} · "
        goal = "no goal of its own" if self.measure.goal is None else f"goal {self.measure.goal:g}"
        return f"{self.name}: {clean}after {self._said(self.after)}{span} · {goal}{way}"

    def _said(self, value: float | None) -> str:
        return fixed(value, self.digits)


def bars_of(outcome: Mapping[str, Any]) -> list[Bar]:
    """A bar for every column of one protocol."""
    bars = []
    for name, column in (outcome.get("columns") or {}).items():
        after = number(dig(column, "value"))
        if after is None:
            continue
        clean, low, high = (number(dig(column, key)) for key in ("initial", "low", "high"))
        measure, digits = MEASURES.get(name, _OTHER), 3 if name in NOT_PERCENT else 1
        bars.append(Bar(name, measure, clean, after, low, high, digits))
    order = [*MEASURES]
    return sorted(bars, key=lambda bar: order.index(bar.name) if bar.name in order else len(order))


def resistance_of(outcome: Mapping[str, Any]) -> list[list[str]]:
    """ARS by both definitions, column by column, with a head; empty for audits without ARS per sample."""
    whole, single = (dig(outcome, "ars", kind) for kind in ("measured", "per_sample"))
    if single is None:
        return []

    def row(name: str, *place: str) -> list[str]:
        left_out = number(dig(single, "left_out", name))
        values = [fixed(number(dig(score, *place)), 1) for score in (whole, single)]
        return [name, *values, "" if left_out is None else f"{left_out:.0f}"]

    parts = [row(name, "terms", name) for name in dig(single, "terms") or ()]
    groups = [row(name, name) for name in ("ranking", "recall")]
    return [["column", "ARS measured", "ARS per sample", "left out"], *parts, *groups, row("ARS", "value")]


# ---------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Verdict:
    """The verdict in a few words: `level` is good, fair or bad."""

    level: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.title}. {' '.join(self.text.split())}"


def verdict_of(audit: Mapping[str, Any]) -> Verdict:
    """The verdict: by flags first, then by how far the attacks of the last protocol came to their goals."""
    bars = bars_of(list(audit["protocols"].values())[-1]) if audit["protocols"] else []
    recall = _recall_left(audit)
    bars = [bar for bar in bars if bar.name in ARS_COLUMNS] or bars  # their mean is 100 − ARS
    ways = {bar.name: (bar.way, bar) for bar in bars if bar.way is not None}
    said = ""
    if ways:
        hardest = max(ways, key=lambda name: ways[name][0] or -math.inf)
        said = f"The strongest attack, {ways[hardest][1].tip}."
    raised = [flag["name"] for flag in audit.get("flags") or [] if flag["name"] not in MILD]
    if raised:
        return Verdict(
            "bad", "Do not trust this score", f"Flags: {', '.join(raised)}. {recall[0] if recall else ''} {said}"
        )
    if not ways and not recall:
        return Verdict("fair", "Nothing to judge", "No attack has a value both before and after.")
    if "near-chance" in [flag["name"] for flag in audit.get("flags") or []]:
        return Verdict("fair", "Nothing to attack", f"Without an attack it answers hardly better than chance. {said}")
    reached = [way for way, _ in ways.values() if way is not None]
    held = 100 - sum(reached) / len(reached) if reached else 100.0
    mean = f"On average, attacks come {100 - held:z.0f} % of the way to their goals." if reached else ""
    # Older files do not say; the command line always checked.
    unchecked = "" if audit.get("checked", True) else UNCHECKED
    text = " ".join(filter(None, (unchecked, recall[0] if recall else "", mean, said)))
    held = min(held, recall[1]) if recall else held
    if held >= FIRM and max(reached, default=0.0) <= HALF:
        if unchecked:
            return Verdict("fair", "Holds, but unchecked", text)
        return Verdict("good", "Holds against these attacks", text)
    if held >= SOME:
        return Verdict("fair", "Gives way under attack", text)
    return Verdict("bad", "Fails under attack", text)


def _recall_left(audit: Mapping[str, Any]) -> tuple[str, float] | None:
    """A sentence about R@1 under the strong attack at the audit's ε, and the share of right answers that is left."""
    found, eps = recall_left(audit), number(dig(audit, "settings", "eps"))
    known = dig(headline_of(audit).get(0.0), "value"), dig(audit, "protocols", "strong", "columns", "ES:R", "initial")
    clean = next((value for value in map(number, known) if value is not None), None)
    if clean is None or found is None or not eps:
        return None
    said = f"The strong attack at {radius(eps, _norm(audit))} leaves R@1 {found[0]:.1f} of {clean:.1f}."
    return said, 100 * found[0] / clean if clean else 0.0


# ---------------------------------------------------------------- how to repeat it


def command_of(audit: Mapping[str, Any]) -> str:
    """The command that repeats the audit, as far as it is known; the reader fills in a model given in Python."""
    s, typed = audit["settings"], _typed(audit)
    name = str(dig(audit, "data", "query", "name")).removesuffix("/test").removesuffix("/query")
    held = re.fullmatch(r"(.*)/train, last (\d+) classes", name)
    place = typed.pop("data", held[1] if held else name)
    words = ["anchorhold", "audit", quote(typed.pop("model", "MODEL")), "--data", quote(place)]
    typed |= {"held-out": held[2]} if held else {}
    second = {key: typed.pop(key) for key in [*typed] if key in SECOND}
    for key, word in typed.items():
        words += [f"--{key}", quote(word)]
    protocols = s.get("protocols") or []
    words += ["--protocol", str(protocols[0])] if len(protocols) == 1 else []
    words += ["--attacks", quote(",".join(_named_attacks(audit)))]
    words += ["--full"] if s.get("limit") == 0 else ["--limit", str(s.get("limit"))]
    random = s.get("start") == "random"
    words += ["--threat", "adml"] if random else []
    method = s.get("method", "pgd")
    words += ["--method", str(method)] if method != "pgd" else []
    words += ["--norm", norm] if (norm := _norm(audit)) != "linf" else []
    words += ["--eps", length(s["eps"], norm)]
    words += ["--alpha", length(s["alpha"], norm)] if method == "pgd" else []
    words += ["--steps", str(s["steps"])] if method != "fgsm" else []
    words += ["--strength", str(s["strength"])] if s.get("strength", "standard") != "standard" else []
    second = {"surrogate": "SECOND", **second} if dig(audit, "strong", "surrogate") else {}
    for key, word in second.items():
        words += [f"--{key}", quote(word)]
    words += ["--curve", ",".join(length(each, norm) for each in s["epsilons"])] if s.get("epsilons") else []
    words += ["--seed", str(s.get("seed", 0)), "--batch", str(s.get("batch", 128))]
    words += ["--seeds", str(s["seeds"])] if s.get("seeds", 1) > 1 else []
    words += ["--classes", "all"] if s.get("classes") == "all" else []
    for name in ("resize", "crop"):
        words += [f"--{name}", str(s[name])] if s.get(name) is not None else []
    words += ["--precision", str(s["precision"])] if s.get("precision", "auto") != "auto" else []
    return " ".join(words)


SECOND = ("surrogate", "surrogate-mean", "surrogate-std")
TYPED = ("model", "data", "root", "held-out", "mean", "std", "size", "on-bad-image", *SECOND)


def _typed(audit: Mapping[str, Any]) -> dict[str, str]:
    """What was typed, by option; of an audit made in Python what is known of its model."""
    told = dig(audit, "command")
    if isinstance(told, Mapping) and told:
        return {name: str(told[name]) for name in TYPED if isinstance(told.get(name), str)}
    hub = dig(audit, "model", "hub")
    known = {"model": hub} if isinstance(hub, str) else {}
    for name in ("mean", "std", "size"):
        values = dig(audit, "model", "wrap", name)
        numbers = [number(value) for value in values] if isinstance(values, list) else []
        known |= {name: ",".join(f"{value:g}" for value in numbers if value is not None)} if numbers else {}
    return known


def given_in_python(audit: Mapping[str, Any]) -> str:
    """What the command leaves open."""
    if "model" in _typed(audit):
        return ""
    if dig(audit, "command") is None:  # older versions did not record it
        return "MODEL stands for your model."
    return "The model was given in Python. Put a name for the command line, such as module:function, in place of MODEL."


def _named_attacks(audit: Mapping[str, Any]) -> Iterator[str]:
    """Attacks with their settings that are not the default, in the form of --attacks."""
    for name in audit["settings"].get("attacks") or ():
        goals = next((run.get("goals") or {} for run in audit.get("runs") or () if run["attack"] == name), {})
        protocol, made = next(iter(goals.items()), ("corrected", {}))
        usual = usual_settings(name, protocol)
        changed = [f"{key}={value}" for key, value in made.items() if key in usual and usual[key] != value]
        yield ":".join((name, *changed))


# ---------------------------------------------------------------- the page


def write_audit_page(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of the audit in `folder`, by default as page.html in it; returns its path."""
    folder = Path(folder)
    audit = {"flags": [], "checked": True, "notes": [], "runs": [], **read_audit(folder)}
    s = audit["settings"]
    name = _name(folder)
    images = gallery_of(folder, audit)
    outcomes = dict(reversed(audit["protocols"].items()))  # corrected first
    about = {
        "model": _model(audit.get("model") or {}),
        "data": _data(audit["data"]),
        "attack": _attack(s),
        "protocols": ", ".join(outcomes),
    }
    return write_page(
        "audit.html",
        folder / "page.html" if out is None else Path(out),
        title=f"{name}: audit",
        name_of=name,
        audit=audit,
        verdict=verdict_of(audit),
        about=about,
        outcomes=outcomes,
        bars={protocol: bars_of(outcome) for protocol, outcome in outcomes.items()},
        resistance={protocol: resistance_of(outcome) for protocol, outcome in outcomes.items()},
        curve=drawn_curve(audit.get("curve"), audit),
        levels=[(radius(eps, _norm(audit)), found) for eps, found in headline_of(audit).items() if eps],
        strong=tables_of(audit),
        gallery=images,
        mild=MILD,
        facts={key: _plain(key, value, _norm(audit)) for key, value in s.items()} | _origin(audit),
        commands={"this page": f"anchorhold report {quote(place(folder))}", "the audit": command_of(audit)},
        left_open=given_in_python(audit),
    )


def _name(folder: Path) -> str:
    """The name of the audit: that of its folder, or of the run that contains it."""
    place = folder.resolve()
    return place.parent.name if place.name in ("audit", "audits") and place.parent.name else place.name


def _model(model: Mapping[str, Any]) -> str:
    kind = dig(model, "config", "backbone") or model.get("kind") or "model"
    size = number(model.get("parameters"))
    parts = [str(kind), *([f"{size:,.0f} parameters"] if size is not None else [])]
    parts += [f"{model['dim']} dimensions"] if model.get("dim") else []
    return ", ".join(parts)


def _data(data: Mapping[str, Any]) -> str:
    asked, images = (data.get("attacked") or [0])[0], data.get("images") or [0, 0]
    name = dig(data, "query", "name")
    text = f"{name}: {asked:,} of {images[0]:,} queries against {images[1]:,} images"
    return text + (f" of {data['classes']} classes" if data.get("classes") else "")


def _attack(s: Mapping[str, Any]) -> str:
    return attack_in_words(s) + ("; strong: the worst of an ensemble" if s.get("strength") == "strong" else "")


def _origin(audit: Mapping[str, Any]) -> dict[str, str]:
    """The origin of the numbers."""
    versions = audit.get("versions") or {}
    seconds, steps = (number(audit.get(key)) for key in ("seconds", "image_steps"))
    return {
        "commit": audit.get("commit") or "unknown",
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items()) or "unknown",
        "device": audit.get("device") or "unknown",
        "weights": dig(audit, "model", "weights") or "unknown",
        "data": dig(audit, "data", "query", "fingerprint") or "unknown",
        "took": f"{fixed(seconds, 0)} s, {fixed(steps, 0)} image-steps",
    }


def _norm(audit: Mapping[str, Any]) -> str:
    """The norm of its threat; Linf where an older audit does not say."""
    return str(dig(audit, "settings", "norm") or "linf")


def _plain(key: str, value: Any, norm: str) -> str:
    if key in ("eps", "alpha", "epsilons") and value is not None:
        return ", ".join(length(each, norm) for each in (value if isinstance(value, list) else [value])) or "–"
    return ", ".join(map(str, value)) or "–" if isinstance(value, list) else "–" if value is None else str(value)
