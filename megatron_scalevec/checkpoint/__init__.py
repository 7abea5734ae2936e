"""Checkpoints: reading and writing them without a model, the way in from stock Megatron and the way back."""
