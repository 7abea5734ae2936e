#!/usr/bin/env python3
"""Norms on q, k and v of one layer: three of them, with γ apart or in the norm, and one over all heads; with
torch's norm, and with the one that this package has for CPUs.

usage: python benchmarks/norm_bench.py [--tokens 256] [--heads 16] [--groups 4] [--rounds 15] [--json FILE]

Forward and backward pass from the packed output of linear_qkv to q, k and v and back, in bf16 on one thread
of the CPU, the variants in turn; processor time beside that of the split alone, which every model has. And
the bytes that torch's operations move, counted; what a fused kernel must move is in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from counting import Counter
from torch.nn.functional import rms_norm

from megatron_scalevec.layers.rms_norm import rms_norm as rms_norm_in_pieces

HEAD_DIM = 64
EPSILON = 1e-5

Variant = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]


def _split(packed: torch.Tensor) -> list[torch.Tensor]:
    """[tokens, groups, heads of a group and k and v, channels] to q, k and v."""
    return list(packed.split([packed.shape[2] - 2, 1, 1], dim=2))


def _one_scale_each(gamma: torch.Tensor) -> list[torch.Tensor]:
    return [gamma[0], gamma[-2], gamma[-1]]


def split_alone(packed: torch.Tensor, gamma: torch.Tensor) -> list[torch.Tensor]:
    """What stock does."""
    return _split(packed)


def three_with_gamma_apart(packed: torch.Tensor, gamma: torch.Tensor) -> list[torch.Tensor]:
    """Norms whose own scale is one, then γ."""
    one = torch.ones(HEAD_DIM, dtype=packed.dtype)
    parts = zip(_split(packed), _one_scale_each(gamma))
    return [rms_norm(x, (HEAD_DIM,), one, EPSILON) * scale for x, scale in parts]


def three_with_gamma(packed: torch.Tensor, gamma: torch.Tensor) -> list[torch.Tensor]:
    """What this package does with torch's norms on a GPU."""
    parts = zip(_split(packed), _one_scale_each(gamma))
    return [rms_norm(x, (HEAD_DIM,), scale, EPSILON) for x, scale in parts]


def one_for_all_heads(packed: torch.Tensor, gamma: torch.Tensor) -> list[torch.Tensor]:
    """One norm over the packed output, and one product with the scales of its heads."""
    return _split(rms_norm(packed, (HEAD_DIM,), None, EPSILON) * gamma)


def three_in_pieces(packed: torch.Tensor, gamma: torch.Tensor) -> list[torch.Tensor]:
    """What it does on a CPU."""
    return [rms_norm_in_pieces(x, scale, EPSILON) for x, scale in zip(_split(packed), _one_scale_each(gamma))]


def one_in_pieces(packed: torch.Tensor, gamma: torch.Tensor) -> list[torch.Tensor]:
    """The same over all heads at once."""
    one = torch.ones(HEAD_DIM, dtype=packed.dtype)
    return _split(rms_norm_in_pieces(packed, one, EPSILON) * gamma)


VARIANTS: tuple[Variant, ...] = (
    split_alone,
    three_with_gamma_apart,
    three_with_gamma,
    one_for_all_heads,
    three_in_pieces,
    one_in_pieces,
)


def main(argv: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = measure(options.tokens, options.heads, options.groups, options.rounds)
    for row in rows:
        print(
            f"{row['name']:24} {1e6 * row['seconds']:8.0f} us, {1e6 * row['beside']:+8.0f} us beside the "
            f"split alone, {row['bytes'] / row['elements']:6.1f} bytes per element"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(tokens: int, heads: int, groups: int, rounds: int) -> list[dict]:
    """One row per variant."""
    generator = torch.Generator().manual_seed(1)
    shape = tokens, groups, heads // groups + 2, HEAD_DIM
    packed = torch.randn(shape, generator=generator).bfloat16().requires_grad_()
    gamma = (1 + 0.1 * torch.randn(shape[2], HEAD_DIM, generator=generator)).bfloat16().requires_grad_()
    targets = [torch.randn(part.shape, generator=generator).bfloat16() for part in _split(packed)]
    taken: dict[str, list[float]] = {variant.__name__: [] for variant in VARIANTS}
    moved = {}

    def run(variant: Variant) -> float:
        start = time.process_time()
        torch.autograd.backward(variant(packed, gamma), targets)
        packed.grad = gamma.grad = None
        return time.process_time() - start

    for variant in VARIANTS:
        run(variant)
        with Counter() as counter:
            run(variant)
        moved[variant.__name__] = counter.bytes
    for index in range(rounds):
        for variant in VARIANTS if index % 2 == 0 else VARIANTS[::-1]:
            taken[variant.__name__].append(run(variant))
    alone = taken["split_alone"]
    return [
        {
            "name": name,
            "seconds": statistics.median(own),
            "beside": statistics.median(a - b for a, b in zip(own, alone)),
            "bytes": moved[name],
            "elements": packed.numel(),
        }
        for name, own in taken.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
