"""What scale vectors cost one rank: memory and memory traffic, by formulas.

Plain arithmetic on sizes; nothing is measured here. Traffic is a lower bound: every tensor that an operation
needs is read once and every result is written once, as a fused kernel does it; plain torch code moves several
times as much. Nothing is assumed to overlap with computation. With E elements of folded weights on the rank,
of b bytes each, G the gradient of W_eff, and s ranks that share the optimizer's state (1 without the
distributed optimizer):

``autograd``, every microbatch
    The fold reads W and writes W_eff: 2 b E, twice with full recomputation. The split reads G and W and
    writes dW: 3 b E.
``optimizer``, every step
    Each rank works on its share of the weights. The fold reads W in float32 and writes the live weight:
    (4 + b) E / s. The split reads G and W and writes dW, all in float32: 12 E / s.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["H100_BYTES_PER_SECOND", "Cost", "Holding", "Schedule", "cost", "microbatches_in_flight"]

H100_BYTES_PER_SECOND = 3.35e12
"""Memory bandwidth in NVIDIA's data sheet of the H100 SXM."""

_INDEX_BYTES_PER_ROW = 16  # two int64: branch and place of every row
_FLOAT32 = 4
_MOMENTS = 2 * _FLOAT32  # Adam's


@dataclass(frozen=True)
class Holding:
    """What one rank holds.

    Attributes:
        weights: Elements of the weights that are folded, this rank's shards.
        rows: Rows of these weights, all linears together.
        weight_bytes: Per element.
        vectors: Trained elements of scale vectors that the strategy adds.
        vector_bytes: Per element.
        retired: Elements of norm scales that are trained no more.
    """

    weights: int
    rows: int
    weight_bytes: int
    vectors: int
    vector_bytes: int
    retired: int


@dataclass(frozen=True)
class Schedule:
    """How a run goes about it.

    Attributes:
        microbatches: Per rank and step.
        in_flight: Microbatches between their forward and their backward pass, at most.
        state_shards: Ranks that share the optimizer's state of one parameter.
        gradient_bytes: Per element of the gradient buffer.
        master_weights: Whether the optimizer keeps float32 copies.
        full_recompute: Whether layers are computed again in the backward pass.
    """

    microbatches: int
    in_flight: float
    state_shards: int = 1
    gradient_bytes: int = _FLOAT32
    master_weights: bool = True
    full_recompute: bool = False


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank. ``seconds`` is the traffic of a step at a given bandwidth."""

    parameters_and_state: float
    index_maps: int
    folded_weights: float
    fold_per_step: float
    split_per_step: float
    seconds: float

    @property
    def memory(self) -> float:
        return self.parameters_and_state + self.index_maps + self.folded_weights


def cost(
    holding: Holding,
    schedule: Schedule,
    execution: str,
    bytes_per_second: float = H100_BYTES_PER_SECOND,
) -> Cost:
    """Memory added on one rank, and memory traffic added per step.

    Args:
        holding: What the rank holds.
        schedule: Of the run.
        execution: ``autograd`` or ``optimizer``.
        bytes_per_second: For ``seconds``.

    Raises:
        ValueError: There is no such execution mode.
    """
    size, shards = holding.weight_bytes, schedule.state_shards
    if execution == "autograd":
        forward_passes = 2 if schedule.full_recompute else 1
        fold = 2 * size * holding.weights * schedule.microbatches * forward_passes
        split = 3 * size * holding.weights * schedule.microbatches
        # The product keeps W_eff for its backward pass; recomputed layers keep nothing for longer.
        folded = 0 if schedule.full_recompute else size * holding.weights * schedule.in_flight
    elif execution == "optimizer":
        fold = (_FLOAT32 + size) * holding.weights / shards
        split = 3 * _FLOAT32 * holding.weights / shards
        folded = 0
    else:
        raise ValueError(f"no execution mode {execution!r}")

    def state(bytes_each: int) -> float:
        master = _FLOAT32 if schedule.master_weights and bytes_each < _FLOAT32 else 0
        return schedule.gradient_bytes + (_MOMENTS + master) / shards

    held = holding.vectors * (holding.vector_bytes + state(holding.vector_bytes))
    freed = holding.retired * state(size)
    return Cost(
        parameters_and_state=held - freed,
        index_maps=_INDEX_BYTES_PER_ROW * holding.rows,
        folded_weights=folded,
        fold_per_step=fold,
        split_per_step=split,
        seconds=(fold + split) / bytes_per_second,
    )


def microbatches_in_flight(microbatches: int, stage: int, stages: int, chunks: int = 1) -> float:
    """How many microbatches a pipeline stage holds between forward and backward pass, at most.

    Of Megatron's schedules (``core/pipeline_parallel/schedules.py``): one forward, one backward, where
    stage ``stage`` warms up with ``stages - stage - 1`` microbatches; and the interleaved one, counted in
    model chunks. With one stage it is one.

    Args:
        microbatches: Per step.
        stage: Of the rank, from 0.
        stages: Of the pipeline.
        chunks: Model chunks per rank.

    Returns:
        The number, in microbatches through all of the rank's chunks; a fraction with several chunks.
    """
    if stages == 1:
        return 1.0
    if chunks == 1:
        return float(min(microbatches, stages - stage))
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(microbatches * chunks, warm_up + 1) / chunks
