#!/usr/bin/env python3
"""Makes the environments behind ``make venv``, ``make venv-light`` and so on.

usage: python scripts/make_env.py {main,light,te,bridge,nemo,docs}

The Python that runs this file is the one that the environment gets;
``scripts/find_python.sh`` picks it.

An environment has two parts:

* The shared part holds the pinned packages, gigabytes of them, in the user's cache
  under a name made from everything that decides its content. Every checkout with the
  same pins uses the same one.
* The checkout's part, ``.venv`` and those named after it, is a virtual environment of its own
  that takes seconds: it sees the shared packages and adds this checkout of the package,
  editable. Two clones therefore never see each other's code, and ``pip install`` in one
  of them leaves the shared packages alone.

A shared part may lie on top of another one (``base``) and hold only what that one lacks.

A part counts as complete only once its state file lies in it, which is written last.
A lock keeps two set-ups from working on the same part at the same time.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import tomllib

# Part of the shared environment's name: raise it when a change to this file makes the
# environments made before it unfit.
LAYOUT = 1

ROOT = Path(__file__).resolve().parent.parent
STATE = ".scalevec-env.json"

# What an environment holds besides the run-time requirements in pyproject.toml. The
# versions are the constraints file's, and with a ``base`` also the base's.
# ``wheels``: a variable that may name a folder with wheels that no index has.
# ``linked``: folders of the shared packages that the checkout's part must show as its own.
# ``listed``: install exactly the packages of the constraints file and none of their dependencies, other
# versions of the base's packages included.
ENVIRONMENTS = {
    "main": {
        "folder": ".venv",
        "extras": ["training", "demo", "test", "dev"],
        "free_gib": 8,
        "target": "venv",
    },
    "light": {
        "folder": ".venv-light",
        "extras": ["demo", "test"],
        "free_gib": 6,
        "target": "venv-light",
    },
    "te": {
        "folder": ".venv-te",
        "extras": ["te"],
        "free_gib": 4,
        "target": "venv-te",
        "base": "main",
        # The index has TransformerEngine's torch extension as source only, whose build takes a
        # CUDA toolkit and half an hour.
        "wheels": "SCALEVEC_TE_WHEELS",
        # TransformerEngine looks for NVIDIA's libraries there and nowhere else.
        "linked": ["nvidia"],
    },
    # Megatron-Bridge and nemo-toolkit ask for packages that need a CUDA toolkit or a newer system; the
    # tests put placeholders in their place.
    "bridge": {
        "folder": ".venv-bridge",
        "listed": True,
        "free_gib": 2,
        "target": "venv-bridge",
        "base": "main",
    },
    "nemo": {
        "folder": ".venv-nemo",
        "listed": True,
        "free_gib": 4,
        "target": "venv-nemo",
        "base": "light",
    },
    # The site describes the package as it is: its generator imports it, and Megatron with it.
    "docs": {
        "folder": ".venv-docs",
        "extras": ["docs"],
        "free_gib": 1,
        "target": "venv-docs",
        "base": "main",
    },
}


class SetUpError(Exception):
    """A failure that the user can act on; its text is all they get to see."""


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in ENVIRONMENTS:
        given = " ".join(sys.argv[1:]) or "nothing"
        print(f"make_env.py: expected one of {', '.join(ENVIRONMENTS)}, got {given}", file=sys.stderr)
        return 2
    name = sys.argv[1]
    try:
        set_up(name)
    except SetUpError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        # A full disk, a read-only cache, a missing permission: the system's own words
        # name the path.
        print(
            f"\nThe {name} environment could not be set up: {error}. Put that right (or set "
            f"XDG_CACHE_HOME to a folder on a disk with room) and run "
            f"'make {ENVIRONMENTS[name]['target']}' again.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(
            f"\nStopped; 'make {ENVIRONMENTS[name]['target']}' starts over what is incomplete.",
            file=sys.stderr,
        )
        return 130
    return 0


def set_up(name: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shared = set_up_shared(name, settings)
    folder = ROOT / ENVIRONMENTS[name]["folder"]
    state = checkout_state(shared)
    if read_state(folder) == state and runs(folder):
        return
    # One lock for the checkout, not one per environment: an editable install writes
    # the package's metadata into the checkout.
    with locked("checkout-" + digest(str(ROOT))):
        if read_state(folder) != state or not runs(folder):
            make_checkout(name, folder, shared, state)


def set_up_shared(name: str, settings: dict) -> list[Path]:
    """The folder of the shared part, made if need be, and after it those it lies on."""
    base = ENVIRONMENTS[name].get("base")
    below = set_up_shared(base, settings) if base else []
    constraints = ROOT / "constraints" / f"{name}.txt"
    if ENVIRONMENTS[name].get("listed"):
        requirements = sorted(pin_lines(constraints))
    else:
        requirements = wanted(settings, ENVIRONMENTS[name]["extras"])
    key = shared_key(constraints, requirements, below)
    shared = cache_folder() / "venvs" / f"{name}-{key}"
    if read_state(shared) is None or not runs(shared):
        with locked(shared.name):
            # The set-up that held the lock may have been making this very environment.
            if read_state(shared) is None or not runs(shared):
                make_shared(name, shared, constraints, requirements, below)
    return [shared, *below]


def wanted(settings: dict, extras: list[str]) -> list[str]:
    """The packages to install: what builds and runs the package, and some extras."""
    project = settings["project"]
    listed = settings["build-system"]["requires"] + project["dependencies"]
    for extra in extras:
        listed += project["optional-dependencies"][extra]
    # The package's own name stands for another of its extras, which are all given here;
    # the package itself is no part of the shared environment.
    return sorted({entry for entry in listed if not entry.startswith(project["name"])})


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(b"%d:" % len(data) + data)
    return total.hexdigest()[:12]


def shared_key(constraints: Path, requirements: list[str], below: list[Path] = ()) -> str:
    return digest(
        constraints.read_bytes(),
        "\n".join(requirements),
        "{}.{}".format(*sys.version_info[:2]),
        sysconfig.get_platform(),  # a home folder may be mounted on several kinds of machine
        str(LAYOUT),
        *(folder.name for folder in below),
    )


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "megatron-scalevec"


@contextlib.contextmanager
def locked(name: str):
    folder = cache_folder() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up is at work on this environment; waiting for it ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_state(folder: Path) -> dict | None:
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_state(folder: Path, state: dict) -> None:
    # Renamed into place, so that a full disk cannot leave a half-written file that reads
    # as complete.
    draft = folder / (STATE + ".new")
    draft.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    draft.replace(folder / STATE)


def runs(folder: Path) -> bool:
    """Whether the environment's Python is still there (the one it links to can go)."""
    return os.access(folder / "bin" / "python", os.X_OK)


def site_packages(folder: Path) -> Path:
    return folder / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"


def python_environment() -> dict[str, str]:
    """The user's environment less what would send packages or imports elsewhere."""
    cleared = {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"}
    environment = {key: value for key, value in os.environ.items() if key not in cleared}
    environment.update(PYTHONNOUSERSITE="1", PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return environment


def call(command: list, failure: str) -> None:
    """Runs a step: its output goes to the terminal, or else is shown only if it fails."""
    command = [str(part) for part in command]
    # Not closing the descriptors hands the lock on: should this process be killed, the
    # step it started still keeps the next set-up out.
    options = {"env": python_environment(), "stdin": subprocess.DEVNULL, "close_fds": False}
    if sys.stdout.isatty():
        code = subprocess.run(command, **options).returncode
        reason = "the reason is above"
    else:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", **options
        )
        code = done.returncode
        reason = telling(done.stdout.splitlines())
    if code != 0:
        raise SetUpError(f"{failure} (exit code {code}); {reason}")


def telling(lines: list[str]) -> str:
    """What of a failed step's output says why."""
    # Where it reaches no index, pip goes on to complain of conflicting requirements,
    # which sends the reader the wrong way.
    unreached = [line for line in lines if "connection broken by" in line]
    if unreached:
        return "the package index could not be reached:\n  " + unreached[0]
    return "its last lines:\n  " + "\n  ".join(lines[-12:])


def make_shared(
    name: str, folder: Path, constraints: Path, requirements: list[str], below: list[Path] = ()
) -> None:
    if folder.exists():
        print(f"Removing an unfinished set-up: {folder}", flush=True)
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 2**30
    needed = ENVIRONMENTS[name]["free_gib"]
    if free < needed:
        raise SetUpError(
            f"The {name} environment needs about {needed} GiB and {folder.parent} has "
            f"{free:.1f} GiB free: make room, or set XDG_CACHE_HOME to a folder on another disk, "
            f"and run 'make {ENVIRONMENTS[name]['target']}' again."
        )

    print(
        f"Setting up the {name} environment with Python {sys.version.split()[0]} in {folder}\n"
        "(once per machine; several GB are downloaded unless pip has them in its cache) ...",
        flush=True,
    )
    start = time.monotonic()
    try:
        call([sys.executable, "-m", "venv", folder], "Python's venv module failed")
        # pip sees what lies below as installed, and leaves it there.
        show_packages(folder, below)
        pinned = [constraints, *(ROOT / "constraints" / f"{f.name.split('-')[0]}.txt" for f in below)]
        options = [part for file in pinned for part in ("--constraint", file)]
        if ENVIRONMENTS[name].get("listed"):
            options = ["--no-deps"]
        call(
            [folder / "bin" / "python", "-m", "pip", "install", "--no-input"]
            + options
            + wheel_options(ENVIRONMENTS[name].get("wheels"))
            + requirements,
            f"The packages of constraints/{name}.txt could not be installed",
        )
        check_pins(folder, *pinned)
    except SetUpError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetUpError(
            f"{error}\n\nNothing of it was kept. If the network or the disk was at fault, put that "
            f"right and run 'make {ENVIRONMENTS[name]['target']}' again."
        ) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    write_state(folder, {"requirements": requirements, "constraints": constraints.read_text()})
    print(f"Done in {time.monotonic() - start:.0f} s.", flush=True)


def wheel_options(variable: str | None) -> list:
    """pip's options for an environment that may take wheels from a folder."""
    if variable is None:
        return []
    # What has to be built is built against the torch that is installed, not against another
    # one in an environment of the build's own.
    options = ["--no-build-isolation"]
    folder = os.environ.get(variable, "")
    if folder:
        path = Path(folder) if os.path.isabs(folder) else ROOT / folder
        if not path.is_dir():
            raise SetUpError(f"{variable} names {folder}, which is not a folder: correct it, or unset it")
        options += ["--find-links", path]
    return options


def check_pins(folder: Path, *constraints: Path) -> None:
    """Says so where a package has no pin: its version would differ from day to day."""
    text = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "list", "--format=freeze"],
        env=python_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    pinned = {canonical(line.split("==")[0]) for file in constraints for line in pin_lines(file)}
    # The venv module brings its own pip (and, before Python 3.12, setuptools).
    installed = {canonical(line.split("==")[0]) for line in text.splitlines()} - {"pip"}
    loose = sorted(installed - pinned)
    if loose:
        print(
            f"note: constraints/{constraints[0].name} pins no version of {', '.join(loose)}",
            file=sys.stderr,
        )


def pin_lines(constraints: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in constraints.read_text().splitlines())
    return [line for line in lines if line]


def canonical(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


def checkout_state(shared: list[Path]) -> dict:
    """Everything that decides what the checkout's part looks like."""
    package = (ROOT / "megatron_scalevec" / "__init__.py").read_text(encoding="utf-8")
    version = [line for line in package.splitlines() if line.startswith("__version__")]
    return {
        "shared": [str(folder) for folder in shared],
        "root": str(ROOT),  # the editable install holds the checkout's path
        "python": sys.executable,
        "package": digest((ROOT / "pyproject.toml").read_bytes(), *version),
        "layout": LAYOUT,
    }


def make_checkout(name: str, folder: Path, shared: list[Path], state: dict) -> None:
    start = time.monotonic()
    unfinished = folder / (STATE + ".new")
    if folder.is_symlink() or (folder.exists() and read_state(folder) is None and not unfinished.exists()):
        raise SetUpError(
            f"{folder} was not made by 'make {ENVIRONMENTS[name]['target']}', so it is left alone: "
            f"move it away or delete it, and run 'make {ENVIRONMENTS[name]['target']}' again."
        )
    if folder.exists():
        # Out of the way in one step: a half-deleted folder would look like a stranger's.
        discarded = folder.with_name(f"{folder.name}.discarded")
        shutil.rmtree(discarded, ignore_errors=True)
        folder.rename(discarded)
        shutil.rmtree(discarded, ignore_errors=True)
    folder.mkdir()
    unfinished.touch()
    call([sys.executable, "-m", "venv", "--without-pip", folder], "Python's venv module failed")
    # The first folder shows those below it.
    show_packages(folder, shared[:1])
    for below in reversed(shared):
        link_scripts(below / "bin", folder / "bin")
    for package in ENVIRONMENTS[name].get("linked", []):
        found = [site_packages(below) / package for below in shared]
        target = next((path for path in found if path.is_dir()), None)
        if target is not None:
            (site_packages(folder) / package).symlink_to(target, target_is_directory=True)
    call(
        [folder / "bin" / "python", "-m", "pip", "install"]
        + ["--no-input", "--no-deps", "--no-build-isolation", "--editable", ROOT],
        "The package itself could not be installed",
    )
    write_state(folder, state)
    print(
        f"{folder.name} is ready ({time.monotonic() - start:.1f} s); packages are in "
        + " and ".join(map(str, shared)),
        flush=True,
    )


def show_packages(folder: Path, below: list[Path]) -> None:
    """Let an environment's Python see the packages of others."""
    if below:
        # addsitedir instead of a bare path: the shared packages' own .pth files count too.
        lines = [f"import site; site.addsitedir({str(site_packages(other))!r})\n" for other in below]
        (site_packages(folder) / "scalevec_shared.pth").write_text("".join(lines), encoding="utf-8")


def link_scripts(source: Path, target: Path) -> None:
    """Gives the checkout's environment the shared packages' commands, with its own Python.

    A link to the shared `torchrun` would start the shared Python, which does not see this
    checkout of the package.
    """
    for script in sorted(source.iterdir()):
        if script.name.startswith(("python", "activate", "Activate")) or not script.is_file():
            continue
        # One of the same name may have come from another folder, perhaps as a link to it.
        (target / script.name).unlink(missing_ok=True)
        head, _, body = script.read_bytes().partition(b"\n")
        if head.startswith(b"#!") and b"python" in head:
            pass
        elif head == b"#!/bin/sh" and body.startswith(b"'''exec'"):
            # pip's form for a path too long for a #! line: two more lines of header.
            body = body.split(b"\n", 2)[2]
        else:
            (target / script.name).symlink_to(script)  # a program of its own, such as ruff
            continue
        # A header that finds the Python beside it, however long or odd the path is.
        header = (
            b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"\n\' \'\'\'\n'
        )
        (target / script.name).write_bytes(header + body)
        (target / script.name).chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
