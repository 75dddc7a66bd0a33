"""Replay an oracle file through this package and say how far every number is off.

    python tests/conformance.py ../shared/spec/oracle.json

One line a case with its largest deviation; exit 0 when all agree, 1 when any case is off, 2 when the file
cannot be read. Everything runs in float64. To cover a section, write its generator and name it in `SECTIONS`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchorhold import Ball, Budget, ascend, geometry, losses, metrics, triplets
from anchorhold.defences.hardness import lga, raise_hardness
from anchorhold.errors import AnchorholdError
from anchorhold.random import Key

NUMBER = 1e-6  # any value
DRAWS = 400  # made by the file's author for each reachable set

Oracle = dict[str, Any]
Case = tuple[str, float, float]  # name, largest deviation, tolerance


class Malformed(Exception):
    """The file is not an oracle, or a section of it is not what it should be."""


def numbers(values: Any) -> Tensor:
    """A number, or a rectangular list of numbers, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if any(isinstance(leaf, bool | str) for leaf in _leaves(values)):
        raise ValueError("numbers expected")
    return tensor


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, list):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def deviation(ours: Any, theirs: Any) -> float:
    """The largest difference; infinite where the shapes differ, NaN (which fails) where a number is NaN."""
    ours, theirs = torch.as_tensor(ours, dtype=torch.float64), numbers(theirs)
    if ours.shape != theirs.shape:
        return torch.inf
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


def whole(values: Any) -> tuple[Tensor, float]:
    """Labels or positions as integers, and how far they are from being whole."""
    tensor = numbers(values)
    return tensor.round().long(), deviation(tensor.round(), values)


def check_metrics(oracle: Oracle) -> Iterator[Case]:
    """Rank of the first match, R@1, R@2, AP and AP@10 of one list, self left out by identity."""
    section = oracle["metrics"]
    labels, label_error = whole(section["gallery_labels"])
    own, own_error = whole([section["query_index"]])
    label, query_error = whole([section["query_label"]])
    yield "whole numbers", max(label_error, own_error, query_error), NUMBER
    # Points on a line, the query at zero: their distances are the file's.
    query, gallery = torch.zeros(1, 1, dtype=torch.float64), numbers(section["dist"]).unsqueeze(1)
    yield "dist", deviation(gallery.abs().squeeze(1), section["dist"]), 0.0  # never negative, never NaN
    same = labels == label
    same[own] = False
    matches = same.nonzero().reshape(1, -1)
    first = geometry.ranks(query, gallery, matches, exclude=own).min()
    scores = metrics.evaluate(query, label, gallery=gallery, gallery_labels=labels, self_ids=own)
    yield "rank_r1_r2", deviation([float(first), scores.r1, scores.r2], section["rank_r1_r2"]), NUMBER
    yield "AP", deviation(scores.map, section["AP"]), NUMBER
    yield "AP_at10", deviation(scores.map_10, section["AP_at10"]), NUMBER


def check_losses(oracle: Oracle) -> Iterator[Case]:
    """Triplet and contrastive values on unit embeddings; the margin stands at the end of each name."""
    section = oracle["losses"]
    a, p, n = (geometry.unit(numbers(section[name])) for name in "apn")
    values: dict[str, Callable[[float], Tensor]] = {
        "triplet_margin": lambda margin: losses.triplet(a, p, n, margin),
        "triplet_cosine_": lambda margin: losses.triplet(a, p, n, margin, distance=geometry.cosine),
        "contrastive_margin": lambda margin: losses.contrastive(a, p, n, margin),
    }
    wanted = [name for name in section if name not in ("a", "p", "n")]
    if not wanted:
        raise KeyError("triplet_margin0.2")
    for name in wanted:
        kind = next((kind for kind in values if name.startswith(kind)), None)
        if kind is None:
            raise ValueError(f"no loss is called {name}")
        yield name, deviation(values[kind](float(name.removeprefix(kind))), section[name]), NUMBER


def check_miners(oracle: Oracle) -> Iterator[Case]:
    """Hardest triplets, distance-weighted chances, and the sets the random samplers choose from."""
    section = oracle["miners"]
    embeddings = numbers(section["embeddings"])
    labels, label_error = whole(section["labels"])
    yield "whole numbers", label_error, NUMBER
    hard = triplets.mine("hardest", embeddings, labels, Key.of(0))
    ours = torch.stack([hard.anchor, hard.positive, hard.negative])
    yield "hard", deviation(ours, section["hard"]), NUMBER
    e = geometry.unit(embeddings)
    same = labels[0::2, None] == labels
    chances = triplets.distance_weights(geometry.distance_matrix(e, e)[0::2], same, e.shape[1])
    yield (
        "distance_probabilities",
        deviation(chances, section["distance_probabilities_row_per_anchor"]),
        NUMBER,
    )
    for name, theirs in section["reachable_sets_400_draws"].items():
        masks = triplets.candidates(name.removeprefix("spc2-"), embeddings, labels)
        for part, mask in zip(("positives_reachable", "negatives_reachable"), masks):
            yield f"{name} {part}", _mismatches(mask, theirs[part]), 0.0


def _mismatches(mask: Tensor, listed: list[list[float]]) -> float:
    """How many samples are in one of the two sets only, over all anchors.

    A candidate that the draws may well have missed (by chance above one in a million) is no mismatch.
    """
    if len(mask) != len(listed):
        return torch.inf
    total = 0
    for row, theirs in zip(mask, listed):
        ours, found = set(row.nonzero().squeeze(1).tolist()), set(numbers(theirs).tolist())
        rare = (1 - 1 / max(len(ours), 1)) ** DRAWS > 1e-6
        total += len(found - ours) + (0 if rare else len(ours - found))
    return float(total)


def check_inner_pgd(oracle: Oracle) -> Iterator[Case]:
    """Hardness manipulation and min-max: perturbations in 1/255, hardness before and after, training loss."""
    section, net = oracle["inner_pgd"], oracle["pgd_attacks"]
    embed = _net(net)
    images = numbers(net["images"])[: len(section["labels"])]
    labels, label_error = whole(section["labels"])
    steps, step_error = whole(section["iters"])
    hard, hard_error = whole(section["triplets_hard"])
    chosen, chosen_error = whole(section["HM_triplets"])
    yield "whole numbers", max(label_error, step_error, hard_error, chosen_error), NUMBER
    mined = triplets.mine("hardest", embed(images), labels, Key.of(0))
    yield (
        "triplets_hard",
        deviation(torch.stack([mined.anchor, mined.positive, mined.negative]), hard.tolist()),
        0.0,
    )
    destination = lga(numbers(section["HM_prev_loss"]), 0.2)
    yield "HM_dest_hardness", deviation(destination, section["HM_dest_hardness"]), NUMBER

    def climb(which: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        units = images[which.T]
        ball, budget = Ball(float(section["eps"])), Budget(int(steps), float(section["alpha"]))
        found = ascend(embed, units, raise_hardness(goal.expand(len(units))), ball, budget).images
        before, after = (embed(x.flatten(0, 1)).unflatten(0, (-1, 3)) for x in (units, found))
        return ((found - units) * 255).transpose(0, 1).flatten(0, 1), before, after

    shift, before, after = climb(chosen, destination)
    yield "HM_delta", deviation(shift, section["HM_delta_in_255_anc_pos_neg"]), NUMBER
    yield (
        "HM_hardness_before",
        deviation(triplets.hardness(*before.unbind(1)), section["HM_hardness_before"]),
        NUMBER,
    )
    yield (
        "HM_hardness_after",
        deviation(triplets.hardness(*after.unbind(1)), section["HM_hardness_after"]),
        NUMBER,
    )
    yield "HM_train_loss", deviation(losses.triplet(*after.unbind(1), 0.2), section["HM_train_loss"]), NUMBER
    ics = losses.triplet(before[:, 0], after[:, 0], before[:, 1], 0.0)
    yield "ICS_term_on_HM_output", deviation(ics, section["ICS_term_on_HM_output"]), NUMBER
    shift, before, after = climb(hard, torch.tensor(2.0, dtype=torch.float64))  # min-max is HM[S, 2]
    yield "minmax_delta", deviation(shift, section["minmax_delta_in_255_anc_pos_neg"]), NUMBER
    yield (
        "minmax_hardness_after",
        deviation(triplets.hardness(*after.unbind(1)), section["minmax_hardness_after"]),
        NUMBER,
    )


def _net(section: Oracle) -> Callable[[Tensor], Tensor]:
    """The file's own small net, onto the sphere."""
    w1, b1, w2, b2 = (numbers(section[name]) for name in ("W1", "b1", "W2", "b2"))
    if section["act"] != "tanh":
        raise ValueError(f"no activation is called {section['act']}")
    return lambda x: geometry.unit(torch.tanh(x @ w1.T + b1) @ w2.T + b2)


SECTIONS: dict[str, Callable[[Oracle], Iterator[Case]] | None] = {
    "metrics": check_metrics,
    "attack_losses": None,
    "losses": check_losses,
    "miners": check_miners,
    "selectors": None,
    "pgd_attacks": None,
    "inner_pgd": check_inner_pgd,
}
PARTS = {"inner_pgd": "ACT"}  # what a covered section holds beyond what is built


def read(path: Path) -> Oracle:
    """The file as a dictionary of sections."""
    try:
        oracle = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Malformed(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise Malformed(f"{path} is not JSON: {error}") from None
    if not isinstance(oracle, dict) or not any(isinstance(oracle.get(name), dict) for name in SECTIONS):
        raise Malformed(f"{path} is no oracle: it has none of the sections {', '.join(SECTIONS)}")
    return oracle


def replay(oracle: Oracle) -> Iterator[tuple[str, Case]]:
    """Every case of every section that is both in the file and built."""
    for section, check in SECTIONS.items():
        if check is None or section not in oracle:
            continue
        try:
            for case in check(oracle):
                yield section, case
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AnchorholdError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise Malformed(f"section {section} is malformed: {what}") from None


def main(arguments: list[str]) -> int:
    """Print the deviations; the exit status."""
    if len(arguments) != 1:
        print("usage: python tests/conformance.py FILE", file=sys.stderr)
        return 2
    failed: list[str] = []
    try:
        oracle = read(Path(arguments[0]))
        for section, (name, off, tolerance) in replay(oracle):
            agrees = off <= tolerance  # False for NaN
            print(f"{section:14} {name:36} {off:.1e}  {'ok' if agrees else f'FAILED (over {tolerance:.0e})'}")
            if not agrees and section not in failed:
                failed.append(section)
    except Malformed as error:
        print(error, file=sys.stderr)
        return 2
    for section, check in SECTIONS.items():
        if section not in oracle:
            print(f"{section:14} missing from the file")
        elif check is None:
            print(f"{section:14} skipped (not built yet)")
        elif section in PARTS:
            print(f"{section:14} {PARTS[section]} skipped (not built yet)")
    for section in oracle.keys() - SECTIONS.keys() - {"about"}:
        print(f"{section:14} skipped (no such section is known)")
    print(f"FAILED: {', '.join(failed)}" if failed else "all that was replayed agrees")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
