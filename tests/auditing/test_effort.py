"""Steps and step sizes that a method does not have are refused, and those that it has are taken."""

from typing import Any

import pytest

import anchorhold as ah
from anchorhold.auditing.one_image import attack as attack_one
from anchorhold.auditing.plan import effort
from anchorhold.errors import SettingsError
from anchorhold.perturb.cw import CW_STEPS
from anchorhold.report.audit_page import command_of

QUICK: dict[str, Any] = {"limit": 6, "eps": 0.1, "attacks": ["TMA"], "resamples": 5, "examine": None, "device": "cpu"}


@pytest.fixture(scope="module")
def model() -> ah.Embedder:
    return ah.Embedder("small", 8, channels=1, size=8)


def test_cw_takes_the_steps_it_is_given(model: ah.Embedder) -> None:
    data, work = ah.dataset("digits"), {}
    for steps in (None, CW_STEPS, 3, 0):
        found = ah.audit(model, data, method="cw", protocols="corrected", steps=steps, **QUICK)
        work[steps] = found.image_steps
        assert found.settings["steps"] == (CW_STEPS if steps is None else steps)
    assert work[None] == work[CW_STEPS] == 6 * (CW_STEPS + 1)  # the last iterate is measured too
    assert work[3] == 6 * 4 and work[0] <= 6


def test_fgsm_is_one_step_whatever_the_budget(model: ah.Embedder) -> None:
    found = ah.audit(model, ah.dataset("digits"), method="fgsm", protocols="corrected", **QUICK)
    again = ah.audit(model, ah.dataset("digits"), method="fgsm", protocols="corrected", steps=1, **QUICK)
    assert found.image_steps == again.image_steps == 6
    assert found.protocols["corrected"].columns == again.protocols["corrected"].columns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fgsm", "steps": 2}, "FGSM is one step of length ε: leave out steps="),
        ({"method": "fgsm", "steps": 0}, "FGSM is one step of length ε: leave out steps="),
        ({"method": "fgsm", "alpha": 0.1}, "FGSM has no step size: leave out alpha"),
        ({"method": "cw", "alpha": 0.1}, "C&W has no step size: leave out alpha"),
        ({"method": "cw", "steps": -1}, "steps must not be negative"),
    ],
)
def test_what_a_method_does_not_have_is_refused(model: ah.Embedder, options: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ah.audit(model, ah.dataset("digits"), **QUICK, **options)
    with pytest.raises(SettingsError, match=message):
        attack_one(model, "3", ah.dataset("digits"), device="cpu", **options)


def test_a_budget_gives_a_method_its_radius_only() -> None:
    for method in ("cw", "fgsm"):
        assert effort(method, "adml", None, None, None).eps == 0.01
    assert effort("pgd", "adml", None, None, None).steps == 5
    given = ah.Threat(eps=0.5, norm="l2", steps=7)
    assert effort("cw", given, None, None, None).ball == given.ball and effort("cw", given, None, None, None).steps == 7
    with pytest.raises(SettingsError, match="FGSM is one step"):
        effort("fgsm", given, None, None, None)


@pytest.mark.parametrize(("method", "words"), [("cw", ["--steps", "7"]), ("fgsm", []), ("pgd", ["--alpha", "--steps"])])
def test_the_command_on_the_page_is_one_that_is_taken(model: ah.Embedder, method: Any, words: list[str]) -> None:
    steps = {"steps": 7} if method != "fgsm" else {}
    found = ah.audit(model, ah.dataset("digits"), method=method, protocols="corrected", **QUICK, **steps)
    command = command_of(found.to_dict())
    assert all(word in command for word in words)
    assert ("--alpha" in command) == (method == "pgd") and ("--steps" in command) == (method != "fgsm")
    assert ("7 iterations" in str(found)) == (method == "cw")
