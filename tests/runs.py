"""What several test modules do with the rank pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from ranks.arguments import tiny_gpt

__all__ = [
    "assert_continues",
    "assert_equal_steps",
    "assert_equal_telemetry",
    "logits_tolerance",
    "once_per_layout",
    "round_trips",
    "together",
    "worst_gradient",
]


def once_per_layout(ranks, layouts: Mapping[str, tuple[int, list[str]]]) -> Callable[..., dict[str, Any]]:
    """A function that trains in a layout, once however often it is asked: several tests look at one run."""
    runs: dict[Any, dict[str, Any]] = {}

    def run(strategy, layout, model="llama", flags=(), **more):
        key = strategy, layout, model, flags, tuple(more.items())
        if key not in runs:
            world_size, arguments = layouts[layout]
            argv = tiny_gpt(model, *arguments, "--scalevec-strategy", strategy, *flags)
            results = ranks.run("train", world_size, argv=argv, **more)
            # Losses are known to the last pipeline stage, vectors each to its own.
            vectors = {name: v for result in results for name, v in result["vectors"].items()}
            runs[key] = {**results[-1], "vectors": vectors, "all": results}
        return runs[key]

    return run


def round_trips(ranks, folder, forms: Mapping[str, tuple[str, dict, dict]]) -> dict[tuple[str, bool], Any]:
    """Every form (kind of model, strategy, more) unfolded and folded, once without and once with training."""
    keys = [(name, train) for name in forms for train in (False, True)]
    cases = []
    for name, train in keys:
        kind, config, more = forms[name]
        cases.append({"kind": kind, "config": config, "train": train, **more})
    [results] = ranks.run("round_trips", folder=str(folder), cases=cases)
    return dict(zip(keys, results))


def logits_tolerance(name: str) -> float:
    """Relative, of a form whose name tells its dtype."""
    return 2e-2 if "bf16" in name else 1e-5


def worst_gradient(result: dict[str, Any], serial: dict[str, Any]) -> float:
    """Largest difference of a gradient, relative to the largest entry of the serial one."""
    return max(
        abs(gradient - serial["gradients"][name]).max() / abs(serial["gradients"][name]).max()
        for name, gradient in result["gradients"].items()
    )


def together(runs: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Gradients of all vectors over the ranks; those that several ranks hold must agree."""
    found = {}
    for run in runs:
        for name, gradient in run["gradients"].items():
            if name in found:
                np.testing.assert_allclose(gradient, found[name], rtol=1e-9, atol=1e-12, err_msg=name)
            found[name] = gradient
    return found


def assert_equal_steps(runs: Sequence[dict[str, Any]], serial: Sequence[dict[str, Any]]) -> None:
    """Of the job ``expert_gradients`` in a layout and on one rank: every vector's gradient to 1e-6, the norm
    that would be clipped by, the vectors after a step, and the audit."""
    [serial] = serial
    found = together(runs)
    assert found.keys() == serial["gradients"].keys()
    for name, expected in serial["gradients"].items():
        limit = 1e-6 * abs(expected).max() + 1e-9
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=limit, err_msg=name)
    for run in runs:
        np.testing.assert_allclose(run["norm"], serial["norm"], rtol=1e-6)
        assert run["audit"] == serial["audit"]
        for name, moved in run["moved"].items():
            np.testing.assert_allclose(moved, serial["moved"][name], rtol=1e-5, err_msg=name)


def assert_continues(run: dict[str, Any], whole: dict[str, Any]) -> None:
    """The last five of ten steps, up to the rounding that another layout brings."""
    np.testing.assert_allclose(run["losses"], whole["losses"][5:], rtol=1e-6)
    np.testing.assert_allclose(run["grad_norms"], whole["grad_norms"][5:], rtol=1e-5)
    for name in run["vectors"].keys() & whole["vectors"].keys():
        # Adam's step is as large for a tiny gradient as for a large one, so where a scalar's gradient
        # nearly cancels, rounding is amplified: measured against one step of the learning rate, 3e-3.
        atol = 5e-5 if name.endswith("_beta") else 5e-6
        np.testing.assert_allclose(
            run["vectors"][name], whole["vectors"][name], rtol=0, atol=atol, err_msg=name
        )


def assert_equal_telemetry(told: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every figure of every vector, to the rounding of a float32 model."""
    assert told["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    names = ("layer", "site", "branch", "side")
    rows = {tuple(row.pop(name) for name in names): row for row in told["vectors"]}
    assert len(rows) == len(told["vectors"])
    assert rows.keys() == expected["figures"].keys()
    wrong = [
        (place, name, rows[place][name], value)
        for place, figures in expected["figures"].items()
        for name, value in figures.items()
        # Gradients that are zero in exact arithmetic (of a scale in front of a norm) are rounding.
        if rows[place][name] != (value if value is None else pytest.approx(value, rel=2e-5, abs=1e-8))
    ]
    assert not wrong
    cosines = {tuple(row[name] for name in names): row["cosine"] for row in told["branches"]}
    assert cosines == pytest.approx(expected["cosines"], rel=1e-6)
