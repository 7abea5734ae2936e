"""Save in one layout and resume in another: five steps and five are ten, optimizer and schedule included."""

import pytest
from ranks.arguments import LAYOUTS, tiny_gpt
from runs import assert_continues

pytestmark = pytest.mark.needs_training

RESHARDABLE = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
STRATEGIES = ("unified", "dp")
SAVED_AT = ("serial", "tp2-sp", "pp2")


def _run(ranks, layout, strategy, *more, **options):
    world_size, arguments = LAYOUTS[layout]
    flags = [*RESHARDABLE, *arguments, "--scalevec-strategy", strategy, *more]
    return ranks.run("train", world_size, argv=tiny_gpt("llama", *flags), **options)[-1]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Runs of ten steps with a checkpoint at the fifth, made when they are first asked for."""
    runs = {}

    def get(layout, strategy):
        if (layout, strategy) not in runs:
            folder = tmp_path_factory.mktemp("run")
            save = ["--save", str(folder), "--save-interval", "5"]
            runs[layout, strategy] = (folder, _run(ranks, layout, strategy, *save))
        return runs[layout, strategy]

    return get


def _cases():
    for source in SAVED_AT:
        for target in SAVED_AT:
            yield "unified", source, target
    yield from (("dp", "serial", "tp2-sp"), ("dp", "tp2-sp", "pp2"), ("dp", "pp2", "serial"))
    yield from (("unified", "tp2-sp", layout) for layout in ("pp2-vpp", "cp2", "dp2-distopt"))


@pytest.mark.parametrize(("strategy", "source", "target"), list(_cases()))
def test_a_resumed_run_repeats_the_uninterrupted_one(ranks, saved, strategy, source, target):
    folder, whole = saved(source, strategy)
    load = ["--load", str(folder), "--ckpt-step", "5"]
    run = _run(ranks, target, strategy, *load, by_name=False)
    assert len(run["losses"]) == 5
    if source == target:
        assert run["losses"] == whole["losses"][5:]
        assert run["grad_norms"] == whole["grad_norms"][5:]
    assert_continues(run, whole)


def test_a_lost_optimizer_state_is_seen(ranks, saved):
    """The comparison above can fail."""
    folder, whole = saved("serial", "unified")
    load = ["--load", str(folder), "--ckpt-step", "5", "--no-load-optim"]
    run = _run(ranks, "serial", "unified", *load, by_name=False)
    assert len(run["losses"]) == 5
    with pytest.raises(AssertionError):
        assert_continues(run, whole)


def test_asynchronous_saves_resume(ranks, saved, tmp_path):
    """Written by a process in the background while training goes on."""
    _, whole = saved("tp2-sp", "unified")
    save = ["--save", str(tmp_path), "--save-interval", "5"]
    background = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    first = _run(ranks, "tp2-sp", "unified", *save, *background)
    assert first["losses"] == whole["losses"]
    run = _run(ranks, "tp2-sp", "unified", "--load", str(tmp_path), "--ckpt-step", "5", by_name=False)
    assert run["losses"] == whole["losses"][5:]
