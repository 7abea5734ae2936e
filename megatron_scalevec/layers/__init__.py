"""Leaf modules that carry scale vectors. Importing this package imports Megatron."""
