"""Tests that compute in a fork of their process do so whatever ran before them."""

import os
import subprocess
import sys

import pytest

EXPORT_THEN_FORK = """
import os
import tests.conftest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # what an export works with

def gradient():
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    return x.grad.sum().item()

with FakeTensorMode():
    torch.zeros(3)
gradient()
child = os.fork()
if child == 0:
    os._exit(int(gradient()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.medium
def test_a_fork_computes_gradients_after_an_export() -> None:
    alike = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", EXPORT_THEN_FORK], env=alike, capture_output=True, text=True, check=False
    )
    assert done.stdout == "3\n", done.stderr
