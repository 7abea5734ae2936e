"""The way in and the way back for checkpoints of TransformerEngine's layers."""


def test_checkpoints_unfold_and_fold(te_ranks, tmp_path):
    cases = [
        {"kind": kind, "config": config, "train": train}
        for kind, config in (
            ("llama", {"strategy": "unified-foldable"}),
            ("gpt2", {"strategy": "dp", "sites": "attention,mlp,head,projections"}),
        )
        for train in (False, True)
    ]
    [results] = te_ranks.run("round_trips", folder=str(tmp_path), cases=cases)
    for case, result in zip(cases, results):
        assert result["initial"] == [] and result["dtypes"] == []
        assert result["unfolded"] < 1e-5 and result["folded"] < 1e-5 and result["product"] < 1e-5
        if case["kind"] == "llama" and not case["train"]:
            assert result["changed"] == []


def test_checkpoints_of_experts_unfold_and_fold(te_ranks, tmp_path):
    """Grouped linears and one for each expert; the norm before them has a key of its own here."""
    sites = "attention,mlp,head,projections"
    cases = [
        {"kind": kind, "config": config, "train": train, "overrides": {"moe_grouped_gemm": grouped}}
        for kind, grouped, config in (
            ("shared", True, {"strategy": "unified-foldable", "sites": sites}),
            ("mixtral", True, {"strategy": "dp", "experts": "shared"}),
            ("mixtral", False, {"strategy": "or"}),
        )
        for train in (False, True)
    ]
    [results] = te_ranks.run("round_trips", folder=str(tmp_path), cases=cases)
    for case, result in zip(cases, results):
        assert result["initial"] == [] and result["dtypes"] == [], case
        assert result["unfolded"] < 1e-5 and result["folded"] < 1e-5 and result["product"] < 1e-5
        if not case["train"]:
            assert result["changed"] == [], case


def test_checkpoints_of_experts_on_latents_and_of_rows_that_take_turns(te_ranks, tmp_path):
    """The projections to the latents and back; gate and up rows in turns, four at a time."""
    sites = "attention,mlp,head,projections"
    grouped, turns = {"moe_grouped_gemm": True}, {"moe_mlp_glu_interleave_size": 4}
    cases = [
        {"kind": kind, "config": config, "train": train, "overrides": overrides}
        for kind, overrides, config in (
            ("latent", grouped, {"strategy": "unified-foldable"}),
            ("latent", {**grouped, **turns}, {"strategy": "unified-foldable", "sites": sites}),
            ("latent", {}, {"strategy": "dp", "experts": "shared", "sites": sites}),
            ("mixtral", {**grouped, **turns}, {"strategy": "dp"}),
            # A module for each expert has its rows in the ordinary order.
            ("mixtral", turns, {"strategy": "hg"}),
        )
        for train in (False, True)
    ]
    [results] = te_ranks.run("round_trips", folder=str(tmp_path), cases=cases)
    for case, result in zip(cases, results):
        assert result["initial"] == [] and result["dtypes"] == [], case
        assert result["unfolded"] < 1e-5 and result["folded"] < 1e-5 and result["product"] < 1e-5, case
        if case["train"]:
            assert result["other"] > 2e-2, case
        else:
            assert result["changed"] == [], case


def test_checkpoints_of_latent_attention_unfold_and_fold(te_ranks, tmp_path):
    """Norms fused into the up-projections, and one down-projection, which is stored as two."""
    cases = [
        {"kind": "mla", "config": config, "train": train, "overrides": {"mla_down_proj_fusion": joined}}
        for joined, config in (
            (False, {"strategy": "unified"}),
            (True, {"strategy": "unified"}),
            (True, {"strategy": "iwd"}),
            (True, {"strategy": "dp", "reparam": "unit", "sites": "attention"}),
        )
        for train in (False, True)
    ]
    cases.append(
        {
            "kind": "mla",
            "config": {"strategy": "post-qkv", "sites": "attention", "branches_off": "q_down"},
            "overrides": {"mla_down_proj_fusion": True},
            "train": False,
            "fresh": True,
        }
    )
    [results] = te_ranks.run("round_trips", folder=str(tmp_path), cases=cases)
    for case, result in zip(cases, results):
        assert result["initial"] == [] and result["dtypes"] == [], case
        assert result["unfolded"] < 1e-5 and result["folded"] < 1e-5 and result["product"] < 1e-5
        if not case["train"] and "reparam" not in case["config"]:
            assert result["changed"] == [], case


def test_one_down_projection_and_two_read_each_other(te_ranks, tmp_path):
    """Saved by the one, loaded by the other, values in the same places; a shared scale folds too."""
    saved, loaded = te_ranks.run("joined_and_apart", folder=str(tmp_path))[0]
    assert saved == loaded
    [result] = te_ranks.run("fold_joined", folder=str(tmp_path / "shared"))
    assert result < 1e-5
