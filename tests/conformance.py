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

from anchorhold import geometry, losses, metrics, triplets
from anchorhold.attacks.goal import Goal, Scene, own_ids
from anchorhold.attacks.menu import ATTACKS
from anchorhold.attacks.ranking import hinge
from anchorhold.attacks.recall import subset_index
from anchorhold.attacks.run import Attack
from anchorhold.defences.act import collapse_pair
from anchorhold.defences.hardness import lga, raise_hardness
from anchorhold.errors import AnchorholdError
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Problem
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key

NUMBER = 1e-6  # any value
PIXEL = 1e-5  # a perturbation in units of 1/255
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


def check_attack_losses(oracle: Oracle) -> Iterator[Case]:
    """What each attack minimises, on embeddings that are given; the targets are not items of the gallery."""
    section = oracle["attack_losses"]
    gallery, q, targets = (numbers(section[name]) for name in ("gallery", "q", "targets"))
    lists = geometry.distance_matrix(q, gallery)
    reach, target_lists = _distances(q, targets), _distances(targets.flatten(0, 1), gallery).unflatten(0, (len(q), -1))
    rank = (target_lists < reach.unsqueeze(2)).double().mean() * len(gallery)
    for name, raised in (("CA+", True), ("CA-", False), ("QA+", True), ("QA-", False)):
        theirs = section[name]
        loss = hinge(reach, target_lists if name.startswith("CA") else lists, raised)
        yield f"{name} loss_per_sample", deviation(loss, theirs["loss_per_sample"]), NUMBER
        yield f"{name} loss_mean", deviation(loss.mean(), theirs["loss_mean"]), NUMBER
        if theirs["rank_mean_times_N"] is not None:
            yield f"{name} rank_mean_times_N", deviation(rank, theirs["rank_mean_times_N"]), NUMBER
    everybody = torch.arange(len(q))
    scene = Scene(gallery, torch.arange(len(gallery)), q, everybody, torch.full_like(everybody, -1))
    chosen, chosen_error = whole(section["QA_rank"]["cand_idx"])
    counted = ATTACKS["QA+"]("published").measure(scene, everybody, chosen, q)["QA+"].mean() * len(gallery)
    yield "QA_rank cand_idx", chosen_error, NUMBER
    yield "QA_rank mean_rank0based", deviation(counted, section["QA_rank"]["mean_rank0based"]), NUMBER
    top = _distances(q, numbers(section["GTT"]["top1"]).unsqueeze(1))
    yield "GTT loss_mean", deviation(hinge(top, lists, False).mean(), section["GTT"]["loss_mean"]), NUMBER

    def loss_of(name: str, given: str) -> Tensor:
        """Each sample aims at the given vector of its number, which is also its clean embedding."""
        other = numbers(section[name][given])
        there = Scene(other, everybody, other, everybody, everybody)
        return -ATTACKS[name]("published").objective(there, everybody, everybody).value(q.unsqueeze(1), everybody)

    yield "ES loss_sum", deviation(loss_of("ES", "other").sum(), section["ES"]["loss_sum"]), NUMBER
    yield "TMA loss_mean", deviation(loss_of("TMA", "other").mean(), section["TMA"]["loss_mean"]), NUMBER
    yield "GTM loss_mean", deviation(loss_of("GTM", "target").mean(), section["GTM"]["loss_mean"]), NUMBER


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """(N, D) to (G, D) as a matrix, to (N, T, D) row by row."""
    if y.ndim == 2:
        return geometry.distance_matrix(x, y)
    return torch.cat([geometry.distance_matrix(a[None], b) for a, b in zip(x, y)])


def check_selectors(oracle: Oracle) -> Iterator[Case]:
    """Whom GTM (as coded) and GTT aim at."""
    section = oracle["selectors"]
    labels, label_error = whole(section["labels"])
    ids, id_error = whole(section["query_idx"])
    yield "whole numbers", max(label_error, id_error), NUMBER
    scene = Scene.of(numbers(section["gallery"]), labels)
    yield "loc_self", deviation(own_ids(scene, ids, by_position=True), section["loc_self"]), NUMBER
    match, unmatch = _misranking(scene, ids)
    yield "GTM_match_idx_as_coded", deviation(match, section["GTM_match_idx_as_coded"]), NUMBER
    yield "GTM_unmatch_idx_as_coded", deviation(unmatch, section["GTM_unmatch_idx_as_coded"]), NUMBER
    first, second = _translocation(scene, ids)
    yield "GTT_top1", deviation(first, section["GTT_top1"]), NUMBER
    yield "GTT_top2", deviation(second, section["GTT_top2"]), NUMBER


def _misranking(scene: Scene, ids: Tensor) -> Tensor:
    """(2, N) the match, which nobody uses, and the non-match that published GTM aims at."""
    nearest = geometry.retrieve(scene.queries[ids], scene.gallery, 1, exclude=scene.own[ids]).ids[:, 0]
    match = subset_index(scene, ids, scene.gallery_labels[nearest], matching=True)
    return torch.stack([match, _drawn("GTM", scene, ids)])


def _translocation(scene: Scene, ids: Tensor) -> Tensor:
    """(2, N) the neighbour that GTT aims at, and the one after it."""
    second = geometry.retrieve(scene.queries[ids], scene.gallery, 2, exclude=scene.own[ids]).ids[:, 1]
    return torch.stack([_drawn("GTT", scene, ids), second])


def _drawn(name: str, scene: Scene, ids: Tensor) -> Tensor:
    targets = ATTACKS[name]("published").targets(scene, ids, Key.of(0))
    assert targets is not None
    return targets


def check_pgd_attacks(oracle: Oracle) -> Iterator[Case]:
    """Whole runs of every attack: whom it aimed at, the perturbation, and the numbers before and after."""
    section = oracle["pgd_attacks"]
    embed, images = _net(section), numbers(section["images"])
    labels, label_error = whole(section["labels"])
    ids, id_error = whole(section["attacked"])
    steps, step_error = whole(section["iters"])
    yield "whole numbers", max(label_error, id_error, step_error), NUMBER
    scene, own = Scene.of(embed(images), labels), images[ids]
    ball, budget = Ball(float(section["eps"])), Budget(int(steps), float(section["alpha"]))
    # These two list what they do not aim at as well; whom the others aim at was drawn, or injected by the author.
    listed: dict[str, tuple[Tensor, int]] = {
        "GTM": (_misranking(scene, ids), 1),
        "GTT": (_translocation(scene, ids), 0),
    }
    for name, run in section["runs"].items():
        if name not in ATTACKS:
            raise ValueError(f"no attack is called {name}")
        goal, targets = ATTACKS[name]("published"), None
        if run["selected"] is not None:
            targets, off = whole(run["selected"])
            if name in listed:
                ours, row = listed[name]
                off, targets = max(off, deviation(ours, run["selected"])), targets[row]
            yield f"{name} selected", off, NUMBER
        found = Attack(embed, scene, goal, ball, budget, look_back=True).run(own, ids, targets=targets)
        yield f"{name} delta_in_255", deviation((found.images - own) * 255, run["delta_in_255"]), PIXEL
        clean = scene.queries[ids]
        for when, e, early in (("summary_orig", clean, clean), ("summary_adv", found.embeddings, found.early)):
            assert early is not None
            summary = _summary(goal, scene, ids, targets, e, early)
            for entry, theirs in run[when].items():
                off = deviation(summary[entry], theirs)
                if when == "summary_orig" and entry in ("CA+:prank", "CA-:prank") and targets is not None:
                    off = _tied(scene, ids, targets, theirs)
                yield f"{name} {when} {entry}", off, NUMBER


def _tied(scene: Scene, ids: Tensor, targets: Tensor, theirs: float) -> float:
    """How far CA's rank before the attack is from one that is possible.

    An unperturbed candidate lies exactly where its clean image in the gallery lies, so whether that image counts
    as nearer is up to rounding, sample by sample: any number of samples from none to all may count one more.
    """
    strict = geometry.ranks(scene.queries[targets[:, 0]], scene.gallery, ids)
    possible = torch.arange(len(ids) + 1) + strict.sum()
    return float((possible / (len(ids) * len(scene.gallery)) - numbers(theirs)).abs().min())


def _summary(
    goal: Goal, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor
) -> dict[str, Tensor]:
    """What the file's author calls our measures; ES sums its loss and has recall in percent."""
    name, everybody = goal.name, torch.arange(len(ids))
    loss = -goal.objective(scene, ids, targets).value(embeddings.unsqueeze(1), everybody)
    measures = goal.measure(scene, ids, targets, embeddings, early)
    means = {measure: values.mean() for measure, values in measures.items()}
    shift = geometry.euclidean(early, scene.clean(goal.side)[ids]).mean()
    summary = {"loss": loss.sum() if name == "ES" else loss.mean(), "embshift": shift}
    if name == "ES":
        relevant = geometry.retrieve(
            embeddings,
            scene.gallery,
            min(100, len(scene.gallery) - 1),
            query_labels=scene.labels[ids],
            gallery_labels=scene.gallery_labels,
            exclude=own_ids(scene, ids, by_position=True),
        ).relevant
        recalls = {f"r@{k}": 100 * relevant[:, :k].any(1).double().mean() for k in (10, 100)}
        return summary | recalls | {"r@1": 100 * means["ES:R"], "ES:D": means["ES:D"]}
    names = {"TMA": "Cosine-SIM", "LTM": "r@1", "GTM": "r@1", "GTT": "retain@4", "GTT@1": "ID-Retain@1"}
    return summary | {names.get(measure, f"{measure}:prank"): mean for measure, mean in means.items()}


def check_inner_pgd(oracle: Oracle) -> Iterator[Case]:
    """ACT, hardness manipulation and min-max: perturbations in 1/255, hardness before and after, training loss."""
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
        found = ascend(Problem(embed, raise_hardness(goal.expand(len(units))), ball, budget), units).images
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
    pairs = images[hard[1:].T]
    ball, budget = Ball(float(section["eps"])), Budget(int(steps), float(section["alpha"]))
    moved = ascend(Problem(embed, collapse_pair(), ball, budget), pairs).images
    act = ((moved - pairs) * 255).transpose(0, 1).flatten(0, 1)
    yield "ACT_delta", deviation(act, section["ACT_delta_in_255_pos_then_neg"]), NUMBER
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


SECTIONS: dict[str, Callable[[Oracle], Iterator[Case]]] = {
    "metrics": check_metrics,
    "attack_losses": check_attack_losses,
    "losses": check_losses,
    "miners": check_miners,
    "selectors": check_selectors,
    "pgd_attacks": check_pgd_attacks,
    "inner_pgd": check_inner_pgd,
}


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
    """Every case of every section that is in the file."""
    for section, check in SECTIONS.items():
        if section not in oracle:
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
    for section in SECTIONS:
        if section not in oracle:
            print(f"{section:14} missing from the file")
    for section in oracle.keys() - SECTIONS.keys() - {"about"}:
        print(f"{section:14} skipped (no such section is known)")
    print(f"FAILED: {', '.join(failed)}" if failed else "all that was replayed agrees")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
