"""Who is lost in the ensemble, and what its shares are shares of."""

from typing import Any

import pytest
import torch

from anchorhold.attacks.menu import goal_named
from anchorhold.auditing.doubts import doubts_of
from anchorhold.auditing.ensemble import Task
from anchorhold.auditing.members import MEMBERS


def task_of(name: str, measure: str) -> Task:
    goal: Any = goal_named("margin" if name == "recall" else name, "corrected")
    return Task(name, goal, (), {measure: measure})


@pytest.mark.parametrize("gallery", [4, 5, 100, 5924])
@pytest.mark.parametrize("name", ["CA-", "QA-"])
def test_the_last_rank_alone_is_lost_where_a_rank_is_to_rise(name: str, gallery: int) -> None:
    ranks = torch.tensor([0, gallery - 3, gallery - 2, gallery - 1], dtype=torch.float64) / gallery
    assert task_of(name, name).lost(ranks, gallery).tolist() == [False, False, False, True]


def test_what_has_an_end_is_lost_there_and_what_has_none_never() -> None:
    values = torch.tensor([0.0, 0.01, 1.0], dtype=torch.float64)
    for name, measure in (("CA+", "CA+"), ("QA+", "QA+"), ("GTT", "GTT"), ("recall", "margin")):
        assert task_of(name, measure).lost(values, 50).tolist() == [True, False, False]
    for name, measure in (("TMA", "TMA"), ("ES", "ES:D")):
        assert not task_of(name, measure).lost(values, 50).any()


def test_square_and_transfer_are_counted_among_right_answers_only() -> None:
    rows = {
        "before/margin": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        "beaten/black": torch.tensor([True, False, False, False, True, True]),
        "beaten/transfer": torch.tensor([True, True, True, False, False, False]),
    }
    recall = task_of("recall", "margin")
    assert doubts_of([recall], {"recall": rows}, MEMBERS) == {"black": 25.0, "transfer": 75.0}
    # A recall goal is asked before others, wherever it stands.
    ranks = {name.replace("margin", "CA-"): row for name, row in rows.items()}
    both = [task_of("CA-", "CA-"), recall]
    assert doubts_of(both, {"recall": rows, "CA-": ranks}, MEMBERS) == {"black": 25.0, "transfer": 75.0}
    nobody = {**rows, "before/margin": torch.zeros(6)}
    assert doubts_of([recall], {"recall": nobody}, MEMBERS) == {}


def test_without_a_recall_goal_all_samples_are_counted() -> None:
    rows = {
        "before/CA-": torch.tensor([0.01, 0.02, 0.6, 0.9]),
        "beaten/black": torch.tensor([True, False, False, False]),
        "beaten/transfer": torch.tensor([True, True, False, False]),
    }
    assert doubts_of([task_of("CA-", "CA-")], {"CA-": rows}, MEMBERS) == {"black": 25.0, "transfer": 50.0}
    assert doubts_of([], {}, MEMBERS) == {}
