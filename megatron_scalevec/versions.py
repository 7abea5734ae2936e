"""The Megatron versions this package is written for, and the check that comes before any private name."""

from __future__ import annotations

import importlib.util

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "BRIDGE",
    "NEMO_TOOLKIT",
    "SUPPORTED",
    "megatron_version",
    "require_megatron",
    "require_bridge",
    "require_supported_megatron",
    "require_megatron_training",
]

SUPPORTED = SpecifierSet(">=0.16.1,<0.20")
BRIDGE = SpecifierSet(">=0.6.2,<0.7")
"""Megatron-Bridge, with any megatron-core of the window that it takes."""
NEMO_TOOLKIT = SpecifierSet(">=0.15.3,<0.16")
"""For nemo-toolkit 2.7 alone, which hands later versions an argument that they no longer take."""


def megatron_version() -> Version:
    """Version of the importable megatron-core.

    Raises:
        ScaleVecError: There is none.
    """
    try:
        from megatron.core.package_info import __version__
    except ImportError as error:
        raise ScaleVecError(
            "megatron-core is not importable in this environment "
            f"({error}): install megatron-core {SUPPORTED}, or put a Megatron-LM checkout on PYTHONPATH."
        ) from error
    return Version(__version__)


def require_supported_megatron() -> Version:
    """The version, if it lies in the window.

    Raises:
        ScaleVecError: It does not, or there is no Megatron.
    """
    return require_megatron(SUPPORTED)


def require_megatron(window: SpecifierSet, user: str = "") -> Version:
    """The version, if it lies in ``window``; ``user`` names who that window is for.

    Raises:
        ScaleVecError: It does not, or there is no Megatron.
    """
    version = megatron_version()
    # A development checkout carries a local part (0.19.0+abc123), which a specifier would reject.
    if not window.contains(version.base_version, prereleases=True):
        raise ScaleVecError(
            f"megatron-core {version} is outside the versions this package is written for "
            f"({f'with {user}: ' if user else ''}{window}); install one of those, or a newer "
            "megatron_scalevec."
        )
    return version


def require_bridge(version: str) -> None:
    """Check the version of Megatron-Bridge.

    Raises:
        ScaleVecError: It is outside of :data:`BRIDGE`.
    """
    if not BRIDGE.contains(Version(version).base_version, prereleases=True):
        raise ScaleVecError(
            f"megatron-bridge {version} is outside the versions this package is written for ({BRIDGE}); "
            "install one of those, or a newer megatron_scalevec."
        )


def require_megatron_training(version: Version) -> None:
    """Check that the training loop is there: the wheels of megatron-core before 0.17 lack it.

    Raises:
        ScaleVecError: ``megatron.training`` is not importable.
    """
    if importlib.util.find_spec("megatron.training") is None:
        raise ScaleVecError(
            f"megatron.training is missing beside megatron-core {version} (its wheel carries it from 0.17 "
            "on): put a Megatron-LM checkout of the same version on PYTHONPATH, or install a newer wheel."
        )
