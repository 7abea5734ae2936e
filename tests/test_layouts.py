"""Checkpoints at scale: over all ranks, every tensor is there exactly once, scale vectors included."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_scalevec.explain.launch_line import launch_in_script

_TRAINING = """--micro-batch-size 1 --global-batch-size 1024 --train-iters 10 --lr 1e-3 --bf16 --mock-data
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --transformer-impl local
    --seq-length 8192 --max-position-embeddings 8192 --padded-vocab-size 128256
    --group-query-attention --num-query-groups 8 --tensor-model-parallel-size 8 --sequence-parallel
    --use-distributed-optimizer --scalevec-strategy unified""".split()
# 256 ranks: every tensor-parallel shard of every layer four times, or twice without context parallelism.
DENSE_70B = """--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672
    --pipeline-model-parallel-size 8 --context-parallel-size 2""".split()
DENSE_405B = """--num-layers 126 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248
    --pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 7
    --decoder-last-pipeline-num-layers 7""".split()
MIXTRAL_8X22B = """--num-layers 56 --hidden-size 6144 --num-attention-heads 48 --ffn-hidden-size 16384
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1""".split()


def problems(tiles: dict[tuple, list]) -> list[str]:
    """Where shards do not tile their tensors: (key, global shape, offset, shape, dtype) to replica ids."""
    found = []
    owners: dict[str, list] = defaultdict(list)
    times: dict[str, set] = defaultdict(set)
    wholes: dict[str, tuple] = {}
    for (key, whole, offset, shape, dtype), replicas in tiles.items():
        if wholes.setdefault(key, (whole, dtype)) != (whole, dtype):
            found.append(f"{key}: two tensors, {wholes[key]} and {whole, dtype}")
        if len(shape) != len(whole) or any(o % s or o + s > w for o, s, w in zip(offset, shape, whole)):
            found.append(f"{key}: {shape} at {offset} is no tile of {whole}")
        if len(set(replicas)) != len(replicas):
            found.append(f"{key} at {offset}: two ranks claim to be the same replica")
        times[key].add(len(replicas))
        mains = [one for one in replicas if not any((one,) if isinstance(one, int) else one)]
        owners[key] += [(offset, shape)] * len(mains)
    for key, (whole, _) in wholes.items():
        here = owners[key]
        if len({shape for _, shape in here}) != 1 or len({offset for offset, _ in here}) != len(here):
            found.append(f"{key}: {len(here)} main shards are not distinct tiles of one shape")
        elif sum(math.prod(shape) for _, shape in here) != math.prod(whole):
            found.append(f"{key}: {len(here)} shards of {here[0][1]} do not make up {whole}")
        if len(times[key]) != 1:
            found.append(f"{key}: some shards have {min(times[key])} replicas, others {max(times[key])}")
    return found


def look_at(ranks, arguments, of, built):
    """What every rank would write, and global shapes by key, after the checks that hold for any model."""
    [found] = ranks.run(
        "sharded_state_at_scale", timeout=480, arguments=[*map(str, arguments)], of=of, built=built
    )
    assert found["differing"] == []
    assert problems(found["tiles"]) == []
    identities = [identity for _, identity in found["groups"]]
    assert len(identities) == len(set(identities)), found["groups"]
    return found, {key: whole for key, whole, *_ in found["tiles"]}


def elements(found, whole) -> tuple[int, int]:
    """Of the stock model, and of what the strategy added to it."""
    # Where a stock Megatron looks for a weight, it finds a place-holder that it cannot load.
    stand_ins = {key for key in whole if key.replace(".weight", ".scalevec_weight") in whole.keys() - {key}}
    stock = whole.keys() - stand_ins - set(found["vectors"])
    sizes = [sum(math.prod(whole[key]) for key in keys) for keys in (stock, found["vectors"])]
    return sizes[0], sizes[1]


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("model", "layers", "hidden", "ffn", "stages", "built"),
    [
        (DENSE_70B, 80, 8192, 28672, 8, [17, 110, 255]),
        (DENSE_405B, 126, 16384, 53248, 16, [17, 110, 255]),
    ],
    ids=["70b", "405b"],
)
def test_dense_models_are_tiled(ranks, model, layers, hidden, ffn, stages, built):
    found, whole = look_at(ranks, [*model, *_TRAINING], 256, built)
    rows = hidden + 2 * 8 * 128
    assert whole["decoder.layers.self_attention.linear_qkv.scalevec_weight"] == (layers, rows, hidden)
    # Reparameterized: five input scales, two output scales and three head norms per layer, two parts each;
    # the norms keep a frozen weight beside them.
    per_layer = [key for key in found["vectors"] if key.startswith("decoder.layers.")]
    assert len(per_layer) == 2 * (5 + 2 + 3) + 3
    assert all(whole[key][0] == layers for key in per_layer)
    assert whole["decoder.layers.self_attention.linear_qkv.gamma_in_q_alpha"] == (layers, hidden)
    # By hand: nothing of the model is missing, and there is nothing else.
    layer = rows * hidden + hidden * hidden + 3 * hidden * ffn + 2 * hidden
    added = 5 * (hidden + 1) + 2 * (ffn + 1) + 3 * (128 + 1 + 128)
    assert elements(found, whole) == (
        layers * layer + 2 * 128256 * hidden + hidden,
        layers * added + hidden + 1,
    )
    # Every tensor-parallel rank holds vectors whole, and its own shard of a weight.
    copies = {key: len(replicas) for (key, *_), replicas in found["tiles"].items()}
    assert copies["decoder.layers.self_attention.linear_qkv.gamma_in_q_alpha"] == 256 // stages
    assert copies["decoder.layers.self_attention.linear_qkv.scalevec_weight"] == 256 // stages // 8
    assert len(found["groups"]) == 2


@pytest.mark.needs_training
def test_experts_are_tiled(ranks):
    """Mixtral 8x22B: each rank holds one expert of a layer, tensor-parallel neighbours different ones."""
    found, whole = look_at(ranks, [*_TRAINING, *MIXTRAL_8X22B], 64, [7, 25, 63])
    vectors = [key for key in found["vectors"] if ".experts." in key]
    assert len(vectors) == 2 * 4 and all(whole[key][:2] == (56, 8) for key in vectors)
    # By hand: 141 billion. A layer's experts, its router, its attention, its norms.
    experts, router = 8 * 3 * 6144 * 16384, 8 * 6144
    attention = 2 * 6144 * 6144 + 2 * 1024 * 6144
    head_norms = 3 * (128 + 1 + 128)
    added = 8 * (2 * 6145 + 2 * 16385) + 6145 + 9 + 3 * 6145 + head_norms
    assert elements(found, whole) == (
        56 * (experts + router + attention + 2 * 6144) + 2 * 128256 * 6144 + 6144,
        56 * added + 6145,
    )
    # Each expert is on two ranks; its tile is missed when nobody brings it, or nobody as the main one.
    tiles = found["tiles"]
    fifth = [tile for tile in tiles if tile[0] == vectors[0] and tile[2][1] == 5]
    assert len(fifth) == 56 and all(len(tiles[tile]) == 2 for tile in fifth)
    assert problems({tile: replicas for tile, replicas in tiles.items() if tile not in fifth})
    assert problems({**tiles, fifth[7]: tiles[fifth[7]][1:]})


@pytest.mark.needs_training
def test_a_model_that_stays_on_its_rank_is_noticed(ranks):
    """The look at every rank can fail: without the groups of the other ranks all claim the same shards."""
    [found] = ranks.run(
        "sharded_state_at_scale",
        timeout=480,
        arguments=[*_TRAINING, *MIXTRAL_8X22B, "--num-layers", "4"],
        of=64,
        built=[0, 7],
        becoming=False,
    )
    assert found["differing"] == [7]
    assert any("same replica" in sentence for sentence in problems(found["tiles"]))


@pytest.mark.needs_training
def test_the_deepseek_recipe_is_tiled(ranks):
    """256 experts on the 64 ranks of each of 16 stages, latent attention, and multi-token prediction."""
    recipe = Path(__file__).resolve().parent.parent / "examples/megatron/deepseek-v3-like.sh"
    found, whole = look_at(ranks, launch_in_script(recipe, [], {}).arguments, 1024, [5, 500, 1023])
    vectors = [key for key in found["vectors"] if ".experts.experts." in key]
    # The 58 layers with experts and the one that predicts a second token.
    assert len(vectors) == (58 + 1) * 2 * 4 and all(whole[key][0] == 256 for key in vectors)
    # By hand: 671 billion, and what predicts the second token.
    hidden, ffn, expert = 7168, 18432, 2048
    q_rows, kv_rows = 128 * (128 + 64), 128 * 128
    attention = (1536 + 576) * hidden + q_rows * 1536 + 2 * kv_rows * 512 + hidden * kv_rows
    attention += 2 * hidden + 1536 + 512
    dense, experts = 3 * hidden * ffn, (256 + 1) * 3 * hidden * expert + 256 * hidden
    whole_model = 61 * attention + 3 * dense + 58 * experts + 2 * 129280 * hidden + hidden
    assert whole_model == 671_026_404_352
    second_token = attention + experts + 2 * hidden * hidden + 3 * hidden
    # Vectors, behind a factor each: of the latents' linears, of gate and up, of router and experts.
    latent = 3 * (hidden + 1) + 1537 + 65 + 513 + 1537 + q_rows + 1 + 2 * 513 + 2 * (kv_rows + 1)
    gated = 2 * (hidden + 1)
    of_experts = (256 + 1) * (gated + 2 * (expert + 1)) + hidden + 1 + 256 + 1
    added = (61 + 1) * latent + 3 * (gated + 2 * (ffn + 1)) + (58 + 1) * of_experts + 4 * (hidden + 1)
    assert elements(found, whole) == (whole_model + second_token, added)


def test_what_counts_as_a_problem():
    def tile(offset, shape, whole=(4, 2), dtype="bf16"):
        return ("w", whole, offset, shape, dtype)

    a, b = tile((0, 0), (2, 2)), tile((2, 0), (2, 2))
    main, copy = (0, 0, 0), (0, 0, 1)
    assert problems({a: [main, copy], b: [main, copy]}) == []
    for broken in (
        {a: [main]},
        {a: [main, copy], b: [copy]},
        {a: [main, copy], b: [main]},
        {a: [main, copy, copy], b: [main, copy, (0, 0, 2)]},
        {a: [main, main], b: [main, copy]},
        {a: [main], tile((1, 0), (2, 2)): [main]},
        {a: [main], b: [main], tile((4, 0), (2, 2), whole=(6, 2)): [main]},
        {a: [main], tile((2, 0), (2, 2), dtype="fp32"): [main]},
        {a: [main], tile((2, 0), (1, 2)): [main], tile((3, 0), (1, 2)): [main]},
        {tile((0, 0), (4, 2)): [(0, 1, 0)]},
    ):
        assert problems(broken), broken
