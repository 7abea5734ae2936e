#!/bin/sh
# Prints the path of a Python that can make an environment, or says in one sentence
# how to get one and exits with 1.
#
# usage: find_python.sh [--keep VENV] VERSION [VERSION...]
#   e.g. find_python.sh --keep .venv 3.12 3.13
#
# Versions are tried in the order given; for each: PATH, then pyenv's versions, then
# uv's. $SCALEVEC_PYTHON, where set, is the only candidate. --keep VENV takes the Python
# that VENV was made with, where it serves, so that an environment once made with a named
# Python is not made anew with another. Shell built-ins only, so that the answer comes on
# the barest of machines.

set -u

keep=
if [ "${1:-}" = --keep ] && [ $# -ge 2 ]; then
    keep=$2
    shift 2
fi
if [ $# -eq 0 ]; then
    echo "find_python.sh: give at least one Python version, e.g. 'find_python.sh 3.12 3.13'" >&2
    exit 2
fi

# A candidate has to be run to be believed: pyenv leaves a `python3.12` on PATH that only
# prints an error while another version is selected, and Debian ships Pythons without
# ensurepip. Prints the real interpreter, not the shim or the virtual environment.
accept() { # candidate version
    [ -x "$1" ] || return 1
    found=$("$1" -I -c '
import sys
if "%d.%d" % sys.version_info[:2] != sys.argv[1] or sys.maxsize < 2**32:
    sys.exit(1)
if sys.implementation.name != "cpython":
    sys.exit(1)
import ensurepip, venv
print(getattr(sys, "_base_executable", None) or sys.executable)
' "$2" 2>/dev/null </dev/null) || return 1
    [ -n "$found" ] && printf '%s\n' "$found"
}

search_path() { # version
    set -f
    old_ifs=$IFS
    IFS=:
    # shellcheck disable=SC2086  # splitting at the colons is the point
    set -- "$1" $PATH
    IFS=$old_ifs
    set +f
    version=$1
    shift
    for name in "python$version" python3 python; do
        for folder in "$@"; do
            accept "${folder:-.}/$name" "$version" && return 0
        done
    done
    return 1
}

search_pyenv() { # version
    root=${PYENV_ROOT:-}
    if [ -z "$root" ] && command -v pyenv >/dev/null 2>&1; then
        root=$(pyenv root 2>/dev/null)
    fi
    root=${root:-${HOME:-}/.pyenv}
    for folder in "$root/versions/$1" "$root/versions/$1".*; do
        accept "$folder/bin/python" "$1" && return 0
    done
    return 1
}

search_uv() { # version
    command -v uv >/dev/null 2>&1 || return 1
    candidate=$(UV_PYTHON_DOWNLOADS=never uv python find --no-project "$1" 2>/dev/null </dev/null) \
        || return 1
    accept "$candidate" "$1"
}

wanted=$1
first=$1
for version in "$@"; do
    [ "$version" = "$first" ] || wanted="$wanted or $version"
done

if [ -n "${SCALEVEC_PYTHON:-}" ]; then
    candidate=$(command -v "$SCALEVEC_PYTHON" 2>/dev/null) || candidate=$SCALEVEC_PYTHON
    for version in "$@"; do
        accept "$candidate" "$version" && exit 0
    done
    echo "PYTHON=$SCALEVEC_PYTHON is not a 64-bit CPython $wanted with the venv and ensurepip" \
        "modules: give the path of one, or leave PYTHON out to have one searched for." >&2
    exit 1
fi

if [ -n "$keep" ]; then
    for version in "$@"; do
        accept "$keep/bin/python" "$version" && exit 0
    done
fi

for version in "$@"; do
    search_path "$version" && exit 0
    search_pyenv "$version" && exit 0
    search_uv "$version" && exit 0
done

echo "No 64-bit CPython $wanted with the venv and ensurepip modules was found on PATH, in pyenv" \
    "or in uv: install one (for example 'uv python install $first', 'pyenv install $first', or" \
    "your system's packages python$first and python$first-venv) and run make again, or name one" \
    "with 'make PYTHON=/path/to/python$first ...'." >&2
exit 1
