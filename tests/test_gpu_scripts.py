"""The scripts for a GPU without one. What gpu_check computes is tried by tests/te as well."""

import json
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


def test_what_fails_or_does_not_fit_is_in_the_results(monkeypatch, tmp_path, capsys):
    """The start and the end that both scripts have in common, with a GPU that is none."""
    import time

    import torch

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import on_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(on_gpu, "start_parallel", lambda backend: None)
    monkeypatch.setattr(sys, "argv", ["script.py", "--minutes", "3", "--json", str(tmp_path / "found.json")])
    run = on_gpu.GpuRun("A script.")
    now = time.monotonic()

    def measure(name, *, device):
        if name == "long":
            monkeypatch.setattr(time, "monotonic", lambda: now + 150)
        return {"seconds": {"short": 1, "long": 90}[name], "device": device}

    found = dict(run.measured(measure, [("short",), ("wrong",), ("long",), ("late",)]))
    assert found["short",] == {"seconds": 1, "device": "cuda"}
    assert found["wrong",] == {"error": "wrong: KeyError: 'wrong'"}
    assert list(found) == [("short",), ("wrong",), ("long",)]
    run.finish()
    saved = json.loads((tmp_path / "found.json").read_text())
    assert (saved["device"], saved["skipped"]) == ("none", 1)
    assert "1 measurements did not fit into 3 minutes" in capsys.readouterr().out


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
