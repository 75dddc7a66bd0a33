"""The examples about models: each runs as a user runs it, and what it prints is asserted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = pytest.mark.slow


def printed(name: str) -> dict[str, tuple[float, float]]:
    """R@1 clean and attacked by the words before it."""
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^([^:]+): .*R@1 ([\d.]+), attacked ([\d.]+)$", done.stdout, re.MULTILINE)
    return {name: (float(clean), float(attacked)) for name, clean, attacked in lines}


@pytest.mark.parametrize("kind", ["OML", "PML"])
def test_models_of_oml_and_pml_are_hardened(kind: str, shared: dict[str, tuple[float, float]]) -> None:
    (clean, before), (kept, after) = shared[f"{kind} start"], shared[f"{kind} hardened"]
    assert after > before + 5 and kept > clean - 5


@pytest.fixture(scope="module")
def shared() -> dict[str, tuple[float, float]]:
    return printed("oml_and_pml_models.py")


def test_a_mobilenet_is_hardened_on_a_folder() -> None:
    found = printed("harden_mobilenet.py")
    assert found["hardened"][1] > max(found["start"][1], found["control"][1]) + 5
    assert found["hardened"][0] > found["start"][0] - 5


def test_a_vit_is_hardened_with_adapters_on_a_folder() -> None:
    found = printed("harden_vit_lora.py")
    assert found["hardened"][1] > max(found["start"][1], found["control"][1]) + 10
    assert found["hardened"][0] > found["start"][0] - 5


def test_encoders_are_audited() -> None:
    found = printed("audit_encoders.py")
    assert set(found) == {"open_clip", "transformers"}
    assert all(clean > 70 and attacked < 20 for clean, attacked in found.values())


def test_data_in_any_form_hardens_a_module_with_dropout_tied_weights_and_a_narrow_input() -> None:
    found = printed("any_data.py")
    assert found["hardened"][1] > found["start"][1] + 5 and found["hardened"][0] > found["start"][0] - 5
    assert found["hardened"] == found["as a Dataset"] == found["as a DataLoader"]
