"""scalevec explain for a whole cluster: launch scripts, pipeline stages, costs, and two runs side by side."""

import json

import pytest
from ranks.arguments import EXPERT_LAYOUTS, LAYOUTS, tiny_gpt

pytestmark = pytest.mark.needs_training

# Per layer of the small llama: q/k/v of 64 rows, gate/up of 128, hidden size 32, all in float32.
FOLDED_PER_LAYER = (64 + 128) * 32


def command(ranks, *arguments):
    [found] = ranks.run("explain_command", arguments=list(arguments))
    return found


def test_a_launch_script_is_what_its_command_line_is(ranks, tmp_path):
    argv = [word for word in tiny_gpt("llama", *LAYOUTS["pp2"][1]) if word != "--mock-data"]
    script = tmp_path / "train.sh"
    script.write_text(
        "#SBATCH --nodes=2 --gpus-per-node=2\nARGS=(\n"
        + "\n".join(f'  "{word}"' for word in argv)
        + '\n)\nsrun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu pretrain_gpt.py "${ARGS[@]}" '
        '--data-path "$DATA" --scalevec-strategy "${1:-hg}"\n'
    )
    found = command(ranks, "--json", str(script), "dp")
    assert found["error"] is None and found["code"] == 0
    record = json.loads(found["printed"])
    [words] = ranks.run("explain_line", arguments=[*argv, "--mock-data", "--scalevec-strategy", "dp"], of=4)
    assert record["strategy"].startswith("dp:") and record["world_size"] == 4
    assert "--data-path <$DATA>: not known here" in record["notes"][0]
    for key in ("whole_model", "stages", "parameters", "weight_decay"):
        assert record[key] == words[key], key
    missing = command(ranks, str(tmp_path / "none.sh"))
    assert "cannot be read as a script" in missing["error"]
    assert "is a training script; put it" in command(ranks, "pretrain_gpt.py")["error"]


def test_stages_and_what_they_cost(ranks):
    argv = tiny_gpt("llama", *LAYOUTS["pp2"][1], "--scalevec-strategy", "hg")
    [found] = ranks.run("explain_line", arguments=argv)
    first, last = found["stages"]
    assert (first["rank"], first["layers"], last["rank"], last["layers"]) == (0, "1-2", 1, "3-4")
    assert first["linears"] == 4 and first["parameters"]["added"] == 2 * (5 - 2) * 32
    # Two microbatches; the first stage holds both before it goes back.
    assert (first["in_flight"], last["in_flight"]) == (2, 1)
    autograd = first["costs"]["autograd"]
    assert autograd["fold_per_step"] == 2 * (2 * 4) * 2 * FOLDED_PER_LAYER
    assert autograd["split_per_step"] == 2 * (3 * 4) * 2 * FOLDED_PER_LAYER
    assert autograd["folded_weights"] == 2 * 4 * 2 * FOLDED_PER_LAYER
    assert last["costs"]["autograd"]["folded_weights"] == 4 * 2 * FOLDED_PER_LAYER
    # Ten vectors of 32 come, four norm scales go: parameter, gradient and two moments of four bytes.
    assert autograd["parameters_and_state"] == 10 * 32 * 16 - 4 * 32 * 12
    assert "One rank of each pipeline stage (2 of 2 ranks built" in found["text"]


def test_experts_that_the_optimizer_folds(ranks):
    """Four ranks share the optimizer's state of the dense weights, two that of an expert's."""
    argv = tiny_gpt("mixtral", *EXPERT_LAYOUTS["ep2-dp2"][1], "--bf16", "--scalevec-strategy", "hg")
    [found] = ranks.run("explain_line", arguments=[*argv, "--scalevec-execution", "optimizer"], of=4)
    assert found["error"] is None and found["problems"] == []
    [stage] = found["stages"]
    # Of the whole model: q/k/v, router and four experts in each of four layers; two experts on a rank.
    assert found["whole_model"]["linears_converted"] == 4 * (2 + 4) and stage["linears"] == 4 * (2 + 2)
    dense, experts = 4 * (64 + 4) * 32, 4 * 2 * 64 * 32
    cost = stage["costs"]["optimizer"]
    assert cost["fold_per_step"] == (4 + 2) * (dense / 4 + experts / 2)
    assert cost["split_per_step"] == 3 * 4 * (dense / 4 + experts / 2)
    # Eleven int64 for each block of 32 rows.
    assert cost["index_maps"] == 11 * 8 * 4 * (64 + 4 + 2 * 64) / 32
    # Vectors of 32: q, k, v and router, and gate and up of two experts. Two norm scales of a layer go.
    vectors, of_experts, retired = 4 * 4 * 32, 4 * 2 * 2 * 32, 4 * 2 * 32
    assert cost["tables"] == 16 * (vectors + of_experts)
    state = (vectors - retired) * (4 + 12 / 4) + of_experts * (4 + 12 / 2)
    assert cost["parameters_and_state"] == 2 * (vectors + of_experts) + state
    assert "execution optimizer in all layers" in found["text"]
    # In the forward pass nothing is shared: each microbatch reads W and writes W_eff.
    [formed] = ranks.run("explain_line", arguments=[*argv, "--scalevec-execution", "autograd"], of=4)
    assert formed["stages"][0]["linears"] == stage["linears"]
    assert formed["stages"][0]["costs"] == stage["costs"]
    assert stage["costs"]["autograd"]["fold_per_step"] == 2 * 2 * (dense + experts)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama", LAYOUTS["tp2"]), ("mixtral", EXPERT_LAYOUTS["ep2"])],
    ids=["tp2-pp2", "ep2-pp2"],
)
def test_every_rank_is_built_on_request(ranks, model, layout):
    argv = tiny_gpt(model, *layout[1], *LAYOUTS["pp2"][1], "--scalevec-strategy", "unified")
    [some] = ranks.run("explain_line", arguments=argv)
    [every] = ranks.run("explain_line", arguments=argv, every_rank=True)
    assert (some["ranks_built"], every["ranks_built"]) == (2, 4)
    for key in ("whole_model", "this_rank", "stages"):
        assert some[key] == every[key], key


def test_two_strategies_side_by_side(ranks):
    argv = tiny_gpt("llama")
    found = command(ranks, "--json", "--diff", "hg", "--scalevec-strategy dp", "--", *argv)
    assert found["code"] == 0, found
    rows = json.loads(found["printed"])
    assert "parameters, stock" not in rows and "linears converted" not in rows
    assert rows["parameters added"] == [4 * 3 * 32, 4 * (3 * 32 + 64 + 128)]
    assert rows["vectors attention q out"] == [None, 4]
    shown = command(ranks, "--diff", "hg", "dp", "--", *argv)["printed"]
    assert "What differs" in shown and "parameters added" in shown
    # In the place of what the line says.
    line = [*argv, "--scalevec-strategy", "unified", "--seed", "1"]
    assert command(ranks, "--json", "--diff", "hg", "dp", "--", *line)["printed"] == found["printed"]


def test_two_layouts_side_by_side(ranks):
    argv = tiny_gpt("llama", "--scalevec-strategy", "hg")
    layouts = [" ".join(LAYOUTS[name][1]) for name in ("tp2", "pp2")]
    rows = json.loads(command(ranks, "--json", "--diff", *layouts, "--", *argv)["printed"])
    assert rows["pipeline stages"] == [1, 2]
    assert set(rows) <= {
        "pipeline stages",
        "most parameters on a rank",
        "most vectors on a rank",
        "bytes to fold per step, most on a rank",
        "bytes to split per step, most on a rank",
    }


def test_a_refused_side_is_shown(ranks):
    argv = tiny_gpt("llama", "--scalevec-strategy", "hg")
    rows = command(ranks, "--json", "--diff", "--qk-clip", "--seed 1", "--", *argv)
    assert rows["code"] == 2
    refused = json.loads(rows["printed"])["refused"]
    assert "--qk-clip rescales" in refused[0] and refused[1] is None
    both = command(ranks, "--json", "--diff", "--qk-clip", "--qk-clip", "--", *argv)
    assert both["code"] == 2 and json.loads(both["printed"])["refused"][1]
    assert "is neither a strategy" in command(ranks, "--diff", "hgg", "hg", "--", *argv)["error"]


def test_bad_options_are_sentences(ranks):
    for arguments, message in (
        (["--memory-bandwidth", "0", "--"], "'0' is not a bandwidth in GB/s"),
        (["--diff", "hg", "--", "x"], "--diff takes two strategies, or two sets of arguments"),
        ([], "name a launch script, or put the arguments of the run behind --"),
    ):
        assert message in command(ranks, *arguments)["error"]
