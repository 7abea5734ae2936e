"""What scale vectors cost one rank: memory, memory traffic and arithmetic, by formulas.

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
    (4 + b) E / s. It takes the place of Megatron's own copy of W to the live weight, which moves as much.
    The split reads G and W and writes dW, all in float32: 12 E / s.

In both, an element takes two multiplications to fold and seven operations to split: G W, a multiplication
and an addition for each of the two sums, and two multiplications for dW. Beside a matrix product, which does
six operations with an element for every token, that is nothing; what costs is the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = [
    "FLOPS_TO_FOLD",
    "FLOPS_TO_SPLIT",
    "H100",
    "H100_BYTES_PER_SECOND",
    "H200",
    "Cost",
    "Device",
    "Holding",
    "Schedule",
    "ModelSizes",
    "cost",
    "microbatches_in_flight",
    "norm_bytes",
]


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: bytes per second of its memory, dense bf16 operations per second, bytes."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    memory: float


H100 = Device("H100", 3.35e12, 989.4e12, 80e9)
"""NVIDIA's data sheet of the H100 SXM."""

H200 = Device("H200", 4.8e12, 989.4e12, 141e9)
"""NVIDIA's data sheet of the H200 SXM."""

H100_BYTES_PER_SECOND = H100.bytes_per_second

FLOPS_TO_FOLD = 2
"""Per element."""

FLOPS_TO_SPLIT = 7
"""Per element."""

_INDEX_BYTES_PER_ROW = 16  # autograd: two int64, branch and place of every row
_BYTES_PER_BLOCK, _ROWS_PER_BLOCK = 88, 32  # the kernels: eleven int64 per block of rows
_FLOAT32 = 4
_MOMENTS = 2 * _FLOAT32  # Adam's
# The optimizer's mode keeps of each vector its stored parts and γ, and the gradients of both, in float32.
_TABLES = 4 * _FLOAT32


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
    """Bytes of one rank, and arithmetic.

    ``replaced_per_step``: of stock's traffic, what is left out. ``seconds``: what is added to a step, at a
    given bandwidth.
    """

    parameters_and_state: float
    index_maps: float
    folded_weights: float
    fold_per_step: float
    split_per_step: float
    replaced_per_step: float
    flops_per_step: float
    tables: float
    seconds: float

    @property
    def added_per_step(self) -> float:
        """Traffic on top of stock's."""
        return self.fold_per_step + self.split_per_step - self.replaced_per_step

    @property
    def memory(self) -> float:
        """All that is added."""
        return self.parameters_and_state + self.beside_the_vectors

    @property
    def beside_the_vectors(self) -> float:
        """Of it, what is neither the vectors themselves nor their gradients and optimizer state."""
        return self.index_maps + self.folded_weights + self.tables

    def __add__(self, other: Cost) -> Cost:
        """Of two sets of weights on one rank, such as experts, whose state is shared by fewer ranks."""
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


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
        flops = schedule.microbatches * (forward_passes * FLOPS_TO_FOLD + FLOPS_TO_SPLIT) * holding.weights
        maps, tables, replaced = _INDEX_BYTES_PER_ROW * holding.rows, 0, 0
    elif execution == "optimizer":
        fold = (_FLOAT32 + size) * holding.weights / shards
        replaced = fold if schedule.master_weights else 0
        split = 3 * _FLOAT32 * holding.weights / shards
        folded = 0
        flops = (FLOPS_TO_FOLD + FLOPS_TO_SPLIT) * holding.weights / shards
        maps, tables = _BYTES_PER_BLOCK * holding.rows / _ROWS_PER_BLOCK, _TABLES * holding.vectors
    else:
        raise ValueError(f"no execution mode {execution!r}")

    def state(bytes_each: int) -> float:
        master = _FLOAT32 if schedule.master_weights and bytes_each < _FLOAT32 else 0
        return schedule.gradient_bytes + (_MOMENTS + master) / shards

    held = holding.vectors * (holding.vector_bytes + state(holding.vector_bytes))
    freed = holding.retired * state(size)
    return Cost(
        parameters_and_state=held - freed,
        index_maps=maps,
        folded_weights=folded,
        fold_per_step=fold,
        split_per_step=split,
        replaced_per_step=replaced,
        flops_per_step=flops,
        tables=tables,
        seconds=(fold + split - replaced) / bytes_per_second,
    )


NORM_ACCESSES = 5
"""Of each element of q, k and v by a norm: forward reads and writes it, backward reads it and its gradient,
and writes one. A separate product with γ makes three more: it reads and writes in forward, and in backward it
writes the gradient once more, where the norm's kernel reads it."""

NORM_ACCESSES_WITH_GAMMA_APART = 8


def norm_bytes(elements: float, *, gamma_apart: bool = False, element_bytes: int = 2) -> float:
    """What the norms of dual-norm must move for ``elements`` of q, k and v, forward and backward.

    One fused pass over packed q, k and v moves the same: no element is in two of them.
    """
    accesses = NORM_ACCESSES_WITH_GAMMA_APART if gamma_apart else NORM_ACCESSES
    return accesses * element_bytes * elements


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


@dataclass(frozen=True)
class ModelSizes:
    """A GPT with RMSNorm, gated MLPs and untied embeddings, as far as costs go.

    Attributes:
        layers: Of the model.
        hidden: Channels between layers.
        heads, groups: Of queries, and of keys and values.
        head_dim: Channels of a head.
        ffn: Of the MLP, or of one expert.
        vocabulary: Rows of the output layer.
        sequence: Tokens of one sample.
        experts: In place of the MLP; 0 for a dense model.
        chosen: Experts per token.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocabulary: int
    sequence: int
    experts: int = 0
    chosen: int = 0

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused weight of one layer."""
        return (self.heads + 2 * self.groups) * self.head_dim

    def flops_per_token(self) -> float:
        """Of forward and backward pass: six per weight that a token meets, and attention to the half of the
        other tokens that come before it."""
        mlp = 3 * self.hidden * self.ffn * max(1, self.chosen) + self.hidden * self.experts
        layer = self.hidden * self.qkv_rows + self.hidden * self.heads * self.head_dim + mlp
        attention = 6 * self.layers * self.heads * self.head_dim * self.sequence
        return 6.0 * (self.layers * layer + self.hidden * self.vocabulary) + attention

    def unified(self, layers: int, tensor: int, expert: int = 1) -> tuple[Holding, Holding]:
        """What a rank holds under strategy ``unified`` in bf16: outside of routed experts, and in them.

        Args:
            layers: On the rank; those without embedding and final norm.
            tensor: Ranks that share a weight (of experts: none, each is whole on its rank).
            expert: Ranks that share the experts of a layer.
        """
        # A vector is a scalar and its channels; per layer q, k and v in, and their norms' three scales.
        own = 3 * (self.hidden + 1) + 3 * (self.head_dim + 1)
        rows = self.qkv_rows // tensor
        # Of one MLP, dense or expert: gate and up, in and out.
        of_mlp = 2 * (self.hidden + 1) + 2 * (self.ffn + 1)
        mlps = layers * self.experts // expert
        if self.experts:
            # The router's weight is whole on every rank and has both vectors.
            rows += self.experts
            own += self.hidden + 1 + self.experts + 1
        else:
            rows += 2 * self.ffn // tensor
            own += of_mlp
        dense = Holding(
            layers * rows * self.hidden, layers * rows, 2, layers * own, 2, layers * 2 * self.hidden
        )
        in_experts = mlps * 2 * self.ffn
        return dense, Holding(in_experts * self.hidden, in_experts, 2, mlps * of_mlp, 2, 0)
