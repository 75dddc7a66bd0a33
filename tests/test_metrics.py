"""Scores against plain loops, RobRank's exact cases, pytorch-metric-learning and scikit-learn."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anchorhold import geometry, metrics
from anchorhold.errors import DataError, SettingsError
from anchorhold.random import Key
from tests import reference


def clustered(count: int = 90, classes: int = 9, dimension: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.arange(count)
    labels = Key.of(5)("labels").integers(ids, classes)
    spread = Key.of(5)("points").normal(ids, (dimension,))
    return geometry.unit(spread + 1.5 * Key.of(5)("centres").normal(labels, (dimension,))), labels


def one_query(hits: set[int], count: int) -> metrics.Metrics:
    """Protocol 8.3: items at distance i / count from the query, which is item 0; `hits` share its label."""
    gallery = torch.arange(count, dtype=torch.float64).unsqueeze(1) / count
    labels = torch.tensor([1 if i in hits else 0 for i in range(count)])
    return metrics.evaluate(gallery[:1], labels[:1], gallery=gallery, gallery_labels=labels, self_ids=torch.tensor([0]))


# Exact cases


@pytest.mark.parametrize(("hits", "rank", "r1", "r2"), [({0, 1}, 0, 1.0, 1.0), ({0, 2}, 1, 0.0, 1.0)])
def test_robrank_rank_cases(hits: set[int], rank: int, r1: float, r2: float) -> None:
    scores = one_query(hits, 32)
    assert (scores.r1, scores.r2) == (r1, r2)
    line = torch.arange(32.0).unsqueeze(1) / 32
    target = torch.tensor([max(hits)])
    assert geometry.ranks(line[:1], line, target, exclude=torch.tensor([0])).item() == rank


@pytest.mark.parametrize(
    ("hits", "expected"), [({0, 1}, 0.1), ({0, 1, 10}, 0.12), ({0, 1, 2}, 0.20), (set(range(11)), 1.0)]
)
def test_robrank_map_10_cases(hits: set[int], expected: float) -> None:
    assert one_query(hits, 101).map_10 == pytest.approx(expected, abs=1e-12)


def test_map_and_map_r_by_hand() -> None:
    scores = one_query({0, 1, 3}, 5)  # hits at places 1 and 3 of the list, R = 2
    assert scores.map == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert scores.map_r == pytest.approx((1 / 1) / 2)
    assert scores.map_10 == pytest.approx((1 / 1 + 2 / 3) / 10)


# Per-query functions


def test_per_query_scores_match_loops() -> None:
    relevant = Key.of(0).uniform(torch.arange(40), (25,)) < 0.3
    relevant[0], relevant[0, 24], relevant[1] = False, True, True
    total = relevant.sum(1).tolist()
    rows = relevant.tolist()
    hits = relevant.sum(1)
    found = (*relevant.nonzero(as_tuple=True), hits)
    assert (metrics.precision_sum(*found, 25) / hits).tolist() == pytest.approx(
        [reference.average_precision(row) for row in rows]
    )
    assert (metrics.precision_sum(*found, hits) / hits).tolist() == pytest.approx(
        [reference.average_precision_at_r(row, r) for row, r in zip(rows, total)]
    )
    assert (metrics.precision_sum(*found, 10) / 10).tolist() == pytest.approx(
        [reference.average_precision_at_10(row) for row in rows]
    )


def test_nothing_relevant_has_no_average_precision_and_no_recall() -> None:
    line = torch.tensor([[0.0], [1.0]])
    columns = metrics.score_queries(line, torch.tensor([7, 8]), gallery=line, gallery_labels=torch.tensor([0, 1]))
    assert columns["map"].isnan().all() and columns["map_r"].isnan().all()
    assert all((columns[name] == 0).all() for name in ("r1", "r2", "r4", "map_10"))


# Whole evaluations


@pytest.mark.parametrize("chunk", [1, 13, 1024])
def test_evaluate_matches_loops(chunk: int) -> None:
    embeddings, labels = clustered()
    embeddings[7] = embeddings[3]  # a duplicate with its own identity
    columns = metrics.score_queries(embeddings, labels, chunk=chunk)
    points = embeddings.tolist()
    for q in range(len(points)):
        order = reference.ordered([reference.distance(points[q], x) for x in points], q)
        relevant = [bool(labels[i] == labels[q]) for i in order]
        assert bool(columns["r1"][q]) == reference.recall(relevant, 1)
        assert bool(columns["r4"][q]) == reference.recall(relevant, 4)
        assert float(columns["map"][q]) == pytest.approx(reference.average_precision(relevant))
        slow = reference.average_precision_at_r(relevant, sum(relevant))
        assert float(columns["map_r"][q]) == pytest.approx(slow)
        assert float(columns["map_10"][q]) == pytest.approx(reference.average_precision_at_10(relevant))
    scores = metrics.evaluate(embeddings, labels, chunk=chunk)
    assert scores.map == pytest.approx(float(columns["map"].mean()))
    assert (scores.queries, scores.unmatched, scores.nmi) == (90, 0, None)


@pytest.mark.parametrize("own", [False, True])
def test_items_that_are_equally_far_stand_in_the_order_of_their_ids(own: bool) -> None:
    ids = torch.arange(60)
    grid = Key.of(1)("grid").integers(ids, 3).float().unsqueeze(1)  # three places, so nearly everything ties
    labels = Key.of(2)("labels").integers(ids, 4)
    self_ids = ids if own else torch.full((60,), -1)
    columns = metrics.score_queries(grid, labels, gallery=grid, gallery_labels=labels, self_ids=self_ids, chunk=7)
    for q in range(60):
        far = [abs(float(grid[q] - x)) for x in grid]
        order = sorted((i for i in range(60) if not own or i != q), key=lambda i: (far[i], i))
        relevant = [bool(labels[i] == labels[q]) for i in order]
        assert float(columns["r1"][q]) == reference.recall(relevant, 1)
        assert float(columns["r2"][q]) == reference.recall(relevant, 2)
        assert float(columns["map"][q]) == pytest.approx(reference.average_precision(relevant))
        slow = reference.average_precision_at_r(relevant, sum(relevant))
        assert float(columns["map_r"][q]) == pytest.approx(slow)


def test_self_as_gallery_is_the_default() -> None:
    embeddings, labels = clustered()
    explicit = metrics.evaluate(
        embeddings, labels, gallery=embeddings, gallery_labels=labels, self_ids=torch.arange(len(labels))
    )
    assert metrics.evaluate(embeddings, labels) == explicit
    with_self = metrics.evaluate(embeddings, labels, gallery=embeddings, gallery_labels=labels)
    assert with_self.r1 == 1.0  # nobody said who is who: every query finds itself


def test_queries_without_a_match_are_counted_apart() -> None:
    line = torch.tensor([[0.0], [0.1], [5.0]])
    scores = metrics.evaluate(line, torch.tensor([0, 0, 1]))
    assert scores.unmatched == 1
    assert scores.r1 == pytest.approx(2 / 3)
    assert scores.map == scores.map_r == 1.0
    assert scores.map_10 == pytest.approx(2 / 30)


# A choice of metrics


@pytest.mark.parametrize("count", [120, 400, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["points", "grid", "apart"])
@pytest.mark.parametrize("chosen", [("R@1",), ("R@4", "R@2"), ("mAP@R", "R@1"), ("mAP@10",), ("mAP", "mAP@10"), ()])
def test_chosen_metrics_are_those_of_all(chosen: tuple[str, ...], kind: str, count: int) -> None:
    embeddings, labels = clustered(count, count // 8, 8)
    labels[:3] = torch.tensor([-5, 10**6, 10**6])  # one label of its own, one of two
    sides = {}
    if kind == "grid":
        embeddings = (2 * embeddings[:, :2]).round()  # many equal distances
    if kind == "apart":
        asked = slice(0, count // 3)
        own = torch.arange(count)[asked].where(torch.arange(count)[asked] % 2 > 0, -1)
        sides = {"gallery": embeddings, "gallery_labels": labels, "self_ids": own}
        embeddings, labels = embeddings[asked], labels[asked]
    whole = metrics.evaluate(embeddings, labels, **sides)  # type: ignore[arg-type]
    some = metrics.evaluate(embeddings, labels, **sides, metrics=chosen, chunk=100)  # type: ignore[arg-type]
    assert some.percent() == pytest.approx({name: whole.percent()[name] for name in chosen}, abs=1e-9)
    assert (some.queries, some.unmatched, some.nmi) == (whole.queries, whole.unmatched, None)
    columns = metrics.score_queries(embeddings, labels, **sides)  # type: ignore[arg-type]
    assert whole.unmatched == int(columns["map"].isnan().sum())


@pytest.mark.parametrize(
    ("chosen", "depth"), [(["R@1"], 1), (["R@2", "R@4"], 4), (["R@1", "mAP@10"], 10), (["R@1", "mAP@R"], 13)]
)
def test_lists_are_ranked_as_deep_as_the_metrics_need(
    chosen: list[str], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings, _ = clustered(200)
    labels = torch.cat([torch.zeros(13, dtype=torch.long), torch.arange(13, 200) // 4])
    asked: list[int] = []

    def watched(query: Tensor, gallery: Tensor, k: int, **others: Any) -> Any:
        asked.append(k)
        return geometry.nearest_rows(query, gallery, k, **others)

    monkeypatch.setattr(metrics, "nearest_rows", watched)
    metrics.evaluate(embeddings, labels, metrics=chosen)
    assert asked == [depth]
    metrics.evaluate(embeddings, labels)  # mAP is of the whole list
    assert asked == [depth]


def test_nmi_may_be_asked_for_by_name_and_nonsense_may_not() -> None:
    embeddings, labels = clustered()
    assert metrics.evaluate(embeddings, labels, metrics=["NMI"]).percent() == {
        "NMI": metrics.evaluate(embeddings, labels, metrics=(*metrics.RANKED, "NMI")).percent()["NMI"]
    }
    with pytest.raises(SettingsError, match=r"no metric 'R@3'.*R@"):
        metrics.evaluate(embeddings, labels, metrics=["R@3"])
    with pytest.raises(SettingsError, match="list of names"):
        metrics.evaluate(embeddings, labels, metrics="R@1")
    with pytest.raises(DataError, match="gallery is empty"):
        metrics.evaluate(embeddings, labels, gallery=embeddings[:0], gallery_labels=labels[:0])


def test_percent_names_the_scores() -> None:
    embeddings, labels = clustered()
    scores = metrics.evaluate(embeddings, labels, metrics=(*metrics.RANKED, "NMI"))
    printed = scores.percent()
    assert list(printed) == ["R@1", "R@2", "R@4", "mAP", "mAP@R", "mAP@10", "NMI"]
    assert printed["R@1"] == 100 * scores.r1
    assert "NMI" not in metrics.evaluate(embeddings, labels).percent()


def test_fp32_and_chunks_change_nothing_that_is_printed() -> None:
    embeddings, labels = clustered(300, 20, 32)
    exact = metrics.evaluate(embeddings, labels).percent()
    single = metrics.evaluate(embeddings.float(), labels, chunk=17).percent()
    assert list(single.values()) == pytest.approx(list(exact.values()), abs=0.01)


def test_bad_input_is_named() -> None:
    embeddings, labels = clustered()
    with pytest.raises(DataError, match="give both"):
        metrics.evaluate(embeddings, labels, gallery=embeddings)
    with pytest.raises(DataError, match="one label for each"):
        metrics.evaluate(embeddings, labels[:-1])
    with pytest.raises(DataError, match="no queries"):
        metrics.evaluate(embeddings[:0], labels[:0])
    with pytest.raises(DataError, match="choose k from 1 to 90"):
        metrics.kmeans(embeddings, 91, Key.of(0))


def test_pytorch_metric_learning_agrees() -> None:
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    accuracy = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    inference = pytest.importorskip("pytorch_metric_learning.utils.inference")
    embeddings, labels = clustered(200, 12)
    calculator = accuracy.AccuracyCalculator(
        include=("precision_at_1", "mean_average_precision_at_r"),
        k="max_bin_count",
        knn_func=inference.CustomKNN(distances.LpDistance(normalize_embeddings=False)),
        device=torch.device("cpu"),
    )
    theirs = calculator.get_accuracy(embeddings, labels)
    ours = metrics.evaluate(embeddings, labels)
    assert ours.r1 == pytest.approx(theirs["precision_at_1"], abs=1e-6)
    assert ours.map_r == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-6)


# Clusters


@pytest.mark.parametrize("seed", range(5))
def test_mutual_information_is_scikit_learn_s(seed: int) -> None:
    cluster = pytest.importorskip("sklearn.metrics")
    a = Key.of(seed)("a").integers(torch.arange(200), 7)
    b = torch.where(Key.of(seed)("keep").uniform(torch.arange(200)) < 0.6, a * 3, 1)
    for x, y in ((a, b), (b, a), (a, a), (a, torch.zeros(200)), (torch.zeros(200), torch.ones(200))):
        expected = cluster.normalized_mutual_info_score(x.numpy(), y.numpy())
        assert metrics.normalised_mutual_information(x, y) == pytest.approx(expected, abs=1e-12)


def test_kmeans_reaches_a_fixed_point() -> None:
    embeddings, _ = clustered()
    clusters = metrics.kmeans(embeddings, 9, Key.of(0), iterations=100)
    centres = torch.stack([embeddings[clusters == c].mean(0) for c in range(9)])
    assert torch.equal(geometry.distance_matrix(embeddings, centres).argmin(1), clusters)


def test_kmeans_is_keyed_and_whatever_the_chunk() -> None:
    embeddings, _ = clustered()
    clusters = metrics.kmeans(embeddings, 9, Key.of(0))
    assert torch.equal(clusters, metrics.kmeans(embeddings, 9, Key.of(0), chunk=7))
    assert not torch.equal(clusters, metrics.kmeans(embeddings, 9, Key.of(1)))


def test_empty_clusters_are_filled_while_there_are_points_to_fill_them() -> None:
    # Five copies each of three points: random starts often coincide, and every cluster must still be used.
    points = torch.eye(3).repeat(5, 1)
    for seed in range(20):
        assert set(metrics.kmeans(points, 3, Key.of(seed)).tolist()) == {0, 1, 2}
    assert set(metrics.kmeans(torch.ones(6, 2), 4, Key.of(0)).tolist()) <= {0, 1, 2, 3}  # not enough points: no crash


def test_separate_classes_give_full_nmi() -> None:
    labels = torch.arange(60) % 3
    points = torch.eye(3)[labels] + 0.01 * Key.of(0).normal(torch.arange(60), (3,), torch.float32)
    assert metrics.nmi(points, labels, Key.of(1)) == pytest.approx(1.0)
