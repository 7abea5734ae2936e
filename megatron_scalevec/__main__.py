"""``python -m megatron_scalevec``, the same as the ``scalevec`` command."""

import sys

from megatron_scalevec.cli import main

if __name__ == "__main__":
    sys.exit(main())
