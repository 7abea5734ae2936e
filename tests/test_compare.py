"""Comparing runs: reading them, what is computed from them, and what is said and drawn."""

import base64
import importlib.util
import json
import math
import os
import re
import shlex
from pathlib import Path

import numpy
import pytest
from test_demo import ITERATION, LOG, VALIDATION, _report

from megatron_scalevec.cli import main
from megatron_scalevec.compare import (
    Interval,
    Run,
    bootstrap_interval,
    compare,
    draw,
    read_run,
    read_runs,
    render,
    smooth,
    terminal_gap,
    terminal_loss,
    token_ratio,
    verdict,
)
from megatron_scalevec.compare.rendering import shown
from megatron_scalevec.compare.statistics import decreasing
from megatron_scalevec.errors import ScaleVecError

DOCUMENTATION = (Path(__file__).parents[1] / "docs" / "compare.md").read_text(encoding="utf-8")
TOKENS = numpy.arange(1, 801) * 1000.0


def curve(tokens):
    """A loss that falls as losses do."""
    return 1.2 + 30.0 * tokens**-0.3


def synthetic(label, seed, losses, *, tokens=TOKENS, **more):
    return Run(label, f"{label}-{seed}", numpy.arange(1, len(losses) + 1), losses, tokens, seed=seed, **more)


def seeds_of(label, count, *, gap=0.0, spread=0.01, speed=1.0, generator):
    """Runs whose losses share each seed's noise with the other labels' runs, but for ``spread``."""
    runs = []
    for seed in range(count):
        shared = numpy.random.default_rng(seed).normal(0, 0.05, len(TOKENS))
        losses = curve(TOKENS * speed) + gap + shared + generator.normal(0, spread)
        runs.append(synthetic(label, seed, losses))
    return runs


# --- what is computed -------------------------------------------------------------------------------


def test_smooth_is_a_centred_mean():
    losses = numpy.random.default_rng(0).normal(size=(2, 400))
    done = smooth(losses)
    assert done[1, 200] == pytest.approx(losses[1, 190:211].mean())
    assert done[0, 0] == pytest.approx(losses[0, :11].mean())
    assert smooth(losses[0])[7] == pytest.approx(done[0, 7])
    assert (smooth(losses[:, :39]) == losses[:, :39]).all(), "too short to be smoothed"


def test_decreasing_is_the_nearest_such_curve():
    falling = numpy.array([5.0, 4.0, 4.0, 1.0])
    assert (decreasing(falling) == falling).all()
    assert decreasing(numpy.array([3.0, 1.0, 2.0, 0.0])).tolist() == [3.0, 1.5, 1.5, 0.0]
    noisy = curve(TOKENS) + numpy.random.default_rng(1).normal(0, 0.1, len(TOKENS))
    found = decreasing(noisy)
    assert (numpy.diff(found) <= 0).all() and found.mean() == pytest.approx(noisy.mean())


@pytest.mark.parametrize("by", ["training", "validation"])
def test_a_known_gap_is_recovered(by):
    generator = numpy.random.default_rng(5)
    stock = seeds_of("stock", 8, generator=generator)
    other = seeds_of("other", 8, gap=-0.04, generator=generator)
    if by == "validation":
        stock, other = (
            [
                synthetic(r.label, r.seed, r.losses, final_validation=r.losses[-40:].mean() + 0.1)
                for r in group
            ]
            for group in (stock, other)
        )
    gap = terminal_gap(stock, other, by=by)
    assert gap.paired and gap.count == 8
    assert gap.low < -0.04 < gap.high
    assert gap.mean == pytest.approx(-0.04, abs=0.01) and gap.high - gap.low < 0.03


def test_terminal_loss_is_the_mean_of_the_last_twentieth():
    run = synthetic("a", 0, numpy.concatenate([numpy.full(760, 9.0), numpy.arange(40.0)]))
    assert terminal_loss(run, "training") == pytest.approx(19.5)


def test_the_note_says_how_many_losses_the_one_at_the_end_is_made_of():
    every = synthetic("stock", 0, curve(TOKENS))
    steps = numpy.arange(50, 801, 50)
    few = Run("hg", "few.jsonl", steps, curve(steps * 1000.0), steps * 1000.0, seed=0)
    assert terminal_loss(few, "training") == few.losses[-1], "steps 761 to 800"
    [note] = [note for note in compare([every, few]).notes if "at the end are" in note]
    assert note.endswith("last twentieth of a run's steps. few.jsonl has 1 there for 40 steps.")
    other = synthetic("hg", 0, curve(TOKENS))
    [note] = [note for note in compare([every, other]).notes if "at the end are" in note]
    assert note.endswith("last twentieth of a run's steps.")


@pytest.mark.parametrize("level", [0.4, 0.9999999, float("nan")])
def test_levels_that_the_resamples_cannot_tell_are_refused(level):
    with pytest.raises(ScaleVecError, match="must be from 0.5 to 0.999"):
        bootstrap_interval([1.0, 2.0], level=level)


@pytest.mark.parametrize("count, paired", [(2, True), (3, True), (5, True), (3, False), (5, False)])
def test_intervals_hold_the_truth_as_often_as_they_say(count, paired):
    generator = numpy.random.default_rng(count)
    trials, held = 2000, 0
    for _ in range(trials):
        noise = generator.normal(0, 1.0, count)
        if paired:
            interval = bootstrap_interval(0.3 + noise)
            held += interval.low <= 0.3 <= interval.high
        else:
            other = generator.normal(1.0, 1.0, count)
            interval = bootstrap_interval(0.3 + noise, other, draws=4000)
            held += interval.low <= -0.7 <= interval.high
    assert held / trials == pytest.approx(0.95, abs=0.02)


def test_the_coverage_test_can_fail():
    """Resamples of three values themselves, the usual bootstrap, would not pass it."""
    generator = numpy.random.default_rng(0)
    picks = generator.integers(0, 3, (1000, 3))
    held = 0
    for _ in range(1000):
        values = generator.normal(0, 1, 3)
        low, high = numpy.quantile(values[picks].mean(1), [0.025, 0.975])
        held += low <= 0 <= high
    assert held / 1000 < 0.85


def test_one_value_has_no_interval_and_equal_ones_have_no_width():
    assert bootstrap_interval([0.5]) == Interval(0.5, None, None, 1)
    assert bootstrap_interval([0.5, 0.5]) == Interval(0.5, 0.5, 0.5, 2)
    assert bootstrap_interval([1.0, 2.0, 4.0]) == bootstrap_interval([1.0, 2.0, 4.0])


@pytest.mark.parametrize("count, quantile", [(2, 12.706), (3, 4.303), (5, 2.776)])
def test_the_interval_of_one_mean_is_students(count, quantile):
    """Against the table of t with one degree of freedom less than there are values."""
    values = numpy.random.default_rng(count).normal(size=count)
    interval = bootstrap_interval(values)
    standard_error = values.std(ddof=1) / count**0.5
    assert interval.high - interval.mean == pytest.approx(quantile * standard_error, rel=0.02)


def test_seeds_are_paired_where_they_are_the_same():
    generator = numpy.random.default_rng(3)
    stock = seeds_of("stock", 3, generator=generator)
    other = seeds_of("other", 3, generator=generator)
    without = [synthetic("other", seed, run.losses) for seed, run in zip((7, 8, 9), other)]
    assert terminal_gap(stock, other).paired
    unpaired = terminal_gap(stock, without)
    assert not unpaired.paired and unpaired.mean == pytest.approx(terminal_gap(stock, other).mean)
    assert (unpaired.count, unpaired.against) == (3, 3)


def test_the_notes_say_what_a_difference_rests_on():
    generator = numpy.random.default_rng(3)
    stock, other = (seeds_of(label, 3, generator=generator) for label in ("stock", "other"))

    def said(*runs):
        return [note for note in compare(runs).notes if "other" in note]

    assert said(*stock, *other) == []
    assert said(*stock, *other[:2]) == [
        "The difference of other to stock, and its token ratio, rest on the 2 seeds that both have, of 3 of "
        "stock."
    ]
    without = [synthetic("other", seed, run.losses) for seed, run in zip((0, 8), other)]
    assert said(*stock, *without) == [
        "other and stock are compared by their means, not seed by seed: their seeds are not the same."
    ]
    silent = synthetic("other", None, other[0].losses)
    assert said(*stock, silent)[0].endswith("other-None does not say its seed.")


def test_a_loss_that_was_there_at_step_0_has_no_token_ratio():
    steps = numpy.arange(3)
    stock = Run("stock", "a", steps, numpy.array([3.0, 3.5, 3.2]), steps * 10.0, seed=0)
    other = Run("other", "b", steps, numpy.array([3.0, 2.5, 3.4]), steps * 10.0, seed=0)
    assert compare([stock, other]).rows[1].token_ratio is None


@pytest.mark.parametrize("speed", [1.0, 1.4, 1 / 1.4])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_known_token_ratio_is_recovered(speed, noise):
    generator = numpy.random.default_rng(11)
    ratios = []
    for _ in range(100):
        losses = [curve(TOKENS * s) + generator.normal(0, noise, len(TOKENS)) for s in (1.0, speed)]
        ratios.append(token_ratio(synthetic("stock", 0, losses[0]), synthetic("other", 0, losses[1])))
    assert numpy.exp(numpy.log(ratios).mean()) == pytest.approx(speed, rel=0.01 if noise == 0 else 0.03)


def test_a_run_that_noise_ends_low_is_not_said_to_start_there():
    falling = curve(TOKENS)
    noisy = falling.copy()
    noisy[-60:-25] += 0.5
    noisy[-25:] = falling[-25:] - 1e-3
    assert token_ratio(synthetic("stock", 0, falling), synthetic("other", 0, noisy)) == pytest.approx(
        1, rel=0.05
    )


@pytest.mark.parametrize("rounding", [0.0, 1e-8, -1e-8])
def test_equal_runs_need_equal_tokens_and_swapped_runs_the_reciprocal(rounding):
    generator = numpy.random.default_rng(4)
    losses = [curve(TOKENS * speed) + generator.normal(0, 0.05, len(TOKENS)) for speed in (1.0, 1.2)]
    losses[0][-20:] += 0.02  # ends higher than it has been
    first, other = (synthetic("a", seed, values) for seed, values in enumerate(losses))
    again = synthetic("b", 0, losses[0] + rounding)
    # Rounding, as that of a curve kept in float32, must not matter either.
    assert token_ratio(first, again) == token_ratio(again, first) == 1
    assert token_ratio(other, first) == pytest.approx(1 / token_ratio(first, other))
    assert token_ratio(first, other) > 1.05


def test_steps_stand_for_tokens_that_are_not_known():
    stock = synthetic("stock", 0, curve(TOKENS), tokens=None)
    other = synthetic("other", 0, curve(TOKENS * 1.4))
    assert token_ratio(stock, other) == pytest.approx(1.4, rel=0.01)
    assert "does not say how many tokens" in compare([stock, other]).notes[0]


# --- what is said -----------------------------------------------------------------------------------

GAPS = {
    "below": (
        Interval(-0.02, -0.03, -0.01, 5),
        "new ended below stock, by 0.0100 to 0.0300 (5 seeds, 95% interval).",
    ),
    "above": (
        Interval(0.02, 0.01, 0.03, 5),
        "new ended above stock, by 0.0100 to 0.0300 (5 seeds, 95% interval).",
    ),
    "nothing": (
        Interval(-0.02, -0.05, 0.01, 3),
        "new: no difference from stock is shown; the loss may be up to 0.0500 lower or 0.0100 higher (3 "
        "seeds, 95% interval).",
    ),
    "touches zero": (
        Interval(-0.02, -0.04, 0.0, 3),
        "new: no difference from stock is shown; the loss may be up to 0.0400 lower (3 seeds, 95% interval).",
    ),
    "hardly above zero": (
        Interval(-0.02, -0.04, 1e-6, 3, level=0.999),
        "new: no difference from stock is shown; the loss may be up to 0.0400 lower or 0.0001 higher (3 "
        "seeds, 99.9% interval).",
    ),
    "near zero": (
        Interval(0.02, 1e-6, 0.04, 3, level=0.975),
        "new ended above stock, by less than 0.0001 to 0.0400 (3 seeds, 97.5% interval).",
    ),
    "equal": (
        Interval(0.0, 0.0, 0.0, 3),
        "new: no difference from stock is shown; all ended at the same loss (3 seeds, 95% interval).",
    ),
    "no width": (Interval(0.02, 0.02, 0.02, 2), "new ended above stock, by 0.0200 (2 seeds, 95% interval)."),
    "not paired": (
        Interval(-0.02, -0.03, -0.01, 3, against=5),
        "new ended below stock, by 0.0100 to 0.0300 (3 seeds against 5, not paired, 95% interval).",
    ),
    "one seed, equal": (
        Interval(0.0, None, None, 1),
        "new ended at the same loss as stock with one seed, which says nothing about chance.",
    ),
    "one seed, nearly equal": (
        Interval(1e-6, None, None, 1, against=1),
        "new ended less than 0.0001 above stock with one seed, which says nothing about chance.",
    ),
    "one seed of stock": (
        Interval(-0.02, None, None, 3, against=1),
        "new ended 0.0200 below stock with 3 seeds against 1, one of them alone, which says nothing about "
        "chance.",
    ),
    "one seed": (
        Interval(-0.02, None, None, 1),
        "new ended 0.0200 below stock with one seed, which says nothing about chance.",
    ),
    "none": (None, "new: nothing can be said, as no two finished runs can be compared."),
}


@pytest.mark.parametrize("name", GAPS)
def test_verdicts(name):
    gap, expected = GAPS[name]
    assert verdict("new", "stock", gap) == expected


def test_verdicts_name_what_is_missing_and_what_diverged():
    gap = Interval(-0.02, -0.03, -0.01, 2)
    said = verdict("new", "stock", gap, missing=1, diverged=2, wanted=6)
    assert said == (
        "new ended below stock among the runs that did not diverge, by 0.0100 to 0.0300 (2 seeds, 95% "
        "interval). Runs of new or stock that diverged: 2. Not complete: 1 of the 6 runs that this compares "
        "are missing."
    )


@pytest.mark.parametrize(
    "gap, expected",
    [
        (Interval(-2e-8, None, None, 1), "0.0000"),
        (Interval(0.0, 0.0, 0.0, 2), "0.0000 [0.0000, 0.0000]"),
        (Interval(-2e-5, -0.01, 4e-5, 3), "0.0000 [-0.0100, 0.0000]"),
        (Interval(-0.12, -0.2, -6e-5, 3), "-0.1200 [-0.2000, -0.0001]"),
        (Interval(0.12, 0.1, 0.2, 3), "+0.1200 [+0.1000, +0.2000]"),
    ],
)
def test_what_rounds_to_zero_has_no_sign(gap, expected):
    assert shown(gap, "+.4f") == expected


# --- reading ----------------------------------------------------------------------------------------


def write_log(path, strategy, seed, losses, milliseconds=100.0, memory=None):
    lines = [
        f"  {name} {'.' * 20} {value}"
        for name, value in (("scalevec_strategy", strategy), ("seed", seed), ("seq_length", 16))
    ]
    for step, loss in enumerate(losses, 1):
        lines.append(ITERATION.format(step=step, ms=milliseconds, loss=loss))
        if memory and step == 2:
            lines.append(
                f"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: {memory} |"
            )
    lines.append(VALIDATION.format(where=f"{len(losses)} on validation set", loss=losses[-1] + 0.1))
    path.write_text("\n".join(lines) + "\n")


def test_logs_are_read(tmp_path):
    write_log(tmp_path / "log", "hg", 7, [4.0, 3.0, 2.0], memory=512.0)
    run = read_run(tmp_path / "log")
    assert (run.label, run.seed, run.final_validation) == ("hg", 7, pytest.approx(2.1))
    # The log's 3.0 is the mean of the first two steps, see LogReader.
    assert run.losses.tolist() == [4.0, 2.0, 2.0] and run.tokens.tolist() == [16000, 32000, 48000]
    assert run.seconds.tolist() == pytest.approx([0.1, 0.2, 0.3]) and run.step_time_ms == 100.0
    assert run.memory_bytes == 512 * 2**20
    assert read_run(tmp_path / "log", "mine").label == "mine"


def test_a_validation_that_training_went_on_after_is_not_final(tmp_path):
    write_log(tmp_path / "log", "hg", 7, [4.0, 3.0, 2.0])
    with open(tmp_path / "log", "a") as log:
        log.write(ITERATION.format(step=4, ms=1, loss=1.9) + "\n")
    assert read_run(tmp_path / "log").final_validation is None


def test_a_log_that_leaves_steps_out(tmp_path):
    (tmp_path / "plain.log").write_text(LOG)
    run = read_run(tmp_path / "plain.log")
    assert run.label == "plain" and run.tokens is None and run.steps.tolist() == [1, 2, 10]
    # Steps 3 to 10 at the time that step 10 gives.
    assert run.seconds.tolist() == pytest.approx([0.1111, 0.1907, 0.1907 + 8 * 0.0538])
    assert read_run(tmp_path / "plain.log", seq_length=8).tokens.tolist() == [8000, 16000, 80000]


def test_json_lines_are_read(tmp_path):
    lines = [{"strategy": "hg", "seed": 3}]
    for step in (1, 2, 3):
        lines.append({"step": step, "loss": 9.0 - step, "tokens": 100 * step, "step_time_ms": 50})
        lines.append({"step": step, "memory_bytes": 1000 + step, "something": {"else": 1}})
    lines.append({"step": 3, "validation_loss": 6.5})
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    run = read_run(path)
    assert (run.label, run.seed, run.final_validation, run.memory_bytes) == ("hg", 3, 6.5, 1003)
    assert run.losses.tolist() == [8, 7, 6] and run.tokens.tolist() == [100, 200, 300]
    path.write_text('{"step": 1, "loss": 2.0}\nspam\n')
    with pytest.raises(ScaleVecError, match="run.jsonl:2 is no JSON object"):
        read_run(path)


def test_counts_that_only_some_steps_have_go_on(tmp_path):
    """Between them, before the first from nothing, and beyond the last as they did last."""
    lines = [{"step": step, "loss": 9.0 - step / 10} for step in range(11)]
    for step, tokens, ms in ((2, 200, 10), (4, 400, 20), (6, 800, 10)):
        lines[step] |= {"tokens": tokens, "step_time_ms": ms}
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    run = read_run(path)
    assert run.tokens.tolist() == [0, 100, 200, 300, 400, 600, 800, 1000, 1200, 1400, 1600]
    milliseconds = [0, 10, 20, 40, 60, 70, 80, 90, 100, 110, 120]
    assert (run.seconds * 1e3).tolist() == pytest.approx(milliseconds) and run.step_time_ms == 10
    assert run.remarks == (
        f"{path} counts its tokens up to step 6 of 10 only; beyond, they are taken to grow as they did last.",
    )
    assert token_ratio(run, run) == 1
    path.write_text("\n".join(json.dumps({k: v for k, v in line.items() if k != "tokens"}) for line in lines))
    assert read_run(path).tokens is None and read_run(path).remarks == ()
    for tokens in (0, 5):
        path.write_text(f'{{"step": 0, "tokens": {tokens}, "loss": 2}}\n{{"step": 1, "loss": 1}}\n')
        assert read_run(path).tokens is None, "nothing says how fast they grow"


@pytest.mark.parametrize(
    "times, expected",
    [
        ({step: 60e3 if step == 101 else 100 for step in range(101, 201)}, {101: 70, 102: 70.1, 200: 79.9}),
        (
            {step: 60e3 if step == 101 else 100 for step in range(1, 201) if not 50 < step < 101},
            {50: 5, 101: 70, 102: 70.1, 200: 79.9},
        ),
        ({step: 60e3 if step in (1, 101) else 100 for step in range(1, 201)}, {1: 60, 100: 69.9, 101: 129.9}),
        # A value every ten steps is their mean, that of the first ten as well.
        ({step: 6e3 if step in (10, 110) else 100 for step in range(10, 201, 10)}, {10: 60, 110: 129}),
        ({step: 6e3 if step == 110 else 100 for step in range(110, 201, 10)}, {110: 70, 120: 71}),
        ({7: 100}, {7: 0.7}),
    ],
    ids=["second half", "gap", "no gap", "every ten", "second half, every ten", "one"],
)
def test_a_slow_first_step_counts_once(tmp_path, times, expected):
    lines = [{"step": step, "loss": 2.0, "step_time_ms": time} for step, time in times.items()]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(tmp_path / "run.jsonl")
    seconds = dict(zip(run.steps.tolist(), run.seconds.tolist()))
    assert {step: seconds[step] for step in expected} == pytest.approx(expected)


def test_half_the_tokens_do_not_halve_the_token_ratio(tmp_path):
    for name, known in (("stock", 200), ("hg", 100)):
        lines = [
            {"step": step, "loss": curve(1000.0 * step), **({"tokens": 1000 * step} if step <= known else {})}
            for step in range(1, 201)
        ]
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    comparison = compare([read_run(tmp_path / "stock"), read_run(tmp_path / "hg")])
    assert comparison.rows[1].token_ratio.mean == pytest.approx(1)
    assert "up to step 100 of 200 only" in comparison.notes[0]
    assert not any("end at different points" in note for note in comparison.notes)


@pytest.mark.parametrize(
    "first, second, message",
    [
        ({"tokens": 4096}, {"tokens": 4096}, "counts 4,096 tokens at step 1 and 4,096 at step 2"),
        ({"tokens": 4096}, {"tokens": 100}, "must be counted from the start of the run, and rise"),
        ({"tokens": math.nan}, {}, "the tokens nan at step 1; it must be a finite number"),
        ({"tokens": -1}, {}, "the tokens -1 at step 1"),
        ({"step_time_ms": math.inf}, {}, "the step time inf at step 1"),
        ({"memory_bytes": math.nan}, {}, "the memory nan at step 1"),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path, first, second, message):
    lines = [{"step": step, "loss": 2.0, **more} for step, more in ((1, first), (2, second))]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ScaleVecError, match=re.escape(message)):
        read_run(tmp_path / "run.jsonl")


def test_what_a_run_says_of_its_sequences_counts(tmp_path):
    write_log(tmp_path / "log", "hg", 7, [4.0, 3.0])
    assert read_run(tmp_path / "log", seq_length=99).tokens.tolist() == [16000, 32000]


def test_a_file_is_told_by_what_it_holds(tmp_path):
    lines = b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n'
    report = json.dumps(_report("stock,hg", "1")).encode()
    for name in ("run.json", "run.jsonl", "run"):
        for start in (b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf \n"):
            (tmp_path / name).write_bytes(start + lines)
            assert read_run(tmp_path / name).losses.tolist() == [2.0, 1.5]
            (tmp_path / name).write_bytes(start + lines.splitlines()[0])
            assert read_run(tmp_path / name).losses.tolist() == [2.0]
            (tmp_path / name).write_bytes(start + report)
            assert [run.label for run in read_runs(tmp_path / name)] == ["stock", "hg"]
    write_log(tmp_path / "log", "hg", 7, [4.0, 3.0])
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "log").read_bytes().rstrip(b"\n"))
    run = read_run(tmp_path / "log")
    assert (run.label, run.seed) == ("hg", 7) and run.final_validation is not None, "the last line has no end"


NO_RUNS = [
    (
        "a.json",
        b'{\n "kind": "scalevec study report"\n}',
        "of kind 'scalevec study report'; name one, or JSON",
    ),
    ("a.json", b'[{"step": 1, "loss": 2.0}]', "and holds no JSON lines"),
    ("a.json", b"", "and holds no JSON lines"),
    ("a.json", b'{\n "step": 1,\n "loss', "a.json:1 is no JSON object in UTF-8; each line must be one"),
    ("a.json", b'{"kind": "scalevec demo"}', "a report of scalevec demo, is not as it was written (KeyError"),
    ("a.json", b'{"kind": "scalevec demo", "runs": [{"training": 3}]}', "is not as it was written"),
    ("a.json", b'{"kind": "scalevec demo", "runs": []}', "is a report of scalevec demo on no run"),
    ("study.json", b'{"kind": "scalevec study"}', "study.json has no 'options'"),
    ("a.log", b"\x1f\x8b\x08\x00", "is compressed; unpack it first"),
    ("a.log", "iteration 1/ 2 | lm loss: 1 |".encode("utf-16"), "is UTF-16; save it as UTF-8"),
    ("a.jsonl", b'{"step": 1, "a": ' + b"[" * 100_000 + b"\n{}\n", "a.jsonl:1 is no JSON object"),
    ("a.jsonl", b'{"step": 1.5, "loss": 2}\n{}', "a.jsonl:1 has the step 1.5; a step is a whole number"),
    ("a.jsonl", b'{"step": 1, "loss": "2"}\n{}', "a.jsonl holds no training loss"),
    ("a" * 300, None, "cannot be read: File name too long"),
    ("pipe", None, "no file that can be read twice"),
]


@pytest.mark.parametrize("name, content, message", NO_RUNS, ids=[f"{n[:8]} {m[:30]}" for n, _, m in NO_RUNS])
def test_what_is_no_run_is_told_so(tmp_path, name, content, message):
    if name == "pipe":
        os.mkfifo(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ScaleVecError, match=re.escape(message)):
        read_runs(tmp_path if name == "study.json" else tmp_path / name)


def test_a_loss_that_telemetry_has_no_number_for_has_diverged(tmp_path):
    lines = [
        {"step": 10 * n, "loss": loss, "skipped": skipped}
        for n, loss, skipped in (
            (1, 3.0, False),
            (2, None, True),
            (3, None, False),
        )
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_run(tmp_path / "t.jsonl").diverged_at == 30


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"step": NaN, "loss": 2.0}', "2 has the step nan"),
        (b'{"step": Infinity, "loss": 2.0}', "2 has the step inf"),
        (b'{"step": -1, "loss": 2.0}', "2 has the step -1"),
        (b'{"step": 1' + b"0" * 400 + b', "loss": 2.0}', "2 has the step inf"),
        (b'{"step": 1' + b"0" * 30 + b', "loss": 2.0}', "2 has the step 1e"),
        (b'{"step": 2, "label": "\xff"}', "2 is no JSON object in UTF-8"),
    ],
)
def test_json_lines_that_cannot_be_are_refused(tmp_path, line, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + line + b"\n")
    with pytest.raises(ScaleVecError, match=f"run.jsonl:{message}"):
        read_run(path)


def test_a_loss_beyond_what_a_float_can_be_is_none(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1' + "0" * 400 + "}\n")
    assert read_run(path).diverged_at == 2
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1e308}\n')
    assert read_run(path).diverged_at == 2


def tensorboard_is_missing(path):
    """Whether this is the light environment, where such a folder is refused."""
    missing = importlib.util.find_spec("tensorboard") is None
    if missing:
        with pytest.raises(ScaleVecError, match="read with tensorboard, which is not installed"):
            read_run(path)
    return missing


def test_tensorboard_is_read(tmp_path):
    if tensorboard_is_missing(tmp_path):
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "tb") as writer:
        for name, value in (("seq_length", 16), ("seed", 5), ("scalevec_strategy", "dp")):
            writer.add_text(name, str(value))
        for step in range(1, 6):
            loss = 5.0 - step / 10
            writer.add_scalar("lm loss", loss, step)
            writer.add_scalar("lm loss vs samples", loss, step * 4)
            writer.add_scalar("iteration-time", 0.25, step)
            writer.add_scalar("mem-max-allocated-bytes", 1e6 + step, step)
        writer.add_scalar("lm loss validation", 4.4, 3)
        writer.add_scalar("lm loss validation", 4.2, 5)
    run = read_run(tmp_path / "tb")
    assert (run.label, run.seed, run.step_time_ms) == ("dp", 5, 250.0)
    assert run.losses.tolist() == pytest.approx([4.9, 4.8, 4.7, 4.6, 4.5])
    assert run.tokens.tolist() == [64, 128, 192, 256, 320]
    assert run.seconds.tolist() == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25])
    assert run.validation == ((3, pytest.approx(4.4)),) and run.final_validation == pytest.approx(4.2)
    assert run.memory_bytes == 1e6 + 5
    with SummaryWriter(tmp_path / "other") as writer:
        writer.add_scalar("accuracy", 0.5, 1)
    with pytest.raises(ScaleVecError, match="no TensorBoard curve of the training loss"):
        read_run(tmp_path / "other")


LEFT_OUT = "had come to step 200, went back, and has come to step 120 since: what lay beyond is left out."
# A run that was at step 200 and goes on from step 50.
WENT_ON = [(step, 3.0 + step / 1e4) for step in range(1, 201)] + [(step, 2.0) for step in range(51, 121)]


def assert_went_on(run):
    assert run.steps.tolist() == list(range(1, 121)) and run.remarks == (f"{run.source} {LEFT_OUT}",)
    assert run.losses[:50] == pytest.approx([loss for _, loss in WENT_ON[:50]])
    assert run.losses[50:].tolist() == [2.0] * 70
    assert run.tokens.tolist() == [16 * step for step in range(1, 121)]
    assert run.seconds[-1] == pytest.approx(0.1 * 50 + 0.2 * 70) and run.step_time_ms == pytest.approx(200)
    assert run.validation == ((40, 3.5), (60, 2.5)) and run.final_validation is None


def test_steps_that_were_given_up_in_json_lines_are_left_out(tmp_path):
    lines = []
    for index, (step, loss) in enumerate(WENT_ON):
        more = {"tokens": 16 * step, "memory_bytes": 10 if index < 200 else 5}
        # Values of one step may stand on lines of their own, before and after its loss.
        lines.append({"step": step, "step_time_ms": 100 if index < 200 else 200})
        lines.append({"step": step, "loss": loss, **more})
        lines += [{"step": step - 1, "validation_loss": 3.5 if index < 200 else 2.5}] * (
            (step - 1) in (40, 60, 180, 199)
        )
        lines += [{"step": 200, "validation_loss": 3.25}] * (step == 200)
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(tmp_path / "run.jsonl")
    assert_went_on(run)
    assert run.memory_bytes == 10
    (tmp_path / "other.jsonl").write_text(
        "\n".join(json.dumps(line | {"step": line["step"] + 1}) for line in lines)
    )
    assert run.remarks[0] in compare([run, read_run(tmp_path / "other.jsonl")]).notes


@pytest.mark.parametrize("times", [1, 2])
def test_steps_that_were_given_up_in_a_log_without_its_arguments_are_left_out(tmp_path, times):
    """Each line may be there twice, from two ranks."""
    lines = []
    for index, (step, loss) in enumerate(WENT_ON):
        line = ITERATION.format(step=step, ms=100 if index < 200 else 200, loss=loss)
        lines += [line.replace(f"{step}000 |", f"{step} |")] * times
        if step in (40, 60, 180):
            lines += [VALIDATION.format(where=step, loss=3.5 if index < 200 else 2.5)] * times
        if step == 200:
            lines.append(VALIDATION.format(where="200 on validation set", loss=3.25))
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")
    assert_went_on(read_run(tmp_path / "run.log", seq_length=16))
    with open(tmp_path / "run.log", "a") as log:
        log.write("RuntimeError: Unexpected result nan (iteration 121)\n")
    assert read_run(tmp_path / "run.log").diverged_at == 121


# Without its start, nothing tells that the run which goes on at 151 went back.
@pytest.mark.parametrize(
    ("starts", "again"), [(True, 101), (True, 150), (True, 151), (False, 101), (False, 150)]
)
def test_validations_of_steps_that_were_given_up_are_left_out(tmp_path, again, starts):
    """Megatron prints the first step of a process and then one in a hundred: a run that goes on may do so
    between the last one that it printed and its last validation."""
    start = "  seed .......... 1\n" * starts
    lines = [start, *(ITERATION.format(step=step, ms=100, loss=3.0) + "\n" for step in (100, 150))]
    lines += [VALIDATION.format(where=step, loss=3.5) + "\n" for step in (150, 175)]
    lines += [start, ITERATION.format(step=again, ms=100, loss=2.0) + "\n"]
    (tmp_path / "run.log").write_text("".join(lines))
    run = read_run(tmp_path / "run.log")
    assert run.losses[-1] == 2.0
    assert run.steps.tolist() == sorted({step for step in (100, 150) if step <= again} | {again})
    # The one of step 150 may be of a line that is there twice.
    assert [step for step, _ in run.validation] == [150] * (again > 150 or (again == 150 and not starts))
    [remark] = run.remarks
    assert f"had come to step 175, went back, and has come to step {again} since" in remark


def test_steps_taken_again_to_the_end_need_no_remark(tmp_path):
    lines = [{"step": step, "loss": 9.0 - step} for step in (1, 2, 3, 4, 3, 4, 4, 5)]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(tmp_path / "run.jsonl")
    assert run.steps.tolist() == [1, 2, 3, 4, 5] and run.remarks == ()


def test_steps_that_were_given_up_in_tensorboard_are_left_out(tmp_path):
    if tensorboard_is_missing(tmp_path):
        return
    from torch.utils.tensorboard import SummaryWriter

    for start, part in ((0, WENT_ON[:200]), (1000, WENT_ON[200:])):
        with SummaryWriter(tmp_path / "tb", filename_suffix=f".{start}") as writer:
            for index, (step, loss) in enumerate(part):
                now = 1e9 + start + index / 2
                for name, value, at in (
                    ("iteration-time", 0.2 if start else 0.1, step),
                    ("lm loss", loss, step),
                    ("lm loss vs samples", loss, step * 4),
                ):
                    now += 0.01
                    writer.add_scalar(name, value, at, walltime=now)
                if step in (40, 60, 180, 200):
                    writer.add_scalar("lm loss validation", 2.5 if start else 3.5, step, walltime=now + 0.01)
    assert_went_on(read_run(tmp_path / "tb", seq_length=4))


TWO_RUNS = [
    ("None", 1, "hg", 2, "strategy stock and one with hg"),
    ("hg", 1, "hg", 2, "seed 1 and one with 2"),
    ("dp", 1, "hg", 1, "strategy dp and one with hg"),
    (None, 1, "hg", 1, "strategy stock and one with hg"),
    ("hg", 1, None, 1, "strategy hg and one with stock"),
    ("hg", 1, "hg", 1, None),
    ("None", 1, "stock", 1, None),
    (None, 1, None, 1, None),
    (None, None, "hg", 1, None),  # its beginning is cut off
]


@pytest.mark.parametrize("one, seed, other, other_seed, message", TWO_RUNS)
def test_two_runs_in_one_log_are_refused(tmp_path, one, seed, other, other_seed, message):
    parts = []
    for strategy, value, steps in ((one, seed, 200), (other, other_seed, 100)):
        write_log(tmp_path / "log", strategy, value, curve(TOKENS[:steps]))
        parts += [line for line in (tmp_path / "log").read_text().splitlines(True) if "... None" not in line]
        if strategy == "None":
            parts.insert(0, "  scalevec_strategy .......... None\n")
    (tmp_path / "log").write_text("".join(parts))
    if message is None:
        assert read_run(tmp_path / "log").steps[-1] == 100
        return
    said = f"log holds two runs, one with the {message}: give each a file of its own."
    with pytest.raises(ScaleVecError, match=re.escape(said)):
        read_run(tmp_path / "log")


def test_a_start_that_took_no_step_is_no_run_unless_it_is_the_last(tmp_path):
    write_log(tmp_path / "log", "hg", 2, [4.0, 3.0])
    written = (tmp_path / "log").read_text()
    start = "  scalevec_strategy .......... hg\n  seed .......... 1\n"
    (tmp_path / "log").write_text(start + written)
    assert read_run(tmp_path / "log").seed == 2
    (tmp_path / "log").write_text(written + start)
    with pytest.raises(ScaleVecError, match="one with the seed 2 and one with 1"):
        read_run(tmp_path / "log")


@pytest.mark.parametrize("name, values", [("seed", (1, 2)), ("strategy", ("dp", "hg"))])
def test_two_runs_in_one_file_of_json_lines_or_folder_are_refused(tmp_path, name, values):
    lines = [{"step": step, "loss": 2.0, name: value} for value in values for step in (1, 2)]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = f"holds two runs, one with the {name} {values[0]} and one with {values[1]}"
    with pytest.raises(ScaleVecError, match=f"run.jsonl {said}: give each a file"):
        read_run(tmp_path / "run.jsonl")
    if tensorboard_is_missing(tmp_path):
        return
    from torch.utils.tensorboard import SummaryWriter

    for value in values:
        with SummaryWriter(tmp_path / "tb") as writer:
            writer.add_text("scalevec_strategy" if name == "strategy" else name, str(value))
            writer.add_scalar("lm loss", 2.0, 1)
    with pytest.raises(ScaleVecError, match=f"tb {said}: give each a folder"):
        read_run(tmp_path / "tb")


def test_demos_are_read(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(_report("stock,hg", "2")))
    runs = read_runs(tmp_path)
    assert [(run.label, run.seed) for run in runs] == [
        ("stock", 1234),
        ("hg", 1234),
        ("stock", 1235),
        ("hg", 1235),
    ]
    assert terminal_gap(runs[::2], runs[1::2], by="validation").mean == pytest.approx(-0.02)
    report = _report("stock,hg", "2")
    report["runs"][1]["final_validation_loss"] = None  # as it writes NaN
    (tmp_path / "diverged.json").write_text(json.dumps(report))
    with pytest.raises(ScaleVecError, match="hg.*diverged at step"):
        compare(read_runs(tmp_path / "diverged.json"))
    with pytest.raises(ScaleVecError, match="holds 4 runs"):
        read_run(tmp_path)
    with pytest.raises(ScaleVecError, match="leave the label out"):
        read_runs(tmp_path, "both")


BAD = [
    (["absent"], "absent does not exist"),
    (["empty.log", "stock.log"], "empty.log holds no training loss"),
    (["stock.log"], "a comparison needs two labels"),
    (["a=stock.log", "a=stock.log", "b=hg.log"], "no repetitions of one another"),
    (["a=plain.log", "a=./plain.log", "b=hg.log"], "both called 'a', are the same run"),
    (["a=plain.log", "a=copy.log", "b=hg.log"], "both called 'a', are the same run"),
    (["hg.log", "nan.log"], "nan.log diverged at step 2"),
    (["hg.log", "late.log"], "late.log diverged at step 2"),
    (["hg.log", "ended.log"], "ended.log diverged at step 3"),
    (["hg.log", "inf.jsonl"], "inf.jsonl diverged at step 7"),
    (["stock.log", "hg.log", "--baseline", "dp"], "no run is called 'dp'"),
    (["stock.log", "hg.log", "--confidence", "20"], "--confidence 20"),
    (["stock.log", "hg.log", "--confidence", "99.99999"], "--confidence 99.99999 must be a percentage"),
    (["stock.log", "hg.log", "--confidence", "nan"], "--confidence nan"),
    (["a=plain.log", "a=later.log", "b=hg.log"], "share no step"),
    (["hg.log", "validated.jsonl"], "validated.jsonl diverged at step 1"),
    (["stock.log", "hg.log", "--png", "/dev/null"], "/dev/null cannot be written"),
    (["stock.log", "hg.log", "--png", "a.png", "--html", "a" * 300], "nothing was written: "),
    (["stock.log", "hg.log", "--seq-length", "0"], "--seq-length 0"),
    (["stock.log", "hg.log", "--png", "absent/loss.png"], "cannot be written"),
    (["stock.log", "a=hg.log", "--json", "./hg.log"], "hg.log cannot be written: it is the run hg.log"),
    (["stock.log", ".", "--json", "report.json"], "report.json cannot be written: it is of the run ."),
    (["stock.log", "hg.log", "--png", "x", "--html", "./x"], "x cannot be written: it is another output"),
    (["stock.log", "plain.log", "--by", "validation"], "compare by training"),
    (["other.json", "stock.log"], "no report of scalevec demo"),
    (["stock.log", "--nonsense"], "--nonsense"),
]


@pytest.mark.parametrize("argv, message", BAD, ids=[" ".join(argv)[:60] for argv, _ in BAD])
def test_bad_input_is_refused(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "stock.log", "stock", 1, [4.0, 3.0])
    write_log(tmp_path / "hg.log", "hg", 1, [4.0, 2.9])
    (tmp_path / "plain.log").write_text(ITERATION.format(step=1, ms=1, loss=2.0) + "\n")
    (tmp_path / "later.log").write_text(ITERATION.format(step=2, ms=1, loss=1.9) + "\n")
    (tmp_path / "validated.jsonl").write_text('{"step": 1, "validation_loss": NaN}\n{"step": 2, "loss": 1}\n')
    (tmp_path / "copy.log").write_text((tmp_path / "plain.log").read_text())
    write_log(tmp_path / "nan.log", "stock", 1, [4.0, float("nan"), 3.0])
    write_log(tmp_path / "late.log", "stock", 1, [4.0, 3.0])
    late = (tmp_path / "late.log").read_text()
    (tmp_path / "late.log").write_text(re.sub(r"(lm loss value: *)[\d.E+]+", r"\1nan", late))
    (tmp_path / "ended.log").write_text(late + "RuntimeError: Unexpected result nan (iteration 3)\n")
    (tmp_path / "inf.jsonl").write_text('{"step": 7, "loss": Infinity}\n')
    (tmp_path / "empty.log").write_text("nothing\n")
    (tmp_path / "other.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    assert main(["compare", *argv]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


# --- the whole --------------------------------------------------------------------------------------


@pytest.fixture
def six_logs(tmp_path, monkeypatch):
    """The runs that docs/compare.md names, in the current folder."""
    monkeypatch.chdir(tmp_path)
    generator = numpy.random.default_rng(0)
    for seed in (1, 2, 3):
        shared = curve(TOKENS[:200]) + generator.normal(0, 0.02, 200)
        for strategy, gap, ms, memory in (("stock", 0.0, 100.0, 1000.0), ("hg", -0.05, 104.0, 1010.0)):
            losses = shared + gap + generator.normal(0, 0.002)
            write_log(tmp_path / f"{strategy}{seed}.log", strategy, seed, losses.round(6), ms, memory)


def test_the_command_of_the_documentation_writes_all_that_it_is_asked_for(tmp_path, six_logs, capsys):
    [command] = re.findall(r"^scalevec compare .*$", DOCUMENTATION, re.MULTILINE)
    assert main([*shlex.split(command)[1:], "--title", "<Mine> & yours"]) == 0
    shown = capsys.readouterr().out
    assert "hg ended below stock, by 0.0" in shown and "104 ms (x 1.04)" in shown and "GiB (x 1.01)" in shown
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "figures.json").read_text())
    [row] = [row for row in figures["rows"] if row["label"] == "hg"]
    assert row["gap"]["mean"] == pytest.approx(-0.05, abs=0.005) and row["token_ratio"]["mean"] > 1
    page = (tmp_path / "page.html").read_text()
    assert "&lt;Mine&gt; &amp; yours" in page and "hg ended below stock" in page
    assert not re.search(r"(src|href)=[\"'](?!data:)", page), "the page needs another file"
    [encoded] = re.findall(r"data:image/png;base64,([^\"]+)", page)
    assert base64.b64decode(encoded) == (tmp_path / "loss.png").read_bytes()


def test_labels_and_paths_may_hold_equals_signs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "lr=1.log", "stock", 1, [4.0, 3.0])
    write_log(tmp_path / "lr=2.log", "stock", 1, [4.0, 2.5])
    assert main(["compare", "lr=1.log", "dp+reparam=unit=lr=2.log"]) == 0
    assert "dp+reparam=unit ended 0.5000 below stock" in capsys.readouterr().out
    assert main(["compare", "lr=1.log", "new=absent.log"]) == 2
    assert "absent.log does not exist" in capsys.readouterr().err


def test_labels_may_hold_brackets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a.log", "stock", 1, [4.0, 3.0])
    write_log(tmp_path / "b.log", "hg", 1, [4.0, 2.5])
    assert main(["compare", "[red]=a.log", "b[/b]=b.log"]) == 0
    shown = capsys.readouterr().out
    assert "against [red]" in shown and shown.count("b[/b]") == 2


def test_the_python_of_the_documentation_runs(tmp_path, six_logs):
    (tmp_path / "stock1.log").rename("stock.log")
    (tmp_path / "hg1.log").rename("hg.log")
    [code] = re.findall(r"```python\n(.*?)```", DOCUMENTATION, re.DOTALL)
    exec(code, {})
    assert (tmp_path / "loss.png").is_file() and (tmp_path / "page.html").is_file()


def test_pictures_of_runs_that_differ_in_everything(tmp_path):
    short = synthetic("short", None, curve(TOKENS[:50]), tokens=None, step_time_ms=3.0)
    long = synthetic("long", 1, curve(TOKENS), validation=((10, 4.0),), final_validation=2.0)
    comparison = compare([short, long], "long")
    assert comparison.by == "training"
    assert any("of unequal training" in note for note in comparison.notes)
    render(comparison, png=tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.fixture
def drawn(monkeypatch):
    """Figures in the order in which they were drawn."""
    from matplotlib.figure import Figure

    figures = []
    keep = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **more: (figures.append(self), keep(self, *a, **more))
    )
    return figures


def test_names_stand_in_the_picture_as_they_are(drawn):
    """matplotlib takes text between dollars for mathematics, and hides what begins with _."""
    names = ["_stock", "lr=$\\frac$", "a" * 100]
    runs = [synthetic(name, 0, curve(TOKENS), final_validation=2.0, seconds=TOKENS) for name in names]
    draw(compare(runs).groups, names[0], title="$\\x$_", with_time=True)
    [figure] = drawn
    axis = figure.axes[0]
    shown = [text.get_text() for text in axis.get_legend().get_texts()]
    assert (
        shown[:3] == ["_stock, training", "_stock, validation", "lr=$\\frac$, training"] and len(shown) == 6
    )
    assert all(len(text) < 60 for text in shown) and axis.get_title(loc="left") == "$\\x$_"
    texts = [*axis.get_legend().get_texts(), axis._left_title, *(a.yaxis.label for a in figure.axes)]
    assert axis.get_legend().get_window_extent().x0 >= axis.get_window_extent().x0, "beside the curves"
    assert not any(text.get_parse_math() for text in texts if "$" in text.get_text())


def test_differences_in_the_picture_are_between_the_pairs_of_the_table(drawn):
    generator = numpy.random.default_rng(3)
    stock, other = (seeds_of(label, 3, spread=1.0, generator=generator) for label in ("stock", "other"))
    comparison = compare([*stock[:2], *other])
    draw(comparison.groups, "stock", title="")
    curves = drawn[0].axes[-1].lines[1].get_ydata()
    paired = [smooth(other[seed].losses) - smooth(stock[seed].losses) for seed in (0, 1)]
    assert comparison.rows[1].gap.paired and curves == pytest.approx(numpy.mean(paired, 0))


def test_names_are_written_as_what_can_be_seen(tmp_path, capsys):
    """A file's name may hold bytes that are no text, and a log what drives a terminal."""
    write_log(tmp_path / "a.log", "stock", 1, [4.0, 3.0])
    write_log(tmp_path / os.fsdecode(b"b\xff\n.log"), "\x1b[2J", 1, [4.0, 2.5])
    write_log(tmp_path / os.fsdecode(b"c\xff.log"), "None", 1, [4.0, 2.5])
    inputs = [str(path) for path in sorted(tmp_path.glob("*.log"))]
    outputs = [f"--{kind}={tmp_path / kind}" for kind in ("png", "html", "json")]
    assert main(["compare", *inputs, *outputs, "--title", "\udcff\n"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    labels = [row["label"] for row in json.loads((tmp_path / "json").read_text())["rows"]]
    assert (
        labels == ["stock", "\\x1b[2J", "c\\udcff"]
        and "<h1>\\udcff\\n</h1>" in (tmp_path / "html").read_text()
    )


def test_runs_of_different_stretches_are_drawn_where_they_have_steps(drawn):
    early = synthetic("stock", 0, curve(TOKENS[:100]), tokens=None)
    late = Run("late", "late", numpy.arange(500, 600), curve(TOKENS[500:600]), seed=0)
    overlapping = Run("late", "other", numpy.arange(550, 600), curve(TOKENS[550:600]) + 0.1, seed=1)
    draw(compare([early, late, overlapping]).groups, "stock", title="")
    top, bottom = drawn[0].axes
    assert top.lines[1].get_xdata()[0] == 545 and len(bottom.lines[1].get_xdata()) == 0


def test_a_single_step_is_drawn(tmp_path):
    runs = [
        synthetic(label, 0, numpy.array([3.0]), tokens=numpy.array([tokens]))
        for label, tokens in (("a", 0.0), ("b", 5.0))
    ]
    render(compare(runs), png=tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000
