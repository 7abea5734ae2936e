"""The tools' own check: source and result compute the same.

Where the model is small enough, both are built on the CPU from the arguments in the checkpoint, in a process
of its own, and their logits on random tokens are compared in float32. Otherwise the tensors are compared
chunk by chunk in float64, after both have been folded and the norms' scales multiplied into the linears
behind them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_scalevec.checkpoint.draft import Draft
from megatron_scalevec.checkpoint.fold import Folding
from megatron_scalevec.checkpoint.keys import GUARD_SHAPE
from megatron_scalevec.checkpoint.store import Box, CheckpointReader
from megatron_scalevec.checkpoint.tables import find_linears, rows_that_take_turns
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.hybrid_layers import hybrid_pattern

__all__ = ["LOGITS_LIMIT", "PEAK_TENSORS", "Finding", "compare_logits", "compare_products", "verify"]

LOGITS_LIMIT = 2 << 30
"""Largest model, in bytes of its stored tensors, whose logits are compared."""

PEAK_TENSORS = 8

_TIMEOUT = 1800  # seconds
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True)
class Finding:
    """What was compared, and the largest difference relative to the largest entry."""

    what: str
    difference: float
    tolerance: float


def verify(source: Path, result: Path) -> Finding:
    """Compare two checkpoints.

    Raises:
        ScaleVecError: They do not compute the same.
    """
    reader = CheckpointReader(source)
    tolerance = _TOLERANCES.get(_dtype(reader), 2e-2)
    size = sum(
        torch.Size(stored.shape).numel() * stored.dtype.itemsize
        for key, stored in reader.tensors.items()
        if "optimizer." not in key
    )
    found, why = None, f"the model has more than {LOGITS_LIMIT >> 30} GiB"
    if hybrid_pattern(reader.args) is not None:
        why = "the layers of a hybrid model need a GPU's kernels"
    elif getattr(reader.args, "moe_latent_size", None):
        why = "the projections around experts on latents are TransformerEngine's"
    elif rows_that_take_turns(reader.args):
        why = "local layers know no gate and up rows that take turns"
    elif size <= LOGITS_LIMIT:
        found, why = compare_logits(source, result)
    if found is None:
        difference = compare_products(reader, CheckpointReader(result))
        found = Finding(
            f"products of weights and scales, in float64 (logits not: {why})", difference, tolerance
        )
    else:
        found = Finding("logits on random tokens", found, tolerance)
    if not found.difference <= tolerance:
        raise ScaleVecError(
            f"the result would not compute what {source} computes: {found.what} differ by "
            f"{found.difference:.1e}, more than {tolerance:.0e}; nothing was written. --no-check writes it "
            "all the same."
        )
    return found


def _dtype(reader: CheckpointReader) -> torch.dtype:
    return next(
        stored.dtype for key, stored in reader.tensors.items() if key.endswith("word_embeddings.weight")
    )


def compare_logits(source: Path, result: Path) -> tuple[float | None, str]:
    """The difference, or None and the reason why there is none."""
    command = [sys.executable, "-m", "megatron_scalevec.checkpoint.logits", str(source), str(result)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        environment.pop(name, None)
    try:
        run = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return None, "building the models took too long"
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        return None, lines[-1][:200]
    return float(json.loads(run.stdout.splitlines()[-1])["difference"]), ""


def compare_products(first: CheckpointReader, second: CheckpointReader) -> float:
    """Largest difference over all tensors, relative to a tensor's largest entry.

    Takes up to :data:`PEAK_TENSORS` times the memory of the largest chunk in float32.

    Returns:
        Infinity where one has tensors that the other has not, and NaN where one of both holds a NaN.
    """
    views = [_Stock(first), _Stock(second)]
    worst = 0.0
    keys = views[0].keys()
    if keys != views[1].keys():
        return float("inf")
    for key in sorted(keys):
        shape = views[0].shape(key)
        for box in views[0].boxes(key):
            a, b = (view.read(key, box) for view in views)
            scale = _largest(a) if shape else 0.0
            difference = _largest(a - b)
            del a, b  # before the next two are read
            relative = difference / scale if scale else difference
            if math.isnan(relative):  # which compares with nothing, so that a maximum would lose it
                return relative
            worst = max(worst, relative)
    return worst


def _largest(values: torch.Tensor) -> float:
    """Absolute value, without a copy of all."""
    return float(torch.linalg.vector_norm(values, float("inf"))) if values.numel() else 0.0


class _Stock:
    """A checkpoint as a stock one with the norms' scales multiplied into the linears behind them."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        draft = Draft(reader, optimizer=False)
        if ScaleVecConfig.from_namespace(draft.args).active:
            Folding(draft)
        self._pieces: dict[str, list] = {}
        for piece in draft.pieces:
            self._pieces.setdefault(piece.key, []).append(piece)
        sites = [site for site in find_linears(self._pieces) if site.norm is not None]
        self._norm_of = {site.weight: f"{site.norm}weight" for site in sites}
        self._norm_of |= {f"{site.norm}bias": f"{site.norm}weight" for site in sites}
        self._zero_centered = bool(getattr(draft.args, "apply_layernorm_1p", False))

    def keys(self) -> set[str]:
        return self._pieces.keys() - set(self._norm_of.values())

    def shape(self, key: str) -> tuple[int, ...]:
        return self._pieces[key][0].shape

    def boxes(self, key: str) -> list[Box]:
        return [piece.box for piece in self._pieces[key] if piece.shape[-3:] != GUARD_SHAPE]

    def read(self, key: str, box: Box) -> torch.Tensor:
        [piece] = [piece for piece in self._pieces[key] if piece.box == box]
        values = piece.make().double()
        norm = self._norm_of.get(key)
        if norm not in self._pieces:
            return values
        gamma = self._whole(norm)
        gamma = gamma + 1 if self._zero_centered else gamma
        leading = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
        if key != norm.removesuffix("weight") + "bias":
            layers = gamma.dim() - 1
            own = gamma[leading[:layers]][..., leading[-1]]
            # One norm for all experts of a layer, and for all rows of a weight.
            return values * own.view(*own.shape[:-1], *[1] * (values.dim() - own.dim()), own.shape[-1])
        own = gamma[leading]
        return values / torch.where(own == 0, torch.ones_like(own), own)

    def _whole(self, key: str) -> torch.Tensor:
        pieces = self._pieces[key]
        whole = torch.empty(pieces[0].shape, dtype=torch.float64)
        for piece in pieces:
            where = tuple(slice(s, s + n) for s, n in zip(piece.box.offsets, piece.box.sizes))
            whole[where] = piece.make().double()
        return whole
