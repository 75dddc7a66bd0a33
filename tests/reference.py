"""The slow truth: every definition once more in plain Python loops, to compare the fast code with.

Nothing here uses torch or the package: numbers are floats, batches are lists, and each function is written
from the definition (spec/protocol.md 2, 3 and 4.1), so that an error in the fast code has no twin here.
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


# A small oracle file with the schema of spec/oracle.json


def small_oracle(seed: int = 0) -> dict[str, Any]:
    """Sections metrics, losses and miners, computed by the loops above on random numbers."""
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
    }
