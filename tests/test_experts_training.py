"""Megatron's training loop on models with experts: layouts, resuming, what is printed."""

import re

import numpy as np
import pytest
from ranks.arguments import EXPERT_LAYOUTS, tiny_gpt
from ranks.pool import RankFailure
from runs import once_per_layout

pytestmark = pytest.mark.needs_training


@pytest.fixture(scope="module")
def train(ranks):
    run = once_per_layout(ranks, EXPERT_LAYOUTS)
    return lambda model, layout, *flags, strategy="unified", **more: run(
        strategy, layout, model, flags, **more
    )


def assert_equal_runs(run, other, start=0):
    assert len(run["losses"]) == len(other["losses"][start:]) >= 10
    np.testing.assert_allclose(run["losses"], other["losses"][start:], rtol=1e-5)
    np.testing.assert_allclose(run["grad_norms"], other["grad_norms"][start:], rtol=1e-4)
    assert run["vectors"].keys() == other["vectors"].keys()
    for name, vector in run["vectors"].items():
        # See test_parallel.py: Adam amplifies the rounding of gradients that nearly cancel.
        np.testing.assert_allclose(vector, other["vectors"][name], atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("mixtral", "ep2-distopt"),
        ("mixtral", "tp2-sp-etp1"),
        ("mixtral", "pp2-ep2"),
        ("qwen3-moe", "ep2"),
        ("shared-experts", "ep2-distopt"),
        ("shared-experts", "tp2-sp-etp1"),
        ("deepseek-v3", "ep2"),
        ("deepseek-v3", "tp2-sp"),
    ],
)
def test_parallel_equals_serial(train, model, layout):
    """Losses, clipped gradient norms and the vectors after ten updates; the audit is the same everywhere."""
    run, serial = train(model, layout), train(model, "serial")
    assert_equal_runs(run, serial)
    for result in run["all"]:
        assert result["audit"] == serial["audit"]


def test_one_checkpoint_trains_alike_in_every_layout(ranks, tmp_path):
    """Ten iterations from the weights and vectors of one checkpoint, whose optimizer state is left behind:
    Megatron keeps that of experts apart once they are spread over ranks."""
    common = ["--scalevec-strategy", "unified", "--no-save-optim", "--no-save-rng"]
    saving = ["--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"]
    ranks.run("train", argv=tiny_gpt("shared-experts", *common, *saving))
    loading = ["--load", str(tmp_path), "--finetune", "--no-load-optim", "--no-load-rng"]
    found = {}
    for layout in ("serial", "ep2", "tp2-sp-ep2", "etp2"):
        world_size, arguments = EXPERT_LAYOUTS[layout]
        argv = tiny_gpt("shared-experts", *arguments, *common, *loading)
        runs = ranks.run("train", world_size, argv=argv, by_name=False)
        vectors = {name: vector for run in runs for name, vector in run["vectors"].items()}
        found[layout] = {**runs[-1], "vectors": vectors}
    for layout, run in found.items():
        assert_equal_runs(run, found["serial"])
        assert run["audit"] == found["serial"]["audit"], layout


@pytest.mark.parametrize("layout", ["ep2-distopt", "tp2-sp-etp1"])
def test_one_set_of_vectors_for_all_experts(train, layout):
    run = train("mixtral", layout, "--scalevec-experts", "shared")
    assert_equal_runs(run, train("mixtral", "serial", "--scalevec-experts", "shared"))
    note = "experts: one set of vectors for the 4 routed experts of a layer"
    assert any(note in line for line in run["audit"]["notes"])


def test_an_expert_without_tokens(train):
    """With the distributed optimizer and both overlaps, which wait for every gradient of a bucket."""
    run, serial = (
        train("shared-experts", layout, strategy="dp", sabotage="idle expert")
        for layout in ("ep2-distopt", "serial")
    )
    assert_equal_runs(run, serial)
    busy = train("shared-experts", "serial", strategy="dp")["vectors"]
    [name] = (name for name in busy if re.search(r"layer4\..*experts\.3\..*gamma_in_expert_gate", name))
    # Weight decay alone has moved it.
    assert np.abs(run["vectors"][name] - busy[name]).max() > 1e-3


def test_replicas_of_experts_are_compared(ranks):
    """Two expert-parallel ranks, each twice: copies over expert-data-parallel ranks."""
    world_size, arguments = EXPERT_LAYOUTS["ep2-dp2"]
    flags = ["--scalevec-strategy", "dp", "--exit-interval", "4", "--scalevec-debug-replicas", "2"]
    argv = tiny_gpt("mixtral", *arguments, *flags)
    assert len(ranks.run("train", world_size, argv=argv)[-1]["losses"]) == 4
    sentence = r"after step 2 of this run: .*experts\.local_experts\.0\..* on all expert-data-parallel ranks"
    with pytest.raises(RankFailure, match=sentence):
        ranks.run("train", world_size, argv=argv, sabotage="one copy")


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("mixtral", "ep2-distopt", "tp2-sp-etp1"),
        ("qwen3-moe", "pp2", "tp2-sp"),
        ("shared-experts", "tp2-sp-etp1", "ep2"),
        ("deepseek-v3", "tp2-sp-etp1", "ep2"),
        ("deepseek-v3", "tp2-sp", "pp2"),
    ],
)
def test_a_run_resumes_in_another_layout(ranks, tmp_path, model, first, second):
    """Twenty iterations, and the last ten of them again from the checkpoint. Folded, that one is stock
    Megatron's, where the model has no place for a v norm; the others say why they do not fold.

    Megatron has an optimizer of their own for experts that are spread over ranks, so it resumes no optimizer
    state across the step from one expert-parallel rank to several.
    """
    common = ["--scalevec-strategy", "unified", "--train-iters", "20"]
    common += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    saving = ["--save", str(tmp_path), "--save-interval", "10"]
    world_size, arguments = EXPERT_LAYOUTS[first]
    whole = ranks.run("train", world_size, argv=tiny_gpt(model, *arguments, *common, *saving))
    world_size, arguments = EXPERT_LAYOUTS[second]
    loading = ["--load", str(tmp_path), "--ckpt-step", "10"]
    argv = tiny_gpt(model, *arguments, *common, *loading)
    resumed = ranks.run("train", world_size, argv=argv, by_name=False)
    assert len(whole[-1]["losses"]) == 20 and whole[-1]["losses"][-1] < whole[-1]["losses"][0]
    vectors = [{n: v for r in run for n, v in r["vectors"].items()} for run in (resumed, whole)]
    assert_equal_runs({**resumed[-1], "vectors": vectors[0]}, {**whole[-1], "vectors": vectors[1]}, start=10)
    out = tmp_path / "out"
    fold = {"arguments": ["fold", str(tmp_path), str(out), "--ckpt-step", "10", "--no-check"]}
    if model != "deepseek-v3":
        with pytest.raises(RankFailure, match="normalizes its values"):
            ranks.run("scalevec", **fold)
        return
    ranks.run("scalevec", **fold)
    checkpoints = [str(folder / "iter_0000010") for folder in (tmp_path, out)]
    [[difference]] = ranks.run("logit_differences", first=checkpoints[0], others=checkpoints[1:])
    assert difference < 1e-6
    argv = tiny_gpt(model, *arguments, *common[2:], "--exit-interval", "12", "--load", str(out))
    stock = ranks.run("train", world_size, argv=argv, plugin=False, by_name=False)[-1]
    assert stock["losses"][0] == pytest.approx(whole[-1]["losses"][10], rel=1e-6)
    assert len(stock["losses"]) == 2


@pytest.mark.parametrize(
    ("arguments", "parallel", "stock", "counts"),
    [
        (
            # Mixtral 8x7B
            "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
            "--group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2 "
            "--padded-vocab-size 32000",
            "--expert-model-parallel-size 8 --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2",
            46_702_792_704,
            {"layers": 32, "experts": 8, "hidden": 4096},
        ),
        (
            # Qwen3 30B-A3B
            "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
            "--kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm --num-experts 128 "
            "--moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-pre-softmax "
            "--padded-vocab-size 151936",
            "--expert-model-parallel-size 32 --pipeline-model-parallel-size 4",
            30_532_122_624,
            {"layers": 48, "experts": 128, "hidden": 2048},
        ),
    ],
    ids=["mixtral-8x7b", "qwen3-30b-a3b"],
)
def test_models_of_full_size(ranks, arguments, parallel, stock, counts):
    """Parameters of the published models, and the vectors counted by hand."""
    common = (
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096 "
        "--micro-batch-size 1 --global-batch-size 1024 --train-iters 1000 --lr 1e-4 --bf16 "
        "--transformer-impl local --use-distributed-optimizer --moe-token-dispatcher-type alltoall "
        "--scalevec-strategy hg"
    )
    argv = [*arguments.split(), *parallel.split(), *common.split()]
    [found] = ranks.run("explain_line", arguments=argv)
    assert found["error"] is None and not found["problems"]
    layers, experts, hidden = counts["layers"], counts["experts"], counts["hidden"]
    whole = found["whole_model"]
    assert whole["built_vectors"] == {
        **{f"attention {branch} in": layers for branch in "qkv"},
        "mlp router in": layers,
        "mlp expert_gate in": layers * experts,
        "mlp expert_up in": layers * experts,
        "head logits in": 1,
    }
    # One fused q/k/v and one router in every layer, one fused gate/up in every expert.
    assert whole["linears_converted"] == layers * (1 + 1 + experts)
    assert whole["norm_scales_retired"] == 2 * layers
    assert found["parameters"]["stock"] == stock
    assert found["parameters"]["added"] == layers * (3 + 1 + 2 * experts - 2) * hidden
    own = layers * 2 * experts * hidden
    assert f"{own:,} parameters; --scalevec-experts shared would take {own // experts:,}" in found["text"]
