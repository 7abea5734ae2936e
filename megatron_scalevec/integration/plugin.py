"""The entry point of a patched Megatron (:mod:`megatron_scalevec.patches`).

Megatron calls :func:`start` when ``megatron.training`` has been imported, in every process: training, and
tools that know nothing of scale vectors. What it does is what ``import megatron_scalevec.megatron`` does,
with two differences. CPU mode is turned on only if the command line has a ``--scalevec-*`` flag, because a
stock run is to stay stock. And where one of this package's own commands is at work already, nothing is done.
"""

from __future__ import annotations

import multiprocessing
import sys

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration import hooks
from megatron_scalevec.report import leave_with, speak_for_this_process, tolerate_any_encoding

__all__ = ["start"]


def start() -> None:
    """Put the hooks in place, once."""
    if hooks.claimed():
        return
    from megatron_scalevec.integration import launch

    # A worker process of a data loader ends without a model, and rightly so.
    if multiprocessing.parent_process() is None:
        speak_for_this_process(
            lambda: hooks.installed() and hooks.require_applied(hooks.session(), sys.argv[0])
        )
    tolerate_any_encoding()
    given = any(word.startswith("--scalevec-") for word in sys.argv[1:])
    try:
        launch.prepare(sys.argv[1:], cpu=None if given else "off")
    except ScaleVecError as error:
        # Importers of Megatron may catch what importing it raises, and go on without.
        sys.exit(leave_with(error))
