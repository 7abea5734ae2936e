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
