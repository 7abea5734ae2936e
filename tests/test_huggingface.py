"""Checkpoints to Hugging Face and back: logits beside transformers', values one by one, bits."""

import json
import math

import numpy as np
import pytest
import torch
from ranks.arguments import LAYOUTS, tiny_gpt

from megatron_scalevec.errors import ScaleVecError

pytestmark = pytest.mark.needs_training

TOKENS = [int(token) for token in torch.randint(0, 120, (24,), generator=torch.Generator().manual_seed(5))]
SMALL = ("--num-layers", "2", "--seq-length", "32")
MOE = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "24")

# Name to the architecture that `auto` takes, Megatron's arguments, and the strategy.
MODELS = {
    "llama": ("llama", ("llama",), None),
    "llama tied, all biases, llama3 RoPE, wide heads": (
        "llama",
        ("gpt2", "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope")
        + ("--kv-channels", "16", "--use-rope-scaling"),
        None,
    ),
    "llama zero-centered": ("llama", ("llama",), None),
    "qwen2": ("qwen2", ("llama", "--add-qkv-bias", "--rotary-base", "500000"), None),
    "qwen3": ("qwen3", ("qk-norm", "--kv-channels", "16", "--norm-epsilon", "1e-3"), None),
    "mixtral": ("mixtral", ("llama", *MOE), None),
    "qwen3_moe": ("qwen3_moe", ("qk-norm", *MOE), None),
    "qwen3_moe some layers": (
        "qwen3_moe",
        ("qk-norm", *MOE, "--moe-layer-freq", "[0,1]", "--moe-router-pre-softmax"),
        None,
    ),
    "hg": ("llama", ("llama",), {"strategy": "hg"}),
    "or": ("llama", ("one-group",), {"strategy": "or"}),
    "none": ("llama", ("llama",), {"strategy": "none"}),
    "iwd": ("llama", ("llama",), {"strategy": "iwd"}),
    "foldable everywhere": (
        "llama",
        ("llama",),
        {
            "strategy": "unified-foldable",
            "reparam": "unit",
            "sites": ("attention", "mlp", "head", "projections"),
        },
    ),
    "dp, bias, some branches": (
        "qwen2",
        ("llama", "--add-qkv-bias"),
        {"strategy": "dp", "branches_off": ("k", "up")},
    ),
    "dnp without v": ("qwen3", ("llama",), {"strategy": "dnp", "branches_off": ("v",)}),
    "unified": ("scalevec", ("llama",), {"strategy": "unified"}),
    "unified, bias, one group, no q norm": (
        "scalevec",
        ("one-group", "--add-qkv-bias"),
        {"strategy": "unified", "branches_off": ("q",), "reparam": "unit"},
    ),
}
STOCK = [name for name, (_, _, strategy) in MODELS.items() if strategy is None and "centered" not in name]


def arguments(name, *more):
    kind, *flags = MODELS[name][1]
    return tiny_gpt(kind, *SMALL, *flags, *more)


def export(checkpoint, folder, **options):
    from megatron_scalevec.huggingface.exporting import export_checkpoint

    return export_checkpoint(checkpoint, folder, **options)


def transformers_model(folder, **options):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def transformers_logits(folder, **options):
    model = transformers_model(folder, **options)
    return model(torch.tensor(TOKENS)[None], use_cache=False).logits[0].double().numpy()


def assert_close(found, expected, tolerance):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Every model as a Megatron checkpoint and as its export: name to (checkpoint, export, logits)."""
    root = tmp_path_factory.mktemp("models")
    cases, folders = [], {}
    for number, (name, (_, _, strategy)) in enumerate(MODELS.items()):
        folders[name] = root / f"{number}", root / f"{number}-exported"
        cases.append({"argv": arguments(name), "folder": str(folders[name][0]), "strategy": strategy})
        cases[-1]["zero_centered"] = "zero-centered" in name
    [made] = ranks.run("save_models", timeout=600, cases=cases, tokens=TOKENS)
    found = {}
    for (name, (architecture, _, _)), case in zip(MODELS.items(), made):
        checkpoint, folder = folders[name]
        assert export(checkpoint, folder).architecture == architecture, name
        found[name] = checkpoint, folder, case["logits"]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(saved, name):
    _, folder, expected = saved[name]
    assert np.abs(expected).max() > 0.5
    assert_close(transformers_logits(folder), expected, 1e-5)


@pytest.fixture(scope="module")
def imported(saved, tmp_path_factory):
    """Every stock model's export as a Megatron checkpoint again."""
    from megatron_scalevec.huggingface.importing import import_folder

    root = tmp_path_factory.mktemp("imported")
    found = {}
    for number, name in enumerate(STOCK):
        target = root / str(number)
        made = import_folder(saved[name][1], target, implementation="local", vocabulary_multiple=1)
        found[name] = target, made
    return found


def test_import_of_export_is_the_same_bit_by_bit(saved, imported):
    from megatron_scalevec.checkpoint.store import CheckpointReader

    for name in STOCK:
        before, after = CheckpointReader(saved[name][0]), CheckpointReader(imported[name][0])
        assert after.tensors.keys() == before.tensors.keys(), name
        for key, stored in before.tensors.items():
            assert after.tensors[key].shape == stored.shape, (name, key)
            assert after.tensors[key].dtype == stored.dtype, (name, key)
            assert torch.equal(after.read(key), before.read(key)), (name, key)
        assert set(before.objects) <= set(after.objects), name


def test_megatron_computes_the_same_logits_after_an_import(ranks, saved, imported):
    """With the flags that the import wrote down and nothing else about the model."""
    general = (
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --seq-length 32"
    )
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 127"
    cases = []
    for folder, _ in imported.values():
        written = (folder / "megatron_arguments.txt").read_text().split()
        assert not {"--vocab-size", "--seq-length"} & set(written)
        argv = [*general.split(), *tokenizer.split(), "--use-cpu-initialization", *written]
        cases.append({"argv": argv, "folder": str(folder / "release")})
    [found] = ranks.run("logits_of_checkpoints", timeout=600, cases=cases, tokens=TOKENS)
    for name, logits in zip(imported, found):
        np.testing.assert_allclose(logits, saved[name][2], rtol=0, atol=1e-6, err_msg=name)


def test_what_transformers_saves_can_be_imported(saved, tmp_path):
    """Its own layout of files and config, and the same numbers as ours."""
    from megatron_scalevec.checkpoint.store import CheckpointReader
    from megatron_scalevec.huggingface.importing import import_folder

    for number, name in enumerate(STOCK):
        folder = tmp_path / f"{number}"
        transformers_model(saved[name][1]).save_pretrained(folder, max_shard_size="40KB")
        import_folder(folder, tmp_path / f"{number}-megatron", implementation="local", vocabulary_multiple=1)
        before = CheckpointReader(saved[name][0])
        after = CheckpointReader(tmp_path / f"{number}-megatron")
        assert after.tensors.keys() == before.tensors.keys(), name
        for key in before.tensors:
            assert torch.equal(after.read(key), before.read(key)), (name, key)


@pytest.mark.parametrize("name", ["unified", "foldable everywhere", "qwen3"])
def test_bf16(ranks, tmp_path, name):
    case = {"argv": arguments(name, "--bf16"), "folder": str(tmp_path / "saved"), "strategy": MODELS[name][2]}
    [[made]] = ranks.run("save_models", cases=[case], tokens=TOKENS)
    export(tmp_path / "saved", tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_close(transformers_logits(tmp_path / "exported"), made["logits"], 2e-2)


# Where each value lands

LAYER = "decoder.layers.{}."
QKV, FC1 = "self_attention.linear_qkv.", "mlp.linear_fc1."
# Hugging Face's tensor of a layer to the parameters of Megatron's layer whose product it holds.
DENSE = {
    "input_layernorm": ["input_layernorm.weight"],
    "post_attention_layernorm": ["pre_mlp_layernorm.weight"],
    "self_attn.q_proj": [QKV + "weight"],
    "self_attn.k_proj": [QKV + "weight"],
    "self_attn.v_proj": [QKV + "weight"],
    "self_attn.o_proj": ["self_attention.linear_proj.weight"],
    "mlp.gate_proj": [FC1 + "weight"],
    "mlp.up_proj": [FC1 + "weight"],
    "mlp.down_proj": ["mlp.linear_fc2.weight"],
}
QK_NORMS = {
    "self_attn.q_norm": ["self_attention.q_layernorm.weight"],
    "self_attn.k_norm": ["self_attention.k_layernorm.weight"],
}
WHOLE = {
    "model.embed_tokens.weight": ["embedding.word_embeddings.weight"],
    "model.norm.weight": ["decoder.final_layernorm.weight"],
    "lm_head.weight": ["output_layer.weight"],
}


def product_parts(name):
    return [f"{name}_beta", f"{name}_alpha"]


def scaled(branch, linear, *sides):
    return [
        f"{linear}weight",
        *(p for side in sides for p in product_parts(f"{linear}gamma_{side}_{branch}")),
    ]


UNIFIED = {
    **DENSE,
    **{f"self_attn.{b}_proj": scaled(b, QKV, "in") for b in "qkv"},
    **{f"mlp.{b}_proj": scaled(b, FC1, "in", "out") for b in ("gate", "up")},
    **{f"self_attn.{b}_norm": product_parts(f"self_attention.{b}_layernorm.gamma") for b in "qk"},
    "self_attn.v_proj.norm": product_parts("self_attention.v_layernorm.gamma"),
}
FOLDABLE = {
    **DENSE,
    **{f"self_attn.{b}_proj": scaled(b, QKV, "in", "out") for b in "qkv"},
    **{f"mlp.{b}_proj": scaled(b, FC1, "in", "out") for b in ("gate", "up")},
}
FINAL = {**WHOLE, "model.norm.weight": product_parts("decoder.final_layernorm.gamma")}


def experts_of(block, gate, up, down):
    names = {f"{block}.gate": ["mlp.router.weight"]}
    for expert in range(4):
        own = f"mlp.experts.local_experts.{expert}."
        theirs = f"{block}.experts.{expert}"
        names |= {
            f"{theirs}.{gate}": [own + "linear_fc1.weight"],
            f"{theirs}.{up}": [own + "linear_fc1.weight"],
        }
        names[f"{theirs}.{down}"] = [own + "linear_fc2.weight"]
    dense = {name: parts for name, parts in DENSE.items() if not name.startswith("mlp.")}
    return {**dense, **names}


LANDS = {
    "llama": (("llama",), None, DENSE, WHOLE),
    "qwen2": (
        ("llama", "--add-qkv-bias"),
        None,
        {**DENSE, **{f"self_attn.{b}_proj.bias": [QKV + "bias"] for b in "qkv"}},
        WHOLE,
    ),
    "qwen3": (("qk-norm",), None, {**DENSE, **QK_NORMS}, WHOLE),
    "mixtral": (("llama", *MOE), None, experts_of("block_sparse_moe", "w1", "w3", "w2"), WHOLE),
    "qwen3_moe": (
        ("qk-norm", *MOE),
        None,
        {**experts_of("mlp", "gate_proj", "up_proj", "down_proj"), **QK_NORMS},
        WHOLE,
    ),
    "scalevec": (("llama",), {"strategy": "unified"}, UNIFIED, FINAL),
    "llama from unified-foldable": (("llama",), {"strategy": "unified-foldable"}, FOLDABLE, FINAL),
}


@pytest.fixture(scope="module")
def constants(ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("constants")
    cases = [
        {"argv": tiny_gpt(flags[0], *SMALL, *flags[1:]), "folder": str(root / str(number))}
        | {"strategy": strategy, "constants": True}
        for number, (flags, strategy, _, _) in enumerate(LANDS.values())
    ]
    [made] = ranks.run("save_models", timeout=600, cases=cases, tokens=TOKENS)
    return {name: (case["folder"], result["constants"]) for name, case, result in zip(LANDS, cases, made)}


@pytest.mark.parametrize("name", LANDS)
def test_every_constant_lands_in_its_place(constants, tmp_path, name):
    """Every parameter was filled with a number of its own, so a swap, a hole or an old value shows."""
    from safetensors.torch import load_file

    checkpoint, values = constants[name]
    _, _, layer_map, whole_map = LANDS[name]
    architecture = export(checkpoint, tmp_path / "exported").architecture
    assert architecture == name.split()[0]
    found = load_file(tmp_path / "exported" / "model.safetensors")
    expected = dict(whole_map)
    for layer in range(2):
        for theirs, ours in layer_map.items():
            suffix = "" if theirs.endswith(".bias") else ".weight"
            parts = [LAYER.format(layer) + part for part in ours]
            expected[f"model.layers.{layer}.{theirs}{suffix}"] = parts
    assert found.keys() == expected.keys()
    used = {part for parts in expected.values() for part in parts}
    retired = {part for part in values if values[part] == 1.0}
    assert used | retired == values.keys(), "every parameter has a place"
    for tensor_name, parts in expected.items():
        tensor = found[tensor_name]
        value = math.prod(values[part] for part in parts)
        torch.testing.assert_close(
            tensor, torch.full_like(tensor, value), rtol=1e-6, atol=0, msg=f"{tensor_name}: not {value}"
        )


# Folding, unfolding and these tools


@pytest.mark.parametrize("name", ["hg", "foldable everywhere"])
def test_an_export_is_that_of_the_folded_checkpoint(saved, tmp_path, name):
    from safetensors.torch import load_file

    from megatron_scalevec.checkpoint.commands import fold_checkpoint

    checkpoint, folder, _ = saved[name]
    fold_checkpoint(checkpoint, tmp_path / "folded", check=False)
    export(tmp_path / "folded", tmp_path / "exported")
    first, second = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "exported"))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("mixtral", {"strategy": "unified-foldable"}),
        ("qwen3_moe some layers", {"strategy": "dnp", "branches_off": ("v",)}),
    ],
)
def test_experts_are_exported_after_folding(ranks, tmp_path, name, strategy):
    from megatron_scalevec.checkpoint.commands import fold_checkpoint

    case = {"argv": arguments(name), "folder": str(tmp_path / "trained"), "strategy": strategy}
    [[made]] = ranks.run("save_models", cases=[case], tokens=TOKENS)
    with pytest.raises(ScaleVecError, match="make a stock checkpoint of it first"):
        export(tmp_path / "trained", tmp_path / "exported")
    fold_checkpoint(tmp_path / "trained", tmp_path / "folded", check=False)
    assert export(tmp_path / "folded", tmp_path / "exported").architecture == MODELS[name][0]
    assert_close(transformers_logits(tmp_path / "exported"), made["logits"], 1e-5)


def test_import_to_a_strategy(ranks, saved, tmp_path):
    from megatron_scalevec.huggingface.importing import import_unfolded

    said = []
    _, folder, expected = saved["llama"]
    import_unfolded(
        folder,
        tmp_path / "start",
        "unified-foldable",
        implementation="local",
        vocabulary_multiple=1,
        say=said.append,
    )
    assert any(text.startswith("checked: ") for text in said), said
    assert sorted(path.name for path in (tmp_path / "start").iterdir()) == [
        *("latest_checkpointed_iteration.txt", "megatron_arguments.txt", "release")
    ]
    case = {
        "argv": arguments("llama"),
        "folder": str(tmp_path / "start" / "release"),
        "strategy": {"strategy": "unified-foldable"},
    }
    [[logits]] = ranks.run("logits_of_checkpoints", cases=[case], tokens=TOKENS)
    assert_close(logits, expected, 1e-5)
    export(tmp_path / "start", tmp_path / "again")
    assert_close(transformers_logits(tmp_path / "again"), expected, 1e-5)


# Whole runs


def test_a_trained_checkpoint_of_two_ranks(ranks, tmp_path):
    """From the real training loop, sharded, with optimizer state beside the model."""
    world_size, layout = LAYOUTS["tp2-sp"]
    argv = tiny_gpt("llama", *SMALL, *layout, "--scalevec-strategy", "unified")
    ranks.run("train", world_size, argv=[*argv, "--save", str(tmp_path / "run"), "--save-interval", "10"])
    export(tmp_path / "run", tmp_path / "exported")
    case = {
        "argv": tiny_gpt("llama", *SMALL, "--padded-vocab-size", "128"),
        "folder": str(tmp_path / "run" / "iter_0000010"),
        "strategy": {"strategy": "unified"},
    }
    [[expected]] = ranks.run("logits_of_checkpoints", cases=[case], tokens=TOKENS)
    assert_close(transformers_logits(tmp_path / "exported"), expected, 1e-5)


def test_training_starts_from_an_import(ranks, tmp_path):
    """Megatron's own loading, with ``--use-checkpoint-args`` and the flags that the import names, beside a
    start from the checkpoint that was exported."""
    from megatron_scalevec.huggingface.importing import import_folder

    model = arguments("qwen3", "--padded-vocab-size", "128")
    case = {"argv": model, "folder": str(tmp_path / "saved")}
    ranks.run("save_models", cases=[case], tokens=TOKENS)
    export(tmp_path / "saved", tmp_path / "exported")
    made = import_folder(tmp_path / "exported", tmp_path / "start", implementation="local")
    assert made.flags_to_give == ("--norm-epsilon", "0.001", "--qk-layernorm")
    general = [
        *"--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --seed 1234 --lr 1e-9".split(),
        *"--min-lr 0 --lr-warmup-iters 0".split(),
        *"--mock-data --split 99,1,0 --eval-iters 0 --eval-interval 100".split(),
        *"--tokenizer-type NullTokenizer --vocab-size 127 --seq-length 32".split(),
        *"--transformer-impl local --use-cpu-initialization".split(),
    ]
    start = ["--load", str(tmp_path / "start"), "--use-checkpoint-args", *made.flags_to_give]
    [run] = ranks.run("train", argv=[*general, *start], by_name=False)
    saved = ["--load", str(tmp_path / "saved"), "--finetune"]
    [expected] = ranks.run("train", argv=[*model, *general, *saved], by_name=False)
    assert len(run["losses"]) == 2
    np.testing.assert_allclose(run["losses"], expected["losses"], rtol=1e-6)
