"""The plugin is imported, and nothing is trained."""

import megatron_scalevec.megatron  # noqa: F401

print("nothing to do")
