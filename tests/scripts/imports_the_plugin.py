"""The launcher's other form: one import before everything else."""

import megatron_scalevec.megatron  # noqa: F401, I001

from megatron_scalevec.integration.pretrain_gpt import main

if __name__ == "__main__":
    main()
