"""scalevec patch: one file of a Megatron tree, from stock to patched and back, or not at all."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.arguments import tiny_gpt

from megatron_scalevec import ScaleVecError
from megatron_scalevec.patches import apply, check, main, revert
from megatron_scalevec.patches.diff import patches, read

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path("megatron/training/__init__.py")


def installed_tree() -> Path:
    """The folder that holds the installed megatron-core."""
    return Path(importlib.util.find_spec("megatron.core").origin).parent.parent.parent


def released_trees() -> list[Path]:
    """The installed Megatron, and what ``make test-patches`` has put beside it."""
    folder = os.environ.get("SCALEVEC_MEGATRON_TREES")
    more = sorted(path for path in (ROOT / folder).iterdir() if path.is_dir()) if folder else []
    return [installed_tree(), *more]


def copy_of(source: Path, target: Path) -> Path:
    """A tree with its own training loop; the rest is the original's."""
    (target / "megatron").mkdir(parents=True)
    shutil.copytree(source / "megatron/training", target / "megatron/training")
    (target / "megatron/core").symlink_to(source / "megatron/core")
    return target


@pytest.fixture
def megatron(tmp_path):
    return copy_of(installed_tree(), tmp_path / "Megatron-LM")


def fingerprint(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file of the training loop, with mode and content."""
    return {
        str(path.relative_to(folder)): (
            stat.S_IMODE(path.lstat().st_mode),
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted((folder / "megatron/training").rglob("*"))
        if "__pycache__" not in path.parts
    }


@pytest.mark.needs_training
@pytest.mark.parametrize("source", released_trees(), ids=lambda path: path.name)
def test_there_and_back(source, tmp_path):
    folder = copy_of(source, tmp_path / "tree")
    (folder / TARGET).chmod(0o640)
    before = fingerprint(folder)
    assert check(str(folder))[0] is False
    assert "was patched" in apply(str(folder))
    patched = fingerprint(folder)
    assert [name for name in before if before[name] != patched[name]] == [str(TARGET)]
    assert patched.keys() == before.keys() and patched[str(TARGET)][0] == 0o640
    found, sentence = check(str(folder))
    assert found and "Plugins of this environment: scalevec" in sentence
    assert "patched already" in apply(str(folder)) and fingerprint(folder) == patched
    assert "stock again" in revert(str(folder))
    assert fingerprint(folder) == before
    assert "is not patched" in revert(str(folder)) and fingerprint(folder) == before


@pytest.mark.needs_training
def test_the_flag_works_in_a_script_that_knows_nothing_of_it(megatron, tmp_path):
    """Three iterations of a patched Megatron, then the stock one again."""
    before = fingerprint(megatron)
    assert main(["apply", str(megatron)]) == 0
    run = start(megatron, tmp_path, "--scalevec-strategy", "hg", "--scalevec-audit", "audit.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "linears converted 8 of 8" in run.stdout and "iteration        3/" in run.stdout
    assert (tmp_path / "audit.json").is_file()
    misspelt = start(megatron, tmp_path, "--scalevec-strategy", "hgg")
    assert misspelt.returncode == 2 and "Did you mean 'hg'" in misspelt.stderr
    assert "Traceback" not in misspelt.stderr
    assert main(["revert", str(megatron)]) == 0
    assert fingerprint(megatron) == before
    stock = start(megatron, tmp_path, "--scalevec-strategy", "hg")
    assert stock.returncode == 2 and "unrecognized arguments: --scalevec-strategy hg" in stock.stderr


def start(megatron: Path, folder: Path, *flags: str):
    argv = tiny_gpt("llama", *flags)
    argv[argv.index("--train-iters") + 1] = "3"
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/scripts/pretrain_as_users_do.py"), *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(megatron), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.needs_training
def test_our_own_commands_come_first_in_a_patched_megatron(megatron, tmp_path):
    """The hooks are the command's, with CPU mode on, not those of a plugin in the middle of an import; and a
    process without our flags keeps torch as it is."""
    apply(str(megatron))
    code = (
        "import sys; sys.argv[1:] = {argv}\n"
        "from megatron_scalevec import cpu\n"
        "from megatron_scalevec.integration import hooks, launch\n"
        "{first}\n"
        "import megatron.training\n"
        "current = hooks.session()\n"
        "print(current.cpu, current.command_line.scalevec_strategy, cpu.installed())"
    )
    cases = (
        (["--scalevec-strategy", "hg"], "launch.prepare(['--scalevec-strategy', 'dp'])", "True dp True", 0),
        # It ends without a model, which the launcher, too, would not let pass.
        (["--scalevec-strategy", "hg"], "", "True hg True", 2),
        (["--num-layers", "2"], "", "False None False", 0),
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(argv=argv, first=first)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(megatron), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for argv, first, _, _ in cases
    ]
    for run, (argv, first, expected, code) in zip(started, cases):
        out, err = run.communicate(timeout=240)
        assert run.returncode == code, err
        assert out.splitlines()[-1] == expected, (argv, first)


def refused(action, folder: Path, message: str) -> None:
    """The sentence, and a tree as it was."""
    before = fingerprint(folder)
    with pytest.raises(ScaleVecError) as caught:
        action(str(folder))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert fingerprint(folder) == before


@pytest.mark.needs_training
@pytest.mark.parametrize("action", [apply, revert, check])
@pytest.mark.parametrize("first", [None, apply])
def test_a_tree_that_differs_by_one_byte_is_left_alone(megatron, action, first):
    if first:
        first(str(megatron))
    content = (megatron / TARGET).read_bytes()
    (megatron / TARGET).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    refused(action, megatron, "was left alone")


@pytest.mark.needs_training
@pytest.mark.parametrize("path", [TARGET, TARGET.parent])
def test_a_read_only_tree_is_left_alone(megatron, path):
    mode = (megatron / path).stat().st_mode
    (megatron / path).chmod(mode & ~0o222)
    refused(apply, megatron, "is read-only, so nothing was changed")
    (megatron / path).chmod(mode)
    apply(str(megatron))
    (megatron / path).chmod(mode & ~0o222)
    refused(revert, megatron, "is read-only, so nothing was changed")
    (megatron / path).chmod(mode)


@pytest.mark.needs_training
def test_what_the_system_says_becomes_a_sentence(megatron, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(apply, megatron, "No space left on device")


@pytest.mark.needs_training
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_interruption_changes_nothing(megatron, monkeypatch, function):
    def interrupted(*args):
        raise KeyboardInterrupt

    before = fingerprint(megatron)
    with monkeypatch.context() as patched:
        patched.setattr(os, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            apply(str(megatron))
    assert fingerprint(megatron) == before


@pytest.mark.needs_training
def test_a_killed_process_leaves_a_stock_tree_that_can_be_patched(megatron):
    before = fingerprint(megatron)
    killed = os.fork()
    if killed == 0:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        apply(str(megatron))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(killed, 0)[1]) == signal.SIGKILL
    left = fingerprint(megatron).keys() - before.keys()
    assert len(left) == 1 and check(str(megatron))[0] is False
    apply(str(megatron))
    revert(str(megatron))
    assert fingerprint(megatron) == before


def test_what_is_no_megatron_is_told_so(tmp_path):
    with pytest.raises(ScaleVecError, match="there is no Megatron in .*name a Megatron-LM checkout"):
        apply(str(tmp_path))
    info = tmp_path / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\n")
    with pytest.raises(ScaleVecError, match="Megatron 0.15.3 in .* is outside the versions"):
        apply(str(tmp_path))
    info.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    with pytest.raises(ScaleVecError, match="has no megatron/training/__init__.py"):
        apply(str(tmp_path))
    info.write_text("nothing")
    with pytest.raises(ScaleVecError, match="does not say MAJOR, MINOR and PATCH"):
        apply(str(tmp_path))


@pytest.mark.needs_training
def test_a_link_into_another_tree_is_left_alone(megatron, tmp_path):
    other = tmp_path / "other.py"
    (megatron / TARGET).rename(other)
    (megatron / TARGET).symlink_to(other)
    refused(apply, megatron, "is a symbolic link")


@pytest.mark.needs_training
def test_exit_codes(megatron, capsys):
    assert main(["check", str(megatron)]) == 1
    assert main(["apply", str(megatron)]) == 0
    assert main(["check", str(megatron)]) == 0
    assert capsys.readouterr().out.count("\n") == 3
    with pytest.raises(ScaleVecError, match="invalid choice: 'aply'"):
        main(["aply", str(megatron)])


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("forth", "back"),
    [
        (["git", "apply", "--unidiff-zero"], ["git", "apply", "--unidiff-zero", "-R"]),
        (["patch", "-p1", "-s", "-i"], ["patch", "-p1", "-s", "-R", "-i"]),
    ],
    ids=["git", "patch"],
)
def test_ordinary_tools_read_the_patch(megatron, forth, back):
    [patch] = patches()
    file = str(ROOT / "megatron_scalevec/patches" / patch.name)
    for tool, state in ((forth, True), (back, False)):
        run = subprocess.run([*tool, file], cwd=megatron, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        assert check(str(megatron))[0] is state


def test_patches_hold_our_lines_only():
    """No context, nothing taken away; a patch of another form is not read."""
    [patch] = patches()
    assert len(patch.added) < 10 and patch.expects != patch.gives
    text = (ROOT / "megatron_scalevec/patches" / patch.name).read_text()
    assert read(patch.name, text) == patch
    for broken in (text.replace("\n+for", "\n for"), text.replace("-18,0 +19,7", "-18,1 +18,8")):
        with pytest.raises(RuntimeError, match="is not one hunk of added lines"):
            read("broken", broken)


def test_this_package_is_a_plugin():
    [entry] = importlib.metadata.entry_points(group="megatron.plugins", name="scalevec")
    assert entry.value == "megatron_scalevec.integration.plugin:start"
    assert callable(entry.load())
