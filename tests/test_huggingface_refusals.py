"""What an export or an import will not do, and says so; and the command line. No Megatron model is built."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_scalevec.checkpoint.store import Box, Piece, write_checkpoint
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.huggingface.architectures import choose_architecture, config_of, description_of
from megatron_scalevec.huggingface.blocks import blocks_of
from megatron_scalevec.huggingface.description import (
    Description,
    Experts,
    Rope,
    from_arguments,
    megatron_flags,
    to_arguments,
)
from megatron_scalevec.huggingface.exporting import export_checkpoint

SCALEVEC = Path(sys.executable).parent / "scalevec"
SMALL = Description(
    layers=2,
    hidden=32,
    heads=4,
    groups=2,
    head_dim=8,
    width=48,
    vocabulary=96,
    positions=64,
    epsilon=1e-5,
    rope=Rope(10000.0),
    tied=False,
)
EXPERTS = Experts(number=4, chosen=2, width=24, layers=(True, True))


def changed(**facts):
    return Description(**{**vars(SMALL), **facts})


def save(folder, model=SMALL, dtype=torch.float32, make=None, skip=(), extra=(), **args):
    """A stock checkpoint of random numbers, written without Megatron; ``extra`` keys besides."""
    generator = torch.Generator().manual_seed(7)
    pieces = []
    for block in blocks_of(model, "mixtral", model.vocabulary):
        if block.key in skip:
            continue
        stacked = block.layer is not None
        key = f"decoder.layers.{block.key}" if stacked else block.key
        stack, place = ((model.layers,), (block.layer,)) if stacked else ((), ())
        box = Box(place + (0,) * len(block.shape), (1,) * len(stack) + block.shape)

        def draw(sizes=box.sizes):
            return torch.randn(sizes, generator=generator).to(dtype)

        pieces.append(Piece(key, stack + block.shape, dtype, box, make or draw))
    pieces += [Piece(key, (3,), dtype, Box((0,), (3,)), lambda: torch.zeros(3, dtype=dtype)) for key in extra]
    stored = to_arguments(model, "local")
    vars(stored).update(args)
    common = {"args": stored, "iteration": 5, "checkpoint_version": 3.0}
    write_checkpoint(folder, iteration=5, pieces=pieces, objects={}, common=common, common_file=True)
    return folder


def hidden_or_not(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# What no architecture holds


@pytest.mark.parametrize(
    ("name", "value", "lost"),
    [
        ("normalization", "LayerNorm", "LayerNorms"),
        ("swiglu", False, "activation function"),
        ("position_embedding_type", "yarn", "position embeddings"),
        ("rotary_percent", 0.5, "a part of each head"),
        ("rotary_interleaved", True, "interleaved pairs"),
        ("multi_latent_attention", True, "latent attention"),
        ("attention_output_gate", True, "gate on the output"),
        ("window_size", (128, 0), "window"),
        ("softmax_type", "learnable", "softmax"),
        ("qk_l2_norm", True, "L2 norm"),
        ("apply_residual_connection_post_layernorm", True, "residual"),
        ("use_mup", True, "multipliers"),
        ("rotary_seq_len_interpolation_factor", 4, "not known"),
    ],
)
def test_arguments_that_would_be_lost(tmp_path, name, value, lost):
    checkpoint = save(tmp_path / "saved", **{name: value})
    with pytest.raises(ScaleVecError, match=rf"{name} .*{lost}"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert hidden_or_not(tmp_path) == ["saved"]


@pytest.mark.parametrize(
    ("name", "value", "lost"),
    [
        ("moe_shared_expert_intermediate_size", 64, "shared expert"),
        ("moe_router_score_function", "sigmoid", "score function"),
        ("moe_router_enable_expert_bias", True, "expert bias"),
        ("moe_router_topk_scaling_factor", 2.5, "factor"),
        ("moe_router_num_groups", 2, "groups of experts"),
        ("moe_expert_capacity_factor", 1.5, "capacity"),
        ("moe_latent_size", 8, "latent projection"),
        ("moe_router_load_balancing_type", "sinkhorn", "routes"),
        ("moe_layer_freq", [1], "names 1 layers"),
    ],
)
def test_arguments_of_experts_that_would_be_lost(name, value, lost):
    args = to_arguments(changed(experts=EXPERTS), "local")
    setattr(args, name, value)
    with pytest.raises(ScaleVecError, match=rf"{name} .*{lost}"):
        from_arguments(args)


def test_another_factor_of_llama3_positions_is_refused():
    args = to_arguments(changed(rope=Rope(500000.0, llama3=True)), "local")
    args.rope_scaling_factor = 32.0
    with pytest.raises(ScaleVecError, match="rope_scaling_factor 32.0.*not known"):
        from_arguments(args)


@pytest.mark.parametrize(
    ("model", "wanted", "said"),
    [
        (changed(head_norms=("q", "k", "v")), "qwen3", "norm on v of every attention layer would be lost"),
        (changed(head_norms=("q", "k")), "llama", "norm on q and k .*use --format qwen3 or scalevec"),
        (changed(head_norms=("k",)), "qwen3", "always has norms on q and k"),
        (SMALL, "qwen3", "always has norms on q and k"),
        (SMALL, "qwen2", "always has biases on q, k and v"),
        (changed(qkv_bias=True), "llama", "biases of q, k and v would be lost"),
        (changed(qkv_bias=True, linear_bias=True), "qwen2", "biases of the linears would be lost"),
        (changed(qkv_bias=True, head_dim=16), "qwen2", "size of hidden / heads"),
        (changed(experts=EXPERTS), "llama", "experts would be lost"),
        (SMALL, "mixtral", "always has experts"),
        (changed(experts=Experts(4, 2, 24, (False, True))), "mixtral", "in every layer"),
        (changed(experts=Experts(4, 2, 24, (True, True), renormalized=False)), "mixtral", "sum to one"),
        (
            changed(experts=EXPERTS, head_norms=("q", "k", "v")),
            "auto",
            "no architecture.*qwen3_moe: the norm on v",
        ),
        (
            changed(experts=EXPERTS, head_norms=("q", "k", "v")),
            "qwen3_moe",
            "no other format holds it either",
        ),
        (SMALL, "lama", "unknown format 'lama'.*Did you mean 'llama'"),
    ],
)
def test_formats_that_cannot_hold_a_model(model, wanted, said):
    with pytest.raises(ScaleVecError, match=said):
        choose_architecture(model, wanted)


def test_tensors_that_nobody_asks_for_stop_an_export(tmp_path):
    checkpoint = save(tmp_path / "saved", extra=["decoder.layers.self_attention.linear_qkv.adapter"])
    with pytest.raises(ScaleVecError, match="holds decoder.layers.self_attention.linear_qkv.adapter.*lost"):
        export_checkpoint(checkpoint, tmp_path / "out")
    # As vectors do whose strategy the arguments do not name.
    checkpoint = save(tmp_path / "other", extra=["decoder.layers.mlp.linear_fc1.gamma_in_up"])
    with pytest.raises(ScaleVecError, match="gamma_in_up.*lost"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert hidden_or_not(tmp_path) == ["other", "saved"]


def test_prediction_layers_are_left_out_on_request_only(tmp_path):
    checkpoint = save(tmp_path / "saved", extra=["mtp.layers.eh_proj.weight"])
    with pytest.raises(ScaleVecError, match="multi-token-prediction.*--drop-mtp"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert export_checkpoint(checkpoint, tmp_path / "out", drop_mtp=True).architecture == "llama"


def test_tensors_that_are_not_there_or_of_another_shape(tmp_path):
    checkpoint = save(tmp_path / "saved", skip=["decoder.final_layernorm.weight"])
    with pytest.raises(ScaleVecError, match="lacks decoder.final_layernorm.weight"):
        export_checkpoint(checkpoint, tmp_path / "out")
    checkpoint = save(tmp_path / "other", ffn_hidden_size=64)
    with pytest.raises(ScaleVecError, match=r"linear_fc1.weight \[2, 96, 32\].*\[2, 128, 32\]"):
        export_checkpoint(checkpoint, tmp_path / "out")


# Configs that Megatron cannot hold


def config(model=SMALL, wanted="auto", **entries):
    architecture = choose_architecture(model, wanted)
    return {**config_of(model, architecture, model.vocabulary, "float32", 0.02), **entries}


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        changed(tied=True, qkv_bias=True, linear_bias=True, rope=Rope(5e5, llama3=True), head_dim=16),
        changed(qkv_bias=True),
        changed(head_norms=("q", "k"), head_dim=16),
        changed(experts=EXPERTS, width=24),
        changed(experts=Experts(4, 2, 24, (False, True), renormalized=False), head_norms=("q", "k")),
    ],
)
def test_configs_and_arguments_say_what_the_description_says(model):
    assert description_of(config(model))[0] == model
    assert from_arguments(to_arguments(model, "local")) == model


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'; this version reads llama, qwen2"),
        ({"model_type": "scalevec"}, "continue from the Megatron checkpoint"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
        ({"num_key_value_heads": None}, "lacks num_key_value_heads"),
        ({"attention_bias": True}, "attention_bias True and mlp_bias False"),
        ({"rope_theta": 10000.5}, "integer"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE by 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE by 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "RoPE by 'llama3'.*32.0"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 64},
            "64",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 1, "num_local_experts": 4}, "pre-softmax"),
    ],
)
def test_configs_that_cannot_be_imported(entries, said):
    with pytest.raises(ScaleVecError, match=said):
        description_of(config(**entries))


def test_the_flags_that_checkpoint_arguments_do_not_restore():
    model = changed(head_norms=("q", "k"), rope=Rope(5e5, llama3=True))
    flags = megatron_flags(model, "local", restored=False)
    assert flags == ["--use-rope-scaling", "--norm-epsilon", "1e-05", "--qk-layernorm"]
    assert {"--swiglu", "--num-query-groups", "--disable-bias-linear"} <= set(megatron_flags(model, "local"))


def import_folder(*arguments, **options):
    from megatron_scalevec.huggingface.importing import import_folder

    return import_folder(*arguments, **options)


# Reading weights takes safetensors, which the main environment has.
with_safetensors = pytest.mark.needs_training


@pytest.fixture
def exported(tmp_path):
    folder = tmp_path / "hf"
    export_checkpoint(save(tmp_path / "saved"), folder, file_bytes=20_000)
    return folder


@with_safetensors
def test_several_files_and_their_index(tmp_path, exported):
    from safetensors import safe_open

    index = json.loads((exported / "model.safetensors.index.json").read_text())
    files = sorted(exported.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    places = {}
    for file in files:
        assert file.stat().st_size < 20_000 + 2_000 or len(list(safe_open(file, "pt").keys())) == 1
        places |= dict.fromkeys(safe_open(file, "pt").keys(), file.name)
    assert places == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(
        safe_open(exported / name, "pt").get_tensor(key).nbytes for key, name in places.items()
    )
    import_folder(exported, tmp_path / "back", vocabulary_multiple=32)


@with_safetensors
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: sorted(folder.glob("model-*"))[0].unlink(), "lacks model-00001-of"),
        (lambda folder: sorted(folder.glob("model-*"))[1].write_bytes(b"x" * 99), "cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "no index"),
        (lambda folder: _set(folder, num_hidden_layers=1), "holds model.layers.1.* and .*lost"),
        (lambda folder: _set(folder, num_hidden_layers=3), "lacks model.layers.2"),
        (lambda folder: _set(folder, intermediate_size=40), r"gate_proj.weight is \[48, 32\].*\[40, 32\]"),
        (lambda folder: _set(folder, model_type="qwen2"), "lacks model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_folders_that_cannot_be_imported(tmp_path, exported, damage, said):
    damage(exported)
    with pytest.raises(ScaleVecError, match=said):
        import_folder(exported, tmp_path / "back")
    assert hidden_or_not(tmp_path) == ["hf", "saved"]


def _set(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@with_safetensors
def test_padding_of_the_vocabulary(tmp_path):
    from megatron_scalevec.checkpoint.store import CheckpointReader

    checkpoint = save(tmp_path / "saved")
    export_checkpoint(checkpoint, tmp_path / "hf", vocabulary=90)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 90
    import_folder(tmp_path / "hf", tmp_path / "back", vocabulary_multiple=64)
    before, after = CheckpointReader(checkpoint), CheckpointReader(tmp_path / "back")
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert after.tensors[key].shape == (128, 32)
        assert torch.equal(after.read(key)[:90], before.read(key)[:90])
        assert not after.read(key)[90:].any()
    assert after.args.padded_vocab_size == 128
    with pytest.raises(ScaleVecError, match="--vocab-size 97.*96 rows"):
        export_checkpoint(checkpoint, tmp_path / "more", vocabulary=97)


@with_safetensors
def test_layers_of_both_implementations_find_their_norms(tmp_path):
    """Before experts, TransformerEngine's layers save the norm under its own name."""
    from megatron_scalevec.checkpoint.store import CheckpointReader

    model = changed(experts=EXPERTS, width=24)
    folder = tmp_path / "hf"
    names = {}
    _write_hf(folder, model)
    for implementation in ("local", "transformer_engine"):
        target = tmp_path / implementation
        import_folder(folder, target, implementation=implementation, vocabulary_multiple=1)
        reader = CheckpointReader(target)
        names[implementation] = reader.tensors.keys()
        assert reader.args.transformer_impl == implementation
        states = set(reader.objects)
        assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4" in states
        assert "decoder.layers.pre_mlp_layernorm._extra_state/shard_0_2" in states
        again = tmp_path / f"{implementation}-hf"
        export_checkpoint(target, again)
        assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert names["local"] - names["transformer_engine"] == {"decoder.layers.mlp.linear_fc1.layer_norm_weight"}
    assert names["transformer_engine"] - names["local"] == {"decoder.layers.pre_mlp_layernorm.weight"}


def _write_hf(folder, model):
    from megatron_scalevec.huggingface.safetensors_files import Entry, write_file

    architecture = choose_architecture(model, "auto")
    entries = [
        Entry(name, shape, torch.float32)
        for block in blocks_of(model, architecture.name, model.vocabulary)
        for name, shape in zip(block.names, block.shapes)
    ]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(model)))
    write_file(folder / "model.safetensors", entries, (torch.randn(entry.shape) for entry in entries))


# Folders


def test_a_tokenizer_is_copied_and_nothing_else_of_its_folder(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        (tokenizer / name).write_text('"theirs"')
    checkpoint = save(tmp_path / "saved")
    export_checkpoint(checkpoint, tmp_path / "hf", tokenizer=tokenizer)
    assert hidden_or_not(tmp_path / "hf") == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    with pytest.raises(ScaleVecError, match="holds no tokenizer files"):
        export_checkpoint(checkpoint, tmp_path / "other", tokenizer=tmp_path / "saved")


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    checkpoint = save(tmp_path / "saved")
    (tmp_path / "there").mkdir()
    with pytest.raises(ScaleVecError, match="exists already"):
        export_checkpoint(checkpoint, tmp_path / "there")
    with pytest.raises(ScaleVecError, match="or is no folder; create it"):
        export_checkpoint(checkpoint, tmp_path / "no" / "parent")

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(checkpoint, tmp_path / "out", progress=stop)
    assert hidden_or_not(tmp_path) == ["saved", "there"]


# The command


def scalevec(*arguments, cwd, **options):
    return subprocess.run(
        [str(SCALEVEC), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        **options,
    )


@with_safetensors
def test_out_and_back_by_command(tmp_path):
    save(tmp_path / "saved")
    out = scalevec("export", "saved", "hf", "--format", "llama", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "hf: llama, 21 tensors, 21,664 parameters, from iteration 5." in out.stdout
    back = scalevec("import", "hf", "back", "--make-vocab-size-divisible-by", "32", cwd=tmp_path)
    assert back.returncode == 0, back.stderr
    assert "--load back --use-checkpoint-args --norm-epsilon 1e-05" in back.stdout
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert hidden_or_not(tmp_path) == ["back", "hf", "saved"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "nothing", "out"], "nothing is not a folder"),
        (["export", ".", "out"], "latest_checkpointed_iteration.txt"),
        (["export", "."], "the following arguments are required: OUT"),
        (["export", ".", "out", "--vocab-size", "many"], "invalid int value: 'many'"),
        (["import", ".", "out"], "config.json cannot be read"),
        (["import", ".", "out", "--transformer-impl", "te"], "choose one of transformer_engine, local"),
        (["import", ".", "out", "--make-vocab-size-divisible-by", "0"], "give a positive number"),
    ],
)
def test_bad_input_by_command(tmp_path, arguments, said):
    from megatron_scalevec import cli

    run = _Run(tmp_path, arguments, cli.main)
    assert run.code == 2
    assert said in run.error and run.error.count("scalevec: error") == 1
    assert not hidden_or_not(tmp_path)


class _Run:
    """The command in this process, which spares imports."""

    def __init__(self, cwd, arguments, main):
        import contextlib
        import io

        stream, before = io.StringIO(), os.getcwd()
        os.chdir(cwd)
        try:
            with contextlib.redirect_stderr(stream):
                self.code = main(arguments)
        finally:
            os.chdir(before)
        self.error = stream.getvalue()


def test_a_request_to_end_leaves_nothing_behind(tmp_path):
    from forked import Child

    checkpoint = save(tmp_path / "saved")

    def work(ready):
        from megatron_scalevec.huggingface import exporting
        from megatron_scalevec.huggingface.commands import export_main

        original = exporting.write_file

        def slow(path, entries, tensors):
            def waiting():
                for tensor in tensors:
                    yield tensor
                    ready()
                    signal.pause()

            original(path, entries, waiting())

        exporting.write_file = slow
        os._exit(export_main([str(checkpoint), str(tmp_path / "out")]))

    child = Child(work)
    child.wait_ready()
    assert len(hidden_or_not(tmp_path)) == 2
    child.send(signal.SIGTERM)
    assert child.wait() == 130
    assert hidden_or_not(tmp_path) == ["saved"]


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """Thirty layers need no more than one."""
    from forked import in_child

    sizes = {"hidden": 256, "heads": 4, "head_dim": 64, "groups": 4, "width": 4096, "vocabulary": 64}
    model = changed(layers=30, **sizes)
    checkpoint = save(tmp_path / "saved", model)
    largest = 2 * 4096 * 256 * 4

    def peak():
        import resource

        from megatron_scalevec.huggingface.commands import export_main  # noqa: F401 - counted before

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        export_checkpoint(checkpoint, tmp_path / "hf")
        return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    grown = in_child(peak)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 40 * largest
    assert grown < 6 * largest, f"{grown / largest:.1f} times the largest tensor"


def test_arguments_are_plain_values():
    """Megatron reads checkpoints with a list of types that are allowed."""
    args = to_arguments(changed(experts=EXPERTS), "local")
    assert isinstance(args, Namespace)
    assert all(isinstance(value, (bool, int, float, str, list)) for value in vars(args).values())
