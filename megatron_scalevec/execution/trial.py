"""Kernels on trial: in the first step of a run they work on a sample of its data, beside float64 torch.

Kernels are compiled where they run, for a device, a driver and a compiler that no test has seen. So before
they touch a gradient or a weight, they split and fold copies of the first and last elements of this rank's
shards. The vectors stand in with factors of their own, because those of a fresh start are all one and would
hide a kernel that takes the wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution import shard as torch_passes
from megatron_scalevec.execution.shard import Part

__all__ = ["try_kernels"]

SHARDS = 64
"""At most, spread over those there are."""
ELEMENTS = 1 << 20
"""Of the sample: no more than 24 MiB of copies, and 8 MiB per temporary of the float64 side."""

# Of a sum, relative to the sum of its absolute terms: kernels add some hundred of them in float32.
_SUMS = 1e-5
# Of a product of three factors, each product rounded once.
_PRODUCTS = 1e-6
_WAY_OUT = "use --scalevec-execution autograd, or take Triton out of the environment for the torch path"


@torch.no_grad()
def try_kernels(
    kernels: Any,
    parts: Sequence[Part],
    gradients: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    lives: Sequence[torch.Tensor],
    entries: int,
) -> None:
    """Compare a module's ``split_parts`` and ``fold_parts`` with the torch passes; nothing given is changed.

    Args:
        kernels: The module.
        parts: This rank's shards.
        gradients: float32 [shard] of each: of W_eff, as the step will split them.
        masters: float32 [shard] of each.
        lives: [shard] of each, for their dtype.
        entries: Of the flat tensors in which the parts' vectors lie.

    Raises:
        ScaleVecError: They do not run on this device, or their results differ.
    """
    chosen = _sample(parts)
    if not chosen:
        return
    cut = [part for _, part, _ in chosen]
    grads = [gradients[index][piece].clone() for index, _, piece in chosen]
    raw = [masters[index][piece] for index, _, piece in chosen]
    live = [torch.empty_like(lives[index][piece]) for index, _, piece in chosen]
    device = raw[0].device
    # Neighbours differ by an eighth or more, and no two branches begin alike.
    gamma = 0.5 + torch.arange(entries, device=device).mul(0.618034).frac_().float()
    totals = torch.zeros(entries, dtype=torch.float64, device=device)
    before = [grad.clone() for grad in grads]
    try:
        kernels.split_parts(cut, grads, raw, gamma, totals)
        kernels.fold_parts(cut, live, raw, gamma)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        said = str(error).strip().splitlines()
        raise ScaleVecError(
            f"the Triton kernels of --scalevec-execution optimizer do not run on {_name(device)} "
            f"({type(error).__name__}: {said[0] if said else 'no message'}); {_WAY_OUT}."
        ) from error
    differs = {
        "the gradients of weights": torch.zeros((), dtype=torch.bool, device=device),
        "the gradients of scale vectors": torch.zeros((), dtype=torch.bool, device=device),
        "the folded weights": torch.zeros((), dtype=torch.bool, device=device),
    }
    weights, vectors, folds = differs
    exact, magnitudes, factors = totals.new_zeros(entries), totals.new_zeros(entries), gamma.double()
    for part, grad, given, master, folded in zip(cut, grads, before, raw, live):
        wide = given.double()
        torch_passes.split_parts([part], [wide], [master.double()], factors, exact)
        absolute = given.double().abs_(), master.double().abs_()
        torch_passes.split_parts([part], [absolute[0]], [absolute[1]], factors, magnitudes)
        differs[weights] |= _beyond(grad, wide, _PRODUCTS * wide.abs())
        expected = torch.empty_like(folded)
        torch_passes.fold_parts([part], [expected], [master], gamma)
        differs[folds] |= _beyond(folded, expected.double(), _PRODUCTS * expected.double().abs())
    differs[vectors] |= _beyond(totals, exact, _SUMS * magnitudes)
    found = [name for name, flag in zip(differs, torch.stack(list(differs.values())).tolist()) if flag]
    if found:
        raise ScaleVecError(
            f"the Triton kernels of --scalevec-execution optimizer and float64 torch disagree about "
            f"{' and '.join(found)}, on {_name(device)}, in a sample of this step's own data; nothing has "
            f"been changed by them yet. Please report it; meanwhile {_WAY_OUT}."
        )


def _beyond(found: torch.Tensor, expected: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Whether any finite expectation is missed; what overflows or is no number is the step's affair."""
    judged = expected.abs() < 1e37
    # Negated, so that it is true of what is no number and should be one.
    return (judged & ~((found.double() - expected).abs() <= limit + 1e-37)).any()


def _sample(parts: Sequence[Part]) -> list[tuple[int, Part, slice]]:
    """(index of a shard, what is taken of it, where that lies in it)."""
    filled = [index for index, part in enumerate(parts) if part.stop > part.start]
    step = -(-len(filled) // SHARDS) or 1
    taken = filled[::step]
    # Whole multiples keep the alignment, and with it the variant of the kernels that the shard itself gets.
    half = ELEMENTS // (2 * max(1, len(taken))) // 16 * 16
    found = []
    for index in taken:
        part = parts[index]
        ends = (
            [(part.start, part.stop)]
            if part.stop - part.start <= 2 * half
            else [(part.start, part.start + half), (part.stop - half, part.stop)]
        )
        for start, stop in ends:
            own = slice(start - part.start, stop - part.start)
            found.append((index, dataclasses.replace(part, start=start, stop=stop), own))
    return found


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
