"""Runs a script in a process of its own, in which `peak()` is the most memory that this process has held, in bytes."""

import subprocess
import sys
from typing import Any

# On Linux `ru_maxrss` survives exec: a child begins with the peak of the process that started it.
PEAK = """
import resource, sys

def peak():
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
"""


def run_measured(script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PEAK + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
