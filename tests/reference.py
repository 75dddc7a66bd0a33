"""The slow truth: every definition once more in plain Python loops, to compare the fast code with.

Nothing here uses torch or the package: numbers are floats, batches are lists, and each function is written
from the definition, so that an error in the fast code has no twin here.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

Vector = Sequence[float]
Rows = Sequence[Vector]
Sets = tuple[list[set[int]], list[set[int]]]


# Distances


def distance(x: Vector, y: Vector, eps: float = 0.0) -> float:
    """Euclidean; `eps` is added to every difference, as torch's pairwise_distance does with 1e-6."""
    return math.sqrt(sum((a - b + eps) ** 2 for a, b in zip(x, y)))


def cosine(x: Vector, y: Vector) -> float:
    """1 - cos."""
    dot = sum(a * b for a, b in zip(x, y))
    return 1 - dot / math.sqrt(sum(a * a for a in x)) / math.sqrt(sum(b * b for b in y))


def unit(x: Vector) -> list[float]:
    """x / |x|."""
    length = math.sqrt(sum(a * a for a in x))
    return [a / length for a in x]


def ordered(distances: Vector, own: int = -1) -> list[int]:
    """Gallery ids, nearest first, equals by id, the query's own image left out."""
    return sorted((i for i in range(len(distances)) if i != own), key=lambda i: (distances[i], i))


def rank(distances: Vector, target: int, own: int = -1) -> int:
    """How many items other than `own` are strictly nearer than the target."""
    return sum(1 for i, d in enumerate(distances) if i != own and d < distances[target])


# Scores of one list of relevances, nearest first


def recall(relevant: Sequence[bool], k: int) -> bool:
    """At least one hit among the first k."""
    return any(relevant[:k])


def precision_sum(relevant: Sequence[bool], depth: int) -> float:
    """Precision at every hit among the first `depth`, summed."""
    total = 0.0
    for i in range(min(depth, len(relevant))):
        if relevant[i]:
            total += sum(relevant[: i + 1]) / (i + 1)
    return total


def average_precision(relevant: Sequence[bool]) -> float:
    """Over the whole list."""
    return precision_sum(relevant, len(relevant)) / sum(relevant)


def average_precision_at_r(relevant: Sequence[bool], total: int) -> float:
    """Musgrave's: over the first R items, R the number of relevant ones in the whole list."""
    return precision_sum(relevant, total) / total


def average_precision_at_10(relevant: Sequence[bool]) -> float:
    """RobRank's: over the first ten items, divided by ten."""
    return precision_sum(relevant, 10) / 10


# Losses


def triplet(a: Rows, p: Rows, n: Rows, margin: float, metric: Any = distance) -> float:
    """Mean of max(0, d(a, p) - d(a, n) + margin), the eps of torch where the metric takes one."""
    d = (lambda x, y: distance(x, y, 1e-6)) if metric is distance else metric
    return sum(max(0.0, d(x, y) - d(x, z) + margin) for x, y, z in zip(a, p, n)) / len(a)


def contrastive(a: Rows, p: Rows, n: Rows, margin: float, reduction: str) -> float:
    """Matching pairs pay their distance, others margin - distance where positive."""
    pull = [distance(x, y, 1e-6) for x, y in zip(a, p)]
    push = [max(0.0, margin - distance(x, z, 1e-6)) for x, z in zip(a, n)]
    if reduction == "all":
        return (sum(pull) + sum(push)) / (len(pull) + len(push))
    active = [x for x in push if x > 0]
    return sum(pull) / len(pull) + (sum(active) / len(active) if active else 0.0)


# Samplers: the sets they may draw from, anchor by anchor


def candidate_sets(name: str, embeddings: Rows, labels: Sequence[int], margin: float = 0.2) -> Sets:
    """The positives and the negatives that sampler `name` may draw, for every even position."""
    e, everything = [unit(x) for x in embeddings], set(range(len(labels)))
    positives, negatives = [], []
    for a in range(0, len(labels), 2):
        d = [0.0 if i == a else distance(e[a], e[i]) for i in everything]
        same = {i for i in everything if labels[i] == labels[a]}
        others = everything - same
        positive, partner = {a + 1}, a + 1
        wanted: set[int] = set()
        if name == "random":
            wanted = others
        elif name == "semihard":
            for i in others:
                if d[partner] ** 2 < d[i] ** 2 and d[partner] - d[i] + margin > 0:
                    wanted.add(i)
        elif name == "softhard":
            wanted = {i for i in others if d[i] ** 2 < max(d[j] ** 2 for j in same)}
            if others:
                positive = {i for i in same if d[i] ** 2 > min(d[j] ** 2 for j in others)} or same
        elif name == "hardest":
            apart = [i for i in sorted(others) if d[i] > 0]
            if apart:
                wanted = {min(apart, key=lambda i: d[i])}
        elif name == "distance":
            weights = distance_probabilities(d, [i in same for i in range(len(d))], len(e[a]))
            wanted = {i for i, w in enumerate(weights) if w > 0}
        positives.append(positive)
        negatives.append(wanted or others or everything)
    return positives, negatives


def distance_probabilities(
    d: Vector, same: Sequence[bool], dimension: int, lower: float = 0.0, upper: float = math.inf
) -> list[float]:
    """One anchor's chances of drawing each sample as negative; 1/N each where the formula gives nothing."""
    logs = []
    for i, x in enumerate(d):
        x = max(x, lower)
        if same[i] or x >= upper:
            logs.append(-math.inf)
        elif not 0 < x < 2:
            return [1 / len(d)] * len(d)
        else:
            logs.append((2 - dimension) * math.log(x) - (dimension - 3) / 2 * math.log(1 - x * x / 4))
    top = max(logs)
    if top == -math.inf:
        rest = [i for i in range(len(d)) if not same[i]] if upper < math.inf else []
        rest = rest or list(range(len(d)))
        return [1 / len(rest) if i in rest else 0.0 for i in range(len(d))]
    weights = [math.exp(x - top) for x in logs]
    return [w / sum(weights) for w in weights]


# Attacks: what they minimise, whom they aim at, what is measured


def hinge(reach: Vector, lists: Rows, raised: bool, margin: float = 0.0) -> float:
    """Mean of max(0, margin ± (d(target) - d(x))) over targets and the list of each."""
    terms = [max(0.0, (r - x if raised else x - r) + margin) for r, row in zip(reach, lists) for x in row]
    return sum(terms) / len(terms)


def misrank_loss(distances: Vector, labels: Sequence[int], label: int, own: int) -> float:
    """Furthest non-match against nearest match, `own` being none of the matches; 0 where either is missing."""
    others = [d for d, c in zip(distances, labels) if c != label]
    matches = [d for i, (d, c) in enumerate(zip(distances, labels)) if c == label and i != own]
    return max(0.0, max(others) - min(matches)) if others and matches else 0.0


def nearest_other(distances: Vector, labels: Sequence[int], label: int) -> int:
    """The nearest item of another class, -1 where there is none."""
    others = [i for i in range(len(labels)) if labels[i] != label]
    return min(others, key=lambda i: (distances[i], i)) if others else -1


def as_coded(distances: Vector, labels: Sequence[int], own: int, matching: bool = False) -> int:
    """RobRank's slip: judged by the neighbour's label, and counted inside the list of those."""
    neighbour = ordered(distances, own)[0]
    chosen = [i for i in range(len(labels)) if (labels[i] == labels[neighbour]) == matching]
    return min(range(len(chosen)), key=lambda k: (math.inf if chosen[k] == own else distances[chosen[k]], k))


def query_standing(distances: Vector, target: int, own: int, counts_self: bool) -> float:
    """Rank of a candidate over the length of the list it stands in."""
    listed = [i for i in range(len(distances)) if counts_self or i != own or i == target]
    return sum(1 for i in listed if distances[i] < distances[target] and (counts_self or i != own)) / len(listed)


def candidate_standing(
    query: Vector, candidate: Vector, gallery: Rows, number: int, own: int, counts_self: bool
) -> float:
    """Rank of a perturbed candidate over the length of the query's list; `number` is its place in the gallery."""
    reach = distance(query, candidate)
    listed = [x for i, x in enumerate(gallery) if counts_self or i not in (own, number)]
    nearer = sum(1 for x in listed if distance(query, x) < reach)
    return nearer / (len(listed) if counts_self else len(listed) + 1)


# A small oracle file with the schema of spec/oracle.json


def small_oracle(seed: int = 0) -> dict[str, Any]:
    """All sections but those of whole ascents, computed by the loops above on random numbers."""
    draw = random.Random(seed)

    def vectors(count: int, size: int) -> list[list[float]]:
        return [unit([draw.gauss(0, 1) for _ in range(size)]) for _ in range(count)]

    distances, own = [draw.random() for _ in range(14)], 5
    distances[own] = 0.0
    labels = [draw.randrange(3) for _ in distances]
    labels[2] = labels[own]
    order = ordered(distances, own)
    relevant = [labels[i] == labels[own] for i in order]
    a, p, n = vectors(5, 4), vectors(5, 4), vectors(5, 4)
    n[0] = unit([x + 0.1 for x in a[0]])  # so that at least one pair is active
    e, classes = vectors(12, 4), [0, 0, 1, 1, 2, 2, 0, 0, 3, 3, 1, 1]
    hardest = candidate_sets("hardest", e, classes)[1]
    reachable = {}
    for name in ("random", "semihard", "softhard"):
        positives, negatives = candidate_sets(name, e, classes)
        reachable[f"spc2-{name}"] = {
            "positives_reachable": [sorted(s) for s in positives],
            "negatives_reachable": [sorted(s) for s in negatives],
        }
    return {
        "about": "made by tests/reference.py",
        "metrics": {
            "dist": distances,
            "gallery_labels": labels,
            "query_index": own,
            "query_label": labels[own],
            "rank_r1_r2": [relevant.index(True), int(recall(relevant, 1)), int(recall(relevant, 2))],
            "AP": average_precision(relevant),
            "AP_at10": average_precision_at_10(relevant),
        },
        "losses": {
            "a": a,
            "p": p,
            "n": n,
            "triplet_margin0.2": triplet(a, p, n, 0.2),
            "triplet_margin0": triplet(a, p, n, 0.0),
            "contrastive_margin1": contrastive(a, p, n, 1.0, "active"),
            "triplet_cosine_0.2": triplet(a, p, n, 0.2, cosine),
        },
        "miners": {
            "embeddings": e,
            "labels": classes,
            "hard": [list(range(0, 12, 2)), list(range(1, 12, 2)), [min(s) for s in hardest]],
            "distance_probabilities_row_per_anchor": [
                distance_probabilities([distance(e[i], x) for x in e], [c == classes[i] for c in classes], 4)
                for i in range(0, 12, 2)
            ],
            "reachable_sets_400_draws": reachable,
        },
        "attack_losses": _attack_losses(vectors),
        "selectors": _selectors(vectors),
    }


def _attack_losses(vectors: Any) -> dict[str, Any]:
    gallery, q, others = vectors(9, 4), vectors(3, 4), vectors(3, 4)
    targets, chosen = [vectors(2, 4) for _ in q], [[0, 5], [3, 7], [8, 2]]
    lists = [[distance(x, y) for y in gallery] for x in q]
    reach = [[distance(x, t) for t in each] for x, each in zip(q, targets)]
    target_lists = [[[distance(t, y) for y in gallery] for t in each] for each in targets]
    ranks = [sum(1 for d in row if d < r) for each, rows in zip(reach, target_lists) for r, row in zip(each, rows)]
    section: dict[str, Any] = {"gallery": gallery, "q": q, "targets": targets}
    for name in ("CA+", "CA-", "QA+", "QA-"):
        losses = [
            hinge(reach[i], target_lists[i] if name < "Q" else [lists[i]] * 2, name.endswith("+"))
            for i in range(len(q))
        ]
        section[name] = {
            "loss_mean": sum(losses) / len(losses),
            "loss_per_sample": losses,
            "rank_mean_times_N": sum(ranks) / len(ranks) if name < "Q" else None,
        }
    standing = [rank(lists[i], c) for i, each in enumerate(chosen) for c in each]
    section["QA_rank"] = {"cand_idx": chosen, "mean_rank0based": sum(standing) / len(standing)}
    apart = [distance(x, y, 1e-6) for x, y in zip(q, others)]
    sunk = [hinge([distance(x, y)], [row], False) for x, y, row in zip(q, others, lists)]
    section["ES"] = {"other": others, "loss_sum": -sum(apart)}
    section["TMA"] = {"other": others, "loss_mean": sum(cosine(x, y) for x, y in zip(q, others)) / len(q)}
    section["GTM"] = {"target": others, "loss_mean": sum(apart) / len(q)}
    section["GTT"] = {"top1": others, "loss_mean": sum(sunk) / len(q)}
    return section


def _selectors(vectors: Any) -> dict[str, Any]:
    gallery, labels, queries = vectors(12, 4), [0, 0, 1, 1, 2, 2, 2, 0, 3, 3, 1, 3], [0, 4, 7, 11]
    rows = [[distance(gallery[i], x) for x in gallery] for i in queries]
    return {
        "gallery": gallery,
        "labels": labels,
        "query_idx": queries,
        "loc_self": queries,
        "GTM_unmatch_idx_as_coded": [as_coded(row, labels, i) for row, i in zip(rows, queries)],
        "GTM_match_idx_as_coded": [as_coded(row, labels, i, matching=True) for row, i in zip(rows, queries)],
        "GTT_top1": [ordered(row, i)[0] for row, i in zip(rows, queries)],
        "GTT_top2": [ordered(row, i)[1] for row, i in zip(rows, queries)],
    }
