"""Unpack the training loops of released megatron-core wheels, for the tests of patches.

``scripts/megatron_trees.py FOLDER`` leaves ``FOLDER/<version>/megatron/...`` for every version below. Only
the files that a patch looks at are unpacked, the first time; the wheels are not kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Of every minor version whose wheel has megatron.training, the first and the last release.
VERSIONS = ("0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.1")
_WANTED = ("megatron/training/", "megatron/core/package_info.py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    for version in VERSIONS:
        target = folder / version
        if not target.is_dir():
            unpack(version, target)
        print(target)


def unpack(version: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        subprocess.run([*command, "--only-binary", ":all:", f"megatron-core=={version}"], check=True)
        [wheel] = Path(temporary).glob("*.whl")
        unpacked = Path(temporary) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [n for n in archive.namelist() if n.startswith(_WANTED)])
        unpacked.rename(target)


if __name__ == "__main__":
    main()
