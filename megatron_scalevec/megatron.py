"""``import megatron_scalevec.megatron`` as a script's first line does what the launcher does.

It reads the ``--scalevec-*`` flags of the running command line and puts the hooks in place; it does not
switch CPU mode on by itself, only with ``--scalevec-cpu on``.
"""

import sys

from megatron_scalevec.integration import hooks
from megatron_scalevec.integration.arguments import parse_own

_cpu = parse_own(sys.argv[1:]).scalevec_cpu == "on"
if _cpu and not hooks.installed():
    from megatron_scalevec import cpu

    cpu.install()
hooks.install(cpu=_cpu)
