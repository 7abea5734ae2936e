"""Weight decay and optimizer of every trainable parameter, against tables under version control.

``pytest tests/test_golden_decay.py --update-golden`` writes the table of the megatron-core in use anew; what
changed is then to be read in the diff.
"""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from ranks.models import EXPERTS

STRATEGIES = ("stock", "iwd", "hg", "dnp", "or", "unified")
# A model is one line: name, kind in ranks.models.build_gpt, overrides of Megatron's configuration.
MODELS = (
    ("llama", "llama", {}),
    ("gpt2", "gpt2", {}),
    ("qk-norm", "qk-norm", {}),
    ("mtp", "llama", {"mtp_num_layers": 1}),
    ("zero-centered", "llama", {"layernorm_zero_centered_gamma": True}),
    ("mla", "mla", {}),
    ("experts", "llama", {**EXPERTS["shared"], "num_layers": 2}),
    ("deepseek", "mla", {**EXPERTS["deepseek"], "num_layers": 2, "mtp_num_layers": 1}),
)
# Built with Muon as well, where there is one.
WITH_MUON = ("llama", "qk-norm")


def _version() -> str:
    return ".".join(metadata.version("megatron-core").split(".")[:2])


def _has_muon() -> bool:
    try:
        metadata.version("emerging-optimizers")
    except metadata.PackageNotFoundError:
        return False
    return _version() not in ("0.16", "0.17")  # there it is built by a function of its own


def _cases() -> list[dict]:
    return [
        {
            "name": f"{name}, {strategy}, {optimizer}",
            "kind": kind,
            "overrides": overrides,
            "strategy": strategy,
            "optimizer": optimizer,
        }
        for optimizer in ("adam", "muon")
        for name, kind, overrides in MODELS
        for strategy in STRATEGIES
        if optimizer == "adam" or (name in WITH_MUON and _has_muon())
    ]


@pytest.fixture(scope="module")
def tables(ranks):
    cases = _cases()
    jobs = [{key: value for key, value in case.items() if key != "name"} for case in cases]
    [found] = ranks.run("decay_tables", cases=jobs)
    return {case["name"]: table for case, table in zip(cases, found)}


def test_golden_tables(tables, request):
    file = Path(__file__).parent / "golden" / f"decay-{_version()}.json"
    if request.config.getoption("--update-golden"):
        file.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert file.exists(), f"no table for megatron-core {_version()}: run pytest with --update-golden"
    golden = json.loads(file.read_text(encoding="utf-8"))
    assert tables.keys() == golden.keys()
    for case, table in golden.items():
        assert tables[case] == table, case


def test_versions_differ_in_nothing_that_both_have():
    """A difference between two versions of Megatron is a finding, not a matter of regenerating."""
    files = sorted((Path(__file__).parent / "golden").glob("decay-*.json"))
    assert len(files) >= 2
    # The layer inside an MTP block was called differently before 0.17.
    texts = [
        file.read_text(encoding="utf-8").replace(".transformer_layer.", ".mtp_model_layer.") for file in files
    ]
    first, *others = map(json.loads, texts)
    for other in others:
        common = first.keys() & other.keys()
        assert len(common) == len(MODELS) * len(STRATEGIES)
        for case in common:
            assert first[case] == other[case], case


def test_matrices_biases_and_embeddings_are_in_the_groups_of_the_stock_model(tables):
    for case, table in tables.items():
        model, strategy, optimizer = case.split(", ")
        stock = tables[f"{model}, stock, {optimizer}"]
        kept = {name: entry for name, entry in table.items() if not re.search("gamma|norm", name)}
        assert kept == {name: entry for name, entry in stock.items() if "norm" not in name}


def test_the_classes_of_the_method(tables):
    """Independently of the tables: Input-Norm scales decay, those of q and k norms do not, under Adam."""
    for case, table in tables.items():
        _, strategy, _ = case.split(", ")
        for name, entry in table.items():
            if re.search(r"\.[qk]_layernorm\.", name):
                assert entry == "0 adam", (case, name)
            elif "gamma" in name or re.search(r"norm\.weight$", name):
                assert entry == ("0 adam" if strategy == "stock" else "1 adam"), (case, name)
            elif "bias" in name:
                assert entry == "0 adam", (case, name)
            elif case.endswith("muon") and not re.search("embedding|output_layer", name):
                assert entry == "1 muon", (case, name)
            else:
                assert entry == "1 adam", (case, name)
