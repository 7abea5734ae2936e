"""Telemetry of one step, and what the float64 reference says of the same step."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ranks.initial import fill_by_name

__all__ = [
    "read_wandb",
    "telemetry_by_the_reference",
    "telemetry_of_a_loop",
    "telemetry_of_a_step",
    "train_with_wandb_offline",
]

_RATE, _CLIP = 100.0, 0.5  # the latter as jobs.executing has it
_MICROBATCHES = 2


def telemetry_of_a_step(
    cases: list[dict[str, Any]], sequence_parallel: bool = False, **sizes: int
) -> list[dict[str, Any] | None]:
    """Per case what a step of plain gradient descent is told as, None on all ranks but the last.

    Args:
        cases: As of ``compare_executions``, with ``mode`` of execution.
        sequence_parallel: Of the model.
        sizes: Of Megatron's groups.
    """
    from megatron_scalevec.execution.members import leaves_of
    from megatron_scalevec.execution.optimizer import execute_in_optimizer
    from megatron_scalevec.telemetry import Telemetry
    from ranks.jobs.executing import _build, _step
    from ranks.models import initialize_parallel

    initialize_parallel(**sizes)
    results = []
    for case in cases:
        case = dict(case)
        mode = case.pop("mode", "autograd")
        _, wrapped, stepper = _build(mode, sequence_parallel, sizes, **case)
        if mode == "optimizer":
            execute_in_optimizer(stepper, wrapped)
        stepper.reload_model_params()
        for leaf in leaves_of(stepper):
            leaf.optimizer.step = functools.partial(_descend, leaf.optimizer)
        telemetry = Telemetry(wrapped, stepper)
        telemetry.before_step()
        _, norm = _step(wrapped, stepper, 0)
        found = telemetry.after_step()
        results.append(None if found is None else {**found, "norm": norm})
    return results


def telemetry_of_a_loop(code: str, folder: str) -> list[tuple[str, float, int]]:
    """Scalars that code for a loop of one's own writes, run in ``folder`` around a step with gradients."""
    from ranks.jobs.executing import _build, _step
    from ranks.models import initialize_parallel

    initialize_parallel()
    _, wrapped, optimizer = _build("autograd", False, {}, config={"strategy": "hg"})
    _step(wrapped, optimizer, 0)
    told: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar))
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(code, {"model_chunks": wrapped, "optimizer": optimizer, "step": 1, "summary_writer": writer})
    finally:
        os.chdir(before)
    return told


@torch.no_grad()
def _descend(optimizer: torch.optim.Optimizer) -> None:
    """In place of Adam's step, which would be the gradient's sign; the distributed optimizer has no SGD."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param -= _RATE * param.grad


def telemetry_by_the_reference(
    config: dict[str, Any], kind: str = "llama", experts: str | None = None, data_ranks: int = 1
) -> dict[str, Any]:
    """The oracle: a whole model's step in float64, on the data of ``data_ranks`` data-parallel ranks."""
    from reference import gpt_logits
    from reference_telemetry import expected_telemetry, stepped

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.initial import name_of_expert
    from ranks.models import EXPERTS, SIZES, build_gpt, initialize_parallel, reference_of

    initialize_parallel()
    model = build_gpt(**{"kind": kind, **EXPERTS.get(experts, {})})
    apply_scale_vectors(model, ScaleVecConfig(**config))
    fill_by_name(model, 0, 1)
    params, reference_config, leaves = reference_of(model)
    trained = {name_of_expert(n, 0): p.requires_grad for n, p in model.named_parameters()}
    leaves = {name: leaf for name, leaf in leaves.items() if trained[name]}
    shape = (2, SIZES["sequence"])
    loss = 0.0
    for rank in range(data_ranks):
        for microbatch in range(_MICROBATCHES):
            generator = torch.Generator().manual_seed(10 * microbatch + rank)  # as jobs.executing draws
            tokens = torch.randint(SIZES["vocabulary"], shape, generator=generator)
            target = torch.randn(*shape, SIZES["vocabulary"], generator=generator).double()
            logits = torch.stack([gpt_logits(row, params, reference_config) for row in tokens])
            loss = loss + (logits * target).mean() / (_MICROBATCHES * data_ranks)
    loss.backward()
    for leaf in leaves.values():
        leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    gradients, norm, after = stepped(leaves, _RATE, _CLIP)
    before = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.copy_(after[name_of_expert(name, 0)])
    params, _, _ = reference_of(model)
    figures, cosines = expected_telemetry(before, after, gradients, params)
    return {"figures": figures, "cosines": cosines, "norm": norm}


def train_with_wandb_offline(argv: list[str]) -> None:
    """A run whose command line asks for W&B, on a machine that is not to reach it."""
    import wandb

    from ranks.jobs.training import train

    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    train(argv)
    wandb.finish()


def read_wandb(folder: str) -> dict[int, dict[str, Any]]:
    """Step to values, from the one run that W&B has left in a folder."""
    from wandb.proto import wandb_internal_pb2

    [file] = Path(folder).glob("wandb/offline-run-*/*.wandb")
    history: dict[int, dict[str, Any]] = {}
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            history.setdefault(row["_step"], {}).update(row)
    return history


def _records(data: bytes) -> Iterator[bytes]:
    """Of LevelDB's log format: blocks of 32 KiB, in which a record is whole or in parts."""
    header, block = 7, 1 << 15
    at, record = header, b""  # the file begins with a header of W&B's own, as long as a record's
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
