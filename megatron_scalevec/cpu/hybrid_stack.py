"""What CPU mode gives as ``--spec`` to hybrid models; importing it replaces kernels until CPU mode ends."""

from megatron_scalevec import cpu
from megatron_scalevec.cpu.hybrids import local_stack_spec, replace_kernels

__all__ = ["stack", "stack_with_latent_norms"]

cpu.change(replace_kernels)

stack = local_stack_spec()
stack_with_latent_norms = local_stack_spec(latent_norms=True)
