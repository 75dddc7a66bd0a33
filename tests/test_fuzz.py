"""A few examples of every target of the fuzz; `python tests/fuzz.py --examples 10000` runs many."""

from collections.abc import Iterator

import pytest

from tests import fuzz

pytestmark = pytest.mark.slow

EXAMPLES = 12


@pytest.fixture(scope="module", autouse=True)
def stock() -> Iterator[None]:
    with fuzz.prepared():
        yield


@pytest.mark.parametrize("name", list(fuzz.TARGETS))
def test_damaged_files_are_one_line(name: str) -> None:
    # A damaged shard is made again, which takes a second.
    fuzz.run_target(name, 4 if name == "shard" else EXAMPLES, _whole, again=True)


def _whole(outcome: str, words: list[str]) -> None:
    assert outcome in ("ok", "refused"), (outcome, words)
