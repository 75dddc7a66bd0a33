"""The conformance command agrees with the oracle, and notices every single number that is shifted."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import conformance, reference

SHARED = Path(__file__).resolve().parents[2] / "shared" / "spec" / "oracle.json"
COVERED = list(conformance.SECTIONS)
SMALL = ["metrics", "losses", "miners", "attack_losses", "selectors"]
INPUTS = {"dist", "gallery_labels", "query_index", "query_label", "a", "p", "n", "embeddings", "labels"}
INPUTS |= {"gallery", "q", "targets", "other", "target", "top1", "query_idx"}
INPUTS |= {"W1", "b1", "W2", "b2", "images", "attacked", "eps", "alpha", "iters"}
SAMPLED = {"delta_in_255": 12, "selected": 8}  # long lists: so many numbers of each run are shifted


def replay(oracle: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    path = folder / "oracle.json"
    path.write_text(oracle if isinstance(oracle, str) else json.dumps(oracle))
    status = conformance.main([str(path)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def outputs(section: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The path of every output number of a section."""

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, dict | list):
            for key, below in value.items() if isinstance(value, dict) else enumerate(value):
                if key not in INPUTS:
                    yield from walk(below, (*path, key))
        elif isinstance(value, int | float):
            yield path

    yield from walk(section, ())


def shifted(oracle: dict[str, Any], path: tuple[Any, ...], by: float = 1e-3) -> dict[str, Any]:
    result = copy.deepcopy(oracle)
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] += by
    return result


def failing(oracle: dict[str, Any]) -> set[str]:
    return {section for section, (_, off, tolerance) in conformance.replay(oracle) if not off <= tolerance}


def shared_oracle() -> dict[str, Any]:
    if not SHARED.exists():
        pytest.skip(f"no oracle at {SHARED}")
    oracle: dict[str, Any] = json.loads(SHARED.read_text())
    return oracle


def test_the_shared_oracle_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    shared_oracle()
    assert conformance.main([str(SHARED)]) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    for section in conformance.SECTIONS:
        assert section in printed


@pytest.mark.parametrize("seed", range(3))
def test_a_small_oracle_agrees(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = replay(reference.small_oracle(seed), tmp_path, capsys)
    assert status == 0, printed
    assert "pgd_attacks    missing from the file" in printed


@pytest.mark.slow
@pytest.mark.parametrize("section", SMALL)
def test_every_shifted_output_is_noticed(section: str) -> None:
    oracle = reference.small_oracle()
    paths = list(outputs(oracle[section]))
    assert paths
    for path in paths:
        assert failing(shifted(oracle, (section, *path))) == {section}, path


@pytest.mark.parametrize("section", SMALL)
def test_every_shifted_output_of_the_shared_oracle_is_noticed(section: str) -> None:
    oracle = {section: shared_oracle()[section]}
    for path in outputs(oracle[section]):
        assert failing(shifted(oracle, (section, *path))) == {section}, path


def test_shifted_outputs_of_training_attacks_are_noticed() -> None:
    whole = shared_oracle()
    oracle = {"inner_pgd": whole["inner_pgd"], "pgd_attacks": whole["pgd_attacks"]}
    for name in whole["inner_pgd"]:
        paths = [path for path in outputs(whole["inner_pgd"]) if path[0] == name]
        for path in paths[:: max(len(paths) // 3, 1)]:
            changed = shifted(oracle, ("inner_pgd", *path))
            off = {case for case, away, limit in conformance.check_inner_pgd(changed) if not away <= limit}
            assert off, path


@pytest.mark.slow
def test_shifted_outputs_of_whole_attacks_are_noticed() -> None:
    shared = shared_oracle()["pgd_attacks"]
    paths = list(outputs(shared))
    runs = shared["runs"]
    assert len(runs) == 9 and {path[1] for path in paths} == set(runs)
    for name, run in runs.items():
        # One run at a time: the others cost time and cannot fail.
        oracle = {"pgd_attacks": {**shared, "runs": {name: run}}}
        assert failing(oracle) == set()
        mine = [path for path in paths if path[1] == name]
        for entry in run:
            there = [path for path in mine if path[2] == entry]
            for path in there[:: -(-len(there) // SAMPLED.get(entry, len(there))) or 1] if there else []:
                assert failing(shifted(oracle, ("pgd_attacks", *path))) == {"pgd_attacks"}, path


@pytest.mark.parametrize(
    "path",
    [
        ("metrics", "gallery_labels", 0),
        ("metrics", "query_index"),
        ("metrics", "query_label"),
        ("losses", "a", 1, 2),
        ("losses", "p", 1, 2),
        ("losses", "n", 0, 0),
        ("miners", "labels", 3),
        ("miners", "embeddings", 4, 1),
        ("attack_losses", "gallery", 1, 1),
        ("attack_losses", "q", 0, 2),
        ("attack_losses", "targets", 1, 0, 1),
        ("attack_losses", "GTT", "top1", 0, 0),
        ("selectors", "labels", 3),
        ("selectors", "query_idx", 1),
    ],
)
def test_shifted_inputs_are_noticed(path: tuple[Any, ...]) -> None:
    assert failing(shifted(reference.small_oracle(), path)) == {path[0]}


def test_a_failure_is_named_and_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oracle = shifted(reference.small_oracle(), ("losses", "triplet_margin0"))
    status, printed = replay(oracle, tmp_path, capsys)
    assert status == 1
    assert printed.endswith("FAILED: losses\n")


def test_not_a_number_fails() -> None:
    assert failing(shifted(reference.small_oracle(), ("metrics", "AP"), float("nan"))) == {"metrics"}


def test_a_missing_or_an_extra_set_is_noticed() -> None:
    for change in ([], [2, 3, 99]):
        oracle = reference.small_oracle()
        oracle["miners"]["reachable_sets_400_draws"]["spc2-random"]["negatives_reachable"][0] = change
        assert failing(oracle) == {"miners"}


def test_a_missing_section_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oracle = reference.small_oracle()
    del oracle["miners"]
    status, printed = replay(oracle, tmp_path, capsys)
    assert status == 0
    assert "miners         missing from the file" in printed


def without(section: str, key: str) -> dict[str, Any]:
    oracle = reference.small_oracle()
    del oracle[section][key]
    return oracle


@pytest.mark.parametrize(
    ("oracle", "message"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "is no oracle"),
        ({"about": "nothing"}, "is no oracle"),
        (without("metrics", "AP"), "section metrics is malformed: 'AP' is missing"),
        (without("losses", "p"), "section losses is malformed: 'p' is missing"),
        ({"metrics": {}, "losses": {"a": "x"}}, "section metrics is malformed"),
        ({"losses": {"a": [[1.0]], "p": [[1.0], [2.0, 3.0]], "n": [[1.0]]}}, "section losses is malformed"),
    ],
)
def test_a_malformed_file_is_one_line_and_exits_with_two(
    oracle: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "oracle.json"
    path.write_text(oracle if isinstance(oracle, str) else json.dumps(oracle))
    assert conformance.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_file_and_no_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main([str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert conformance.main([]) == 2
    assert "usage" in capsys.readouterr().err
