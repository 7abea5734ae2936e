"""The study: its options, its plan, going on after a kill, and its report."""

import errno
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from rich.console import Console
from script_modules import load_script
from test_demo import LOG

from megatron_scalevec import ScaleVecConfig, study
from megatron_scalevec.compare import compare, read_runs
from megatron_scalevec.convert.branches import branches_at
from megatron_scalevec.demo.runs import Machine, RunFailed, carry_out
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.study.arms import _BRANCHES, read_arm
from megatron_scalevec.study.display import StudyDisplay, clock, remaining_steps, seconds_left
from megatron_scalevec.study.options import Options, parse
from megatron_scalevec.study.plan import Job, cells, tuning_of, unplanned_runs, wanted
from megatron_scalevec.study.report import _report, make_report, markdown, write_study_report
from megatron_scalevec.study.running import JobQueue, prepare, run_of
from megatron_scalevec.study.store import Store

ROOT = Path(__file__).resolve().parent.parent
TEXT = {"source": "a book", "training_bytes": 1000, "validation_bytes": 100, "sha256": "0" * 64}
VERSIONS = {"torch": "0"}


# --- options ----------------------------------------------------------------------------------------


def test_arms():
    arm = read_arm("unified+branches-off=v/up+reparam=unit")
    assert (arm.label, arm.strategy) == ("unified+branches-off=v/up+reparam=unit", "unified")
    assert arm.flags() == {"scalevec-branches-off": "v,up", "scalevec-reparam": "unit"}


def test_defaults_have_the_baseline_first_and_an_arm_without_the_v_norm():
    options = parse(["--arms", "hg,stock,hg"])
    assert [arm.label for arm in options.arms] == ["stock", "hg"]
    options = parse([])
    assert {"stock", "unified", "unified-foldable", "unified+branches-off=v"} <= {
        a.label for a in options.arms
    }
    assert options.tuning_seed not in options.seeds and len(options.seeds) == 3
    assert Options.from_record(options.record(), options.out) == options


def test_rates():
    options = parse(["--optimizers", "adam,muon", "--rates", "2e-3,1e-3", "muon=5e-3"])
    assert options.rates == {"adam": (1e-3, 2e-3), "muon": (5e-3,)}
    again = parse(["--optimizers", "adam,muon", "--rates", "muon=5e-3", "--rates", "2e-3,1e-3"])
    assert again.rates == options.rates, "the order of entries says nothing"


def test_rates_that_widening_adds_are_rates_of_their_own():
    """As far as it goes, at both edges of both the nearest and the widest grid that is taken."""
    for grid in ("1e-8,1e2", "1e-3,1.001e-3", "9.99e-4,1e-3", "99.9,100"):
        options = parse(["--arms", "stock", "--rates", grid, "--widen", "20"])
        for sign in (1, -1):
            losses = Losses(lambda rate, sign=sign: sign * rate)
            tried = [rate for rate, _ in tuning_of(cells(options)[0], options, losses).losses]
            assert len(tried) == 22 and all(0 < a < b < math.inf for a, b in zip(tried, tried[1:])), tried


class Losses(dict):
    """Of every run that could be: a function of its rate."""

    def __init__(self, of):
        self.of = of

    def get(self, name, default=None):
        return self.of(float(re.search("-lr(.*)-seed", name)[1]))


def test_the_study_knows_its_models_branches():
    """By a table, so that a command line is read without torch."""
    sizes = {"num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 128}
    model = TransformerConfig(num_layers=2, hidden_size=64, gated_linear_unit=True, **sizes)
    config = ScaleVecConfig(strategy="hg", sites=("attention", "mlp", "head", "projections"))
    of_the_model = {site: tuple(names) for site, names in branches_at(config, model).items()}
    assert of_the_model == {site: names for site, names in _BRANCHES.items() if names}


BAD = [
    (["--arms", "hgg"], "Did you mean 'hg'"),
    (["--arms", "unified+speed=2"], "is no change of a strategy"),
    (["--arms", "stock+reparam=unit"], "needs a strategy to change"),
    (["--arms", ","], "--arms is empty"),
    (["--arms", "unified+"], "'' is no change of a strategy"),
    (["--arms", "unified+reparam=unit+reparam=none"], "changes reparam twice"),
    (["--arms", "unified+branches-off=/"], "changes nothing of unified"),
    (["--arms", "hg+branches=split"], "changes nothing of hg; write hg"),
    (["--arms", "hg+sites=attention/mlp/head"], "changes nothing of hg"),
    (["--arms", "hg+experts=shared"], "'experts=shared' is no change"),
    (["--arms", "hg,dp+placement=input"], "'hg' and 'dp+placement=input' are the same strategy"),
    (["--arms", "dp+branches-off=v/up,dp+branches-off=up/v"], "are the same strategy under two labels"),
    (["--arms", "dp+branches-off=router"], "model has no router"),
    (["--arms", "dp+sites=mamba/mlp"], "model has no mamba"),
    (["--arms", "hg", "--arms", "dp"], "--arms is given twice, hg and dp"),
    (["--steps", "20", "--steps", "30"], "--steps is given twice, 20 and 30"),
    (["--optimizers", "adamw"], "--optimizers 'adamw'"),
    (["--optimizers", ","], "--optimizers is empty"),
    (["--rates", "fast"], "--rates fast"),
    (["--rates", "0"], "--rates 0"),
    (["--rates", "sgd=1"], "'sgd' is none of"),
    (["--rates", "1e-3", "--rates", "2e-3"], "two entries for all optimizers, the second of them 2e-3"),
    (["--rates", "1e-3,1e200"], "from 1e-08 to 100"),
    (["--rates", "0.00123456789"], "0.00123456789 has more; give 0.00123457"),
    (["--rates", "1e-3,1.0001e-3"], "0.001 and 0.0010001 are too near each other"),
    (["--rates", "1e-3", "2e-3"], "two entries for all optimizers, the second of them 2e-3"),
    (["--rates", "adam=1e-3", "adam=2e-3"], "two entries for adam"),
    (["--rates", "muon=1e-3"], "muon is not in this study"),
    (["--tuning-seed", "1235"], "one of --seeds"),
    (["--tuning-steps", "0"], "--tuning-steps 0"),
    (["--tuning-steps", "401"], "--tuning-steps 401 is more than --steps 400"),
    (["--save-interval", str(10**400)], "must be at most"),
    (["--widen", "-1"], "--widen -1"),
    (["--widen", "21"], "--widen 21"),
    (["--seeds", "none"], "--seeds"),
    (["--seeds", "7,07"], "7 is there more than once"),
    (["--text", "\udcff.txt"], "the name is no UTF-8"),
    (["--text", "absent.txt"], "absent.txt cannot be read"),
    (["--out", "mine"], "holds no study"),
    (["--out", "other"], "no description of a study"),
    (["--report-only"], "holds no study"),
    (["--steps", "20", "--out", "mine", "--report-only"], "holds no study"),
]


@pytest.mark.needs_training
@pytest.mark.parametrize("argv, message", BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_creates_nothing(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    Path("other").mkdir()
    Path("other/study.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ScaleVecError) as raised:
        study.main(argv)
    assert message in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


# --- the plan ---------------------------------------------------------------------------------------


def small(*argv):
    """A small study; ``argv``, flags and a value each, says what is other or more."""
    words = {"--arms": "hg", "--seeds": "2", "--rates": "1e-3,2e-3,4e-3", "--widen": "1"}
    words |= dict(zip(argv[::2], argv[1::2]))
    return parse([word for pair in words.items() for word in pair])


def losses_at(options, arm, **losses):
    """Finished tuning runs of an arm: ``lr0_001=2.5``."""
    [cell] = [cell for cell in cells(options) if cell.arm.label == arm]
    rates = {float(name[2:].replace("_", ".")): loss for name, loss in losses.items()}
    return {
        Job("tune", cell, rate, options.tuning_seed, options.tuning_steps).name: loss
        for rate, loss in rates.items()
    }


def test_the_rate_is_tuned_first_and_then_every_seed_takes_the_best():
    options = small()
    assert [job.stage for job in wanted(options, {})] == ["tune"] * 6 and unplanned_runs(options, {}) == 4
    finished = losses_at(options, "stock", lr0_001=2.5, lr0_002=2.4, lr0_004=2.6)
    jobs = wanted(options, finished)
    assert [(job.cell.arm.label, job.rate) for job in jobs if job.stage == "final"] == [("stock", 2e-3)] * 2
    assert unplanned_runs(options, finished) == 2
    finished |= losses_at(options, "hg", lr0_001=2.5, lr0_002=math.nan, lr0_004=2.4, lr0_008=2.45)
    jobs = wanted(options, finished)
    # Seed by seed, so that a study that is cut has compared what it has done.
    assert [(job.cell.arm.label, job.rate, job.seed) for job in jobs] == [
        ("stock", 2e-3, 1234),
        ("hg", 4e-3, 1234),
        ("stock", 2e-3, 1235),
        ("hg", 4e-3, 1235),
    ]
    finished |= {job.name: 2.0 for job in jobs}
    assert wanted(options, finished) == [] and unplanned_runs(options, finished) == 0


def test_the_grid_is_widened_where_the_best_rate_is_at_its_edge():
    options = small()
    cell = cells(options)[0]
    state = tuning_of(cell, options, losses_at(options, "stock", lr0_001=2.4, lr0_002=2.5, lr0_004=2.6))
    assert state.chosen is None and [rate for rate, loss in state.losses if loss is None] == [5e-4]
    done = losses_at(options, "stock", lr0_0005=2.3, lr0_001=2.4, lr0_002=2.5, lr0_004=2.6)
    state = tuning_of(cell, options, done)
    assert state.chosen == 5e-4 and state.at_edge, "no further than --widen, and it is said"
    done = losses_at(options, "stock", lr0_0005=2.45, lr0_001=2.4, lr0_002=2.5, lr0_004=2.6)
    assert tuning_of(cell, options, done).chosen == 1e-3 and not tuning_of(cell, options, done).at_edge


def test_an_arm_of_which_everything_diverges_is_given_up():
    options = small()
    nan = math.nan
    finished = losses_at(options, "stock", lr0_0005=nan, lr0_001=nan, lr0_002=nan, lr0_004=nan)
    state = tuning_of(cells(options)[0], options, finished)
    assert state.failed and state.chosen is None
    assert all(job.cell.arm.label == "hg" for job in wanted(options, finished))
    assert unplanned_runs(options, finished) == 2


def test_a_single_rate_is_not_tuned():
    options = small("--rates", "3e-3")
    assert [(job.stage, job.rate) for job in wanted(options, {})] == [("final", 3e-3)] * 4


def test_runs_go_on_from_their_checkpoints_and_differ_in_their_arm_alone(tmp_path):
    options = parse(["--arms", "unified+branches-off=v", "--rates", "3e-3", "--optimizers", "muon"])
    jobs = [job for job in wanted(options, {}) if job.seed == 1234]
    stock, other = (run_of(job, options, Store(tmp_path), "9,1,0").command for job in jobs)
    for flag, value in (("--optimizer", "muon"), ("--lr", "0.003"), ("--scalevec-branches-off", "v")):
        assert other[other.index(flag) + 1] == value
    assert other[other.index("--load") + 1] == other[other.index("--save") + 1]
    names = [job.name for job in jobs]
    differing = {a.replace(names[1], names[0]) for a in other} - set(stock)
    assert all("audit" in part or part in ("unified", "--scalevec-branches-off", "v") for part in differing)


# --- carrying it out --------------------------------------------------------------------------------


def opened(folder, options):
    store = Store(folder)
    store.check(options, TEXT, VERSIONS)
    with store.owned():
        store.begin(options, text=TEXT, versions=VERSIONS, machine={})
    return store


DIVERGED = "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 0"


class FakeQueue(JobQueue):
    """Runs that print a log, or ``log`` and exit code of their own by name."""

    special: dict = {}

    def next(self):
        run = super().next()
        if run is None:
            return None
        log, code = self.special.get(run.name, (LOG, 0))
        run.command = [sys.executable, "-c", f"print({log!r}); raise SystemExit({code})"]
        run.audit.write_text('{"parameters_added": 5}')
        return run


def carried_out(queue, display=None):
    from megatron_scalevec.demo.display import Display

    carry_out(queue, Machine(cores=2, gpus=(), jobs=2, threads=1), display or Display())


def test_a_study_is_carried_out_and_a_diverged_run_has_its_place(tmp_path):
    options = small("--rates", "3e-3")
    store = opened(tmp_path / "study", options)
    queue = FakeQueue(options, store, "9,1,0")
    name = "final-adam-hg-lr0.003-seed1235"
    queue.special = {name: (DIVERGED, 1)}
    console = Console(width=200, file=open(os.devnull, "w"), record=True)
    display = StudyDisplay(console, queue)
    queue.on_result = display.result
    carried_out(queue, display)
    results = store.results()
    assert len(results) == 4 and results[name]["final_validation_loss"] is None
    assert results["final-adam-stock-lr0.003-seed1234"]["final_validation_loss"] == 4.815117
    assert not any((tmp_path / "study" / "work").iterdir()), "checkpoints of runs that have ended"
    shown = console.export_text()
    assert f"{name}: diverged" in shown and "[4 of 4 runs, 0:00:00 left]" in shown
    assert re.search(r"\[1 of 4 runs, \d:\d\d:\d\d left\]", shown)


def test_a_failure_stops_the_study_and_keeps_what_is_done(tmp_path):
    options = small("--rates", "3e-3")
    store = opened(tmp_path / "study", options)
    queue = FakeQueue(options, store, "9,1,0")
    name = "final-adam-stock-lr0.003-seed1235"
    queue.special = {name: ("RuntimeError: disk full", 1)}
    with pytest.raises(RunFailed, match="exit code 1"):
        carried_out(queue)
    assert name not in store.results() and store.work(name).is_dir()
    queue = FakeQueue(options, store, "9,1,0")
    carried_out(queue)
    assert len(store.results()) == 4


@pytest.mark.parametrize("before, now", [("scalevec: error: no room", DIVERGED), (DIVERGED, "disk full")])
def test_how_a_run_ended_is_said_by_its_last_start(tmp_path, capsys, before, now):
    """A run's log goes on with the one of an earlier start, which may have ended otherwise."""
    options = small("--rates", "3e-3")
    store = opened(tmp_path / "study", options)
    queue = FakeQueue(options, store, "9,1,0")
    name = "final-adam-stock-lr0.003-seed1235"
    (store.folder / "logs" / f"{name}.log").write_text(f"{before}\n")
    queue.special = {name: (now, 1)}
    if now == DIVERGED:
        carried_out(queue)
        assert store.results()[name]["final_validation_loss"] is None
        return
    with pytest.raises(RunFailed) as failed:
        carried_out(queue)
    study._explain(failed.value, options)
    shown = capsys.readouterr().err
    assert now in shown and before not in shown


def test_time_left():
    assert seconds_left(100, 50.0, 300) == 150.0 and seconds_left(0, 50.0, 300) is None
    assert clock(3723.4) == "1:02:03" and clock(-1) == "0:00:00"


def test_steps_left_count_runs_under_way_and_runs_not_planned_yet(tmp_path):
    options = small()
    queue = JobQueue(options, opened(tmp_path / "study", options), "9,1,0")
    runs, steps = remaining_steps(queue)
    assert (runs, steps) == (6 + 4, 6 * options.tuning_steps + 4 * options.steps)
    reader = queue.next().reader
    reader.path.write_text(" iteration       30/     150 | lm loss: 4.1E+00 |\n")
    assert reader.poll()
    assert remaining_steps(queue) == (runs, steps - 30)


def test_a_study_with_other_settings_is_not_gone_on_with(tmp_path):
    store = opened(tmp_path / "study", small())
    store.check(small("--seeds", "5", "--arms", "hg,dp"), TEXT, VERSIONS)  # more of the same
    with pytest.raises(ScaleVecError, match="--steps was 400, is 500"):
        store.check(small("--steps", "500"), TEXT, VERSIONS)
    with pytest.raises(ScaleVecError, match="sha256 was 0"):
        store.check(small(), {**TEXT, "sha256": "1" * 64}, VERSIONS)
    with pytest.raises(ScaleVecError, match="torch was 0, is 1"):
        store.check(small(), TEXT, {"torch": "1"})


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--arms", "stock"], "--arms hg"),
        (["--seeds", "1234,7"], "--seeds 1235"),
        (["--optimizers", "muon"], "--optimizers adam"),
        (["--rates", "2e-3"], "--rates adam=0.001,0.004"),
    ],
)
def test_a_study_does_not_lose_what_it_has(tmp_path, argv, message):
    store = opened(tmp_path / "study", small())
    with pytest.raises(ScaleVecError) as raised:
        store.check(small(*argv), TEXT, VERSIONS)
    assert f"also has {message}, and without them" in str(raised.value)


def test_two_studies_do_not_write_into_one_folder(tmp_path):
    store = opened(tmp_path / "study", small())
    with store.owned() as descriptor:
        with pytest.raises(ScaleVecError, match="in use by another study"), store.owned():
            pass
        holder = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
    with pytest.raises(ScaleVecError, match="or by a run of one"), store.owned():
        pass
    holder.kill()
    holder.wait()
    with store.owned():
        pass


@pytest.mark.parametrize("said, saved, kept", [("8", (8, 16), "8"), ("", (8, 16), "16"), ("", (), None)])
def test_a_kill_while_megatron_names_its_checkpoint(tmp_path, said, saved, kept):
    """A name stays; where it was being written, the last whole checkpoint is it, never a torn one."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text(said)
    for iteration in saved:
        folder = checkpoints / f"iter_{iteration:07}"
        distributed_checkpoint.save({"w": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (checkpoints / "iter_0000024").mkdir()
    prepare(tmp_path)
    assert (tracker.read_text() if tracker.exists() else None) == kept


# --- damaged folders --------------------------------------------------------------------------------


def half_done(folder):
    """A study of one arm with a result at the chosen rate for each of two seeds, and its tuning runs."""
    options = small("--steps", "60")
    store = opened(folder, options)
    fill(store, options, {"stock": (2.0, 2.1), "hg": (2.0, ...)})
    return store, options


def refusals(store, options):
    """What those that read a study's folder say of it; all of them must refuse it."""
    ways = (
        lambda: write_study_report(store),
        lambda: read_runs(store.folder),
        lambda: study.main(["--report-only", "--out", str(store.folder)]),
        lambda: store.check(options, TEXT, VERSIONS),
        lambda: JobQueue(options, store, "9,1,0"),
    )
    for way in ways:
        with pytest.raises(ScaleVecError) as raised:
            way()
        yield str(raised.value)


def everything_in(value, place=()):
    """Places of all values in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*place, key)
        yield from everything_in(value[key], (*place, key))


def changed(value, place, new):
    copy = json.loads(json.dumps(value))
    *path, last = place
    inner = copy
    for key in path:
        inner = inner[key]
    if new is ...:
        del inner[last]
    else:
        inner[last] = new
    return json.dumps(copy)


ODD = (..., None, True, "x", -1, 0, 2.5, 10**400, math.inf, math.nan, [], {}, [[1]], "\udcff")


def test_whatever_is_wrong_with_a_description_is_said(tmp_path):
    """Every value of it, left out or another one. What may be another one is still a study."""
    store, options = half_done(tmp_path / "study")
    whole = json.loads(store.description.read_text())
    refused = 0
    for place in everything_in(whole):
        for new in ODD:
            store.description.write_text(changed(whole, place, new))
            try:
                known = store.known()
            except ScaleVecError as error:
                refused += 1
                assert str(error).startswith(f"{store.description} ")
            else:
                assert known.record() == json.loads(store.description.read_text()), (place, new)
                markdown(_report(known, []), {}).encode()
    assert refused > 300


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is no whole JSON"),
        ("[]", "holds no JSON object"),
        ("[" * 100_000, "is no whole JSON"),
        ("\xff", "is no whole JSON"),
        ('{"kind": "scalevec demo"}', "is no description of a study"),
        ('{"kind": "scalevec study"}', "has no 'options'"),
        (..., "is no whole JSON"),
    ],
)
def test_a_foreign_description(tmp_path, text, said):
    store, options = half_done(tmp_path / "study")
    text = store.description.read_text()[:-20] if text is ... else text
    store.description.write_text(text, encoding="latin-1")
    assert all(said in refusal for refusal in refusals(store, options))


def test_the_description_of_another_version(tmp_path):
    store, options = half_done(tmp_path / "study")
    record = json.loads(store.description.read_text())
    record["options"]["schedule"] = "cosine"
    record["versions"]["megatron_scalevec"] = "9.9"
    store.description.write_text(json.dumps(record))
    for said in refusals(store, options):
        assert "among its options are unknown ones: schedule. It was written by megatron_scalevec 9.9" in said


def test_whatever_is_wrong_with_a_result_is_said(tmp_path):
    store, options = half_done(tmp_path / "study")
    path = store.folder / "results" / "final-adam-stock-lr0.002-seed1234.json"
    whole = json.loads(path.read_text())
    whole["training"] = whole["training"][:2]
    refused = 0
    for place in everything_in(whole):
        for new in ODD:
            path.write_text(changed(whole, place, new))
            try:
                store.results()
            except ScaleVecError as error:
                refused += 1
                assert str(error).startswith(f"{path} ") and "move it away" in str(error)
            else:
                make_report(store)
    assert refused > 180


@pytest.mark.parametrize("kept", [0, 1, 100, -3])
def test_a_result_that_is_cut_short(tmp_path, kept):
    store, options = half_done(tmp_path / "study")
    path = store.folder / "results" / "final-adam-stock-lr0.002-seed1234.json"
    path.write_bytes(path.read_bytes()[:kept])
    assert all(f"{path} is no whole JSON" in said for said in refusals(store, options))
    path.unlink()
    make_report(store)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--seq-length", "64"], "final-adam-stock-lr0.002-seed1234"),
        (["--steps", "61"], "tune-adam-stock-lr0.002-seed99"),
        (["--seeds", "3"], "final-adam-hg-lr0.002-seed1236"),
        (["--arms", "dp"], "final-adam-dp-lr0.002-seed1234"),
    ],
)
def test_the_result_of_another_study(tmp_path, argv, name):
    """One with other settings, or of a run that this one does not have."""
    store, options = half_done(tmp_path / "study")
    other = small("--steps", "60", *argv)
    theirs = opened(tmp_path / "other", other)
    fill(theirs, other, dict.fromkeys(("stock", "hg", "dp"), (2.0, 2.1, 2.2)))
    path = store.folder / "results" / f"{name}.json"
    path.write_bytes((theirs.folder / "results" / path.name).read_bytes())
    assert all(f"{path} is of another study than the one in" in said for said in refusals(store, options))


def test_a_result_under_another_name(tmp_path):
    store, options = half_done(tmp_path / "study")
    path = store.folder / "results" / "final-adam-hg-lr0.002-seed1235.json"
    path.write_bytes((store.folder / "results" / "final-adam-hg-lr0.002-seed1234.json").read_bytes())
    assert all(f"{path} is of another study" in said for said in refusals(store, options))


def test_a_study_that_was_killed_before_it_said_what_it_is_begins_again(tmp_path):
    store = Store(tmp_path / "study")
    with store.owned():
        (store.folder / "study.json.new").write_text('{"kind": "scal')
    store.check(small(), TEXT, VERSIONS)
    (store.folder / "notes.txt").touch()
    with pytest.raises(ScaleVecError, match="holds no study"):
        store.check(small(), TEXT, VERSIONS)


@pytest.mark.parametrize("place", ["file", "file/study"])
def test_a_folder_that_cannot_be_one(tmp_path, place):
    (tmp_path / "file").touch()
    store = Store(tmp_path / place)
    for way in (lambda: store.check(small(), TEXT, VERSIONS), store.known, store.owned().__enter__):
        with pytest.raises(ScaleVecError, match=str(store.folder)):
            way()


ITERATION_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
LOADED = re.compile(r"successfully loaded checkpoint .*at iteration\s+(\d+)")


@pytest.mark.needs_training
def test_a_killed_study_goes_on_and_ends_with_the_same_report(tmp_path):
    """SIGKILL, as from a machine that runs out of memory: no handler runs, and no run of it may live on."""
    interval = 8
    argv = (
        f"--arms hg --rates 4e-3 --seeds 1 --steps 48 --save-interval {interval} --layers 1 --hidden-size 64"
    )
    argv = [*argv.split(), "--seq-length", "32", "--batch-size", "4", "--text-bytes", "200000", "--jobs", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert study.main([*argv, "--out", str(whole)]) == 0

    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_scalevec", "study", *argv, "--out", str(killed)],
        env={**os.environ, "PYTHONPATH": str(Path(study.__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not list(killed.glob("work/*/checkpoints/latest_checkpointed_iteration.txt")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while True:  # the kernel takes the runs with it; they hold the folder until then
        try:
            with Store(killed).owned():
                break
        except ScaleVecError:
            assert time.monotonic() < deadline, "a run has outlived the study"
            time.sleep(0.05)
    done = {path.stem: path.stat().st_mtime_ns for path in (killed / "results").iterdir()}
    before = {path.stem: path.stat().st_size for path in (killed / "logs").iterdir()}

    assert study.main([*argv, "--out", str(killed)]) == 0
    assert all((killed / "results" / f"{n}.json").stat().st_mtime_ns == t for n, t in done.items())
    resumed = 0
    for path in (killed / "logs").iterdir():
        text = path.read_bytes()
        first, second = (part.decode() for part in (text[: before[path.stem]], text[before[path.stem] :]))
        reached = max(map(int, ITERATION_LINE.findall(first)), default=0)
        if path.stem in done:
            assert not second
        elif found := LOADED.findall(second):
            resumed += 1
            assert reached - int(found[0]) <= interval
            # A run that had saved its last step has only its evaluation to do.
            steps = [int(step) for step in ITERATION_LINE.findall(second)] or [49]
            assert steps[0] == int(found[0]) + 1
        else:
            assert reached <= interval, "it began anew in spite of a checkpoint"
    assert resumed, "nothing was under way when it was killed"
    reports = [json.loads((folder / "report.json").read_text()) for folder in (whole, killed)]
    # It is read off training losses, of which the log gives one to a last digit less where a run goes on.
    ratios = [report["cells"][1].pop("token_ratio")["mean"] for report in reports]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)
    assert (whole / "report.md").read_text() == (killed / "report.md").read_text()
    assert reports[0] == reports[1] and reports[0]["complete"]
    assert (killed / "loss-adam.png").is_file()
    assert [run.label for run in read_runs(killed)] == ["stock", "hg"]


# --- the report -------------------------------------------------------------------------------------


def result(store, job, loss, parameters_added=0):
    store.add(
        {
            "name": job.name,
            "stage": job.stage,
            "optimizer": job.cell.optimizer,
            "arm": job.cell.arm.label,
            "learning_rate": job.rate,
            "seed": job.seed,
            "steps": job.steps,
            "final_validation_loss": loss,
            "parameters_logged": 1_000_000,
            "parameters_added": parameters_added,
            "training": [] if loss is None else [[s, loss + 3 / s] for s in range(1, job.steps + 1)],
        }
    )


def fill(store, options, losses):
    """Results of all runs that are wanted; ``losses`` gives those of the seeds by arm, ``...`` leaves one
    out."""
    while jobs := wanted(options, store.losses()):
        if jobs[0].stage == "tune":
            for job in jobs:
                result(store, job, 2.0 + abs(math.log2(job.rate / 2e-3)))
            continue
        for job in jobs:
            loss = losses[job.cell.arm.label][options.seeds.index(job.seed)]
            if loss is not ...:
                result(store, job, loss, parameters_added=7 * (job.cell.arm.label != "stock"))
        return


def test_report(tmp_path):
    options = parse(
        ["--arms", "hg,unified,unified+branches-off=v", "--rates", "1e-3,2e-3,4e-3", "--steps", "60"]
    )
    store = opened(tmp_path / "study", options)
    shared = (2.0, 2.1, 2.2)
    gaps = {
        "stock": (0.0, 0.0, 0.0),
        "hg": (-0.05, -0.051, -0.049),
        "unified": (0.05, 0.051, 0.049),
        "unified+branches-off=v": (0.1, -0.2, 0.03),
    }
    fill(store, options, {arm: [a + b for a, b in zip(shared, gap)] for arm, gap in gaps.items()})
    report = write_study_report(store)
    entries = {entry["arm"]: entry for entry in report["cells"]}
    assert report["complete"] and entries["hg"]["gap"]["mean"] == pytest.approx(-0.05)
    assert entries["hg"]["learning_rate"] == 2e-3 and entries["hg"]["gap"]["paired"]
    assert entries["hg"]["verdict"].startswith("hg ended below stock, by 0.0475 to 0.0525")
    assert entries["unified"]["verdict"].startswith("unified ended above stock")
    assert "no difference from stock is shown" in entries["unified+branches-off=v"]["verdict"]
    page = (tmp_path / "study" / "report.md").read_text()
    for text in (
        "All runs have ended.",
        "a book, 1,000 bytes to train on",
        "| `hg` | 0.002 | 2.0500 [",
        "| `stock` | 3.0000 | **2.0000** | 3.0000 |",
        "| `hg` | 1.9500 | 2.0490 | 2.1510 |",
        "Each of the 3 intervals",
        "tuned on one seed, 99, among few rates",
        "unified has a norm on v",
        "Without it: unified+branches-off=v.",
        "](loss-adam.png)",
    ):
        assert text in page, text
    assert "lowest or highest" not in page and "shorter runs favour" not in page


def test_report_of_a_study_that_is_not_complete(tmp_path):
    options = parse(["--arms", "hg,dp,iwd", "--rates", "1e-3,2e-3,4e-3", "--steps", "60"])
    store = opened(tmp_path / "study", options)
    losses = {"stock": (2.0, 2.1, ...), "hg": (1.9, 2.0, 2.1), "dp": (1.9, None, ...), "iwd": (..., ..., ...)}
    fill(store, options, losses)
    report = make_report(store)
    said = {entry["arm"]: entry["verdict"] for entry in report["cells"]}
    assert not report["complete"] and report["runs"] == {"wanted": 12, "missing": 5, "diverged": 1}
    assert said["hg"].endswith("Not complete: 1 of the 6 runs that this compares are missing.")
    assert (
        "with one seed, which says nothing about chance. Runs of dp or stock that diverged: 1." in said["dp"]
    )
    assert said["iwd"].startswith("iwd: nothing can be said")
    page = markdown(report, {})
    assert "**Not complete: 5 of 12 runs are missing.**" in page
    assert (
        "| `dp` | 1.9000 | diverged | missing |" in page and "| `iwd` | missing | missing | missing |" in page
    )
    runs = read_runs(tmp_path / "study")
    assert compare(runs).notes[0].endswith("study: runs that diverged, which are left out: dp 1.")


def test_report_before_anything_has_ended(tmp_path):
    options = parse(["--optimizers", "adam,muon", "--rates", "1e-3,2e-3"])
    store = opened(tmp_path / "study", options)
    report = write_study_report(store)
    assert report["runs"]["missing"] == report["runs"]["wanted"] == 30
    with pytest.raises(ScaleVecError, match="no finished run"):
        read_runs(tmp_path / "study")


def names_of(folder):
    return {path.name for path in folder.iterdir() if path.is_file()} - {"lock", "study.json"}


def test_a_picture_goes_with_what_it_shows(tmp_path):
    store, options = half_done(tmp_path / "study")
    write_study_report(store)
    assert names_of(store.folder) == {"report.json", "report.md", "loss-adam.png"}
    (store.folder / "loss-muon.png").touch()
    for path in (store.folder / "results").iterdir():
        path.unlink()
    write_study_report(store)
    assert names_of(store.folder) == {"report.json", "report.md"}
    assert "loss-adam" not in (store.folder / "report.md").read_text()


@pytest.mark.parametrize(
    "fails", ["report.md", "report.json", "loss-adam.png", "loss-muon.png", "drawing", "disk"]
)
def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch, fails):
    store, options = half_done(tmp_path / "study")
    for name in ("report.json", "report.md", "loss-adam.png", "loss-muon.png"):
        (store.folder / name).write_text(f"old {name}")
    if fails == "drawing":
        monkeypatch.setattr("megatron_scalevec.study.report.draw", no_space)
    elif fails == "disk":
        monkeypatch.setattr("os.fsync", no_space)
    else:
        (store.folder / fails).unlink()
        (store.folder / fails).mkdir()
    before = contents(store.folder)
    with pytest.raises(
        ScaleVecError, match="the report cannot be written to .*; an earlier one is as it was"
    ):
        study.main(["--report-only", "--out", str(store.folder)])
    assert contents(store.folder) == before


def test_a_first_report_that_fails_leaves_nothing(tmp_path):
    store, options = half_done(tmp_path / "study")
    (store.folder / "report.md").mkdir()
    before = contents(store.folder)
    with pytest.raises(ScaleVecError, match="report.md"):
        write_study_report(store)
    assert contents(store.folder) == before


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["--steps", "60", "--arms", "stock,hg", "--rates", "4e-3,1e-3,2e-3", "--seeds", "2"], None),
        (["--arms", "hg,dp"], "--arms"),
        (["--steps", "61", "--tuning-steps", "10"], "--steps, --tuning-steps"),
        (["--rates", "1e-3"], "--rates"),
        (["--text", "book.txt"], "--text"),
    ],
)
def test_a_report_is_of_the_study_that_is_there(tmp_path, argv, flags):
    """What the command line says besides may be left out, and may not be something else."""
    store, options = half_done(tmp_path / "study")
    argv = [*argv, "--report-only", "--out", str(store.folder)]
    if flags is None:
        assert study.main(argv) == 0
        return
    with pytest.raises(ScaleVecError, match=f"its {flags} differ from what is given"):
        study.main(argv)
    assert names_of(store.folder) == set()


@pytest.mark.needs_training
def test_a_disk_that_is_full_ends_a_study_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "write_dataset", no_space)
    with pytest.raises(ScaleVecError, match="No space left on device.*what was done is kept"):
        study.main(["--out", str(tmp_path / "study")])


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def test_report_names_rates_at_the_edge(tmp_path):
    options = parse(["--arms", "hg", "--rates", "2e-3,4e-3", "--steps", "60", "--widen", "0"])
    store = opened(tmp_path / "study", options)
    fill(store, options, {"stock": (2.0, 2.1, 2.2), "hg": (2.0, 2.1, 2.2)})
    assert "stock, hg was the lowest or highest that was tried" in make_report(store)["notes"][0]


def test_the_command_of_the_documentation_is_understood():
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^scalevec study .*$", page, re.MULTILINE)
    options = parse(shlex.split(command)[2:])
    assert len(options.arms) == 5 and options.rates == {"adam": (1e-3, 2e-3, 4e-3)}


def test_the_page_in_the_documentation_is_what_its_figures_say():
    """Committed are the figures and the page that is made from them, so that nobody edits one alone."""
    study_page = load_script("study_page")
    studies = json.loads((ROOT / "docs" / "study.json").read_text(encoding="utf-8"))["studies"]
    assert (ROOT / "docs" / "study.md").read_text(encoding="utf-8") == study_page.page(studies)
    for report in studies:
        options = parse(shlex.split(study_page.command(report))[2:])
        assert options.record() == report["options"], "the command on the page makes another study"


def test_a_study_with_another_optimizer_joins_those_on_the_page(tmp_path, monkeypatch):
    study_page = load_script("study_page")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    monkeypatch.setattr(study_page, "DOCS", tmp_path / "docs")
    for number, (optimizer, loss) in enumerate((("adam", 2.5), ("muon", 2.4), ("adam", 2.3))):
        options = parse(["--arms", "hg", "--optimizers", optimizer, "--rates", "1e-3,2e-3,4e-3"])
        store = opened(tmp_path / str(number), options)
        fill(store, options, {"stock": (loss,) * 3, "hg": (loss,) * 3})
        study_page.main([str(tmp_path / str(number))])
    page = (tmp_path / "docs" / "study.md").read_text(encoding="utf-8")
    assert re.findall(r"^## .*$", page, re.MULTILINE) == ["## Study with AdamW", "## Study with Muon"]
    assert "2.4000" in page and "2.3000" in page and "2.5000" not in page


def test_report_says_what_short_tuning_may_have_done(tmp_path):
    options = parse(["--arms", "hg", "--rates", "1e-3,2e-3,4e-3", "--steps", "60", "--tuning-steps", "20"])
    store = opened(tmp_path / "study", options)
    best = {"stock": 1e-3, "hg": 2e-3}
    for job in wanted(options, {}):
        result(store, job, 2.0 if job.rate == best[job.cell.arm.label] else 3.0)
    jobs = [job for job in wanted(options, store.losses()) if job.stage == "tune"]
    assert [job.rate for job in jobs] == [5e-4], "the lowest rate was stock's best"
    result(store, jobs[0], 3.0)
    notes = " ".join(make_report(store)["notes"])
    assert "had 20 steps, the others 60" in notes and "may be differences between rates" in notes
    assert parse(["--steps", "60"]).tuning_steps == 60


def test_runs_are_named_apart():
    options = parse(["--optimizers", "adam,muon"])
    jobs = wanted(options, {})
    assert len({job.name for job in jobs}) == len(jobs) == 30
    assert all("/" not in job.name for job in jobs)
