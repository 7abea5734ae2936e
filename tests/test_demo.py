"""The demo: its text, its reading of logs, its folder, its runs and its report."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from megatron_scalevec import demo
from megatron_scalevec.demo import report as reports
from megatron_scalevec.demo import runs as runs_module
from megatron_scalevec.demo import text as texts
from megatron_scalevec.demo.display import Display
from megatron_scalevec.demo.folder import ResultFolder, check_place
from megatron_scalevec.demo.logs import LogReader, failure_excerpt
from megatron_scalevec.demo.model import command, evaluation_interval
from megatron_scalevec.demo.options import built_strategies, parse
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.lifetime import Stopped, stopped_by_signals

ITERATION = (
    " [2026-11-29 20:01:11.239271] iteration        {step}/      10 |"
    " consumed samples:         {step}000 |"
    " elapsed time per iteration (ms): {ms} | learning rate: 5.000000E-04 |"
    " global batch size:     4 | lm loss: {loss} | loss scale: 1.0 | grad norm: 0.965 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)
VALIDATION = " validation loss at iteration {where} | lm loss value: {loss} | lm loss PPL: 1.8E+02 | "
LOG = "\n".join(
    [
        "WARNING:megatron.core.rerun_state_machine:Result validation enabled",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 180",
        ITERATION.format(step=1, ms="111.1", loss="5.548747E+00"),
        "Number of parameters in most loaded shard in billions: 0.0002",
        ITERATION.format(step=2, ms="79.6", loss="5.559113E+00"),
        "-" * 93,
        VALIDATION.format(where="5", loss="5.194333E+00"),
        "-" * 93,
        ITERATION.format(step=10, ms="53.8", loss="4.895887E+00"),
        VALIDATION.format(where="10 on validation set", loss="4.815117E+00"),
        VALIDATION.format(where="10 on test set", loss="4.860801E+00"),
        "",
    ]
)


@pytest.fixture
def some_text(tmp_path):
    """Two files with more text than the smallest demo needs."""
    paths = []
    for index in range(2):
        path = tmp_path / f"text{index}.txt"
        lines = [f"line {n} of file {index}: {n * n}\n" for n in range(1500)]
        path.write_text("".join(lines), encoding="utf-8")
        paths.append(path)
    return paths


# --- text -----------------------------------------------------------------------------------------


def test_default_text_is_the_same_every_time():
    first, second = (texts.read_corpus(None, limit=400_000, seq_length=64) for _ in range(2))
    assert first == second and first.digest == second.digest
    assert 0.03 < first.validation_bytes / first.training_bytes < 0.2
    assert b"def " in b"".join(first.documents)


def test_held_out_text_is_whole_files(tmp_path):
    paths = []
    for index in range(60):
        path = tmp_path / f"{index:02}.txt"
        path.write_text(f"file {index:02}\n" * 60)
        paths.append(path)
    corpus = texts.read_corpus(paths, limit=10**6, seq_length=16)
    names = [set(part.split(b"\n")[:-1]) for part in corpus.documents]
    training = set.union(*names[: corpus.training_documents])
    held_out = set.union(*names[corpus.training_documents :])
    assert held_out and not training & held_out
    assert corpus.split == f"{corpus.training_documents},{len(held_out)},0"
    assert [int(name[5:]) for name in held_out] != [57, 58, 59], "files were not shuffled"


def test_one_long_file_is_divided_and_limited(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("some words to a line\n" * 50_000)
    corpus = texts.read_corpus([path], limit=500_000, seq_length=128)
    assert sum(map(len, corpus.documents)) == 500_000
    assert 1 <= corpus.training_documents < len(corpus.documents)
    assert all(part.endswith(b"line\n") for part in corpus.documents[:-1])


def test_bytes_that_are_no_text_do_not_end_documents(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 \xff \xfe\n" * 5000)
    corpus = texts.read_corpus([path], limit=10**6, seq_length=16)
    assert all(texts.END_OF_DOCUMENT not in part for part in corpus.documents)


def test_dataset_round_trip(tmp_path, some_text):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    corpus = texts.read_corpus(some_text, limit=10**6, seq_length=32)
    texts.write_dataset(corpus, tmp_path / "text")
    dataset = IndexedDataset(str(tmp_path / "text"))
    assert len(dataset) == len(corpus.documents) == len(dataset.document_indices) - 1
    for index, expected in enumerate(corpus.documents):
        tokens = dataset[index]
        assert tokens.dtype == numpy.uint8
        assert tokens.tobytes() == expected + bytes([texts.END_OF_DOCUMENT])


# --- logs -----------------------------------------------------------------------------------------


def test_log_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_text(LOG)
    reader = LogReader(path)
    assert reader.poll()
    assert reader.training == {1: 5.548747, 2: 5.559113, 10: 4.895887}
    assert reader.step_times == {1: 111.1, 2: 79.6, 10: 53.8}
    assert reader.validation == {5: 5.194333}
    assert reader.final_validation == 4.815117
    assert (reader.parameters, reader.step) == (180, 10)
    assert not reader.poll()


def test_the_second_step_of_a_process_has_its_own_loss(tmp_path):
    """Megatron prints the mean of a process's first two steps there, also where a run goes on."""
    start = "  seq_length ........ 16\n  seed ........ 1\n"
    lines = [start]
    for step, loss in ((1, 5.0), (2, 4.5), (3, 3.5)):
        lines.append(ITERATION.format(step=step, ms=1, loss=loss) + "\n")
    lines.append(start)
    for step, loss in ((3, 3.5), (4, 3.25), (5, 2.0)):
        lines.append(ITERATION.format(step=step, ms=1, loss=loss) + "\n")
    path = tmp_path / "log"
    path.write_text("".join(lines))
    reader = LogReader(path)
    reader.poll()
    assert reader.training == {1: 5.0, 2: 4.0, 3: 3.5, 4: 3.0, 5: 2.0}


def test_log_is_read_while_it_grows(tmp_path):
    path = tmp_path / "log"
    whole = LogReader(path)
    assert not whole.poll(), "a log that does not exist yet"
    for start in range(0, len(LOG), 37):
        with open(path, "a") as file:
            file.write(LOG[start : start + 37])
        whole.poll()
    assert whole.training == {1: 5.548747, 2: 5.559113, 10: 4.895887}
    assert whole.final_validation == 4.815117


ARGUMENTS = ["  seq_length ........ 16", "  seed ........ 7", "  scalevec_strategy ........ hg"]
# What stands before the lines of two ranks: srun --label, torchrun --tee and its tracebacks, mpirun, a time.
RANKS = [
    ("0: ", "1: "),
    (" 3: ", "12: "),
    ("[default0]:", "[default1]:"),
    ("[rank0]: ", "[rank1]: "),
    ("[trainer0]:", "[trainer1]:"),
    ("[1,0]<stdout>: ", "[1,1]<stdout>: "),
    ("2026-11-29T20:01:11.239Z ", "2026-11-29T20:01:11.240Z "),
]


@pytest.mark.parametrize("marks", RANKS, ids=[mark for mark, _ in RANKS])
def test_lines_may_begin_with_their_rank(tmp_path, marks):
    """The first rank prints the arguments, the last one the losses, and both their memory, in any order."""
    lines = [*ARGUMENTS, *LOG.splitlines()]
    first = [line for line in lines if "iteration" not in line]
    first.append(
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 3.5 | reserved: 9 |"
    )
    last = [line for line in lines if "iteration" in line and line not in first]
    last.insert(
        2, "[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 4.5 | reserved: 9 |"
    )
    mixed = [marks[0] + line for line in first[:5]]
    for index, line in enumerate(last):
        mixed += [marks[1] + line, *(marks[0] + one for one in first[5 + index : 6 + index])]
    readers = []
    for name, written in (
        ("plain", lines),
        ("marked", [marks[0] + line for line in lines]),
        ("mixed", mixed),
    ):
        (tmp_path / name).write_text("\n".join(written) + "\n")
        readers.append(LogReader(tmp_path / name))
        readers[-1].poll()
    plain, marked, both = readers
    for found in (marked, both):
        assert found.arguments == {"seq_length": "16", "seed": "7", "scalevec_strategy": "hg"}
        for name in ("training", "step_times", "samples", "validation", "final_validation", "parameters"):
            assert getattr(found, name) == getattr(plain, name) is not None, name
    assert both.memory_megabytes == 4.5


def test_arguments_with_longer_names_are_others(tmp_path):
    (tmp_path / "log").write_text(
        "  seed ........ 1\n0:   data_seed ........ 2\n0:   decoder-seed ........ 3\n"
    )
    reader = LogReader(tmp_path / "log")
    reader.poll()
    assert reader.arguments == {"seed": "1"}


def read_lines(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    reader = LogReader(path)
    reader.poll()
    return reader


def iteration(step, loss, skipped=0):
    """A line as Megatron writes it; None for a loss that it leaves out because it is NaN."""
    line = ITERATION.format(step=step, ms=1, loss=loss).replace(
        "skipped iterations:   0", f"skipped iterations: {skipped}"
    )
    return line if loss is not None else line.replace(" lm loss: None |", "")


def test_a_loss_that_megatron_leaves_out_is_no_number(tmp_path):
    found = read_lines(tmp_path / "log", iteration(1, 2.0), iteration(2, None), iteration(3, None)).training
    assert found[1] == 2.0 and math.isnan(found[2]) and math.isnan(found[3])


def test_steps_that_were_skipped_have_no_loss(tmp_path):
    """fp16 starts with a few: Megatron prints no loss, or 0, and its first sum holds none of them."""
    start = ARGUMENTS[1]
    lines = [iteration(1, None, 1), iteration(2, None, 2), iteration(3, 4.0), iteration(4, 3.0)]
    assert read_lines(tmp_path / "log", start, *lines).training == {3: 4.0, 4: 3.0}
    lines = [iteration(1, 5.0), iteration(2, 5.0, 1), iteration(3, 0.0, 1), iteration(4, 3.0)]
    assert read_lines(tmp_path / "log", start, *lines).training == {1: 5.0, 4: 3.0}


def test_steps_after_the_checkpoint_that_a_run_went_on_from_are_taken_again(tmp_path):
    first, again = (
        [iteration(step, loss) for step in steps] for steps, loss in (((1, 2, 3, 4), 4.0), ((3,), 3.0))
    )
    found = read_lines(tmp_path / "log", ARGUMENTS[1], *first, ARGUMENTS[1], *again)
    assert found.training == {1: 4.0, 2: 4.0, 3: 3.0} and sorted(found.samples) == sorted(
        found.step_times
    ) == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        "iteration 3/ 10 | elapsed time per iteration (ms): nan | consumed samples: inf |",
        "iteration 9" + "9" * 5000 + "/ 10 | lm loss: 1.0 |",
        "validation loss at iteration 5 | lm loss value: 1.2",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): " + "9" * 5000,
        "iteration 3/ 10 | elapsed time per iteration (ms): 1.2.3 | lm loss: spam |",
        "iteration x/ 10 | lm loss: 1.0 |",
        "validation loss at iteration 5 | lm loss value: | lm loss PPL: 1 |",
        "\x00\x80 | lm loss: 1.0 |",
    ],
)
def test_garbled_lines_are_no_values(tmp_path, line):
    path = tmp_path / "log"
    path.write_text(line + "\n")
    reader = LogReader(path)
    reader.poll()
    assert not reader.training and not reader.step_times and not reader.validation and not reader.samples


def test_excerpt_is_the_cause(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        "starting\nTraceback (most recent call last):\n  File x\nRuntimeError: the cause\n"
        "E1129 torch/distributed/elastic/multiprocessing/api.py: failed (exitcode: 1)\n"
        "Traceback (most recent call last):\nChildFailedError:\n"
    )
    assert failure_excerpt(path)[-1] == "RuntimeError: the cause"
    path.write_text("noise\nscalevec: error: no such thing.\nmore noise\n")
    assert failure_excerpt(path) == ["scalevec: error: no such thing."]
    mixed = [
        "[rank1]: Traceback (most recent call last):",
        "[rank0]: still here",
        "[rank1]:   File x",
        "[rank0]: Traceback (most recent call last):",
        "[rank1]: RuntimeError: the cause",
        "[rank0]: RuntimeError: broken pipe",
    ]
    path.write_text("\n".join(mixed))
    assert failure_excerpt(path) == mixed[::2]
    diverged = "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 0"
    path.write_text(f"{diverged}\nTraceback (most recent call last):\nTypeError: in saving\n")
    assert failure_excerpt(path) == [diverged]
    assert failure_excerpt(tmp_path / "absent") == []


# --- options and places ---------------------------------------------------------------------------


def test_defaults():
    options = parse([])
    assert options.strategies == ("stock", "unified") and not options.baseline_added
    assert options.seeds == (1234,) and options.out == Path("runs/demo")


def test_stock_is_always_there_and_first():
    options = parse(["--strategies", "hg,iwd,hg"])
    assert options.strategies == ("stock", "hg", "iwd") and options.baseline_added
    assert parse(["--strategies", "hg,stock"]).strategies == ("stock", "hg")
    assert "stock" in built_strategies() and "hg" in built_strategies()


@pytest.mark.parametrize("given, seeds", [("2", (1234, 1235)), ("7,", (7,)), ("3,1", (3, 1))])
def test_seeds(given, seeds):
    assert parse(["--seeds", given]).seeds == seeds


BAD = [
    (["--strategies", "hgg"], "Did you mean 'hg'"),
    (["--strategies", ","], "is empty"),
    (["--steps", "0"], "--steps 0 must be at least 1"),
    (["--steps", "many"], "--steps"),
    (["--steps", "20", "--steps", "30"], "--steps is given twice, 20 and 30; give it once"),
    (["--text", "short.txt", "--text", "empty.txt"], "holds 6 bytes"),
    (["--text", "short.txt", "--text", "absent.txt"], "absent.txt cannot be read"),
    (["--text", "absent.txt", "--text", "short.txt"], "absent.txt cannot be read"),
    (["--seeds", "7,8,07"], "7 is there more than once"),
    (["--seeds", f"{2**32},"], "all from 1 to 4294967295"),
    (["--nonsense"], "--nonsense"),
    (["--seeds", "0"], "--seeds"),
    (["--seeds", "a,b"], "--seeds"),
    (["--seeds", "1234"], "'1234,'"),
    (["--learning-rate", "nan"], "--learning-rate"),
    (["--hidden-size", "100"], "multiple of 64"),
    (["--tensor-parallel", "3"], "--hidden-size 192"),
    (["--text", "absent.txt"], "absent.txt cannot be read"),
    (["--text", "."], "cannot be read"),
    (["--text", "empty.txt"], "--text is empty"),
    (["--text", "short.txt"], "holds 6 bytes"),
    (["--text-bytes", "10"], "--text-bytes 10 is too little"),
    (["--out", "."], "current folder"),
    (["--out", "short.txt"], "is not a folder"),
    (["--out", "short.txt/demo"], "not a folder that can be written to"),
    (["--out", "mine"], "not the result of an earlier demo"),
    (["--out", "mixed"], "precious"),
]


@pytest.mark.parametrize("argv, message", BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_creates_nothing(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("short\n")
    Path("mine").mkdir()
    Path("mine/report.json").write_text('{"kind": "something else"}')
    Path("mixed").mkdir()
    Path("mixed/report.json").write_text('{"kind": "scalevec demo"}')
    Path("mixed/precious").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ScaleVecError) as raised:
        demo.main(argv)
    assert message in str(raised.value)
    assert str(raised.value).endswith((".", "?")), "a sentence for a person"
    assert sorted(tmp_path.rglob("*")) == before


def test_unwritable_place(tmp_path, monkeypatch):
    """Answered by the system, not by the mode bits: root may write anywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ScaleVecError, match="written to"):
        check_place(tmp_path / "demo")


def test_folder_appears_only_when_installed(tmp_path):
    out = tmp_path / "runs" / "demo"
    with ResultFolder(out) as folder:
        (folder.path / "report.json").write_text('{"kind": "scalevec demo"}')
        assert not out.exists()
        folder.install()
    assert (out / "report.json").is_file()
    with ResultFolder(out) as folder:
        (folder.path / "report.json").write_text('{"kind": "scalevec demo", "second": 1}')
        assert "second" not in (out / "report.json").read_text()
        folder.install()
    assert "second" in (out / "report.json").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["demo"]


def test_folder_leaves_nothing_when_it_is_given_up(tmp_path):
    with pytest.raises(KeyboardInterrupt), ResultFolder(tmp_path / "a" / "b" / "demo"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_folder_does_not_overwrite_what_came_meanwhile(tmp_path):
    out = tmp_path / "demo"
    with ResultFolder(out) as folder:
        (folder.path / "report.json").touch()
        out.mkdir()
        (out / "thesis.tex").touch()
        with pytest.raises(ScaleVecError, match="demo.result-"):
            folder.install()
    assert (out / "thesis.tex").exists()
    assert len(list(tmp_path.glob("demo.result-*/report.json"))) == 1


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 3, 4, 6, 7, 14, 100, 900, 5040])
def test_last_step_is_not_evaluated_twice(steps):
    assert steps % evaluation_interval(steps) or evaluation_interval(steps) == steps


def test_command_differs_in_the_strategy_alone(tmp_path):
    options = parse(["--tensor-parallel", "2"])
    lines = {}
    for strategy in ("stock", "hg"):
        lines[strategy] = command(
            options,
            strategy=strategy,
            seed=5,
            split="9,1,0",
            folder=tmp_path,
            name="same",
            cache=tmp_path,
        )
    assert "torch.distributed.run" in lines["stock"]
    assert [a for a in lines["hg"] if a not in lines["stock"]] == [
        "hg",
        "--scalevec-audit",
        str(tmp_path / "audits" / "same.json"),
    ]


def _fake_run(folder, name, code):
    return runs_module.Run(
        name=name,
        strategy="stock",
        seed=1,
        command=[sys.executable, "-c", code],
        reader=LogReader(folder / f"{name}.log"),
        audit=folder / f"{name}.json",
    )


def _train(runs, jobs, display=None):
    machine = runs_module.Machine(cores=jobs, gpus=(), jobs=jobs, threads=1)
    runs_module.train(runs, parse(["--steps", "10"]), machine, display or Display())


def _assert_ended(run):
    with pytest.raises(ProcessLookupError):
        os.killpg(run.process.pid, 0)


PRINT_LOG = f"print({LOG!r})"
SLEEP = "import time; time.sleep(600)"


def test_runs_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    code = "import os; assert 'RANK' not in os.environ; assert os.environ['OMP_NUM_THREADS'] == '1'"
    runs = [_fake_run(tmp_path, f"run{index}", f"{code}\n{PRINT_LOG}") for index in range(3)]
    _train(runs, jobs=2)
    assert [run.reader.final_validation for run in runs] == [4.815117] * 3
    assert all(run.seconds is not None for run in runs)


def test_one_failing_run_ends_the_others(tmp_path):
    runs = [
        _fake_run(tmp_path, "bad", "import time; time.sleep(0.5); raise SystemExit(3)"),
        _fake_run(tmp_path, "good", SLEEP),
        _fake_run(tmp_path, "never", PRINT_LOG),
    ]
    began = time.monotonic()
    with pytest.raises(runs_module.RunFailed, match="bad failed with exit code 3"):
        _train(runs, jobs=2)
    assert time.monotonic() - began < 60
    _assert_ended(runs[1])
    assert runs[2].process is None


def test_a_run_without_a_result_failed(tmp_path):
    with pytest.raises(runs_module.RunFailed, match="without a validation loss"):
        _train([_fake_run(tmp_path, "quiet", "print('nothing')")], jobs=1)


def test_interrupt_ends_the_runs_and_leaves_nothing(tmp_path):
    class Interrupt(Display):
        def started(self, run):
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "runs" / "demo"
    with pytest.raises(Stopped), stopped_by_signals(), ResultFolder(out) as folder:
        runs = [_fake_run(folder.path / "logs", "long", SLEEP)]
        _train(runs, jobs=1, display=Interrupt())
    _assert_ended(runs[0])
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is not None


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_runs_end_with_a_command_that_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; import test_demo;"
        "test_demo._train([test_demo._fake_run(Path(sys.argv[1]), 'long', sys.argv[2])], jobs=1)"
    )
    say = f"import os; print(os.getpid(), flush=True); {SLEEP}"
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), say], cwd=Path(__file__).parent)
    log = tmp_path / "long.log"
    while not log.is_file() or not log.read_text().rpartition("\n")[0].rpartition("\n")[2].isdigit():
        assert parent.poll() is None
        time.sleep(0.05)
    run = int(log.read_text().split()[-1])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while _lives(run):
        assert time.monotonic() < deadline, "the run has outlived the command"
        time.sleep(0.05)


# --- report ---------------------------------------------------------------------------------------

AUDIT = {
    "strategy": "hg",
    "parameters_stock": 1_246_592,
    "parameters_added": 2304,
    "norm_scales_retired": 12,
    "vectors": [{"added": True}] * 30 + [{"added": False}],
    "decay_groups": [{"weight_decay_multiplier": 1.0, "max_learning_rate": 3e-3, "tensors": 57}],
}


def _result(strategy, seed, final, milliseconds):
    steps = range(1, 201)
    return reports.Result(
        name=f"{strategy}-seed{seed}",
        strategy=strategy,
        seed=seed,
        command=("python", "-m", "megatron_scalevec"),
        training={step: final + 4 / step for step in steps},
        validation={step: final + 4 / step for step in range(28, 200, 28)},
        final_validation_loss=final,
        step_times_ms={step: 900.0 if step < 20 else milliseconds for step in steps},
        seconds=20.0,
        parameters_logged=1_246_592,
        audit=None if strategy == "stock" else AUDIT,
    )


def _report(strategies, seeds):
    options = parse(["--steps", "200", "--strategies", strategies, "--seeds", seeds])
    losses = {"stock": 1.6, "hg": 1.58}
    times = {"stock": 100.0, "hg": 110.0}
    results = [
        _result(name, seed, losses[name] + index / 100, times[name])
        for index, seed in enumerate(options.seeds)
        for name in options.strategies
    ]
    return reports.make_report(results, options, text={}, machine={"jobs": 2}, versions={"torch": "0"})


def _shown(report):
    from rich.console import Console

    console = Console(width=110, file=open(os.devnull, "w"), record=True)
    console.print(reports.table(report))
    return console.export_text()


def test_report_of_one_seed(tmp_path):
    report = _report("stock,hg", "1")
    stock, hg = report["summary"]
    assert hg["difference_to_stock"]["mean"] == pytest.approx(-0.02)
    assert hg["difference_to_stock"]["std"] is None
    assert hg["step_time_ratio"]["mean"] == pytest.approx(1.1), "warm-up steps count"
    assert stock["parameters"] == {"stock": 1_246_592, "added": 0, "added_percent": 0.0}
    assert hg["parameters"]["added_percent"] == pytest.approx(0.1848, abs=1e-4)
    # Six layers: 4 matrices each and two embeddings decay in Megatron, 13 norms do not.
    groups = {g["weight_decay_multiplier"]: g["tensors"] for g in stock["weight_decay_groups"]}
    assert groups == {0.0: 13, 1.0: 26}
    shown = _shown(report)
    for text in ("1.5800", "-0.0200", "2,304", "0.185 %", "x 1.10", "26 of 39", "57 of 57"):
        assert text in shown
    assert "does not show how large the gain is" in report["note"]
    reports.write_report(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "scalevec demo"


def test_report_of_two_seeds_shows_the_spread():
    report = _report("stock,hg", "2")
    entry = report["summary"][1]
    assert entry["validation_loss"]["mean"] == pytest.approx(1.585)
    assert entry["validation_loss"]["std"] == pytest.approx(0.01 / math.sqrt(2))
    assert "1.5850 ± 0.0071" in _shown(report)


def test_report_of_stock_alone():
    report = _report("stock", "1")
    assert report["summary"][0]["parameters"]["stock"] == 1_246_592
    assert "1.6000" in _shown(report)


def test_the_end_of_a_run_is_the_last_twentieth_of_its_steps():
    assert reports.tail({step: float(step) for step in range(1, 101)}) == [96, 97, 98, 99, 100]
    assert reports.tail({step: float(step) for step in (1, *range(10, 201, 10))}) == [200], "one at least"
    assert reports.tail({step: float(step) for step in (1, *range(10, 401, 10))}) == [390, 400]
    assert reports.tail({0: 3.0}) == [3.0] and reports.tail_mean({}) is None


def test_report_is_strict_json(tmp_path):
    report = _report("stock,hg", "1")
    report["runs"][0]["training"][0]["loss"] = float("nan")
    reports.write_report(report, tmp_path / "report.json")
    assert "NaN" not in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize("strategies, seeds", [("stock,hg", "1"), ("stock,hg", "2"), ("stock", "1")])
def test_picture(strategies, seeds):
    pytest.importorskip("matplotlib")
    from megatron_scalevec.demo.picture import draw

    picture = draw(_report(strategies, seeds))
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.needs_training
def test_whole_demo(tmp_path, some_text):
    pytest.importorskip("matplotlib")
    argv = "--strategies hg --steps 4 --layers 1 --hidden-size 64 --seq-length 32 --batch-size 4"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_scalevec", "demo", *argv.split()]
        + ["--out", "runs/demo", "--text", *map(str, some_text)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(demo.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stock was added" in done.stdout and "how large the gain is" in done.stdout
    out = tmp_path / "runs" / "demo"
    assert [path.name for path in out.parent.iterdir()] == ["demo"]
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == [
        "hg-seed1234.json",
        "hg-seed1234.log",
        "loss.png",
        "report.json",
        "stock-seed1234.log",
        "text.bin",
        "text.idx",
    ]
    report = json.loads((out / "report.json").read_text())
    stock, hg = report["runs"]
    assert [len(run["training"]) for run in (stock, hg)] == [4, 4]
    # Same seed and data, and every scale starts at one: the same model at the first step.
    assert stock["training"][0] == hg["training"][0]
    assert stock["final_validation_loss"] < stock["training"][0]["loss"]
    # q, k and v for one pre-attention norm, gate and up for one pre-MLP norm.
    assert hg["parameters"]["added"] == 3 * 64
    assert not any(str(tmp_path) in part for part in hg["command"] + stock["command"])
