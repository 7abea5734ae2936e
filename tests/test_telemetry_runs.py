"""Telemetry of whole runs: where it goes, that it changes nothing, and that a resumed run continues it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks.arguments import LAYOUTS, tiny_gpt
from ranks.pool import RankFailure

from megatron_scalevec import ScaleVecConfig, ScaleVecError
from megatron_scalevec.compare import read_run
from megatron_scalevec.integration.argument_hooks import _require_log_file, _settle_telemetry
from megatron_scalevec.telemetry import STATISTICS, JsonLines, scalars


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row_of(line, **place):
    [row] = [row for row in line["vectors"] if place.items() <= row.items()]
    return row


UP = {"layer": 3, "site": "mlp", "branch": "up", "side": "in"}


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("dp2-distopt", []),
        ("dp2-distopt", ["--bf16", "--scalevec-execution", "optimizer"]),
    ],
)
def test_a_run_is_the_same_bit_by_bit(ranks, tmp_path, layout, flags):
    """And what is told is told by TensorBoard too."""
    world_size, arguments = LAYOUTS[layout]
    argv = tiny_gpt("llama", *arguments, *flags, "--scalevec-strategy", "hg", "--exit-interval", "4")
    plain = ranks.run("train", world_size, argv=argv)
    file, board = tmp_path / "new" / "t.jsonl", tmp_path / "board"
    more = ["--tensorboard-dir", str(board), "--scalevec-log", str(file), "--scalevec-log-interval", "2"]
    told = ranks.run("train", world_size, argv=[*argv, *more])
    for ours, theirs in zip(told, plain):
        for what in ("losses", "grad_norms", "moments", "start"):
            assert ours[what] == theirs[what], what
        assert ours["vectors"].keys() == theirs["vectors"].keys()
        assert all((ours["vectors"][name] == theirs["vectors"][name]).all() for name in ours["vectors"])
    lines = lines_of(file)
    assert [line["step"] for line in lines] == [2, 4]
    assert [line["strategy"] for line in lines] == ["hg", "hg"]
    assert [line["loss"] for line in lines] == told[-1]["losses"][1::2]
    assert [line["gradient_norm"] for line in lines] == told[-1]["grad_norms"][1::2]
    run = read_run(file)
    assert run.label == "hg" and run.steps.tolist() == [2, 4]
    assert run.losses.tolist() == [line["loss"] for line in lines]
    if "--bf16" not in flags:
        final, row = told[-1]["vectors"]["layer3.mlp.linear_fc1.gamma_in_up"], row_of(lines[-1], **UP)
        assert row["rms"] == pytest.approx(np.sqrt((final.astype(np.float64) ** 2).mean()), rel=1e-12)
        assert (row["min"], row["max"]) == (final.min(), final.max())
    assert 1e-4 < row_of(lines[-1], **UP)["update_ratio"] < 1e-2

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board), size_guidance={"scalars": 0})
    events.Reload()
    curves = {tag for tag in events.Tags()["scalars"] if tag.startswith("scalevec ")}
    assert "scalevec rms/mlp up in layer 3" in curves and "scalevec cosine/attention q-k in layer 1" in curves
    for line in lines:
        expected = scalars(line)
        assert curves == expected.keys()
        for name, value in expected.items():
            [event] = [event for event in events.Scalars(name) if event.step == line["step"]]
            assert event.value == np.float32(value), name


def test_the_loop_of_the_documentation_runs(ranks, tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [told] = ranks.run("telemetry_of_a_loop", code=code, folder=str(tmp_path))
    [line] = lines_of(tmp_path / "telemetry.jsonl")
    assert line["step"] == 1 and row_of(line, **{**UP, "layer": 1})["update_ratio"] > 0
    assert {name: value for name, value, _ in told} == scalars(line)


def test_a_loop_that_forgets_a_call_is_told(ranks, tmp_path):
    code = "from megatron_scalevec.telemetry import Telemetry\n"
    code += "telemetry = Telemetry(model_chunks, optimizer)\ntelemetry.before_step()\noptimizer.step()\n"
    ranks.run("telemetry_of_a_loop", code=code + "telemetry.after_step()", folder=str(tmp_path))
    with pytest.raises(RankFailure, match=r"call before_step\(\) on every rank"):
        ranks.run("telemetry_of_a_loop", code=code + "telemetry.after_step()\n" * 2, folder=str(tmp_path))


@pytest.mark.needs_training
def test_a_resumed_run_continues_the_file(ranks, tmp_path):
    """Killed after the checkpoint at step 5, with further steps told and a line unfinished: the resumed run,
    which is exact, writes the same file."""
    argv = tiny_gpt("llama", "--bf16", "--save", str(tmp_path), "--save-interval", "5")
    argv += ["--scalevec-strategy", "unified", "--scalevec-log-interval", "2"]
    ranks.run("train", argv=argv)
    file = tmp_path / "scalevec_telemetry.jsonl"
    whole = file.read_bytes()
    assert [line["step"] for line in lines_of(file)] == [2, 4, 6, 8, 10]
    file.write_bytes(whole + b'{"step": 11, "vec')
    ranks.run("train", argv=[*argv, "--load", str(tmp_path), "--ckpt-step", "5"], by_name=False)
    assert file.read_bytes() == whole
    # From the beginning, in the same folder: nothing of the earlier run is lost.
    ranks.run("train", argv=[*argv, "--exit-interval", "2"])
    assert (tmp_path / "scalevec_telemetry.jsonl.1").read_bytes() == whole
    assert file.read_bytes() == whole[: len(file.read_bytes())]


@pytest.mark.needs_training
def test_a_skipped_step_has_no_gradients(ranks, tmp_path):
    argv = tiny_gpt("llama", "--fp16", "--initial-loss-scale", str(2**40), "--exit-interval", "2")
    file = tmp_path / "t.jsonl"
    argv += ["--scalevec-strategy", "unified", "--scalevec-log", str(file), "--scalevec-log-interval", "1"]
    ranks.run("train", argv=argv)
    for line in lines_of(file):
        assert line["skipped"] and line["gradient_norm"] is None
        row = row_of(line, **UP)
        assert (row["gradient_rms"], row["magnitude_gradient"], row["update_ratio"]) == (None, None, 0.0)


@pytest.mark.needs_training
def test_weights_and_biases_offline(ranks, tmp_path):
    """The file that W&B would send holds the same figures under the same names."""
    file = tmp_path / "t.jsonl"
    argv = tiny_gpt("llama", "--scalevec-strategy", "hg", "--exit-interval", "2")
    argv += ["--scalevec-log", str(file), "--scalevec-log-interval", "2"]
    # Without TensorBoard Megatron writes nothing of its own to W&B.
    argv += ["--tensorboard-dir", str(tmp_path / "board")]
    argv += ["--wandb-project", "p", "--wandb-exp-name", "n", "--wandb-save-dir", str(tmp_path)]
    ranks.run("train_with_wandb_offline", argv=argv)
    [line] = lines_of(file)
    expected = scalars(line)
    assert len(expected) > 100
    [history] = ranks.run("read_wandb", folder=str(tmp_path))
    found = {name: value for name, value in history[2].items() if name.startswith("scalevec ")}
    assert found == pytest.approx(expected, rel=1e-12)
    assert history[2]["lm loss"] == pytest.approx(line["loss"])


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--scalevec-log-interval"], "have nothing to say about a stock model"),
        (["--scalevec-strategy", "hg", "--scalevec-log-interval", "5"], "5 has nowhere to log to"),
        (["--scalevec-strategy", "hg", "--scalevec-log", "/dev/null/x"], "cannot be created in /dev/null"),
        (["--scalevec-strategy", "hg", "--scalevec-log", "/tmp"], "--scalevec-log /tmp is a folder"),
        (["--scalevec-strategy", "hg", "--scalevec-log", "new/"], "--scalevec-log new/ names no file"),
        (
            ["--scalevec-strategy", "hg", "--scalevec-log-interval", "--save", "/dev/null"],
            r"/dev/null/scalevec_telemetry.jsonl \(by default in the --save folder\) cannot be created in",
        ),
        (
            ["--scalevec-strategy", "hg", "--scalevec-log", "FILE", "--scalevec-audit", "FILE"],
            "would be both the audit and the file of --scalevec-log",
        ),
        (["--scalevec-strategy", "hg", "--scalevec-log", "OTHER"], "thesis.tex:1 is no line of telemetry"),
        (["--scalevec-strategy", "none", "--scalevec-log", "FILE"], "no scale vectors that could be logged"),
    ],
)
def test_what_cannot_be_logged_is_refused(ranks, tmp_path, flags, sentence):
    files = {"FILE": str(tmp_path / "t.jsonl"), "OTHER": str(tmp_path / "thesis.tex")}
    (tmp_path / "thesis.tex").write_text("\\section{Introduction}")
    with pytest.raises(RankFailure, match=sentence):
        ranks.run("train", argv=tiny_gpt("llama", *(files.get(flag, flag) for flag in flags)))


@pytest.mark.parametrize(
    ("log", "save", "sentence"),
    [
        (None, "saved", r"saved/scalevec_telemetry.jsonl \(by default in the --save folder\) is a folder"),
        (
            None,
            "file",
            r"file/scalevec_telemetry.jsonl \(by default in the --save folder\) cannot be created",
        ),
        ("file", None, "file:1 is no line of telemetry"),
        ("saved/scalevec_audit.json", "saved", "would be both the audit"),
        ("no/folder/", None, "no/folder/ names no file"),
        ("", None, "names no file"),
    ],
)
def test_the_file_is_looked_at_with_the_arguments(tmp_path, monkeypatch, log, save, sentence):
    """Before there is a model: nothing but the arguments is known here."""
    monkeypatch.chdir(tmp_path)
    Path("saved/scalevec_telemetry.jsonl").mkdir(parents=True)
    Path("file").write_text("notes")
    args = SimpleNamespace(scalevec_log=log, scalevec_log_interval=2, save=save, rank=1, world_size=2)
    current = SimpleNamespace()
    _settle_telemetry(current, args, ScaleVecConfig(strategy="hg"))
    with pytest.raises(ScaleVecError, match=sentence):
        _require_log_file(current, args)


def test_only_the_rank_that_writes_reads_the_file(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("notes")
    args = SimpleNamespace(scalevec_log=str(path), save=None, rank=0, world_size=2)
    _require_log_file(SimpleNamespace(log_file=str(path)), args)


def test_an_interval_longer_than_the_run_is_told(capsys):
    args = SimpleNamespace(scalevec_log="t.jsonl", train_iters=99)
    current = SimpleNamespace()
    _settle_telemetry(current, args, ScaleVecConfig(strategy="hg"))
    assert (
        current.log_interval == 100
        and "interval is 100, and the run has 99 iterations" in capsys.readouterr().out
    )
    args.train_iters = 100
    _settle_telemetry(current, args, ScaleVecConfig(strategy="hg"))
    assert capsys.readouterr().out == ""


@pytest.mark.needs_training
def test_a_script_without_steps_says_that_nothing_was_logged(ranks):
    argv = ["--scalevec-strategy", "hg", "--scalevec-log", "t.jsonl"]
    with pytest.raises(RankFailure, match="--scalevec-log-interval logged nothing"):
        ranks.run("launch_only", argv=argv, script="exits_zero.py")


def test_a_file_is_continued_after_the_last_step_that_counts(tmp_path):
    path = tmp_path / "t.jsonl"
    for step in (10, 20, 30):
        JsonLines(path, step).append({"step": step, "vectors": [], "branches": []})
    assert JsonLines(path, 30).notes == []
    [note] = JsonLines(path, 20).notes
    assert "1 lines after step 20" in note
    assert [line["step"] for line in lines_of(path)] == [10, 20]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_new_run_puts_an_earlier_file_aside(tmp_path):
    path = tmp_path / "t.jsonl"
    for number in (1, 2):
        file = JsonLines(path, 0)
        assert len(file.notes) == number - 1
        file.append({"step": number})
    assert lines_of(tmp_path / "t.jsonl.1") == [{"step": 1}] and lines_of(path) == [{"step": 2}]


NO_STEPS = (
    "Infinity",
    "-Infinity",
    "NaN",
    "1e400",
    "1e3",
    "3.0",
    "-1",
    "true",
    "null",
    '"3"',
    "[3]",
    "9" * 5000,
)


@pytest.mark.parametrize(
    "text",
    ["some log\n", "notes", '{"loss": 1}\n', '[{"step": 1}]\n', "\xff\n", "[" * 100_000 + "\n"]
    + [f'{{"step": {step}}}\n' for step in NO_STEPS],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("resumed_at", [0, 3])
def test_a_file_of_somebody_else_is_left_alone(tmp_path, text, resumed_at):
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ScaleVecError, match="t.jsonl"):
        JsonLines(path, resumed_at)
    assert path.read_text(encoding="latin-1") == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kept", [1, 5, 9, 12, 40])
def test_an_unfinished_line_of_ours_leaves_the_file(tmp_path, kept):
    path = tmp_path / "t.jsonl"
    whole = '{"step": 2, "vectors": [], "branches": []}\n'
    path.write_text(whole + whole.replace("2", "4")[:kept])
    assert len(JsonLines(path, 2).notes) == 1
    assert path.read_text() == whole


def test_a_line_is_what_ends_with_a_line_feed(tmp_path):
    """Texts in it may hold what else Python's splitlines takes for an end."""
    path = tmp_path / "t.jsonl"
    JsonLines(path, 0).append({"step": 2, "run": "a\u2028b\x85c"})
    before = path.read_bytes()
    assert JsonLines(path, 2).notes == []
    assert path.read_bytes() == before and b"\xe2\x80\xa8" in before


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"step": 2, "loss": float("nan")}, "telemetry of step 2 cannot be a line of JSON"),
        ({"step": 2, "loss": np.float32(1)}, "telemetry of step 2 cannot be a line of JSON"),
        ({"step": 2, "run": "\udcff"}, "telemetry of step 2 cannot be a line of JSON"),
        ({"step": 2.0}, "telemetry of step 2.0: a line begins with its step"),
        ({"step": True}, "telemetry of step True: a line begins with its step"),
        ({"step": -1}, "telemetry of step -1: a line begins with its step"),
        ({"loss": 2.0, "step": 2}, "telemetry of step 2: a line begins with its step"),
    ],
    ids=str,
)
def test_no_line_is_written_that_could_not_be_read(tmp_path, record, sentence):
    path = tmp_path / "t.jsonl"
    file = JsonLines(path, 0)
    with pytest.raises(ScaleVecError, match=sentence):
        file.append(record)
    assert not path.exists()


def test_a_name_for_every_figure():
    row = {"layer": None, "site": "head", "branch": "logits", "side": "in", **dict.fromkeys(STATISTICS, 2.0)}
    found = scalars({"vectors": [{**row, "rms": None}], "branches": []})
    assert found == {f"scalevec {name}/head logits in": 2.0 for name in STATISTICS if name != "rms"}
