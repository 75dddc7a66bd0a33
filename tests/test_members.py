"""What is computed from the verdicts of the members of the strong ensemble, on examples made by hand."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("members")


def row(eps: float = 0.1, model: str = "m", **verdicts: tuple[str, str]) -> dict[str, Any]:
    """A setting: what each member turns alone, and in its turn at a cost of 10 image-steps."""
    found = {
        name: {
            "alone": {"turned": alone, "image_steps": 20, "queries": 0},
            "in_turn": {"turned": first, "image_steps": 10, "queries": 0},
        }
        for name, (alone, first) in verdicts.items()
    }
    return {"model": model, "mask": "", "norm": "linf", "eps": eps, "members": found}


def test_local_optimality_of_one_threat_is_a_share_of_what_all_turn(members: ModuleType) -> None:
    found = members.local_optimality([(0.1, {"a": "11100", "b": "00110", "c": "00000"})])
    assert found == pytest.approx({"a": 3 / 4, "b": 2 / 4, "c": 0.0})


def test_a_member_that_turns_all_that_any_turns_has_a_local_optimality_of_1(members: ModuleType) -> None:
    assert members.local_optimality([(0.1, {"a": "101", "b": "100"}), (0.3, {"a": "111", "b": "001"})])["a"] == 1


def test_what_is_turned_at_a_small_eps_is_turned_at_larger_ones(members: ModuleType) -> None:
    """By hand: a turns 1, then still 1 of 2; b none, then 2. All together 1, then 2. Areas with ε in tenths."""
    found = members.local_optimality([(0.3, {"a": "00", "b": "11"}), (0.1, {"a": "10", "b": "00"})])
    best = 1 * 1 / 2 + 2 * (1 + 2) / 2
    assert found == pytest.approx({"a": (1 / 2 + 2 * 1) / best, "b": (2 * 2 / 2) / best})


def test_local_optimality_is_that_of_attackbench(members: ModuleType) -> None:
    """1 − (A − A_best) / (ρ(0) ε₀ − A_best), with areas A under robust accuracy, wrong queries counted too."""
    drawn, levels, right, count = np.random.default_rng(0), (0.1, 0.2, 0.5), 40, 50
    smallest = {name: drawn.uniform(0, 0.7, right) for name in "abc"}  # the ε from which a member turns a query
    found = members.local_optimality(
        [(eps, {name: "".join("01"[int(s <= eps)] for s in each) for name, each in smallest.items()}) for eps in levels]
    )
    best = np.minimum.reduce(list(smallest.values()))

    def area(each: Any) -> float:
        left = [right / count, *(float((each > eps).sum()) / count for eps in levels)]
        return float(np.trapezoid(left, [0.0, *levels]))

    for name, each in smallest.items():
        assert found[name] == pytest.approx(
            1 - (area(each) - area(best)) / (right / count * levels[-1] - area(best)), rel=1e-9
        )


def test_models_and_norms_are_compared_apart(members: ModuleType) -> None:
    rows = [row(0.1, a=("11", "11"), b=("10", "00")), row(0.1, "n", a=("01", "01"), b=("01", "00"))]
    assert members.optimality(rows) == {"m, linf": {"a": 1.0, "b": 0.5}, "n, linf": {"a": 1.0, "b": 1.0}}
    table = members.table_of_optimality(rows).splitlines()
    assert table[0] == "| model, norm | `a` | `b` |"
    assert table[2:4] == ["| m, linf | 100.0 | 50.0 |", "| n, linf | 100.0 | 100.0 |"]
    assert table[4:] == ["| **global, linf** | 100.0 | 75.0 |"]


def test_where_no_query_is_turned_there_is_nothing_to_compare(members: ModuleType) -> None:
    with pytest.raises(AssertionError, match="no member turned"):
        members.local_optimality([(0.1, {"a": "00"})])


def test_a_query_is_needed_if_no_other_member_turns_it_alone(members: ModuleType) -> None:
    """b finds two queries first. c turns one of them alone too, so that one would be found without b."""
    found = members.tally([row(a=("1000", "1000"), b=("0000", "0110"), c=("0010", "0000"))] * 2)
    assert found["b"] == {"alone": 0, "first": 4, "needed": 2, "image_steps": 20, "queries": 0, "right": 8}
    assert found["a"]["needed"] == 2 and found["c"]["needed"] == 0 and found["c"]["alone"] == 2
    line = members.table_of_costs([row(a=("1000", "1000"), b=("0000", "0110"))]).splitlines()[3]
    assert line == "| `b` | 0 | 2 | 2 | 10 | 0 | 5 | 5 |"


def test_refine_is_compared_with_more_starts_on_the_same_queries(members: ModuleType) -> None:
    """Square turns the third query too, so neither is needed for it; the last one is found by more starts alone."""
    one = row(refine=("0000", "0110"), square=("0010", "0000"))
    one |= {"more": {"turned": "0011", "image_steps": 30, "queries": 0, "left": 3}}
    assert members.instead([one]) == {
        "left": 3,
        "refine": 2,
        "refine_needed": 1,
        "refine_steps": 10,
        "more": 2,
        "more_needed": 1,
        "more_steps": 30,
    }
    assert members.table_of_refine({"all": [one, one]}).splitlines()[2] == "| all | 6 | 4 | 2 | 20 | 4 | 2 | 60 |"


def test_verdicts_and_tables_are_written_where_they_belong(members: ModuleType) -> None:
    assert members.verdict(members.turned("0110"), 4) == "0110"
    plain = row(refine=("1", "1")) | {"more": {"turned": "0", "image_steps": 0, "queries": 0, "left": 1}}
    rows = [plain, plain | {"mask": "steep"}]
    page = "a\n<!-- members found -->\nold\n<!-- end -->\nb"
    made = members.written(page, rows)
    assert "| `refine` | 1 | 1 | 1 | 10 | 0 | 10 | 10 |\n\n<!-- end -->\nb" in made and "old" not in made
    assert members.written(made, rows) == made


def test_costs_are_compared_over_all_turns_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both codes in turns, the second turn the other way round; 1 + 1 s before and 1 + 3 s after are twice as much."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cost, asked = importlib.import_module("strong_cost"), []

    def apart(code: Path, model: str, kind: str, limit: int) -> dict[str, Any]:
        asked.append(str(code))
        seconds = 3 if asked == ["old", "new", "new"] else 1
        return {"seconds": seconds, "cpu": 2.0, "image_steps": 10 if str(code) == "old" else 15}

    monkeypatch.setattr(cost, "apart", apart)
    found = cost.compared({"before": Path("old"), "after": Path("new")}, "runs/m", "all", 6, 2)
    assert asked == ["old", "new", "new", "old"] and len(found["before"]) == len(found["after"]) == 2
    assert found["ratio"] == {"seconds": 2.0, "cpu": 1.0, "image_steps": 1.5}
