"""Hugging Face: checkpoints out of Megatron with their scale vectors folded in, and models to start from.

The description of a model (:mod:`.description`) stands between Megatron's arguments and a config; one table
of tensors (:mod:`.blocks`) serves both directions; :mod:`.folded` reads a checkpoint as the stock model that
computes the same. ``transformers`` is not needed for any of it.
"""
