"""Door 1: Megatron's own training scripts, unmodified, with ``--scalevec-*`` flags."""
