"""Metadata, pins, set-up scripts and CI agree with each other."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from script_modules import load_script

import megatron_scalevec

ROOT = Path(__file__).resolve().parent.parent
THIS_VERSION = "{}.{}".format(*sys.version_info[:2])
BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def make_env():
    return load_script("make_env")


def pins(name: str) -> dict[str, Version]:
    found: dict[str, Version] = {}
    for line in (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", line)
        assert match, f"constraints/{name}.txt: {line!r} is not of the form name==version"
        package = canonicalize_name(match[1])
        assert package not in found, f"constraints/{name}.txt pins {package} twice"
        found[package] = Version(match[2])
    return found


# Metadata and pins


def test_installed_version_is_the_package_version():
    assert importlib.metadata.version("megatron_scalevec") == megatron_scalevec.__version__


def test_console_command():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="scalevec")
    assert command.value == "megatron_scalevec.cli:main"


def test_apex_is_never_required():
    project = SETTINGS["project"]
    listed = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
    assert "apex" not in {Requirement(entry).name for entry in listed}


@pytest.mark.parametrize("name", ["main", "light", "te", "docs"])
def test_constraints_pin_what_is_installed(make_env, name):
    base = make_env.ENVIRONMENTS[name].get("base")
    pinned = {**(pins(base) if base else {}), **pins(name)}
    for entry in make_env.wanted(SETTINGS, make_env.ENVIRONMENTS[name]["extras"]):
        requirement = Requirement(entry)
        package = canonicalize_name(requirement.name)
        assert package in pinned, f"constraints/{name}.txt does not pin {package}"
        assert requirement.specifier.contains(pinned[package]), (package, pinned[package])


def test_constraints_stand_for_both_ends_of_the_window():
    assert (pins("main")["megatron-core"], pins("main")["torch"]) == (
        Version("0.19.2"),
        Version("2.14.1"),
    )
    assert (pins("light")["megatron-core"], pins("light")["torch"]) == (
        Version("0.16.1"),
        Version("2.13.0"),
    )


def test_an_environment_on_top_of_another_pins_nothing_twice():
    for name in ("te", "docs"):
        assert not pins(name).keys() & pins("main").keys(), name
    versions = [pins("te")[name] for name in pins("te") if name.startswith("transformer-engine")]
    assert versions == [Version("2.20.2")] * 3


# What no file may name. Put together here, so that this file does not name it either.
INDEX_HOSTS = ["py" + "pi.org", "python" + "hosted", "py" + "pi.nvidia", "download.py" + "torch"]
HOME_FOLDERS = ["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]


def files_of_the_project():
    """What git tracks or would; without git all but hidden folders and what Python makes."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        return list(filter(None, listing.stdout.split("\0")))
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    made = ("__pycache__", "build", "dist", "runs")
    return [
        str(path) for path in found if not any(part.startswith(".") or part in made for part in path.parts)
    ]


def test_the_scan_sees_files_with_git_and_without(monkeypatch):
    with_git = set(files_of_the_project())
    monkeypatch.setenv("GIT_DIR", os.devnull)
    without = set(files_of_the_project())
    assert "setup.py" in with_git & without
    hidden = {name for name in with_git if name.startswith(".")}
    assert {name for name in with_git - hidden if name.startswith("megatron_scalevec/")} <= without


def test_no_file_names_an_index_or_a_path_of_one_machine():
    hosts = "|".join(re.escape(host) for host in INDEX_HOSTS)
    # An absolute path only: src/home/x and https://host/home/x are none.
    paths = r"(?<![\w.\-/})\]])/(?:" + "|".join(HOME_FOLDERS) + r")/\w"
    forbidden = re.compile(f"{hosts}|{paths}|{re.escape(str(ROOT))}/")
    hits = []
    for name in files_of_the_project():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        hits += [
            f"{name}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if forbidden.search(line)
        ]
    assert not hits, "\n".join(hits)


# CI

LEGS = [
    "lint",
    "lint-shell",
    "test",
    "test-patches",
    "test-light",
    "test-te",
    "test-bridge",
    "test-nemo",
    "docs",
    "demo",
]


def run_ci(tmp_path: Path, failing: dict[str, int]) -> tuple[subprocess.CompletedProcess, list]:
    """Runs .ci/run with a make that only notes its target."""
    cases = "".join(f"{target}) exit {code};;" for target, code in failing.items())
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/targets"\ncase $1 in {cases} esac\n')
    make.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run")],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done, (tmp_path / "targets").read_text().split()


def test_ci_runs_every_leg(tmp_path):
    done, targets = run_ci(tmp_path, {})
    assert (done.returncode, targets) == (0, LEGS), done.stderr


@pytest.mark.parametrize(("target", "code"), [("lint", 1), ("test", 5), ("test-light", 2), ("test-te", 1)])
def test_ci_fails_with_any_leg_and_runs_the_others(tmp_path, target, code):
    done, targets = run_ci(tmp_path, {target: code})
    assert done.returncode == 1
    assert targets == LEGS
    assert f"CI failed: make {target}\n" in done.stderr


# The search for a Python


@pytest.fixture
def find_python(tmp_path):
    def find(*arguments: str, path: list[Path] = (), **environment: str):
        empty = tmp_path / "empty"
        empty.mkdir(exist_ok=True)
        folders = os.pathsep.join(str(folder) for folder in path or [empty])
        return subprocess.run(
            ["/bin/sh", str(ROOT / "scripts" / "find_python.sh"), *arguments],
            env={"PATH": folders, "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
        )

    return find


def put_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def put_python(path: Path) -> Path:
    return put_script(path, f'exec "{BASE_PYTHON}" "$@"')


def assert_found(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.rstrip("\n")).samefile(BASE_PYTHON)


def test_finds_python_behind_a_broken_shim(find_python, tmp_path):
    put_script(tmp_path / "shims" / f"python{THIS_VERSION}", "exit 127")
    put_python(tmp_path / "bin" / f"python{THIS_VERSION}")
    found = find_python("3.99", THIS_VERSION, path=[tmp_path / "shims", tmp_path / "bin"])
    assert_found(found)


def test_finds_python_under_its_plain_name(find_python, tmp_path):
    put_python(tmp_path / "bin" / "python3")
    assert_found(find_python(THIS_VERSION, path=[tmp_path / "bin"]))


def test_finds_python_in_pyenv(find_python, tmp_path):
    put_python(tmp_path / ".pyenv" / "versions" / f"{THIS_VERSION}.4" / "bin" / "python")
    assert_found(find_python(THIS_VERSION))


def test_finds_python_in_uv(find_python, tmp_path):
    python = put_python(tmp_path / "managed" / "python")
    put_script(tmp_path / "bin" / "uv", f'[ "$1 $2" = "python find" ] && echo "{python}"')
    assert_found(find_python(THIS_VERSION, path=[tmp_path / "bin"]))


def test_keeps_the_python_of_an_environment(find_python, tmp_path):
    put_python(tmp_path / "venv" / "bin" / "python")
    assert_found(find_python("--keep", str(tmp_path / "venv"), "3.99", THIS_VERSION))


def test_no_python_is_one_sentence(find_python):
    done = find_python("3.12", "3.13")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for part in ("3.12 or 3.13", "pyenv install 3.12", "uv python install 3.12", "make PYTHON="):
        assert part in done.stderr


def test_named_python_of_another_version_is_refused(find_python, tmp_path):
    python = put_python(tmp_path / "bin" / "python")
    done = find_python("3.99", SCALEVEC_PYTHON=str(python))
    assert done.returncode == 1
    assert str(python) in done.stderr and "3.99" in done.stderr


# The set-up


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_failed_set_up_leaves_nothing_behind(make_env, cache, monkeypatch, capsys):
    def fail(command, failure):
        Path(command[-1]).mkdir()
        raise make_env.SetUpError(failure)

    monkeypatch.setattr(make_env, "call", fail)
    monkeypatch.setitem(make_env.ENVIRONMENTS["light"], "free_gib", 0)
    monkeypatch.setattr(sys, "argv", ["make_env.py", "light"])
    assert make_env.main() == 1
    assert "make venv-light" in capsys.readouterr().err
    assert list((cache / "megatron-scalevec" / "venvs").iterdir()) == []


def test_lack_of_space_is_said_before_anything_is_downloaded(make_env, cache, monkeypatch, capsys):
    monkeypatch.setitem(make_env.ENVIRONMENTS["light"], "free_gib", 10**9)
    monkeypatch.setattr(make_env, "call", None)
    monkeypatch.setattr(sys, "argv", ["make_env.py", "light"])
    assert make_env.main() == 1
    assert "GiB free" in capsys.readouterr().err


def test_unfinished_environment_is_made_anew(make_env, cache, monkeypatch):
    shared = cache / "megatron-scalevec" / "venvs" / "light-0"
    (shared / "lib").mkdir(parents=True)
    monkeypatch.setattr(make_env, "call", lambda command, failure: shared.mkdir(exist_ok=True))
    monkeypatch.setattr(make_env, "check_pins", lambda *_: None)
    monkeypatch.setitem(make_env.ENVIRONMENTS["light"], "free_gib", 0)
    assert make_env.read_state(shared) is None
    make_env.make_shared("light", shared, ROOT / "constraints" / "light.txt", ["rich"])
    assert make_env.read_state(shared)["requirements"] == ["rich"]
    assert not (shared / "lib").exists()


def test_environment_made_by_hand_is_left_alone(make_env, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    with pytest.raises(make_env.SetUpError, match="not made by 'make venv'"):
        make_env.make_checkout("main", tmp_path / ".venv", [tmp_path / "shared"], {})
    assert (tmp_path / ".venv" / "bin").is_dir()


def test_shared_environment_depends_on_pins_and_packages(make_env, tmp_path):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("rich==1\n")
    first = make_env.shared_key(constraints, ["rich"])
    assert make_env.shared_key(constraints, ["rich"]) == first
    assert make_env.shared_key(constraints, ["numpy", "rich"]) != first
    constraints.write_text("rich==2\n")
    assert make_env.shared_key(constraints, ["rich"]) != first


def test_an_environment_lies_on_top_of_another(make_env, tmp_path):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("rich==1\n")
    below = [tmp_path / "main-1"]
    key = make_env.shared_key(constraints, ["rich"], below)
    assert key == make_env.shared_key(constraints, ["rich"], below)
    assert key != make_env.shared_key(constraints, ["rich"])
    assert key != make_env.shared_key(constraints, ["rich"], [tmp_path / "main-2"])
    for folder in ("top", "main-1"):
        make_env.site_packages(tmp_path / folder).mkdir(parents=True)
    make_env.show_packages(tmp_path / "top", below)
    [shown] = make_env.site_packages(tmp_path / "top").glob("*.pth")
    assert str(make_env.site_packages(below[0])) in shown.read_text()


def test_wheels_may_come_from_a_folder(make_env, tmp_path, monkeypatch):
    variable = make_env.ENVIRONMENTS["te"]["wheels"]
    monkeypatch.delenv(variable, raising=False)
    assert make_env.wheel_options(None) == []
    assert "--find-links" not in make_env.wheel_options(variable)
    monkeypatch.setenv(variable, str(tmp_path))
    assert make_env.wheel_options(variable)[-2:] == ["--find-links", tmp_path]
    monkeypatch.setenv(variable, "scripts")  # relative to the checkout
    assert make_env.wheel_options(variable)[-1] == ROOT / "scripts"
    monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(make_env.SetUpError, match=f"{variable} names .*nowhere, which is not a folder"):
        make_env.wheel_options(variable)


def test_a_command_of_the_upper_folder_does_not_overwrite_the_lower_one(make_env, tmp_path):
    for name in ("lower", "upper", "bin"):
        (tmp_path / name).mkdir()
    put_script(tmp_path / "lower" / "program", "echo lower")
    (tmp_path / "upper" / "program").write_text("#!/usr/bin/python\nprint('upper')\n")
    for source in ("lower", "upper"):
        make_env.link_scripts(tmp_path / source, tmp_path / "bin")
    assert "echo lower" in (tmp_path / "lower" / "program").read_text()
    assert "upper" in (tmp_path / "bin" / "program").read_text()


def test_commands_run_with_the_checkouts_python(make_env, tmp_path):
    shared, folder = tmp_path / "shared", tmp_path / "with space" / "bin"
    folder.mkdir(parents=True)
    body = "import sys\nprint(sys.orig_argv[0], sys.argv[1:])\n"
    put_script(shared / "program", "echo program").chmod(0o755)
    (shared / "short").write_text(f"#!{shared}/python\n{body}")
    (shared / "long").write_text(f"#!/bin/sh\n'''exec' {shared}/python \"$0\" \"$@\"\n' '''\n{body}")
    (shared / "python3").write_text("")
    put_python(folder / "python")
    make_env.link_scripts(shared, folder)
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "long",
        "program",
        "python",
        "short",
    ]
    for name in ("short", "long"):
        done = subprocess.run([folder / name, "a b"], capture_output=True, text=True, check=True)
        assert done.stdout == f"{BASE_PYTHON} ['a b']\n"
    done = subprocess.run([folder / "program"], capture_output=True, text=True, check=True)
    assert done.stdout == "program\n"
