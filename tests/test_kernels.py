"""The Triton kernels, without a GPU: values in the interpreter, and compilation for a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The environment without megatron.training has no Triton either.
pytestmark = pytest.mark.needs_training

SCRIPTS = Path(__file__).parent / "scripts"


def _run(script):
    """In a process of its own: Triton decides at import whether it interprets or compiles."""
    run = subprocess.run(
        [sys.executable, str(SCRIPTS / script)], capture_output=True, text=True, cwd=SCRIPTS.parent.parent
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_values_in_the_interpreter():
    """Shards cut anywhere, branches without vectors, blocks that are not full. bfloat16 is left out: the
    interpreter truncates where the GPU rounds to nearest, which the next test looks for."""
    for found in _run("interpret_kernels.py"):
        assert found["gradient"] and found["live"] and found["sums"] < 1e-6


def test_compilation_for_compute_capability_9():
    found = _run("compile_kernels.py")
    assert all(kernel["cubin"] > 0 and kernel["atomics"] == 0 for kernel in found.values())
    assert found["fold"]["to_bf16"] > 0
    assert all(kernel["shared"] <= 48 * 1024 for kernel in found.values())
