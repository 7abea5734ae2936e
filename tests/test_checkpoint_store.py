"""Checkpoints read and written as files, against Megatron's own reading and writing."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from forked import Child, in_child

from megatron_scalevec import ScaleVecError
from megatron_scalevec.checkpoint.layout import find_checkpoint, missing_parts, whole_iterations
from megatron_scalevec.checkpoint.store import (
    PEAK_BYTES,
    PEAK_TENSORS,
    Box,
    CheckpointReader,
    Piece,
    write_checkpoint,
)
from megatron_scalevec.lifetime import stopped_by_signals

DP = {"strategy": "dp"}


def copy(source, target, **options):
    """Everything of a checkpoint, piece by piece."""
    reader = CheckpointReader(source)
    write_checkpoint(
        target,
        iteration=reader.iteration,
        pieces=[
            Piece(key, stored.shape, stored.dtype, box, lambda key=key, box=box: reader.read(key, box))
            for key, stored in reader.tensors.items()
            for box in stored.chunks
        ],
        objects={name: lambda name=name: reader.read_object(name) for name in reader.objects},
        common=reader.common,
        common_file=reader.has_common_file,
        **options,
    )


def pieces_of(tensors):
    return [
        Piece(key, tuple(t.shape), t.dtype, Box((0,) * t.dim(), tuple(t.shape)), lambda t=t: t)
        for key, t in tensors.items()
    ]


def small(target, tensors=None, **options):
    tensors = {"a.weight": torch.ones(4, 3)} if tensors is None else tensors
    pieces = options.pop("pieces", None) or pieces_of(tensors)
    write_checkpoint(
        target, iteration=3, pieces=pieces, objects={}, common={"iteration": 3}, common_file=False, **options
    )


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A model with scale vectors, saved by Megatron on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("saved")
    parameters = ranks.run("save_model", 2, folder=str(folder), config=DP, tensor_model_parallel_size=2)
    return folder, parameters


def test_tensors_are_read_whole_and_in_part(saved):
    folder, parameters = saved
    reader = CheckpointReader(folder)
    assert reader.iteration == 7 and reader.args.num_query_groups == 2 and reader.common["iteration"] == 7
    key = "decoder.layers.self_attention.linear_qkv.scalevec_weight"
    stored = reader.tensors[key]
    assert stored.shape == (2, 64, 32) and stored.dtype == torch.float32 and len(stored.chunks) == 4
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    whole = np.concatenate([rank[name] for rank in parameters])
    np.testing.assert_array_equal(reader.read(key)[1], whole)
    # A block across the border of the two ranks' chunks.
    np.testing.assert_array_equal(reader.read(key, Box((1, 20, 5), (1, 30, 7)))[0], whole[20:50, 5:12])
    # gate and up lie behind each other over all ranks, whatever the layout was.
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    halves = [np.concatenate(parts) for parts in zip(*(np.split(rank[name], 2) for rank in parameters))]
    fc1 = reader.read("decoder.layers.mlp.linear_fc1.scalevec_weight")[0]
    np.testing.assert_array_equal(fc1, np.concatenate(halves))
    with pytest.raises(KeyError):
        reader.read("no.such.weight")


def test_megatron_loads_what_was_written(ranks, saved, tmp_path):
    folder, _ = saved
    told = []
    copy(folder, tmp_path / "copy", done=told.append)
    first, second = CheckpointReader(folder), CheckpointReader(tmp_path / "copy")
    assert first.tensors == second.tensors and first.objects == second.objects
    assert vars(first.args) == vars(second.args) and first.has_common_file == second.has_common_file
    assert sum(told) == sum(np.prod(t.shape) * t.dtype.itemsize for t in first.tensors.values())
    for name in first.objects:
        assert first.read_object(name) == second.read_object(name)
    both = (folder, tmp_path / "copy")
    results = [ranks.run("load_model", folder=str(path), config=DP)[0] for path in both]
    assert results[0].keys() == results[1].keys() and "error" not in results[0]
    for name, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][name], err_msg=name)


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "log_all", "ignore_all", "return_all"])
def test_a_stock_model_refuses_it_whatever_the_strictness(ranks, saved, strict):
    [found] = ranks.run("load_model", folder=str(saved[0]), strict=strict)
    assert "Global shape mismatch" in found["error"] and "[2, 1, 1, 1]" in found["error"]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        # The scale of the final norm alone has moved; its own parameter would load as ones.
        ("llama", {"strategy": "or", "sites": ("head",)}),
        # No linear carries vectors, but q, k and v are normalized.
        ("llama", {"strategy": "dnp", "branches": "shared", "sites": ("attention",)}),
        ("llama", {"strategy": "dnp", "branches": "split", "branches_off": "v"}),
        ("qk-norm", {"strategy": "unified", "branches": "shared"}),
        ("gpt2", {"strategy": "post-qkv", "sites": ("mlp",)}),
    ],
)
def test_every_strategy_that_stock_cannot_compute_is_refused(ranks, tmp_path, kind, config):
    ranks.run("save_model", folder=str(tmp_path), kind=kind, config=config)
    for overrides in ({}, {"qk_layernorm": True}):
        [found] = ranks.run(
            "load_model", folder=str(tmp_path), kind=kind, strict="ignore_all", overrides=overrides
        )
        assert "Global shape mismatch" in found["error"]
    [found] = ranks.run("load_model", folder=str(tmp_path), kind=kind, config=config)
    assert "error" not in found


@pytest.mark.parametrize("strategy", ["iwd", "none"])
def test_strategies_that_stock_computes_keep_stock_keys(ranks, tmp_path, strategy):
    [first] = ranks.run("save_model", folder=str(tmp_path), config={"strategy": strategy})
    [second] = ranks.run("load_model", folder=str(tmp_path))
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_nothing_is_overwritten_and_errors_leave_nothing(tmp_path):
    target = tmp_path / "out"
    small(target)
    assert CheckpointReader(target).read("a.weight").sum() == 12
    with pytest.raises(ScaleVecError, match="exists already"):
        small(target)
    with pytest.raises(ScaleVecError, match="or is no folder; create it first"):
        small(tmp_path / "no" / "such")

    def fail():
        raise OSError(28, "No space left on device")

    def stop(folder):
        raise KeyboardInterrupt

    bad = [Piece("a", (2,), torch.float32, Box((0,), (2,)), fail)]
    with pytest.raises(ScaleVecError, match="No space left on device.*Nothing was left"):
        small(tmp_path / "other", pieces=bad)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "other", before_commit=stop)
    assert os.listdir(tmp_path) == ["out"]


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path):
    root = tmp_path / "run"
    small(root)
    folder = root / "iter_0000003"
    keep = {file.name: file.read_bytes() for file in folder.iterdir()}
    data = next(name for name in keep if name.endswith(".distcp"))

    def broken(name, content):
        for file, value in keep.items():
            (folder / file).write_bytes(value)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        with pytest.raises(ScaleVecError) as caught:
            CheckpointReader(root)
        assert "is not whole" in str(caught.value) and missing_parts(folder)
        assert whole_iterations(root) == []
        return str(caught.value)

    assert f"{data} is missing" in broken(data, None)
    assert f"{data} has 10 of at least" in broken(data, keep[data][:10])
    assert ".metadata is missing" in broken(".metadata", None)
    assert ".metadata cannot be read" in broken(".metadata", keep[".metadata"][:100])
    assert "which is written last, is missing" in broken("metadata.json", None)
    assert "metadata.json is incomplete" in broken("metadata.json", b"")
    for file, value in keep.items():
        (folder / file).write_bytes(value)
    assert whole_iterations(root) == [3]
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    with pytest.raises(ScaleVecError, match="says '' where an iteration should stand.*whole ones there: 3"):
        CheckpointReader(root)
    tracker.write_text("9")
    with pytest.raises(ScaleVecError, match="there is no checkpoint .*iter_0000009; whole ones there: 3"):
        CheckpointReader(root)
    assert find_checkpoint(root, 3).iteration == 3
    tracker.unlink()
    with pytest.raises(ScaleVecError, match="has no latest_checkpointed_iteration.txt"):
        CheckpointReader(root)
    assert CheckpointReader(folder).iteration == 3


def test_other_formats_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ScaleVecError, match="--ckpt-convert-format torch_dist"):
        CheckpointReader(tmp_path)
    (tmp_path / "iter_0000005" / "mp_rank_00").rmdir()
    (tmp_path / "iter_0000005" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(ScaleVecError, match="'zarr'"):
        CheckpointReader(tmp_path)
    with pytest.raises(ScaleVecError, match="is not a folder"):
        CheckpointReader(tmp_path / "nowhere")


def peak() -> int:
    """The largest amount of memory that this process has held so far, in bytes."""
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """Ten tensors of 48 MiB each are copied with far less than their sum."""
    size = 48 << 20
    small(
        tmp_path / "large",
        pieces=[
            Piece(f"layer{i}.weight", (size // 4,), torch.float32, Box((0,), (size // 4,)), make)
            for i, make in enumerate([lambda: torch.ones(size // 4)] * 10)
        ],
    )

    def measure():
        before = peak()
        copy(tmp_path / "large", tmp_path / "copy")
        return peak() - before

    assert 0 < in_child(measure) < PEAK_TENSORS * size + PEAK_BYTES < 10 * size


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_an_interrupted_writer_leaves_no_checkpoint(tmp_path, number):
    """At the worst moment: everything is written, and it has not got its name."""

    def write(ready):
        def wait(folder):
            ready()
            time.sleep(60)

        with stopped_by_signals():
            small(tmp_path / "out", before_commit=wait)

    child = Child(write)
    child.wait_ready()
    child.send(number)
    assert child.wait() != 0
    left = os.listdir(tmp_path)
    if number == signal.SIGKILL:
        [name] = left
        assert name.startswith(".out.") and name.endswith(".incomplete")
    else:
        assert left == []
