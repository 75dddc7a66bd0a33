"""A long audit on a CPU is said before its first attack, and changes no number."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorhold as ah
from anchorhold.attacks.menu import goal_named
from anchorhold.auditing import expected, standard
from anchorhold.auditing.ensemble import Task, steps_at_most
from anchorhold.auditing.flags import image_steps_at_most
from anchorhold.auditing.members import BLACK, WARM
from anchorhold.errors import Interrupted
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget, Threat
from tests.training.test_suited import Lines

GIVEN: dict[str, Any] = {"device": "cpu", "limit": 20, "steps": 3, "attacks": ["CA+", "ES"], "resamples": 20}


@pytest.fixture(scope="module")
def model() -> ah.Embedder:
    return ah.Embedder("small", 8, channels=1, size=8)


def said(report: Lines) -> list[str]:
    return [line for line in report.said if "on this CPU" in line or "to make it shorter" in line]


def numbers(audit: Any) -> str:
    found = audit.to_dict()
    return json.dumps([found["clean"], found["protocols"]], sort_keys=True)


@pytest.mark.slow
def test_a_long_audit_is_said_beforehand_and_a_tiny_one_is_silent(
    model: ah.Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, quiet, loud = ah.dataset("digits"), Lines(), Lines()
    plain = ah.audit(model, data, report=quiet, **GIVEN)
    assert not said(quiet)
    monkeypatch.setattr(expected, "_PIXELS", 0)
    monkeypatch.setattr(expected, "_seconds", lambda subject, images: 60.0)
    found = ah.audit(model, data, report=loud, out=tmp_path / "a", **GIVEN)
    count = int(next(line for line in loud.said if "attack runs on" in line).split()[0])
    checks = image_steps_at_most(Ball(8 / 255), Threat(steps=3).budget, 20)  # they are part of the time
    work = count * 20 * 3 + checks
    assert said(loud) == [
        f"{work:,} image-steps take up to about {work // 60} h {work % 60} min on this CPU",
        "to make it shorter: fewer steps (now 3), fewer attacks (now 2), smaller images, or a GPU",
    ]
    assert numbers(found) == numbers(plain)
    curve = Lines()
    ah.audit(model, data, report=curve, **{**GIVEN, "limit": 21, "epsilons": [0.02]})
    (way,) = [line for line in said(curve) if "to make it shorter" in line]
    assert "(limit, now 21)" in way and "epsilons=()" in way and "--curve" not in way
    again = Lines()  # everything is there: nothing is left to say
    ah.audit(model, data, report=again, out=tmp_path / "a", **GIVEN)
    assert not said(again)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ah.audit(model, data, **GIVEN)
    assert len([each for each in heard if "on this CPU" in str(each.message)]) == 1


@pytest.mark.medium
def test_the_step_that_is_timed_leaves_no_trace(model: ah.Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    data, timed = ah.dataset("digits"), []
    plain = numbers(ah.audit(model, data, **GIVEN))
    measured = expected._seconds
    monkeypatch.setattr(expected, "_PIXELS", 0)
    monkeypatch.setattr(expected, "_seconds", lambda *given: timed.append(measured(*given)) or timed[-1])
    torch.manual_seed(1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert numbers(ah.audit(model, data, **GIVEN)) == plain
    assert torch.equal(torch.rand(3), drawn)
    assert len(timed) == 1 and 0 < timed[0] < 60 and all(p.grad is None for p in model.parameters())


@pytest.mark.medium
def test_a_step_that_cannot_be_timed_stops_nothing(model: ah.Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> float:
        raise RuntimeError("cannot measure")

    monkeypatch.setattr(expected, "_PIXELS", 0)
    monkeypatch.setattr(expected, "_seconds", fails)
    report = Lines()
    ah.audit(model, ah.dataset("digits"), report=report, **GIVEN)
    assert not said(report)


@pytest.mark.medium
@pytest.mark.parametrize(
    "more",
    [{}, {"epsilons": [0.1, 0.2]}, pytest.param({"strength": "strong", "limit": 2}, marks=pytest.mark.slow)],
)
def test_an_audit_takes_no_more_than_was_counted(
    more: dict[str, Any], model: ah.Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    count = expected._image_steps
    monkeypatch.setattr(expected, "_image_steps", lambda *given: counted.append(count(*given)) or 0)
    given = {**GIVEN, "attacks": ["LTM"], "limit": 6, "protocols": ["corrected"], "examine": None, **more}
    found = ah.audit(model, ah.dataset("digits"), **given)
    if not more:
        assert counted == [6 * 3]
    assert 0 < found.image_steps <= counted[0]


@pytest.mark.medium
def test_queries_of_a_function_are_counted_and_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    base = torch.rand(4, 3, 4, 4)
    images, labels = torch.cat([base, base + 0.001]).clamp(0, 1), torch.arange(8) % 4
    inner, seen = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 6)), [0]

    def service(x: torch.Tensor) -> torch.Tensor:
        seen[0] += len(x)
        return inner(x)

    for name in ("ensemble", "expected"):
        monkeypatch.setattr(f"anchorhold.auditing.{name}.SQUARE_QUERIES", 40, raising=False)
    members = [dataclasses.replace(each, budget=lambda eps: Budget(40)) for each in (*BLACK, WARM)]
    monkeypatch.setattr("anchorhold.auditing.run.BLACK", tuple(members[:2]))
    monkeypatch.setattr("anchorhold.auditing.ladder.BLACK", tuple(members[:2]))
    heard, tiny = Lines(), {"eps": 1e-6, "epsilons": [1e-6, 2e-6, 3e-6, 4e-6], "attacks": ["margin"]}
    found = ah.audit(
        ah.wrap(service, gradients=False),
        (images, labels),
        protocols="corrected",
        **tiny,
        steps=40,
        limit=2,
        resamples=9,
        examine=None,
        device="cpu",
        report=heard,
    )
    line = next(each for each in heard.said if "strong attack: up to" in each)
    most = 2 * 43 + int(line.split("up to ")[1].split()[0].replace(",", ""))
    assert "image-steps" not in line
    gallery = 2 * len(images) + 8  # embedded once; the check for several outputs and a timed call may see some again
    assert found.image_steps <= most and seen[0] - gallery <= found.image_steps <= seen[0]
    assert found.image_steps > 0.95 * most  # nothing fell, so nearly all were needed


@pytest.mark.medium
def test_a_slow_service_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(8, 3, 4, 4), torch.arange(8) % 4
    heard, inner = Lines(), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 6))
    monkeypatch.setattr(expected, "_seconds", lambda subject, given: 1.0)
    few: dict[str, Any] = {"limit": 2, "steps": 400, "attacks": ["ES"], "examine": None, "device": "cpu"}
    ah.audit(ah.wrap(inner, gradients=False), (images, labels), report=heard, resamples=9, **few)
    (said_first,) = [each for each in said(heard) if "queries take up to about" in each]
    assert said_first.startswith(f"{2 * 2 * 400:,} queries")


def photos(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.rand(count, 3, side, side), torch.arange(count) % 4


def flat(side: int) -> Any:
    torch.manual_seed(1)
    return ah.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * side * side, 6)))


@pytest.mark.parametrize(("side", "sizes"), [(32, [16, 4]), (16, [20])])
def test_photos_are_attacked_in_small_shards_on_a_cpu(
    side: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    real = standard._batch

    def heard(run: Any, subject: Any, ids: torch.Tensor, *rest: Any) -> Any:
        found.append(len(ids))
        return real(run, subject, ids, *rest)

    monkeypatch.setattr(standard, "_batch", heard)
    few: dict[str, Any] = {"limit": 0, "steps": 1, "attacks": ["ES"], "resamples": 9, "examine": None, "device": "cpu"}
    few["protocols"] = "corrected"
    small = ah.audit(flat(side), photos(20, side), **few)
    assert found == sizes
    monkeypatch.setattr("anchorhold.auditing.subject.LARGE", 10**9)
    assert numbers(small) == numbers(ah.audit(flat(side), photos(20, side), **few))


def test_who_stops_in_the_checks_is_told_how_to_resume(tmp_path: Path) -> None:
    def stopped(evidence: Any) -> Any:
        raise KeyboardInterrupt

    few: dict[str, Any] = {"limit": 4, "steps": 1, "attacks": ["ES"], "resamples": 9, "device": "cpu"}
    with pytest.raises(Interrupted, match="to resume"):
        ah.audit(flat(8), photos(8, 8), out=tmp_path, examine=stopped, **few)


def test_queries_that_are_wrong_before_any_attack_cost_the_members_nothing() -> None:
    heard, given = Lines(), photos(40, 8)
    found = ah.audit(
        flat(8),
        given,
        limit=0,
        steps=2,
        attacks=["margin"],
        epsilons=[1e-6],
        eps=1e-6,
        resamples=9,
        examine=None,
        device="cpu",
        report=heard,
        protocols="corrected",
    )
    goal = goal_named("margin", "corrected")
    right = round(found.protocols["corrected"].columns["margin"].initial * 40 / 100)
    assert 0 < right < 40
    line = next(each for each in heard.said if "strong attack: up to" in each)
    said_steps, queries = (int(word.replace(",", "")) for word in (line.split()[4], line.split()[7]))
    assert queries == 1000 * right
    assert (
        said_steps
        == right * steps_at_most(Task("recall", goal, (goal,), {"margin": "margin"}), 1, 2) + (40 - right) * 2
    )
