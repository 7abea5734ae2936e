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
    """Shards cut anywhere, branches without vectors, blocks that are not full, vectors that several weights
    share. bfloat16 is left out: the interpreter truncates where the GPU rounds to nearest, which the next
    test looks for."""
    found = _run("interpret_kernels.py")
    # Eight blocks of q/k/v and two of the other weight: those with one γ_out after each other, and few at
    # once where there is little room.
    assert found.pop("in turn") == [10, 8]
    assert found.pop("launches") == [3, 3, 3, 1]
    overlapping, mixed = found.pop("refused")
    assert "parts of one scale vector that overlap" in overlapping and "several dtypes" in mixed
    _assert_judged(found.pop("trial"))
    assert len(found) == 7
    for case, equal in found.items():
        assert equal["gradient"] and equal["live"] and equal["sums"] < 1e-6, case


def _assert_judged(found):
    """The trial of a run's first step passes the kernels as they are, and stops whatever else there is."""
    assert found.pop("right") == "no difference"
    assert "RuntimeError: Failed to find C compiler.)" in found.pop("not compiled")
    differs = {
        "gradients": "about the gradients of weights, on cpu",
        "sums": "about the gradients of scale vectors, on cpu",
        "folds": "about the folded weights, on cpu",
    }
    assert found.keys() == differs.keys()
    for name, said in found.items():
        assert differs[name] in said and "use --scalevec-execution autograd" in said, said


def test_compilation_for_compute_capability_9():
    found = _run("compile_kernels.py")
    assert all(kernel["cubin"] > 0 and kernel["atomics"] == 0 for kernel in found.values())
    assert found["fold"]["to_bf16"] > 0
    assert all(kernel["shared"] <= 48 * 1024 for kernel in found.values())
    # 16 bytes at a time where addresses allow it.
    for name in ("split", "fold"):
        assert found[name]["vector_loads"] > 0 and found[name]["vector_stores"] > 0
        assert found[f"{name} unaligned"]["vector_loads"] < found[name]["vector_loads"]
