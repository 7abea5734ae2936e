"""Two explanations side by side: two strategies, or two layouts, of one launch line."""

from __future__ import annotations

import json
import multiprocessing
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from megatron_scalevec.config import STRATEGIES
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration.arguments import flags_in

__all__ = ["changed", "differences", "in_a_process_of_its_own", "side"]


def side(text: str) -> list[str]:
    """The arguments that one side of ``--diff`` stands for: a strategy's name, or flags.

    Raises:
        ScaleVecError: It is neither.
    """
    if text in STRATEGIES:
        return ["--scalevec-strategy", text]
    words = shlex.split(text)
    if not words or not words[0].startswith("--"):
        raise ScaleVecError(
            f"--diff {text!r} is neither a strategy ({', '.join(STRATEGIES)}) nor arguments that begin "
            "with --."
        )
    return words


def changed(arguments: Sequence[str], words: Sequence[str]) -> list[str]:
    """A launch line with one side of ``--diff``, whose own flags stand in the place of the line's."""
    replaced = set(flags_in(words))
    kept, dropping = [], False
    for word in arguments:
        if word.split("=", 1)[0] in replaced:
            dropping = "=" not in word  # its value follows
            continue
        if not (dropping and not word.startswith("-")):
            kept.append(word)
        dropping = False
    return [*kept, *words]


def in_a_process_of_its_own(make: Callable[[], str]) -> dict[str, Any]:
    """The record that ``make`` returns as JSON, or ``{"refused": sentence}``.

    Megatron keeps one set of arguments and groups per process.

    Raises:
        ScaleVecError: The process ended without an answer.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send(make())
        except ScaleVecError as error:
            theirs.send(json.dumps({"refused": str(error)}))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        raise ScaleVecError("the process that looked at one side of --diff ended early.") from None
    finally:
        process.join()
    return json.loads(answer)


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two records have that is not the same, under names for people."""
    left, right = _facts(a), _facts(b)
    names = list(dict.fromkeys([*left, *right]))
    # A refusal is shown even where both sides are refused for the same reason.
    return {n: (left.get(n), right.get(n)) for n in names if n == "refused" or left.get(n) != right.get(n)}


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    if "refused" in record:
        return {"refused": record["refused"]}
    whole = record["whole_model"] or {}
    tensors = {True: 0, False: 0}
    for row in record["weight_decay"]:
        tensors[row["decays"]] += row["tensors"]
    facts = {
        "strategy": record["strategy"],
        "ranks": record["world_size"],
        "parameters, stock": record["parameters"]["stock"],
        "parameters added": record["parameters"]["added"],
        "linears converted": whole.get("linears_converted", 0),
        "norm scales retired": whole.get("norm_scales_retired", 0),
        "tensors that decay": tensors[True],
        "tensors that do not": tensors[False],
        "execution": whole.get("execution"),
        "pipeline stages": len(record["stages"]),
        "most parameters on a rank": max(stage["parameters"]["stock"] for stage in record["stages"]),
        "most vectors on a rank": max(stage["parameters"]["added"] for stage in record["stages"]),
    }
    for name, number in whole.get("built_vectors", {}).items():
        facts[f"vectors {name}"] = number
    costs = [stage["costs"].get(facts["execution"]) for stage in record["stages"]]
    for name in ("fold", "split"):
        most = max((cost[f"{name}_per_step"] for cost in costs if cost), default=0)
        facts[f"bytes to {name} per step, most on a rank"] = most
    return facts
