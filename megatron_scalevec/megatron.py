"""``import megatron_scalevec.megatron`` as a script's first line does what the launcher does.

It reads the ``--scalevec-*`` flags of the running command line, turns CPU mode on where the launcher would,
and puts the hooks in place. Errors end the process as the launcher's do, and a script that ends without
having built a model although a strategy was asked for is told so.
"""

from __future__ import annotations

import atexit
import os
import sys

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.integration import hooks, launch
from megatron_scalevec.report import leave_with, tolerate_any_encoding


def _install() -> None:
    previous = sys.excepthook
    failed = False

    def end(kind, error, traceback):
        nonlocal failed
        failed = True
        if issubclass(kind, ScaleVecError):
            os._exit(leave_with(error))
        previous(kind, error, traceback)

    def check_at_end():
        # The exit code cannot be changed any more in the ordinary way.
        if not failed:
            try:
                hooks.require_applied(session, sys.argv[0])
            except ScaleVecError as error:
                os._exit(leave_with(error))

    sys.excepthook = end
    tolerate_any_encoding()
    session = launch.prepare(sys.argv[1:])
    atexit.register(check_at_end)


if not hooks.installed():
    _install()
