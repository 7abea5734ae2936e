"""A checkpoint made of a Hugging Face folder has all that TransformerEngine's layers ask for."""

import json

import pytest
import torch


@pytest.mark.parametrize("experts", ["none", "sequential", "grouped"])
def test_every_entry_of_a_model_is_in_an_imported_checkpoint(te_ranks, tmp_path, experts):
    from megatron_scalevec.checkpoint.store import CheckpointReader
    from megatron_scalevec.huggingface.architectures import ARCHITECTURES, config_of
    from megatron_scalevec.huggingface.blocks import blocks_of
    from megatron_scalevec.huggingface.description import Description, Experts, Rope
    from megatron_scalevec.huggingface.importing import import_folder
    from megatron_scalevec.huggingface.safetensors_files import Entry, write_file

    # The sizes of ranks.models.
    model = Description(
        layers=2,
        hidden=32,
        heads=4,
        groups=2,
        head_dim=8,
        width=48,
        vocabulary=64,
        positions=16,
        epsilon=1e-5,
        rope=Rope(10000.0),
        tied=False,
        head_norms=("q", "k"),
        experts=None if experts == "none" else Experts(4, 2, 24, (True, True)),
    )
    architecture = ARCHITECTURES["qwen3" if experts == "none" else "qwen3_moe"]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(model, architecture, 64, "float32", 0.02)))
    entries = [
        Entry(name, shape, torch.float32)
        for block in blocks_of(model, architecture.name, 64)
        for name, shape in zip(block.names, block.shapes)
    ]
    write_file(folder / "model.safetensors", entries, (torch.zeros(entry.shape) for entry in entries))
    import_folder(folder, tmp_path / "megatron", vocabulary_multiple=64)
    reader = CheckpointReader(tmp_path / "megatron")
    [asked_for] = te_ranks.run("stock_entries", kind="qk-norm", experts=experts)
    tensors = {key: shape for key, shape in asked_for.items() if shape is not None}
    assert tensors == {key: stored.shape for key, stored in reader.tensors.items()}
    states = asked_for.keys() - tensors.keys()
    assert any(state.startswith("decoder.layers.self_attention.q_layernorm.") for state in states)
    assert states <= set(reader.objects)
