"""The scripts for a GPU without one. What gpu_check computes is tried by tests/te as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["gpu_check", "gpu_bench"])
def test_without_a_gpu_it_says_so(name):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().startswith(f"{name}.py measures on a GPU, and torch finds none")


def test_what_the_gpu_bench_measures(ranks):
    """On the CPU: every function of it, on a tiny model."""
    [found] = ranks.run("bench_gpu_script")
    assert found["kernels"]["right"] and found["speed"] > 0
    first, second, third = found["rows"]
    for row in (first, second):
        assert set(row["passes"]) == {"split", "write"}
        assert row["passes"]["split"]["seconds"] > 0
    # 16 rows for each of four heads and two times two groups, and two times 96, of 64 columns.
    elements = (16 * (4 + 4) + 2 * 96) * 64
    assert first["passes"]["split"]["bytes"] == 12 * elements
    assert first["passes"]["write"]["bytes"] == 6 * elements
    assert third["passes"] == {} and third["ratio"] > 0
    assert "times its floor" in found["lines"][0] and "times its floor" not in found["lines"][2]
    # Half of 140 or 80 GB for each model, 18 bytes a parameter, half of that less the tables for activations:
    # 1B has 38.5 million parameters a layer and 180 in tables, the other 218 and 262.
    assert found["layers"] == {"1B": [22, 22], "7B stack": [8, 4]}
