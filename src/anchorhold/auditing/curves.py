"""The description of a curve over ε: the attacks behind each line, and the queries."""

from collections.abc import Sequence
from typing import Any

from .ensemble import Member, Task

__all__ = [
    "described",
]


def described(chosen: Sequence[Task], members: Sequence[Member], queries: int) -> dict[str, Any]:
    """A curve's protocol, its number of queries, the attacks behind each line, and a sentence about them."""
    made: dict[str, list[str]] = {}
    for task in chosen:
        names = [goal.name for goal in task.first]
        names += [member.name for member in members if member.wants(task.goal)]
        made |= dict.fromkeys(["R@1", *task.columns] if task.name == "recall" else task.columns, names)
    protocol = "strong" if members else "corrected"
    recall = f"For R@1 the worst of {', '.join(made['R@1'])} counts for each query. " if "R@1" in made else ""
    table = (
        "At the audit's ε it equals the column `strong` of the table."
        if members
        else "Each ε also starts from the results of smaller ones, so numbers can be lower than in the table, "
        "where every column is a single attack."
    )
    about = f"Protocol {protocol}, the same {queries:,} attacked queries at every ε, including ε = 0. {recall}{table}"
    return {"about": about, "protocol": protocol, "queries": queries, "attacks": made}
