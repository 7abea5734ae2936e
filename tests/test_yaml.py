"""--yaml-cfg: Megatron replaces the command line by the file, so the keys live in the file."""

import pytest

pytestmark = pytest.mark.needs_training


@pytest.fixture
def parse(ranks, tmp_path):
    def run(text, *flags):
        path = tmp_path / "run.yaml"
        # Megatron reads these two before anything else.
        path.write_text(text + "disable_msc_deprecated: false\nenable_msc: false\n")
        [found] = ranks.run("parse_arguments", argv=["--yaml-cfg", str(path), *flags])
        return found

    return run


def test_keys_of_the_file_are_read(parse):
    found = parse("scalevec_strategy: dp\nscalevec_sites: [mlp]\n")
    assert found["scalevec_strategy"] == "dp"
    assert found["scalevec_sites"] == "mlp"
    assert found["scalevec_placement"] is None


def test_a_file_without_the_keys_is_stock(parse):
    found = parse("train_iters: 10\n")
    assert found["scalevec_strategy"] is None
    assert found["train_iters"] == 10


def test_the_same_on_the_command_line_is_no_contradiction(parse):
    found = parse("scalevec_strategy: hg\n", "--scalevec-strategy", "hg", "--scalevec-audit", "a.json")
    assert found["scalevec_strategy"] == "hg"
    assert found["scalevec_audit"] == "a.json"


def test_something_else_on_the_command_line_is(parse):
    found = parse("scalevec_strategy: hg\n", "--scalevec-strategy", "dp")
    assert "says 'hg': write 'scalevec_strategy: dp'" in found["error"]


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("sites", "[mlp, attention]", "mlp,attention"),
        ("branches_off", "'v, k'", "v,k"),
        ("lr_mult", "input=2.0", "input=2"),
        ("log_interval", "'20'", "20"),
    ],
)
def test_the_same_in_another_form_is_no_contradiction(parse, key, value, flag):
    flag = f"--scalevec-{key.replace('_', '-')}={flag}"
    assert "error" not in parse(f"scalevec_strategy: hg\nscalevec_{key}: {value}\n", flag)


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("execution", "autograd", "optimizer"),
        ("log_interval", "50", "100"),
        ("debug_replicas", "5", "1"),
        ("log", "a.jsonl", "b.jsonl"),
        ("audit", "a.json", "b.json"),
    ],
)
def test_another_value_for_one_launch_is_a_contradiction(parse, key, value, flag):
    name = f"--scalevec-{key.replace('_', '-')}"
    error = parse(f"scalevec_strategy: hg\nscalevec_{key}: {value}\n", name, flag)["error"]
    assert f"says {name} {flag}, and scalevec_{key} in " in error and f" is {value}: make them" in error


def test_a_wrong_name_in_the_file_is_an_error_with_the_valid_ones(parse):
    found = parse("scalevec_strategy: gh\n")
    assert "unknown strategy 'gh'" in found["error"] and "Did you mean 'hg'" in found["error"]


def test_a_misspelt_key_in_the_file_is_an_error(parse):
    found = parse("scalevec_stratgy: hg\n")
    assert "scalevec_stratgy" in found["error"] and "scalevec_strategy" in found["error"]


@pytest.mark.parametrize(
    "text",
    [
        "scalevec-strategy: hg",
        "--scalevec-strategy: hg",
        "ScaleVec_strategy: hg",
        "scalevec: {strategy: hg}",
        "language_model:\n  scalevec-strategy: hg",
        "model: [{scalevec_stratgy: hg}]",
    ],
)
def test_a_key_that_nobody_would_read_is_an_error(parse, text):
    error = parse(f"{text}\n")["error"]
    assert "unknown key in" in error and "scalevec_strategy" in error


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("language_model:\n  scalevec_strategy: hg", "language_model"),
        ("a:\n  b:\n  - c: 1\n  - scalevec_strategy: hg", "a.b[1]"),
    ],
)
def test_a_key_in_a_section_is_an_error(parse, text, place):
    error = parse(f"scalevec_strategy: hg\n{text}\n")["error"]
    assert f"{place}.scalevec_strategy in " in error and "write scalevec_strategy at the top level" in error


@pytest.mark.parametrize(
    ("key", "value", "given", "expected"),
    [
        ("sites", "[mlp, off]", '["mlp", false]', "a list of names, for example [attention, mlp], or one"),
        ("sites", "[1, 2]", "[1, 2]", "a list of names"),
        ("sites", "[[mlp]]", '[["mlp"]]', "a list of names"),
        ("sites", "{mlp: 1}", '{"mlp": 1}', "a list of names"),
        ("sites", "[mlp, null]", '["mlp", null]', "a list of names"),
        ("sites", "1", "1", "a list of names"),
        ("branches_off", "[v, no]", '["v", false]', "[k, v], or one string with commas"),
        ("lr_mult", "{input: 2}", '{"input": 2}', "[input=2, output=0.5]"),
        ("strategy", "[dp, 1]", '["dp", 1]', "one name"),
        ("placement", "{input: true}", '{"input": true}', "one name"),
    ],
)
def test_a_value_of_another_kind_is_an_error(parse, key, value, given, expected):
    strategy = "" if key == "strategy" else "scalevec_strategy: hg\n"
    error = parse(f"{strategy}scalevec_{key}: {value}\n")["error"]
    assert f"scalevec_{key} in " in error and f" is {given}: give " in error and expected in error
    assert ("put a name in quotes" in error) == ("true" in given or "false" in given)


@pytest.mark.parametrize("key", ["scalevec_log", "scalevec_audit"])
def test_a_file_in_the_file_is_a_name(parse, key):
    error = parse(f"{key}: 5\n")["error"]
    assert f"{key} in " in error and "is 5, not the name of a file" in error


@pytest.mark.parametrize(
    ("value", "found"), [("3", 3), ("often", None), ("0", None), ("2.5", None), ("true", None)]
)
def test_a_number_of_steps_in_the_file(parse, value, found):
    result = parse(f"scalevec_debug_replicas: {value}\n")
    if found is None:
        assert "scalevec_debug_replicas in" in result["error"] and "not a number of steps" in result["error"]
    else:
        assert result["scalevec_debug_replicas"] == found
