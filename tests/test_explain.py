"""scalevec explain: what a launch line would build, against hand counts and real runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.arguments import LAYOUTS, tiny_gpt

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.explain import main

ROOT = Path(__file__).resolve().parent.parent
SCALEVEC = Path(sys.executable).parent / "scalevec"

_TRAINING = """--micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1e-3 --bf16 --mock-data
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --transformer-impl local""".split()
LLAMA_1B = """--num-layers 22 --hidden-size 1792 --num-attention-heads 14 --ffn-hidden-size 4778
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50303""".split()
LLAMA_70B = """--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
    --padded-vocab-size 128256 --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 8""".split()


def scalevec(*arguments, cwd):
    return subprocess.run(
        [str(SCALEVEC), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.needs_training
def test_the_papers_model(ranks):
    """1.03 billion parameters, of which the scale vectors of the norms are 0.0078 %."""
    [stock] = ranks.run("explain_line", arguments=[*LLAMA_1B, *_TRAINING])
    assert stock["error"] is None
    assert stock["parameters"]["stock"] == 1_028_065_024
    assert stock["parameters"]["norm_scales"] == 80_640 == (2 * 22 + 1) * 1792
    assert round(stock["parameters"]["norm_scales_percent"], 4) == 0.0078
    assert stock["parameters"]["added"] == 0 and stock["whole_model"] is None
    [hg] = ranks.run("explain_line", arguments=[*LLAMA_1B, *_TRAINING, "--scalevec-strategy", "hg"])
    assert hg["parameters"]["stock"] == 1_028_065_024
    # Five branches per layer in place of two norms; the final norm keeps its own scale.
    assert hg["parameters"]["added"] == 22 * (5 - 2) * 1792
    assert hg["whole_model"]["linears_converted"] == 44 and hg["problems"] == []


@pytest.mark.needs_training
def test_a_large_model_in_seconds(ranks):
    """70 billion parameters on 64 ranks; nothing of that size is allocated."""
    line = ["launch", "pretrain_gpt.py", *LLAMA_70B, *_TRAINING, "--scalevec-strategy", "unified"]
    [found] = ranks.run("explain_line", timeout=60, arguments=line, rank=61)
    assert found["error"] is None
    per_layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    whole = 80 * per_layer + 2 * 128256 * 8192 + 8192
    assert found["parameters"]["stock"] == whole == 70_553_706_496
    assert found["world_size"] == 64
    assert found["place"] == {
        "tensor": "5 of 8",
        "pipeline": "7 of 8",
        "context": "0 of 1",
        "data": "0 of 1",
        "layers": "71-80",
    }
    own = found["this_rank"]
    assert own["linears_converted"] == own["linears_expected"] == 20
    assert own["norm_scales_retired"] == 21
    matrices = 10 * (per_layer - 2 * 8192) + 128256 * 8192
    assert found["parameters_on_rank"]["stock"] == matrices // 8 + 21 * 8192
    assert found["whole_model"]["linears_converted"] == found["whole_model"]["linears_expected"] == 160


@pytest.mark.needs_training
@pytest.mark.parametrize("ranks_in_all", [1024, 16384])
def test_a_large_cluster(ranks, ranks_in_all):
    """The same model on more ranks; the last of them is the last of everything."""
    line = [*LLAMA_70B, *_TRAINING, "--scalevec-strategy", "unified", "--context-parallel-size", "2"]
    line[line.index("--global-batch-size") + 1] = "1024"
    [found] = ranks.run("explain_line", arguments=line, of=ranks_in_all, rank=ranks_in_all - 1)
    assert found["error"] is None and found["problems"] == []
    assert found["parameters"]["stock"] == 70_553_706_496
    replicas = ranks_in_all // 128
    assert found["place"] == {
        "tensor": "7 of 8",
        "pipeline": "7 of 8",
        "context": "1 of 2",
        "data": f"{replicas - 1} of {replicas}",
        "layers": "71-80",
    }
    # Of every stage the rank at the same place.
    assert [stage["rank"] for stage in found["stages"]] == [
        ranks_in_all // 8 * (stage + 1) - 1 for stage in range(8)
    ]


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("model", "strategy", "layout", "more"),
    [
        ("llama", "unified", "pp2-vpp", []),
        ("gpt2", "dp", "tp2-sp", []),
        ("qk-norm", "iwd", "dp2-distopt", ["--scalevec-weight-decay", "all"]),
        ("llama", "hg", "pp2", ["--mtp-num-layers", "1"]),
    ],
)
def test_it_says_what_the_run_finds(ranks, model, strategy, layout, more):
    """The audit of a run of ten iterations, to the last entry: vectors, counts, decay groups."""
    world_size, arguments = LAYOUTS[layout]
    argv = tiny_gpt(model, *arguments, *more, "--scalevec-strategy", strategy)
    audit = ranks.run("train", world_size, argv=argv)[0]["audit"]
    [found] = ranks.run("explain_line", arguments=argv, of=world_size)
    assert found["error"] is None
    # An optimizer keeps tied embeddings once per stage; the groups count tensors either way.
    assert found["whole_model"] == audit
    decaying = sum(row["tensors"] for row in found["weight_decay"] if row["decays"])
    groups = audit["decay_groups"]
    assert decaying == sum(g["tensors"] for g in groups if g["weight_decay_multiplier"])
    assert sum(row["tensors"] for row in found["weight_decay"]) == sum(g["tensors"] for g in groups)


@pytest.mark.needs_training
def test_every_rank_holds_its_share(ranks):
    """Virtual stages: the shares of the pipeline's ranks make up the whole."""
    argv = tiny_gpt("llama", *LAYOUTS["pp2-vpp"][1], "--scalevec-strategy", "unified")
    runs = [ranks.run("explain_line", arguments=argv, rank=rank)[0] for rank in (0, 1)]
    assert [run["place"]["layers"] for run in runs] == ["1,3", "2,4"]
    for key in ("linears_converted", "norm_scales_retired", "parameters_added"):
        assert sum(run["this_rank"][key] for run in runs) == runs[0]["whole_model"][key], key
        assert runs[0]["whole_model"] == runs[1]["whole_model"]


@pytest.mark.needs_training
def test_a_named_spec_is_explained_as_well(ranks):
    argv = tiny_gpt("llama")
    [flag] = ranks.run("explain_line", arguments=[*argv, "--scalevec-strategy", "post-qkv"])
    [spec] = ranks.run("explain_line", arguments=[*argv, "--spec", "megatron_scalevec.specs", "post_qkv"])
    assert spec == flag


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["--qk-clip", "--scalevec-strategy", "hg"], {}, "--qk-clip rescales"),
        (
            ["--transformer-impl", "inference_optimized", "--scalevec-strategy", "hg"],
            {},
            "--transformer-impl",
        ),
        (["--scalevec-strategy", "unifed"], {}, "Did you mean 'unified'"),
        (
            ["--scalevec-strategy", "hg", "--scalevec-strategy", "unified"],
            {},
            "--scalevec-strategy is given twice, hg and unified",
        ),
        (
            ["--no-such-flag", "1"],
            {},
            "does not know --no-such-flag; correct that, or give the script's name",
        ),
        (["--hidden-size", "big"], {}, "argument --hidden-size: invalid int value: 'big'"),
        (["--num-attention-heads", "5"], {}, "Megatron refuses this run: "),
        ([], {"of": 3}, "--world-size 3 is not a multiple of 2"),
        ([], {"of": 0}, "--world-size 0 is no number of ranks, 1 or more; drop it for 2"),
        ([], {"of": -2}, "--world-size -2 is no number of ranks, 1 or more; drop it for 2"),
        (
            [],
            {"behind": ["torchrun", "--nproc-per-node", "3", "pretrain_gpt.py"]},
            "the launcher's number of ranks, 3, is not a multiple of 2",
        ),
        (
            [],
            {"behind": ["torchrun", "--nproc-per-node", "0", "pretrain_gpt.py"]},
            "the launcher's number of ranks, 0, is no number of ranks",
        ),
        ([], {"rank": 2}, "--rank 2 is not one of the 2 ranks"),
        (
            ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "no/such"],
            {"without": "--vocab-size"},
            "the size of the vocabulary is not known here",
        ),
        (["--scalevec-cpu", "on", "--sft"], {}, "cannot be served in CPU mode"),
    ],
)
def test_refusals_are_sentences(ranks, arguments, options, message):
    argv = tiny_gpt("llama", "--tensor-model-parallel-size", "2", *arguments)
    without = options.get("without")
    if without:
        del argv[argv.index(without) : argv.index(without) + 2]
    argv = [*options.get("behind", ()), *argv]
    options = {key: value for key, value in options.items() if key not in ("without", "behind")}
    [found] = ranks.run("explain_line", arguments=argv, **options)
    assert message in (found["error"] or ""), found
    assert "\n" not in found["error"]


RANKS = "is not a number of ranks, a whole number from 1 to 1048576"
SPEED = "is not a bandwidth in GB/s, 0.001 to 1e+09"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["--world-size", "0"], f"argument --world-size: '0' {RANKS}"),
        (["--world-size", "-8"], f"argument --world-size: '-8' {RANKS}"),
        (["--world-size", "many"], f"argument --world-size: 'many' {RANKS}"),
        (["--world-size", "1e3"], f"argument --world-size: '1e3' {RANKS}"),
        (["--world-size", "10000000"], f"argument --world-size: '10000000' {RANKS}"),
        (["--rank", "-1"], "argument --rank: '-1' is not a rank, a whole number from 0 to"),
        (["--rank", "first"], "argument --rank: 'first' is not a rank"),
        (["--memory-bandwidth", "abc"], f"argument --memory-bandwidth: 'abc' {SPEED}"),
        (["--memory-bandwidth", "0"], f"argument --memory-bandwidth: '0' {SPEED}"),
        (["--memory-bandwidth", "nan"], f"argument --memory-bandwidth: 'nan' {SPEED}"),
        (["--memory-bandwidth", "1e-300"], f"argument --memory-bandwidth: '1e-300' {SPEED}"),
        (["--memory-bandwidth", "inf"], f"argument --memory-bandwidth: 'inf' {SPEED}"),
        (["--rank", "0", "--rank", "1"], "--rank is given twice, 0 and 1; give it once"),
        (["--diff", "hg", "dp", "--diff", "hg", "unified"], "--diff is given twice"),
        (["--diff", "hg", "dp", "--dif", "hg", "unified"], "--diff is given twice"),
        (["--dif", "hg"], "--diff takes two strategies"),
        (["--dif", "hg", "no strategy"], "no strategy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_its_own_options_are_checked(own, message):
    with pytest.raises(ScaleVecError) as raised:
        main([*own, "--", "pretrain_gpt.py", "--num-layers", "2"])
    assert message in str(raised.value)


@pytest.mark.needs_training
def test_what_is_not_on_this_machine_is_not_needed(ranks):
    """Data, tokenizer, output folders and the script with its own flags belong to the cluster."""
    argv = [item for item in tiny_gpt("llama") if item != "--mock-data"]
    argv += ["--data-path", "/no/such/data", "--save", "/no/such/folder", "--save-interval", "5"]
    argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "no/such/tokenizer"]
    argv += ["--scalevec-strategy", "hg", "--scalevec-audit", "/no/such/audit.json"]
    [found] = ranks.run("explain_line", arguments=["my_pretrain.py", *argv, "--my-own-flag", "3"])
    assert found["error"] is None
    notes = " ".join(found["notes"])
    assert "taken for the script's own: --my-own-flag" in notes
    assert "--vocab-size 127 padded to 128, without the tokenizer" in notes
    assert found["problems"] == []


def test_the_support_table(tmp_path):
    from megatron_scalevec.support import REFUSALS

    shown = scalevec("explain", "--support", cwd=tmp_path)
    assert shown.returncode == 0 and shown.stderr == ""
    for refusal in REFUSALS:
        assert refusal.name in shown.stdout
    found = json.loads(scalevec("explain", "--support", "--json", cwd=tmp_path).stdout)
    shapes = {shape["name"]: shape for shape in found["shapes"]}
    for name in ("Mixtral", "Qwen3-MoE", "DeepSeek-V3", "Qwen3-Next", "Nemotron-H", "heterogeneous"):
        [shape] = [shapes[key] for key in shapes if name in key and not key.endswith("3.2)")]
        assert shape["branches"] and not shape["refused"] and "<0.20" in shape["versions"]
        assert name in shown.stdout
    assert any("T5" in name and shape["refused"] for name, shape in shapes.items())
    rows = found["refusals"]
    assert [row["name"] for row in rows] == [refusal.name for refusal in REFUSALS]
    assert all(row["reason"] and row["way_out"] and "{" not in row["reason"] for row in rows)


def test_the_command_line(tmp_path):
    assert "--world-size" in scalevec("explain", "--help", cwd=tmp_path).stdout
    for arguments, message in (
        (["--num-layers", "2"], "stand behind --"),
        ([], "put the arguments of the run behind --"),
        (["--rank", "x", "--"], "'x' is not a rank"),
    ):
        run = scalevec("explain", *arguments, cwd=tmp_path)
        assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_training
def test_the_command_of_the_readme(ranks, tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"<!-- checked: tests/test_explain.py -->\n```bash\n(.*?)```", readme, re.DOTALL)
    arguments = shlex.split(command.replace("\\\n", " "))
    assert arguments[:2] == ["scalevec", "explain"]
    run = scalevec(*arguments[1:], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    [excerpt] = re.findall(r"<!-- explain-excerpt -->\n```\n(.*?)```", readme, re.DOTALL)
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    for line in excerpt.splitlines():
        assert line.rstrip() in lines
    [record] = ranks.run("explain_command", arguments=["--json", *arguments[2:]])
    assert json.loads(record["printed"])["parameters"]["stock"] == 1_028_065_024
    [refused] = ranks.run("explain_command", arguments=["--json", *arguments[2:], "--qk-clip"])
    assert refused["code"] == 2 and "--qk-clip" in json.loads(refused["printed"])["refused"]
    assert not list(tmp_path.iterdir())
