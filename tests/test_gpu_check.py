"""benchmarks/gpu_check.py without a GPU. What it computes is tried on the CPU by tests/te."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().startswith("gpu_check.py measures on a GPU, and torch finds none")
