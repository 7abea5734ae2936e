"""Scale vectors for Megatron-LM and NeMo pre-training runs, without forking Megatron.

Importing this package changes nothing in torch or Megatron. The doors are

* ``python -m megatron_scalevec launch SCRIPT ...`` (or ``import megatron_scalevec.megatron`` as the first
  line of a script), and
* :func:`apply_scale_vectors` on a built model, with :func:`megatron_scalevec.audit.audit` as its proof.

The method is described in arXiv 2605.26895.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

if TYPE_CHECKING:
    from megatron_scalevec.convert import apply_scale_vectors

__all__ = ["ScaleVecConfig", "ScaleVecError", "apply_scale_vectors"]

__version__ = "0.1.0"

# These import Megatron, which takes seconds; the command line and the configuration do not need it.
_LAZY = {"apply_scale_vectors": "megatron_scalevec.convert"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
