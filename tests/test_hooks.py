"""Hooks: they land or the run stops; what they let through and what they do not."""

import re

import pytest
from ranks.arguments import tiny_gpt
from ranks.pool import RankFailure

pytestmark = pytest.mark.needs_training


def test_install_twice_and_uninstall(ranks):
    [found] = ranks.run("install_and_uninstall")
    assert found["second_is_first"]
    assert found["changed"] >= len(found["targets"])
    assert found["restored"]


@pytest.mark.parametrize("target", ["GPTModel.__init__", "get_standard_config_overrides"])
def test_a_hook_whose_target_is_gone_stops_before_anything_is_changed(ranks, target):
    [found] = ranks.run("install_broken", breakage="missing", target=target)
    assert re.search(rf"the hook on .*{re.escape(target)} cannot land in megatron-core 0\.", found["error"])
    assert found["restored"]


def test_a_hook_outside_its_versions_stops(ranks):
    [found] = ranks.run("install_broken", breakage="version", target="GPTModel.__init__")
    assert "was written for megatron-core >=0.16.1,<0.17, not for 0." in found["error"]
    assert found["restored"]


def test_a_function_that_somebody_else_replaced_stops(ranks):
    [found] = ranks.run("install_broken", breakage="replaced", target="get_standard_config_overrides")
    assert "somebody else changed it first" in found["error"]
    assert found["restored"]


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.0"])
def test_megatron_outside_the_window_is_refused(ranks, version):
    [found] = ranks.run("install_broken", breakage="megatron", target=version)
    assert f"megatron-core {version} is outside the versions" in found["error"]
    assert ">=0.16.1" in found["error"] and "<0.20" in found["error"]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("model", "did not take part in building the model.*the run was stopped before training"),
        ("decay overrides", "should decay, but the optimizer's group has wd_mult 0"),
    ],
)
def test_a_hook_that_was_bypassed_stops_before_training(ranks, hook, message):
    """Somebody put the original back between installation and model building."""
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", argv=tiny_gpt("llama", "--scalevec-strategy", "hg"), sabotage=f"bypass {hook}")
    assert re.search(message, " ".join(str(caught.value).split()))


def test_a_script_that_builds_no_model_is_told_so(ranks):
    with pytest.raises(RankFailure, match="ended without building a GPTModel"):
        ranks.run("train", argv=["--scalevec-strategy", "hg"], script="builds_nothing.py")
    ranks.run("launch_only", argv=[], script="builds_nothing.py")


def test_the_import_door_does_what_the_launcher_does(ranks):
    """``import megatron_scalevec.megatron`` as a script's first line."""
    argv = tiny_gpt("llama", "--scalevec-strategy", "hg", "--scalevec-cpu", "on")
    [by_import] = ranks.run("train", argv=argv, plugin=False, script="imports_the_plugin.py")
    [launched] = ranks.run("train", argv=argv)
    assert by_import["losses"] == launched["losses"]


def test_every_entry_of_the_table_refuses_what_it_says():
    """Entry by entry, on the arguments alone."""
    from types import SimpleNamespace

    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    from megatron_scalevec import ScaleVecConfig, ScaleVecError
    from megatron_scalevec.support import REFUSALS, refuse_unsupported

    triggers = {
        "transformer-impl": {"transformer_impl": "inference_optimized"},
        "op-fuser": {"use_transformer_engine_op_fuser": True},
        "grouped-dense-mlp": {"use_grouped_gemm_for_dense_mlp": True},
        "communication-overlap": {"tp_comm_overlap": True},
        "activation-offload": {"cpu_offloading_num_layers": 2},
        "main-params-from-checkpoint": {"load_main_params_from_ckpt": True},
        "experts-legacy-grouped": {"num_experts": 8, "moe_grouped_gemm": True},
        "experts-single-weight": {"num_experts": 8, "moe_single_grouped_weight": True},
        "experts-interleaved-over-ranks": {
            "num_experts": 8,
            "moe_mlp_glu_interleave_size": 32,
            "tensor_model_parallel_size": 2,
        },
        "experts-latent-shared": {"num_experts": 8, "moe_latent_size": 64},
        "experts-fused-shared": {"num_experts": 8, "use_grouped_gemm_for_shared_expert": True},
        "experts-overlap": {"num_experts": 8, "moe_shared_expert_overlap": True},
        "experts-stash": {"num_experts": 8, "moe_paged_stash": True},
        "experts-upcycling": {"num_experts": 8, "moe_use_upcycling": True},
        "experts-tensor-parallel": {"num_experts": 8, "expert_tensor_parallel_size": 2},
        "cached-latents": {"cache_mla_latents": True},
        "fused-down-projection": {"mla_down_proj_fusion": True, "tensor_model_parallel_size": 2},
        "v-norm-of-latent-attention": {"multi_latent_attention": True},
        "encoder-decoder": {"decoder_num_layers": 2},
        "linear-replacements": {"heterogeneous_layers_config_encoded_json": '{"replace_with_linear":true}'},
        "heterogeneous-mtp": {"heterogeneous_layers_config_encoded_json": "{}", "mtp_num_layers": 1},
        "hybrid-layer-kinds": {"hybrid_layer_pattern": "M*D"},
        "hybrid-latent-before-0.19": {"hybrid_layer_pattern": "M+-"},
        "hybrid-before-0.18": {"is_hybrid_model": True},
        "hybrid-mtp": {"hybrid_layer_pattern": "M*/M"},
        "experimental-attention": {"experimental_attention_variant": "dsa"},
        "legacy-models": {"use_legacy_models": True},
        "fsdp": {"use_megatron_fsdp": True},
        "fp8-fp4": {"fp8": "hybrid"},
        "optimizer": {"optimizer": "shampoo"},
        "layer-wise-float32": {"optimizer": "muon", "use_distributed_optimizer": True},
        "soap-checkpoints": {"optimizer": "soap", "save": "folder"},
        "precision-aware-optimizer": {"use_precision_aware_optimizer": True},
        "no-weight-decay": {"weight_decay": 0.0, "start_weight_decay": None},
        "wd-on-qk-norms": {"apply_wd_to_qk_layernorm": True},
        "kitchen": {"use_kitchen": True},
        "adapters": {"peft": "lora"},
        "modelopt": {"modelopt_enabled": True},
        "cuda-graphs": {"cuda_graph_impl": "local"},
        "weight-rematerialization": {"gtp_weight_remat_size": 2},
        "delayed-wgrad": {"delay_wgrad_compute": True},
        "qk-clip": {"qk_clip": True},
        "meta-device-init": {"init_model_with_meta_device": True},
        "fused-qkv-rope": {"fused_single_qkv_rope": True},
        "qk-l2-norm": {"qk_l2_norm": True},
        "telemetry-of-offloaded-masters": {"optimizer_cpu_offload": True, "scalevec_log": "t.jsonl"},
        "learning-rates-on-resume": {},
        "float32-vectors": {"bf16": True, "use_distributed_optimizer": False},
    }
    configs = {
        "no-weight-decay": ScaleVecConfig(strategy="iwd"),
        "fused-qkv-rope": ScaleVecConfig(strategy="dnp"),
        "qk-l2-norm": ScaleVecConfig(strategy="unified"),
        "v-norm-of-latent-attention": ScaleVecConfig(strategy="unified", decay_v_norm="output"),
        "experts-latent-shared": ScaleVecConfig(strategy="hg", experts="shared"),
        "learning-rates-on-resume": ScaleVecConfig(strategy="hg", lr_mult="input=2"),
        "float32-vectors": ScaleVecConfig(strategy="hg", vector_dtype="fp32"),
    }
    assert triggers.keys() == {refusal.name for refusal in REFUSALS}
    fine = {"transformer_impl": "local", "optimizer": "adam", "cuda_graph_impl": "none"}
    hg = ScaleVecConfig(strategy="hg")
    for implementation in ("local", "transformer_engine"):
        accepted = SimpleNamespace(**{**fine, "transformer_impl": implementation})
        refuse_unsupported(accepted, hg, Version("0.19.2"))
    for refusal in REFUSALS:
        args = SimpleNamespace(**{**fine, **triggers[refusal.name]})
        versions = ("0.16.1", "0.18.2", "0.19.2")
        version = next(v for v in map(Version, reversed(versions)) if v in SpecifierSet(refusal.versions))
        refuse_unsupported(args, ScaleVecConfig(), version)
        with pytest.raises(ScaleVecError) as caught:
            refuse_unsupported(args, configs.get(refusal.name, hg), version)
        message = str(caught.value)
        assert refusal.way_out in message and message.endswith("or drop --scalevec-strategy.")
        assert "{" not in message and "\n" not in message
    # γ − 1 in the norms: their scale becomes a vector.
    masters = SimpleNamespace(**fine, load_main_params_from_ckpt=True)
    iwd = ScaleVecConfig(strategy="iwd")
    refuse_unsupported(masters, iwd, Version("0.19.2"))
    masters.apply_layernorm_1p = True
    with pytest.raises(ScaleVecError, match="drop that flag"):
        refuse_unsupported(masters, iwd, Version("0.19.2"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-experts", "2", "--moe-use-upcycling"],
        ["--qk-clip"],
        ["--apply-wd-to-qk-layernorm"],
    ],
    ids=lambda a: a[0].strip("-"),
)
def test_refusals_come_before_the_model_is_built(ranks, arguments):
    """Through Megatron's real argument parsing."""
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", argv=tiny_gpt("qk-norm", *arguments, "--scalevec-strategy", "hg"))
    assert "or drop --scalevec-strategy." in str(caught.value)
    assert "building GPT" not in str(caught.value)


def test_flags_are_frozen():
    """A new flag is a conscious act: add it here, to the README and to the changelog."""
    from megatron_scalevec.integration.arguments import options

    assert options() == [
        "--scalevec-strategy",
        "--scalevec-branches",
        "--scalevec-experts",
        "--scalevec-placement",
        "--scalevec-reparam",
        "--scalevec-weight-decay",
        "--scalevec-decay-v-norm",
        "--scalevec-vector-dtype",
        "--scalevec-execution",
        "--scalevec-branches-off",
        "--scalevec-lr-mult",
        "--scalevec-sites",
        "--scalevec-audit",
        "--scalevec-debug-replicas",
        "--scalevec-log-interval",
        "--scalevec-log",
        "--scalevec-cpu",
    ]


def test_a_loop_of_the_users_own_is_audited_too(ranks):
    """get_model and get_megatron_optimizer without Megatron's set-up function."""
    [found] = ranks.run("own_loop", overrides=False)
    assert found["error"] is None and found["audited"] and "linears converted" in found["printed"]
    [found] = ranks.run("own_loop", overrides=True)
    assert "should decay, but the optimizer's group has wd_mult 0" in found["error"]


def test_a_script_that_exits_zero_without_a_model_is_told_so(ranks):
    with pytest.raises(RankFailure, match="ended without building a GPTModel"):
        ranks.run("launch_only", argv=["--scalevec-strategy", "hg"], script="exits_zero.py")


def test_the_scripts_own_megatron_is_the_one_that_runs(tmp_path):
    """A checkout beside the script comes before an installed wheel, as for the script alone."""
    import subprocess
    import sys
    from pathlib import Path

    core = tmp_path / "checkout" / "megatron" / "core"
    core.mkdir(parents=True)
    for path in (core.parent, core):
        (path / "__init__.py").touch()
    (core / "package_info.py").write_text('__version__ = "0.15.9"\n')
    script = tmp_path / "checkout" / "train.py"
    script.write_text("raise SystemExit(7)\n")
    for command in (
        [Path(sys.executable).parent / "scalevec"],
        [sys.executable, "-m", "megatron_scalevec"],
    ):
        run = subprocess.run(
            [*map(str, command), "launch", str(script)], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 2 and "megatron-core 0.15.9 is outside" in run.stderr


def test_flags_reach_megatron_through_a_script_that_composes_its_command_line(ranks, tmp_path, monkeypatch):
    config = tmp_path / "run.txt"
    config.write_text(" ".join(tiny_gpt("llama")))
    argv = ["--config", str(config), "--scalevec-strategy", "hg", "--scalevec-sites", "mlp"]
    [result] = ranks.run("train", argv=argv, script="composes_its_command_line.py")
    assert result["audit"]["strategy"] == "hg"
    assert result["audit"]["components"]["sites"] == ["mlp"]
    config.write_text(" ".join(tiny_gpt("llama", "--scalevec-strategy", "dp")))
    with pytest.raises(RankFailure, match="says --scalevec-strategy hg, and the script hands"):
        ranks.run("train", argv=argv, script="composes_its_command_line.py")


def test_cpu_mode_says_what_it_hides(ranks):
    """The same command line goes to a cluster later."""
    argv = ["--use-precision-aware-optimizer", "--scalevec-strategy", "hg"]
    [found] = ranks.run("choose_for_cpu", argv=tiny_gpt("llama", *argv))
    assert "on GPUs this run would be refused: --scalevec-strategy hg" in found
    assert "--use-precision-aware-optimizer" in found


def test_a_stock_run_does_not_save_beside_another_runs_audit(ranks, tmp_path):
    import shutil

    argv = tiny_gpt("llama", "--save", str(tmp_path), "--save-interval", "10")
    ranks.run("train", argv=[*argv, "--scalevec-strategy", "hg"])
    audit = tmp_path / "scalevec_audit.json"
    assert audit.exists()
    for path in tmp_path.iterdir():
        if path != audit:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    ranks.run("train", argv=argv)
    assert not audit.exists()
