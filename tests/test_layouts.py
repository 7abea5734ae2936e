"""Checkpoints at scale: over all ranks, every tensor is there exactly once, scale vectors included."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

_TRAINING = """--micro-batch-size 1 --global-batch-size 1024 --train-iters 10 --lr 1e-3 --bf16 --mock-data
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --transformer-impl local
    --seq-length 8192 --max-position-embeddings 8192 --padded-vocab-size 128256
    --group-query-attention --num-query-groups 8 --tensor-model-parallel-size 8 --sequence-parallel
    --use-distributed-optimizer --scalevec-strategy unified""".split()
DENSE_70B = """--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672
    --pipeline-model-parallel-size 8 --context-parallel-size 2""".split()


MIXTRAL_8X22B = """--num-layers 56 --hidden-size 6144 --num-attention-heads 48 --ffn-hidden-size 16384
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1""".split()


def problems(shards: list[tuple]) -> list[str]:
    """Where shards do not tile their tensors: (key, global shape, offset, shape, replica id) each."""
    found = []
    owners: dict[str, list] = defaultdict(list)
    copies: dict[tuple, list] = defaultdict(list)
    shapes: dict[str, tuple] = {}
    for key, whole, offset, shape, replica in shards:
        if shapes.setdefault(key, whole) != whole:
            found.append(f"{key}: two global shapes, {shapes[key]} and {whole}")
        if len(shape) != len(whole) or any(o % s or o + s > w for o, s, w in zip(offset, shape, whole)):
            found.append(f"{key}: {shape} at {offset} is no tile of {whole}")
        copies[key, offset, shape].append(replica)
        if not any((replica,) if isinstance(replica, int) else replica):
            owners[key].append((offset, shape))
    for key, whole in shapes.items():
        tiles = owners[key]
        if len({shape for _, shape in tiles}) != 1 or len({offset for offset, _ in tiles}) != len(tiles):
            found.append(f"{key}: {len(tiles)} main shards are not distinct tiles of one shape")
        elif sum(math.prod(shape) for _, shape in tiles) != math.prod(whole):
            found.append(f"{key}: {len(tiles)} shards of {tiles[0][1]} do not make up {whole}")
    for (key, offset, _), replicas in copies.items():
        if len(set(replicas)) != len(replicas):
            found.append(f"{key} at {offset}: two ranks claim to be the same replica")
    return found


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("model", "stages", "layers", "more_ranks"),
    [
        # Context-parallel neighbours of all tensor-parallel ranks of the first stage, and another copy.
        (DENSE_70B, 8, 80, [*range(8, 16), 16, 21]),
    ],
    ids=["70b"],
)
def test_dense_models_are_tiled(ranks, model, stages, layers, more_ranks):
    [found] = ranks.run(
        "sharded_state_at_scale",
        timeout=480,
        arguments=[*model, *_TRAINING],
        of=1024,
        more_ranks=more_ranks,
    )
    shards = found["shards"]
    assert problems(shards) == []
    hidden = int(model[model.index("--hidden-size") + 1])
    whole = {key: shape for key, shape, *_ in shards}
    assert whole["decoder.layers.self_attention.linear_qkv.scalevec_weight"] == (
        layers,
        hidden + 2 * 8 * 128,
        hidden,
    )
    # Reparameterized: five input scales, two output scales and three head norms per layer, two parts each;
    # the norms keep a frozen weight beside them.
    per_layer = [key for key in found["vectors"] if key.startswith("decoder.layers.")]
    assert len(per_layer) == 2 * (5 + 2 + 3) + 3
    assert all(whole[key][0] == layers for key in per_layer)
    assert whole["decoder.layers.self_attention.linear_qkv.gamma_in_q_alpha"] == (layers, hidden)
    # A rank that stays away is missed, and so is one that holds what another holds.
    assert problems([one for one in shards if one[4] != (0, 0, 0) or one[2][0] != 17])
    assert any("same replica" in sentence for sentence in problems([*shards, shards[-1]]))
    identities = [identity for _, identity in found["groups"]]
    assert len(identities) == len(set(identities)) == 2


@pytest.mark.needs_training
def test_experts_are_tiled(ranks):
    """All 64 ranks; each holds one expert of a layer, tensor-parallel neighbours different ones."""
    [found] = ranks.run(
        "sharded_state_at_scale",
        timeout=480,
        arguments=[*_TRAINING, *MIXTRAL_8X22B],
        of=64,
        more_ranks=[rank for rank in range(64) if rank % 16 >= 2],
    )
    assert problems(found["shards"]) == []
    whole = {key: shape for key, shape, *_ in found["shards"]}
    vectors = [key for key in found["vectors"] if ".experts." in key]
    assert vectors and all(whole[key][:2] == (56, 8) for key in vectors)
    assert sorted(shape[-1] for key, shape in whole.items() if key in vectors).count(6144) == 2
    # An expert that nobody brings is missed.
    assert problems([one for one in found["shards"] if ".experts." not in one[0] or one[2][1] != 5])
    identities = [identity for _, identity in found["groups"]]
    assert len(identities) == len(set(identities))


def test_what_counts_as_a_problem():
    a, b = ("w", (4, 2), (0, 0), (2, 2), (0, 0, 0)), ("w", (4, 2), (2, 0), (2, 2), (0, 0, 0))
    copy = ("w", (4, 2), (0, 0), (2, 2), (0, 0, 1))
    assert problems([a, b, copy]) == []
    for broken in (
        [a],
        [a, copy],
        [a, b, copy, copy],
        [a, a, b],
        [a, ("w", (4, 2), (1, 0), (2, 2), (0, 0, 0))],
        [a, b, ("w", (6, 2), (4, 0), (2, 2), (0, 0, 0))],
        [a, ("w", (4, 2), (2, 0), (1, 2), (0, 0, 0)), ("w", (4, 2), (3, 0), (1, 2), (0, 0, 0))],
        [("w", (4, 2), (0, 0), (4, 2), (0, 1, 0))],
    ):
        assert problems(broken), broken
