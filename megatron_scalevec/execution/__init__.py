"""Execution inside the optimizer: the live weight is W_eff, the raw W exists only as the fp32 master.

Forward, backward and the reduction of gradients are Megatron's own, on a weight that is

    W_eff = W ⊙ (γ_out γ_inᵀ)

Around the optimizer's step each rank turns its shard of the gradient of W_eff into those of W and of the
vectors, steps, and writes cast(W ⊙ γ_out γ_inᵀ) back. Between two steps nothing is kept that a loaded
checkpoint could make stale.

``choice``     which of the two modes a run gets, and why
``folds``      what belongs together: a weight, its rows' branches, its vectors
``shard``      arithmetic on a shard of a weight, in plain torch
``kernels``    the same as Triton kernels, for CUDA
``trial``      the kernels beside float64 torch, once per run
``table``      the vectors' values and gradients, packed
``members``    Megatron's optimizers: where a parameter's master lies
``engine``     the passes over all shards, and the collectives between them
``optimizer``  where the engine is hooked into Megatron's optimizers
``buckets``    vectors are ready for the gradient reduction when their weight is
"""
