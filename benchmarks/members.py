"""What does each member of the strong ensemble find? Verdicts query by query, as JSON, and tables of them.

    python benchmarks/members.py --runs runs/members --out members.json       # stopped? the same command goes on
    python benchmarks/members.py --runs runs/members --out members.json --only "*quantised*"
    python benchmarks/members.py --out members.json --into results/notes      # writes the tables into the notes

The goal is a wrong nearest neighbour, on digits, natural and HM training, also with something in front of the model or
behind it that hides its gradients. Every member attacks the right queries alone, from their clean images. Then the
members attack in the ensemble's order, each what those before it left. `more` is six further starts of `momentum` on
what `refine` finds before it: they may take as many image-steps.

A verdict is one character for each right query, in the order of `ids`: 1 where the member found a wrong neighbour.
`local_optimality` is that of AttackBench (Cinà et al., AAAI 2025, section 3.2).
"""

import argparse
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from parts import Parts
from peers import MASKS, THREATS, Masked
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.attacks.recall import MarginAttack
from anchorhold.auditing.ensemble import Contest, Task
from anchorhold.auditing.inputs import sample
from anchorhold.auditing.members import MEMBERS, Member
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.datasets import dataset
from anchorhold.data.images import load_images
from anchorhold.device import computer_of
from anchorhold.model.frozen import embed_all, frozen
from anchorhold.model.wrap import fingerprint_of
from anchorhold.perturb.ball import Ball
from anchorhold.random import Key
from anchorhold.runs.provenance import provenance

Found = dict[str, Any]
Setting = tuple[str, str, Ball]  # model, mask or "", threat
RECIPES = ("natural", "hm-lga")
MASKED_AT = "linf:0.06"
NORMS: Mapping[str, Literal["linf", "l2"]] = {"linf": "linf", "l2": "l2"}
_COUNTED = ("", "_needed", "_steps")
MORE = 6  # starts of momentum that take as many image-steps as `refine`


# ---------------------------------------------------------------- verdicts


def turned(verdicts: str) -> frozenset[int]:
    """The places of the queries that were turned.

    >>> sorted(turned("0110"))
    [1, 2]
    """
    return frozenset(place for place, each in enumerate(verdicts) if each == "1")


def verdict(found: Iterable[int], count: int) -> str:
    """One character for each of `count` queries; the opposite of `turned`."""
    known = set(found)
    return "".join("01"[place in known] for place in range(count))


def local_optimality(levels: Sequence[tuple[float, Mapping[str, str]]]) -> dict[str, float]:
    """How near each member comes to the best of all of them together, on one model and norm; 1 is as good.

    AttackBench compares areas under curves of robust accuracy ρ against ε, up to an ε₀:
    (∫ ρ(0) − ρ_member) / (∫ ρ(0) − ρ_best), which is 1 − (A − A_best) / (ρ(0) ε₀ − A_best) with the areas A. ρ_best is
    what is left when each query has its best attack. Here ρ(0) − ρ is the share of the right queries that are turned.
    A query that is turned at an ε is turned at every larger one. The curves are straight between the measured ε, and
    start at 0.

    Args:
        levels: each ε with the verdicts of the members, on the same queries.

    >>> local_optimality([(1.0, {"a": "10", "b": "00"}), (2.0, {"a": "10", "b": "11"})])
    {'a': 0.75, 'b': 0.5}
    """
    names = list(levels[0][1])
    known: dict[str, frozenset[int]] = dict.fromkeys(names, frozenset())
    areas, before = dict.fromkeys(["", *names], 0.0), dict.fromkeys(["", *names], 0)
    start = 0.0
    for eps, verdicts in sorted(levels, key=lambda level: level[0]):
        known = {name: known[name] | turned(verdicts[name]) for name in names}
        now = {"": len(frozenset().union(*known.values()))} | {name: len(known[name]) for name in names}
        areas = {name: areas[name] + (eps - start) * (before[name] + now[name]) / 2 for name in now}
        before, start = now, eps
    assert areas[""] > 0, "no member turned any query: there is nothing to compare with"
    return {name: areas[name] / areas[""] for name in names}


def optimality(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The local optimality of every member, by model and norm. Its mean over the models of a norm is the global one."""
    curves: dict[str, list[tuple[float, dict[str, str]]]] = {}
    for row in rows:
        name = f"{row['model']} {row['mask']}".strip() + f", {row['norm']}"
        verdicts = {member: found["alone"]["turned"] for member, found in row["members"].items()}
        curves.setdefault(name, []).append((row["eps"], verdicts))
    return {name: local_optimality(levels) for name, levels in curves.items()}


def tally(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """What each member finds and costs over all of these settings.

    `first` counts the queries that it is the first to turn in the ensemble's order. `needed` counts those of them that
    no other member turns alone: they would be missed without it. The costs are those in the ensemble's order.
    """
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        alone = {name: turned(each["alone"]["turned"]) for name, each in row["members"].items()}
        for name, each in row["members"].items():
            others = frozenset().union(*(one for other, one in alone.items() if other != name))
            first = turned(each["in_turn"]["turned"])
            line = found.setdefault(
                name, dict.fromkeys(("alone", "first", "needed", "image_steps", "queries", "right"), 0)
            )
            line["right"] += len(each["alone"]["turned"])
            line["alone"] += len(alone[name])
            line["first"] += len(first)
            line["needed"] += len(first - others)
            for cost in ("image_steps", "queries"):
                line[cost] += each["in_turn"][cost]
    return found


def instead(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """`refine`, and as many image-steps for more starts of `momentum`, on the same queries.

    What each finds, what of it no other member but `refine` turns alone (`needed`), and its image-steps.
    """
    found = dict.fromkeys(("left", *(f"{way}{what}" for way in ("refine", "more") for what in _COUNTED)), 0)
    for row in rows:
        alone = (turned(each["alone"]["turned"]) for name, each in row["members"].items() if name != "refine")
        others = frozenset[int]().union(*alone)
        found["left"] += row["more"]["left"]
        for way, each in (("refine", row["members"]["refine"]["in_turn"]), ("more", row["more"])):
            found[way] += len(turned(each["turned"]))
            found[f"{way}_needed"] += len(turned(each["turned"]) - others)
            found[f"{way}_steps"] += each["image_steps"]
    return found


# ---------------------------------------------------------------- measuring


def settings(threats: str) -> Iterator[tuple[str, Setting]]:
    """Every setting, by its name: all threats on the models, one on those with a mask."""

    def ball(threat: str) -> Ball:
        norm, eps = threat.split(":")
        return Ball(float(eps), NORMS[norm])

    for mask in ("", *MASKS):
        for recipe in RECIPES:
            for threat in threats.split(",") if not mask else (MASKED_AT,):
                yield f"{recipe} {mask}".strip() + f", {threat}", (recipe, mask, ball(threat))


def model_of(recipe: str, runs: Path, seed: int) -> nn.Module:
    """The model of this recipe, which is trained where the folder lacks it."""
    if not (runs / recipe).exists():
        ah.fit(None, "digits", recipe, runs / recipe, overrides={"train.seed": seed}, device="cpu")
    return ah.load(runs / recipe)


def measured(setting: Setting, runs: Path, seed: int, limit: int) -> Found:
    """One setting: what each member turns, alone and in its turn."""
    recipe, mask, ball = setting
    begun, model = time.monotonic(), model_of(recipe, runs, seed)
    weights = fingerprint_of(model)
    model = Masked(model, *MASKS[mask]).eval() if mask else model
    test = load_images(
        dataset("digits").test,
        settings_from("natural", {"data": {"name": "digits"}}).data,
        torch.device("cpu"),
        Silent(),
    )
    images = torch.cat(list(test.plain(torch.arange(len(test.labels)), 256)))
    asked = sample(test.labels, limit, Key.of(0)("audit")("sample"))
    with frozen(model) as embed:
        e = embed_all(embed, list(images.split(256)))
        scene = Scene.of(e, test.labels)
        ids = asked[MarginAttack().right(scene, asked, e[asked]).bool()]
        members, more, left = attacked(embed, images[ids], scene, ids, ball)
    return {
        "model": recipe,
        "mask": mask,
        "weights": weights,
        "norm": ball.norm,
        "eps": ball.eps,
        "queries": len(asked),
        "ids": " ".join(map(str, ids.tolist())),
        "left": len(left),
        "members": members,
        "more": more,
        "seconds": round(time.monotonic() - begun, 1),
    }


def attacked(embed: Any, images: Tensor, scene: Scene, ids: Tensor, ball: Ball) -> tuple[Found, Found, set[int]]:
    """The members alone and in turn, further starts in place of `refine`, and who withstands all."""
    task = Task("recall", goal_named("margin", "corrected"), (), {"margin": "margin"})
    usable = [member for member in MEMBERS if member.kind != "transfer" and member.wants(task.goal)]
    key = Key.of(0)("audit")
    chain = Contest(task, embed, images, scene, ids, key)

    def entered(contest: Contest, member: Member) -> Found:
        before, steps, queries = set(contest.left().tolist()), contest.steps, contest.queries
        contest.enter(member, ball, None)
        gone = verdict(before - set(contest.left().tolist()), len(contest.ids))
        return {"turned": gone, "image_steps": contest.steps - steps, "queries": contest.queries - queries}

    members, more = {}, {}
    for member in usable:
        if member.refines:
            left = sorted(chain.left().tolist())
            again = replace(next(one for one in usable if one.name == "momentum"), rounds=MORE)
            rest = Contest(task, embed, images[left], scene, ids[left], key("more"))
            found = entered(rest, again)
            places = [left[place] for place in turned(found["turned"])]
            more = found | {"left": len(left), "turned": verdict(places, len(ids))}
        members[member.name] = {
            "alone": entered(Contest(task, embed, images, scene, ids, key), member),
            "in_turn": entered(chain, member),
        }
        print(f"  {member.name}: {len(chain.left())} of {len(ids)} left", flush=True)
    return members, more, set(chain.left().tolist())


# ---------------------------------------------------------------- tables


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def table_of_costs(rows: Sequence[Mapping[str, Any]]) -> str:
    """What each member finds in its turn, and its price; a line for each member."""
    found = tally(rows)
    lines = []
    for name, line in found.items():
        counts = [f"{line[key]:,}" for key in ("alone", "first", "needed", "image_steps", "queries")]
        prices = (line["image_steps"] / line[key] if line[key] else 0.0 for key in ("first", "needed"))
        lines.append([f"`{name}`", *counts, *(f"{price:,.0f}" if price else "–" for price in prices)])
    head = ["member", "alone", "first", "needed", "image-steps", "queries", "image-steps for each first", "each needed"]
    return _table(head, lines)


def table_of_optimality(rows: Sequence[Mapping[str, Any]]) -> str:
    """Local optimality in percent: a column for each member, a line for each model, and one for the mean of a norm."""
    local = optimality(rows)
    names = list(next(iter(local.values())))
    lines = []
    for norm in dict.fromkeys(row["norm"] for row in rows):
        models = {name: each for name, each in local.items() if name.endswith(f", {norm}")}
        mean = {name: sum(each[name] for each in models.values()) / len(models) for name in names}
        for model, each in {**models, f"**global, {norm}**": mean}.items():
            lines.append([model, *(f"{100 * each[name]:.1f}" for name in names)])
    return _table(["model, norm", *(f"`{name}`" for name in names)], lines)


def table_of_refine(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """`refine` beside more starts of `momentum`, on the queries that it attacks; a line for each part."""
    lines = []
    for name, rows in parts.items():
        found = instead(rows)
        counts = ("left", *(f"{way}{what}" for way in ("refine", "more") for what in _COUNTED))
        lines.append([name, *(f"{found[key]:,}" for key in counts)])
    head = ["settings", "queries left", "`refine` finds", "needed", "image-steps"]
    head += [f"{MORE} starts find", "needed", "image-steps"]
    return _table(head, lines)


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The tables of the notes, by name."""
    plain, masked = ([row for row in rows if bool(row["mask"]) == hidden] for hidden in (False, True))
    return {
        "found, all": table_of_costs(rows),
        "found": table_of_costs(plain),
        "found, masked": table_of_costs(masked),
        "optimality": table_of_optimality(plain),
        "optimality, masked": table_of_optimality(masked),
        "refine": table_of_refine({"without a mask": plain, "masked": masked}),
    }


def in_order(found: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The settings of a file, which may have been measured in any order."""
    return [found[name] for name, _ in settings(THREATS) if name in found]


def written(text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page with its tables made anew, each between <!-- members NAME --> and <!-- end -->."""
    made = tables(rows)
    block = re.compile(r"(<!-- members ([^\n]*) -->\n).*?(<!-- end -->)", re.S)
    return block.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="members.json", help="the JSON; settings that it has are not measured again")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/members"), help="the models; trained if they are absent"
    )
    parser.add_argument("--threats", default=THREATS, help="NORM:EPS, separated by commas, without a mask")
    parser.add_argument("--only", default="*", help="settings, separated by semicolons; * has a meaning")
    parser.add_argument("--limit", type=int, default=200, help="queries; 0 is all")
    parser.add_argument("--seed", type=int, default=0, help="of the trainings")
    parser.add_argument("--into", type=Path, help="write the tables into the pages of this folder, and end")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.into:
        rows = in_order(Parts.read(asked.out, "settings"))
        for page in sorted(asked.into.glob("*.md")):
            page.write_text(written(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return
    about = {"schema": "anchorhold.members/1", **provenance(computer_of(torch.device("cpu")))}
    about |= {"seed": asked.seed, "limit": asked.limit}
    made = Parts(asked.out, "settings", about)
    known = Parts.read(asked.out, "settings")
    for name, setting in settings(asked.threats):
        if name not in known and any(fnmatch(name, one.strip()) for one in asked.only.split(";")):
            print(name, flush=True)
            made.keep(name, measured(setting, asked.runs, asked.seed, asked.limit))


if __name__ == "__main__":
    main()
