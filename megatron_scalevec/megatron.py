"""``import megatron_scalevec.megatron`` as a script's first line does what the launcher does.

It reads the ``--scalevec-*`` flags of the running command line, turns CPU mode on where the launcher would,
and puts the hooks in place. Errors end the process as the launcher's do, and a script that ends without
having built a model although a strategy was asked for is told so.
"""

from __future__ import annotations

import sys

from megatron_scalevec.integration import hooks, launch
from megatron_scalevec.report import speak_for_this_process, tolerate_any_encoding


def _install() -> None:
    speak_for_this_process(lambda: hooks.installed() and hooks.require_applied(hooks.session(), sys.argv[0]))
    tolerate_any_encoding()
    launch.prepare(sys.argv[1:])


if not hooks.installed():
    _install()
