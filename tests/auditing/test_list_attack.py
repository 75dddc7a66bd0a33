"""The attacker who sees only lists: nothing but ids, exact counts, a curve that falls, and wrong use in one line."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorhold as ah
from anchorhold.attacks.listed import Lists, attack_lists, order_value, weighted_share
from anchorhold.errors import AnchorholdError, SettingsError
from anchorhold.model.frozen import embed_all, frozen
from anchorhold.model.wrap import fingerprint_of
from anchorhold.perturb.ball import Ball
from anchorhold.random import Key
from tests.attacks import world
from tests.cli.test_main import run as cli

DIGITS = ah.dataset("digits").test


def service(net: Any, k: int, calls: list[int] | None = None) -> Callable[[Tensor], Any]:
    """A search that knows the model and tells ids only, as lists of whole numbers."""
    images = DIGITS.images.permute(0, 3, 1, 2).float() / 255  # type: ignore[union-attr]
    with frozen(net) as embed:
        gallery = embed_all(embed, [images])

    def search(x: Tensor) -> list[list[int]]:
        assert not x.requires_grad and x.min() >= 0 and x.max() <= 1
        if calls is not None:
            calls.append(len(x))
        with torch.no_grad():
            return torch.cdist(net.eval()(x), gallery).topk(k, largest=False).indices.tolist()

    return search


@pytest.fixture(scope="module")
def net() -> ah.Embedder:
    return ah.Embedder("small", 16, channels=1, size=8).eval().requires_grad_(False)


# ---------------------------------------------------------------- what a list is worth


def test_the_weighted_share_by_hand() -> None:
    held = torch.tensor([[False, True, True]])
    weights = [1.0, 1 / 1.5849625007211562, 0.5]
    assert float(weighted_share(held)) == pytest.approx(sum(weights[1:]) / sum(weights))


def test_the_order_value_is_a_rank_correlation() -> None:
    for found in itertools.permutations((4, 7, 9)):
        wanted = (9, 4, 7)
        pairs = [found.index(a) < found.index(b) for a, b in itertools.combinations(wanted, 2)]
        value = order_value(torch.tensor([found]), torch.tensor([wanted]))
        assert float(value) == pytest.approx(sum(1 if pair else -1 for pair in pairs) / 3)
    assert float(order_value(torch.tensor([[9, 4, 1]]), torch.tensor([[9, 4, 7]]))) == pytest.approx((1 - 2) / 3)


def test_the_own_image_is_left_out_of_a_list() -> None:
    known = Lists(torch.tensor([0, 1]), torch.tensor([0, 1, 1, 0]), torch.tensor([0, -1]))
    found = known.without_own(torch.tensor([[0, 3, 1], [2, 0, 1]]), torch.arange(2))
    assert found.tolist() == [[3, 1, -1], [2, 0, 1]]
    assert known.right(found, torch.arange(2)).tolist() == [[True, False, False], [True, False, True]]
    # Lists that held the query's own image end in −1, which is no wanted id.
    whole = order_value(torch.tensor([[1, 2, 3, 4, -1]]), torch.tensor([[-1, 1, 2, 3, 4]]))
    assert (
        whole.tolist() == [1.0]
        and order_value(torch.tensor([[4, 3, 2, 1, -1]]), torch.tensor([[-1, 1, 2, 3, 4]])) == -1
    )


def test_the_query_itself_is_no_item_whose_order_is_wanted() -> None:
    """Lists of 2 that hold the query's own image have one other id, and no order."""
    there, ids = world(60), torch.arange(0, 60, 5)
    known, ball = Lists(there.scene.labels[ids], there.scene.gallery_labels, ids), Ball(0.15)

    def search(k: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cdist(there.embed(x), there.scene.gallery).topk(k, largest=False).indices

    with pytest.raises(SettingsError, match="lists of at least 2 ids: raise k"):
        attack_lists(search(2), there.images[ids], known, ball, 5, "order", Key.of(0), ids)
    attack_lists(search(3), there.images[ids], known, ball, 5, "order", Key.of(0), ids)


# ---------------------------------------------------------------- the attack


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("goal", ["recall", "overlap", "order"])
def test_values_never_fall_and_the_ball_is_never_left(norm: str, goal: str) -> None:
    there, eps = world(60), 0.15 if norm == "linf" else 0.3
    asked: list[tuple[Tensor, Tensor]] = []

    def search(images: Tensor) -> Tensor:
        ids = torch.cdist(there.embed(images), there.scene.gallery).topk(8, largest=False).indices
        asked.append((images, ids))
        return ids

    ids, scene = torch.arange(0, 60, 5), there.scene
    known, ball = Lists(scene.labels[ids], scene.gallery_labels, ids), Ball(eps, norm)  # type: ignore[arg-type]
    found = attack_lists(search, there.images[ids], known, ball, 80, goal, Key.of(0), ids)  # type: ignore[arg-type]
    shift = found.images - there.images[ids]
    size = shift.abs().amax() if norm == "linf" else shift.flatten(1).norm(dim=1).amax()
    assert 0 < size <= eps * (1 + 1e-9) and found.images.min() >= 0 and found.images.max() <= 1
    assert int(found.queries.sum()) == sum(len(images) for images, _ in asked) and found.queries.max() <= 80
    assert len(found.after) == 80 and int(found.after[-1]) == int(found.right.sum())
    rows = torch.arange(len(ids))
    first, last = (known.without_own(search(x), rows) for x in (there.images[ids], found.images))
    assert torch.equal(known.right(last, rows)[:, 0], found.right)
    if goal == "recall":
        assert found.after.diff().le(0).all() and found.after[-1] < found.after[0]
        assert (found.queries[found.right] == 80).all()
    elif goal == "overlap":
        kept = (last.unsqueeze(2) == first.unsqueeze(1)).any(2) & (last >= 0)
        assert weighted_share(kept).mean() < 0.9
    else:
        wanted = first[:, :5].flip(1)
        assert (order_value(last, wanted) >= order_value(first, wanted)).all()
        assert order_value(last, wanted).mean() > order_value(first, wanted).mean() + 0.2


@pytest.mark.slow
def test_a_search_function_and_the_model_behind_it_give_the_same_curve(net: ah.Embedder, tmp_path: Path) -> None:
    calls: list[int] = []
    options: dict[str, Any] = {"k": 6, "queries": 40, "eps": 0.1, "limit": 30, "batch": 16, "device": "cpu"}
    by_ids = ah.attack_list(service(net, 6, calls), DIGITS, **options)
    by_model = ah.attack_list(net, DIGITS, **options)
    same = ah.attack_list(net, DIGITS, threat=ah.Threat(eps=0.1), **{**options, "eps": None})
    assert same.r1 == by_model.r1 and same.settings == by_model.settings
    assert ah.attack_list(net, DIGITS, threat=ah.Threat(eps=0.1, norm="l2"), **{**options, "eps": None}).r1 != same.r1
    assert by_ids.r1 == by_model.r1 and torch.equal(by_ids.images, by_model.images)
    assert by_ids.queries == sum(calls) == int(by_ids.spent.sum()) <= 30 * 40 and max(calls) <= 16
    assert len(by_ids.r1) == 40 and list(by_ids.r1) == sorted(by_ids.r1, reverse=True) and by_ids.r1[-1] < by_ids.r1[0]
    assert [place for place, _ in by_ids.curve] == [1, 2, 5, 10, 20, 40]
    assert by_ids.r1[-1] == pytest.approx(100 * float(by_ids.right.double().mean()))
    told = json.loads(by_ids.save(tmp_path / "curve.json").read_text())
    assert told["queries"] == by_ids.queries and told["curve"][-1] == [40, by_ids.r1[-1]]
    again = ah.attack_list(net, DIGITS, **{**options, "batch": 7})
    assert again.r1 == by_ids.r1
    assert ah.attack_list(net, DIGITS, **{**options, "seed": 1}).r1 != by_ids.r1


@pytest.mark.medium
def test_ids_may_have_names_and_arrays_will_do(net: ah.Embedder) -> None:
    names = [f"item-{place}" for place in range(len(DIGITS))]
    plain = service(net, 5)

    def named(x: Tensor) -> list[list[str]]:
        return [[names[each] for each in row] for row in plain(x)]

    options: dict[str, Any] = {"k": 5, "queries": 6, "eps": 0.1, "limit": 8}
    one = ah.attack_list(named, DIGITS, names=names, **options)
    two = ah.attack_list(lambda x: torch.tensor(plain(x)).numpy(), DIGITS, **options)
    assert one.r1 == two.r1 == ah.attack_list(lambda x: torch.tensor(plain(x)), DIGITS, **options).r1


@pytest.mark.slow
def test_natural_lists_fall_faster_than_hardened_ones(tmp_path: Path) -> None:
    curves = {}
    for recipe in ("natural", "hm-lga"):
        changes = {"train": {"evaluate_every": 99}}
        ah.fit(None, ah.dataset("digits"), recipe, tmp_path / recipe, overrides=changes, device="cpu")
        model = ah.load(tmp_path / recipe)
        curves[recipe] = ah.attack_list(model, DIGITS, k=10, queries=200, eps=0.1, limit=60, device="cpu").r1
    natural, robust = curves["natural"], curves["hm-lga"]
    assert natural[0] - natural[-1] > 40 and robust[-1] - natural[-1] > 15


# ---------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        (lambda x: torch.zeros(len(x), 3).long(), {}, "a list of 3 ids, not 10; set k = 3 or less"),
        (lambda x: torch.zeros(len(x) + 1, 10).long(), {}, "lists for"),
        (lambda x: torch.full((len(x), 10), 10**6), {}, "the id 1000000, which is not a position"),
        (lambda x: torch.zeros(len(x), 10), {}, "the id 0.0"),
        (lambda x: None, {}, "returns None"),
        (lambda x: 1 / 0, {}, "the search function fails on images"),
        (lambda x: [["a"] * 10] * len(x), {"names": list("ab")}, "2 different ids for"),
        ("service", {}, "give a model, or a function"),
        (lambda x: x, {"queries": 0}, "queries must be at least 1"),
        (lambda x: x, {"queries": -5}, "queries must be at least 1"),
        (lambda x: x, {"k": 0}, "k must be at least 1"),
        (lambda x: x, {"k": 1}, "set k to 2 or more"),
        (lambda x: x, {"k": 10**6}, "more than the"),
        (lambda x: x, {"threat": ah.Threat(steps=5)}, "takes queries, no steps"),
        (lambda x: x, {"threat": "strong"}, "no threat is called 'strong'"),
        (lambda x: torch.zeros(len(x), 10).long(), {"goal": "speed"}, "there are: recall, overlap, order"),
        (lambda x: x, {"limit": -1}, "limit must not be negative"),
        (lambda x: x, {"batch": 0}, "batch must be at least 1"),
    ],
)
def test_wrong_use_is_one_line(search: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message) as error:
        ah.attack_list(search, DIGITS, **{"limit": 4, "queries": 3, **options})
    assert "\n" not in str(error.value)


@pytest.mark.medium
def test_the_command_prints_the_curve(
    net: ah.Embedder, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net.save(tmp_path / "model.safetensors")
    out = tmp_path / "curve.json"
    words = ["attack-list", str(tmp_path / "model.safetensors"), "--data", "digits", "-k", "5", "--queries", "4"]
    words += ["--limit", "6", "--eps", "0.1", "--out", str(out), "--device", "cpu"]
    code, said, _ = cli(capsys, monkeypatch, *words)
    assert code == 0 and "R@1" in said
    told = json.loads(out.read_text())
    assert [place for place, _ in told["curve"]] == [1, 2, 4]
    assert told["schema"] == "anchorhold.list-attack/1" and told["versions"]["torch"] and "commit" in told
    assert told["model"] == {"kind": "Embedder", "weights": fingerprint_of(net)}
    assert told["data"]["query"]["fingerprint"] == DIGITS.fingerprint() and told["data"]["part"]
    code, said, _ = cli(capsys, monkeypatch, *words, "--held-out", "2", "--resize", "9", "--crop", "8")
    again = json.loads(out.read_text())
    assert code == 0 and again["data"]["query"]["name"] != told["data"]["query"]["name"]
    assert (again["settings"]["resize"], again["settings"]["crop"]) == (9, 8)
    code, _, wrong = cli(capsys, monkeypatch, *words, "--classes", "all")
    assert code == 2 and "these data have a test split" in wrong
