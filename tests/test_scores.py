"""ERS and ARS against every published row, their errors, and bootstrap intervals against closed forms."""

import copy
import json
import math
import pickle

import pytest
import torch
from torch import Tensor

from anchorhold.columns import ARS_COLUMNS, ERS_COLUMNS, PRINTED_INITIAL
from anchorhold.errors import SettingsError
from anchorhold.random import Key
from anchorhold.reproduce.rows import Row, row_named, rows
from anchorhold.scores import (
    ars,
    ars_per_sample,
    ars_terms,
    bootstrap,
    ers,
    ers_terms,
    group_means,
    interval,
    overall,
    resampled_means,
)


def _values(row: Row) -> dict[str, float]:
    return {name: row.published[name] for name in ERS_COLUMNS}


ROWS = [row for row in rows() if row.published.keys() >= {*ERS_COLUMNS, "ERS"}]
LGA = _values(row_named("hm/t6/cub/hm-lga-8"))

# How far the ten columns of a row may be from its ERS: one paper prints TMA and ES:D to a tenth only.
ROUNDING = {"robust-init": 0.75, "hm": 0.075, "catride": 0.1001}
# What the ten columns give where another score stands beside them.
INCONSISTENT = {"catride/t2/cub/ca-tride-16": 38.79, "catride/t2/cars/natural-r": 3.87}


# ---------------------------------------------------------------- the papers


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_ers_of_every_published_row(row: Row) -> None:
    score, printed = ers(_values(row)), row.published["ERS"]
    if row.id in INCONSISTENT:
        assert abs(score - printed) > 0.15
        assert score == pytest.approx(INCONSISTENT[row.id], abs=0.01)
        assert "ERS" in row.note
    else:
        assert abs(score - printed) < ROUNDING[row.paper]


@pytest.mark.parametrize("data", ["cub", "cars", "sop"])
@pytest.mark.parametrize("method", ["act-r-32", "hm-lga-ics-32"])
def test_ars_of_002_from_the_columns_of_001(data: str, method: str) -> None:
    raw, printed = row_named(f"hm/t6/{data}/{method}"), row_named(f"catride/t1/{data}/{method}").published
    score = ars(_values(raw), clean=raw.published["R@1"])
    assert abs(score - printed["ARS"]) < 0.15
    for attack in ARS_COLUMNS:
        assert abs(score.columns[attack] - printed[f"ARS:{attack}"]) < 0.15, attack
    assert score.initial == "published constants"


# ---------------------------------------------------------------- formulas


def test_each_term_by_hand() -> None:
    terms = ers_terms(LGA)
    expected = [25.4, 53.6, 23.2, 60.1, 43.3, 60.85, 16.8, 11.9, 27.9, 1.4]
    assert list(terms) == list(ERS_COLUMNS)
    assert list(terms.values()) == pytest.approx(expected)
    assert ers(LGA) == pytest.approx(sum(expected) / 10)


def test_nothing_is_clipped() -> None:
    assert ers_terms(LGA | {"CA+": 80.0})["CA+"] == 160
    assert ers_terms(LGA | {"TMA": -0.5})["TMA"] == 150
    assert ars(LGA | {"GTM": 57.0}, clean=38.0).columns["GTM"] == pytest.approx(150)


def test_ars_is_a_number_and_remembers() -> None:
    score = ars(LGA, clean=38.0)
    assert isinstance(score, float)
    assert abs(score - overall(score.columns)) == 0
    assert f"{score:.1f}" == str(round(float(score), 1))
    assert json.loads(json.dumps({"ARS": score}))["ARS"] == float(score)
    assert score.initial_values == PRINTED_INITIAL | {"ES:R": 38.0, "LTM": 38.0, "GTM": 38.0, "GTT": 100.0}
    for twin in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert (twin, twin.columns, twin.initial, twin.initial_values) == (
            score,
            score.columns,
            score.initial,
            score.initial_values,
        )


def test_ars_from_measured_initial_values() -> None:
    initial = {"CA+": 40.0, "CA-": 2.0, "QA+": 58.0, "QA-": 0.5}
    score = ars(LGA, 38.0, initial)
    assert score.initial == "measured"
    assert score.columns["CA+"] == pytest.approx(100 * 12.7 / 40)
    assert score.columns["CA-"] == pytest.approx(100 * (1 - (46.4 - 2) / 98))
    assert score.columns["QA-"] == pytest.approx(100 * (100 - 39.9) / 99.5)
    assert score.columns["GTT"] == 1.4
    # R@1 and retain@4 before the attack may be measured on the attacked queries alone.
    own = ars(LGA, 38.0, initial | {"ES:R": 42.0, "GTT": 70.0})
    assert own.columns["ES:R"] == pytest.approx(40)
    assert own.columns["GTT"] == pytest.approx(2)
    assert own.columns["LTM"] == score.columns["LTM"]


def test_a_model_that_no_attack_moves_scores_100() -> None:
    initial = {"CA+": 49.0, "CA-": 1.2, "QA+": 50.3, "QA-": 0.4}
    still = initial | {"ES:R": 60.0, "LTM": 60.0, "GTM": 60.0, "GTT": 100.0}
    assert ars(still, 60.0, initial) == pytest.approx(100)
    lost = {"CA+": 0.0, "CA-": 100.0, "QA+": 0.0, "QA-": 100.0, "ES:R": 0.0, "LTM": 0.0, "GTM": 0.0, "GTT": 0.0}
    assert ars(lost, 60.0, initial) == 0
    assert ers(lost | {"TMA": 1.0, "ES:D": 2.0}) == 0


def test_per_sample() -> None:
    # Up: rank 10 to 5 resists half; 8 to 12 backfired and is more than 100; 0 was there already.
    up = ars_per_sample("QA+", torch.tensor([10, 8, 0]), torch.tensor([5, 12, 3]), size=101)
    assert up.scores[:2].tolist() == pytest.approx([50, 150])
    assert up.scores[2].isnan() and up.left_out == 1 and up.mean == pytest.approx(100)
    # Down: the goal is the last rank, 100; 0 to 100 is lost, 20 to 40 keeps 3/4, 5 to 1 backfired.
    down = ars_per_sample("CA-", torch.tensor([0, 20, 100, 5]), torch.tensor([100, 40, 100, 1]), size=101)
    assert down.scores[[0, 1, 3]].tolist() == pytest.approx([0, 75, 100 * 99 / 95])
    assert down.left_out == 1
    kept = ars_per_sample("LTM", torch.tensor([1, 1, 0]), torch.tensor([1, 0, 1]))
    assert (kept.mean, kept.left_out) == (50, 1)
    nobody = ars_per_sample("GTT", torch.zeros(2), torch.zeros(2))
    assert math.isnan(nobody.mean) and nobody.left_out == 2


def test_group_means_of_both_scores() -> None:
    terms, score = group_means(ers_terms(LGA)), ars(LGA, 38.0)
    assert terms["ranking"] == pytest.approx((25.4 + 53.6 + 23.2 + 60.1) / 4)
    assert terms["recall"] == pytest.approx((16.8 + 11.9 + 27.9 + 1.4) / 4)
    groups = group_means(score.columns)
    assert (groups["ranking"] + groups["recall"]) / 2 == pytest.approx(float(score))


def test_tensors_are_scored_element_by_element() -> None:
    first, second = LGA, _values(row_named("hm/t6/sop/est-r-32"))
    both = {name: torch.tensor([first[name], second[name]], dtype=torch.float64) for name in ERS_COLUMNS}
    assert ers(both).tolist() == pytest.approx([ers(first), ers(second)])
    clean = torch.tensor([30.0, 40.0], dtype=torch.float64)
    assert overall(ars_terms(both, clean)).tolist() == pytest.approx([ars(first, 30.0), ars(second, 40.0)])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TMA": 56.7}, "TMA is a cosine, -1 to 1, and cannot be 56.7"),
        ({"ES:D": 78.3}, "ES:D is a distance on the unit sphere, 0 to 2"),
        ({"ES:D": -0.1}, "ES:D .* cannot be -0.1"),
        ({"CA-": 464.0}, "CA- is in percent, 0 to 100, and cannot be 464"),
        ({"QA+": -3.0}, "QA\\+ is in percent"),
        ({"LTM": math.nan}, "LTM is NaN"),
        ({"GTT": None}, "GTT is None: give a number"),
        ({"GTT": "much"}, "GTT is 'much': give a number"),
        ({"ES-D": 3.0}, "no column 'ES-D'; did you mean ES:D"),
        ({name: LGA[name] / 100 for name in ARS_COLUMNS}, "probably fractions: multiply by 100"),
    ],
)
def test_columns_in_wrong_units_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ers(LGA | change)


def test_missing_columns_are_named() -> None:
    with pytest.raises(SettingsError, match="ers needs 10 columns; missing: QA-, GTT"):
        ers({name: value for name, value in LGA.items() if name not in ("QA-", "GTT")})
    with pytest.raises(SettingsError, match="ars needs 8 columns; missing: LTM"):
        ars({name: value for name, value in LGA.items() if name != "LTM"}, 38.0)
    with pytest.raises(SettingsError, match="initial needs 4 columns; missing: QA"):
        ars(LGA, 38.0, {"CA+": 50.0, "CA-": 1.0})
    with pytest.raises(SettingsError, match="missing: GTT"):
        group_means(dict.fromkeys(ARS_COLUMNS[:-1], 1.0))


def test_initial_values_that_leave_no_score() -> None:
    with pytest.raises(SettingsError, match="clean R@1 is 0, already the attack's goal"):
        ars(LGA, 0.0)
    with pytest.raises(SettingsError, match="initial CA- is 100, already"):
        ars(LGA, 38.0, PRINTED_INITIAL | {"CA-": 100.0})
    with pytest.raises(SettingsError, match="clean R@1 is in percent"):
        ars(LGA, 380.0)
    with pytest.raises(SettingsError, match="probably a fraction"):
        ars(LGA, 0.38)


@pytest.mark.parametrize(
    ("attack", "initial", "result", "size", "message"),
    [
        ("TMA", [1.0], [1.0], 5, "no column 'TMA'"),
        ("CA-", [1.0], [1.0], None, "give its length as `size`"),
        ("CA+", [1.0], [1.0, 2.0], None, "do not match"),
        ("CA+", [], [], None, "do not match"),
        ("CA+", [1.0, math.nan], [1.0, 2.0], None, "not finite"),
    ],
)
def test_per_sample_errors(
    attack: str, initial: list[float], result: list[float], size: int | None, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        ars_per_sample(attack, torch.tensor(initial), torch.tensor(result), size)


# ---------------------------------------------------------------- bootstrap


def _bernoulli(share: float, count: int, seed: int = 0) -> Tensor:
    return (Key.of(seed)("hits").uniform(torch.arange(count)) < share).double()


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_the_interval_of_a_mean_is_the_normal_one(level: float) -> None:
    hits = _bernoulli(0.3, 2000)
    found = bootstrap({"R@1": hits}, lambda means: means["R@1"], Key.of(1), 4000, level)
    share = float(hits.mean())
    reach = {0.9: 1.6449, 0.95: 1.96}[level] * math.sqrt(share * (1 - share) / len(hits))
    assert found.low == pytest.approx(share - reach, abs=0.07 * reach)
    assert found.high == pytest.approx(share + reach, abs=0.07 * reach)
    assert (found.level, found.resamples) == (level, 4000)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        found = bootstrap({"x": _bernoulli(0.4, 300, seed)}, lambda means: means["x"], Key.of(seed), 300, 0.9)
        covered += found.low <= 0.4 <= found.high
    assert 165 <= covered <= 195  # 180 ± 3.5 standard deviations


def test_draws_are_keyed_and_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"x": torch.randn(50, dtype=torch.float64)}
    whole = resampled_means(columns, Key.of(0), 40)["x"]
    monkeypatch.setattr("anchorhold.scores._CELLS", 150)  # three resamples at a time
    assert torch.allclose(resampled_means(columns, Key.of(0), 40)["x"], whole, rtol=1e-13)
    assert not torch.equal(resampled_means(columns, Key.of(1), 40)["x"], whole)
    assert len(whole.unique()) == 40


def test_the_same_samples_are_drawn_together_and_others_apart() -> None:
    count = 300
    x = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids, order = torch.arange(count) * 7, torch.randperm(count, generator=torch.Generator().manual_seed(1))

    def width(second: Tensor, second_ids: Tensor) -> float:
        found = bootstrap({"a": x, "b": second}, lambda m: m["a"] + m["b"], Key.of(0), ids={"a": ids, "b": second_ids})
        return found.high - found.low

    assert width(-x, ids) < 1e-12
    assert width(-x[order], ids[order]) < 1e-12  # by who they are, not by where they stand
    alone = bootstrap({"a": x}, lambda m: m["a"], Key.of(0))
    assert width(-x, ids + 1) == pytest.approx(math.sqrt(2) * (alone.high - alone.low), rel=0.15)


def test_values_that_are_missing_are_left_out() -> None:
    x = _bernoulli(0.5, 400)
    x[::2] = torch.nan
    means = resampled_means({"x": x}, Key.of(0))["x"]
    assert means.mean() == pytest.approx(float(x.nanmean()), abs=0.01)
    assert means.std() == pytest.approx(math.sqrt(0.25 / 200), rel=0.1)


def test_scores_from_per_sample_columns() -> None:
    key, queries = Key.of(2), torch.arange(500)
    columns = {name: 100 * key(name).uniform(queries) for name in ARS_COLUMNS}
    columns |= {"TMA": key("TMA").uniform(queries), "ES:D": 2 * key("ES:D").uniform(queries)}
    score = ers({name: float(column.mean()) for name, column in columns.items()})
    found = bootstrap(columns, ers, key)
    # Ten independent uniform terms, two of them doubled: variance (8 + 2·4) · 100²/12 / 10² / 500.
    reach = 1.96 * math.sqrt(16 * 100**2 / 12 / 100 / 500)
    assert (found.low, found.high) == pytest.approx((score - reach, score + reach), abs=0.15 * reach)
    clean = (key("clean").uniform(queries) < 0.6).double() * 100
    means = resampled_means(columns | {"clean": clean}, key)
    resisted = interval(overall(ars_terms({name: means[name] for name in ARS_COLUMNS}, means["clean"])))
    plain = ars({name: float(columns[name].mean()) for name in ARS_COLUMNS}, float(clean.mean()))
    assert resisted.low < plain < resisted.high and resisted.resamples == 1000


def test_resamples_without_a_score_are_not_counted() -> None:
    found = interval(torch.tensor([1.0, torch.nan, 3.0, torch.inf]), 0.5)
    assert (found.low, found.high, found.resamples) == (1.5, 2.5, 2)
    nothing = interval(torch.tensor([torch.nan]))
    assert math.isnan(nothing.low) and nothing.resamples == 0
    one = bootstrap({"x": torch.tensor([3.0])}, lambda m: m["x"], Key.of(0))
    assert (one.low, one.high) == (3, 3)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": torch.zeros(0)}, {}, "one per query, at least one"),
        ({"x": torch.zeros(2, 2)}, {}, "one per query"),
        ({"x": torch.zeros(3)}, {"ids": {"x": torch.arange(2)}}, "one per query"),
        ({"x": torch.zeros(3)}, {"resamples": 0}, "draw at least one"),
        ({"x": torch.zeros(3)}, {"level": 95}, "level is 95"),
    ],
)
def test_bootstrap_errors(columns: dict[str, Tensor], options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        bootstrap(columns, lambda means: means["x"], Key.of(0), **options)  # type: ignore[arg-type]
