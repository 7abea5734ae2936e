"""The installed ``scalevec`` command, driven as a person would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.arguments import tiny_gpt

SCALEVEC = Path(sys.executable).parent / "scalevec"
SCRIPTS = Path(__file__).parent / "scripts"


def scalevec(*arguments, cwd, env=None, command=(SCALEVEC,)):
    return subprocess.run(
        [str(item) for item in (*command, *arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


def assert_one_sentence(result, *expected):
    """Exit code 2, no traceback, and the error is one line at the end."""
    output = result.stdout + result.stderr
    assert result.returncode == 2, output
    assert "Traceback" not in output
    errors = [line for line in result.stderr.splitlines() if line.startswith("scalevec: error")]
    assert len(errors) == 1
    assert result.stderr.rstrip().endswith(errors[0])
    for text in expected:
        assert text in errors[0]


def assert_nothing_written(folder):
    assert not list(Path(folder).iterdir())


def test_help_and_version(tmp_path):
    assert "launch" in scalevec("--help", cwd=tmp_path).stdout
    for command in ("launch", "pretrain"):
        shown = scalevec(command, "--help", cwd=tmp_path)
        assert shown.returncode == 0
        assert "--scalevec-strategy" in shown.stdout
    assert scalevec("--version", cwd=tmp_path).stdout.startswith("megatron_scalevec 0.")
    assert scalevec(cwd=tmp_path).returncode == 2


def test_python_dash_m_is_the_same_command(tmp_path):
    module = scalevec("--help", cwd=tmp_path, command=(sys.executable, "-m", "megatron_scalevec"))
    assert module.stdout == scalevec("--help", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["lunch", "x.py"], ["unknown command 'lunch'", "'launch'"]),
        (["pretrain", "--scalevec-strategy", "unifed"], ["stock, none, iwd, hg", "'unified'"]),
        (
            ["pretrain", "--scalevec-strategy", "hg", "--scalevec-execution", "optimiser"],
            ["auto, autograd, optimizer", "'optimizer'"],
        ),
        (["pretrain", "--scalevec-strategy", "hg", "--scalevec-lr-mult", "input"], ["ROLE=FACTOR"]),
        (["pretrain", "--scalevec-stratgy", "hg"], ["--scalevec-stratgy", "--scalevec-strategy"]),
        (["pretrain", "--scalevec-strategy"], ["expected one argument"]),
        (["pretrain", "--scalevec-placement", "dual"], ["needs a strategy"]),
        (
            ["pretrain", "--scalevec-strategy", "none", "--scalevec-placement", "dual"],
            ["contradicts --scalevec-strategy none"],
        ),
        (
            ["pretrain", "--scalevec-strategy", "hg", "--scalevec-placement", "inptu"],
            ["input, output, dual", "'input'"],
        ),
        (["pretrain", "--scalevec-cpu", "yes"], ["auto, on, off"]),
        (
            ["pretrain", "--scalevec-strategy", "hg", "--scalevec-strategy=unified"],
            ["--scalevec-strategy is given twice, hg and unified; give it once"],
        ),
        (["unfold", "a", "b", "--strategy", "hg", "--strategy=dp"], ["--strategy is given twice, hg and dp"]),
        (["unfold", "a", "b", "--strat", "gh"], ["unknown strategy 'gh'", "'hg'"]),
        (["fold", "a", "b", "--ckpt-step", "1", "--ckpt-step", "2"], ["--ckpt-step is given twice, 1 and 2"]),
        (["fold", "a"], ["scalevec fold: the following arguments are required: OUT"]),
        (["export", "a", "b", "--step", "1", "--step", "2"], ["--step is given twice, 1 and 2", "--help"]),
        (["import", "a", "b", "--strategy", "hg", "--strategy", "dp"], ["--strategy is given twice"]),
        (["launch", "no_such_script.py", "--x"], ["no such script: no_such_script.py"]),
        (["launch", str(SCRIPTS), "--x"], ["no such script"]),
    ],
)
def test_bad_input_before_megatron_is_touched(tmp_path, arguments, expected):
    assert_one_sentence(scalevec(*arguments, cwd=tmp_path), *expected)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text", "empty.txt"], ["--text is empty", "give more text"]),
        (["--text", "missing.txt"], ["missing.txt"]),
        (["--strategies", "stock,unifed"], ["unifed", "unified"]),
        (["--steps", "0"], ["--steps"]),
    ],
)
def test_bad_input_of_the_demo(tmp_path, tmp_path_factory, arguments, expected):
    texts = tmp_path_factory.mktemp("texts")
    (texts / "empty.txt").touch()
    arguments = [str(texts / a) if a.endswith(".txt") else a for a in arguments]
    assert_one_sentence(scalevec("demo", *arguments, cwd=tmp_path), *expected)
    assert_nothing_written(tmp_path)


def _fake_megatron(folder: Path, version: str) -> dict[str, str]:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text(f'__version__ = "{version}"\n')
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("version", ["0.15.3", "0.20.1"])
def test_megatron_outside_the_window(tmp_path, tmp_path_factory, version):
    env = _fake_megatron(tmp_path_factory.mktemp("fake"), version)
    result = scalevec("pretrain", "--scalevec-strategy", "hg", cwd=tmp_path, env=env)
    assert_one_sentence(result, f"megatron-core {version} is outside", ">=0.16.1", "<0.20")
    assert_nothing_written(tmp_path)


def test_missing_megatron_training(tmp_path, tmp_path_factory):
    env = _fake_megatron(tmp_path_factory.mktemp("fake"), "0.16.1")
    result = scalevec("pretrain", "--scalevec-strategy", "hg", cwd=tmp_path, env=env)
    assert_one_sentence(result, "megatron.training is missing", "PYTHONPATH")
    assert_nothing_written(tmp_path)


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data-path", "no/such/data"], ["--data-path no/such/data", "no/such/data.bin", ".idx"]),
        (["--data-path", "0.5 no/such/data"], ["no/such/data.bin"]),
    ],
)
def test_data_that_is_not_there(tmp_path, arguments, expected):
    argv = [item for item in tiny_gpt() if item != "--mock-data"]
    run = scalevec("pretrain", *argv, *arguments, "--save", "out", cwd=tmp_path)
    assert_one_sentence(run, *expected)
    assert_nothing_written(tmp_path)


@pytest.mark.needs_training
def test_yaml_without_the_keys(tmp_path, tmp_path_factory):
    """--yaml-cfg replaces the command line, so the flag would be dropped."""
    yaml = tmp_path_factory.mktemp("yaml") / "run.yaml"
    yaml.write_text("language_model:\n  num_layers: 2\n")
    run = scalevec("pretrain", "--yaml-cfg", yaml, "--scalevec-strategy", "hg", "--save", "out", cwd=tmp_path)
    assert_one_sentence(run, "replaces the command line", "'scalevec_strategy: hg'", "run.yaml")
    assert_nothing_written(tmp_path)


@pytest.mark.needs_training
def test_a_run_as_the_readme_shows_it(tmp_path):
    run = scalevec(
        "pretrain",
        *tiny_gpt("llama", "--train-iters", "4", "--lr-warmup-iters", "1"),
        *("--scalevec-strategy", "hg", "--scalevec-audit", "audit.json"),
        *("--save", "out", "--save-interval", "4"),
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert "CPU mode is on" in run.stderr
    assert "--distributed-backend" in run.stdout  # which arguments CPU mode changed
    assert "scale vectors asked for: hg: branches split, placement input" in run.stdout
    assert "linears converted 8 of 8; norm scales retired 8 of 8" in run.stdout
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert audit == json.loads((tmp_path / "out" / "scalevec_audit.json").read_text())
    assert audit["strategy"] == "hg" and len(audit["vectors"]) == 4 * 5 + 1
    assert "iteration        4/       4" in run.stdout


@pytest.mark.needs_training
def test_cpu_mode_can_be_forbidden(tmp_path):
    """Then Megatron says itself what is missing, and no plugin hides it."""
    run = scalevec("pretrain", *tiny_gpt(), "--scalevec-cpu", "off", cwd=tmp_path)
    assert run.returncode != 0
    assert "CPU mode is on" not in run.stderr


@pytest.mark.needs_training
def test_under_torchrun_an_error_is_said_once(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    torchrun += ("-m", "megatron_scalevec")
    argv = tiny_gpt("llama", "--tensor-model-parallel-size", "2", "--qk-clip")
    run = scalevec(
        "launch",
        SCRIPTS / "pretrain_as_users_do.py",
        *argv,
        *("--scalevec-strategy", "hg"),
        cwd=tmp_path,
        command=torchrun,
    )
    assert run.returncode != 0
    assert run.stderr.count("scalevec: error") == 1
    assert "--qk-clip" in run.stderr


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--scalevec-audit", "."], ["--scalevec-audit . is a folder"]),
        (["--scalevec-audit", "notes.txt/audit.json"], ["cannot be created in", "notes.txt"]),
    ],
)
def test_an_audit_file_that_cannot_be_written(tmp_path, flags, expected):
    (tmp_path / "notes.txt").touch()
    run = scalevec("pretrain", *tiny_gpt(), "--scalevec-strategy", "hg", *flags, cwd=tmp_path)
    assert_one_sentence(run, *expected)
    assert "number of parameters" not in run.stdout


@pytest.mark.needs_training
def test_an_audit_of_a_stock_run_is_refused(tmp_path):
    run = scalevec("pretrain", *tiny_gpt(), "--scalevec-audit", "a.json", cwd=tmp_path)
    assert_one_sentence(run, "nothing to say about a stock model")
    assert_nothing_written(tmp_path)


@pytest.mark.needs_training
def test_the_import_door_ends_as_the_launcher_does(tmp_path):
    script = (sys.executable, SCRIPTS / "imports_the_plugin.py")
    wrong = scalevec("--scalevec-strategy", "hgg", cwd=tmp_path, command=script)
    assert_one_sentence(wrong, "unknown strategy 'hgg'")
    refused = scalevec(
        *tiny_gpt("llama", "--qk-clip"), "--scalevec-strategy", "hg", cwd=tmp_path, command=script
    )
    assert_one_sentence(refused, "--qk-clip")
    nothing = scalevec(
        "--scalevec-strategy", "hg", cwd=tmp_path, command=(sys.executable, SCRIPTS / "imports_only.py")
    )
    assert_one_sentence(nothing, "ended without building a GPTModel")


def test_help_on_a_terminal_without_greek(tmp_path):
    shown = scalevec("launch", "--help", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert shown.returncode == 0 and "--scalevec-placement" in shown.stdout
