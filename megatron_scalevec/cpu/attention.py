"""What Megatron's local attention lacks beside TransformerEngine's: context parallelism and MLA.

``DotProductAttention`` refuses a context-parallel size above one, and does not know the separate
channel counts that multi-latent attention passes. Both are added around it here, in the plainest
way: keys and values of the whole sequence are gathered on every rank. That needs memory a GPU run
would not spend, and checks what such a run depends on: the split of the batch, the positions, and
the reduction of gradients.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_scalevec.patching import PatchSet

__all__ = ["gather_sequence", "local_positions", "patch_attention"]


def local_positions(sequence_length: int, group_size: int, rank: int) -> torch.Tensor:
    """Positions in the whole sequence of the tokens that ``rank`` holds, in its order.

    Megatron cuts a sequence into ``2 * group_size`` pieces and gives rank ``r`` pieces ``r`` and
    ``2 * group_size - 1 - r``, so that every rank has the same share of a causal mask.

    Returns:
        Long tensor of shape [sequence_length / group_size].
    """
    pieces = torch.arange(sequence_length).chunk(2 * group_size)
    return torch.cat([pieces[rank], pieces[2 * group_size - 1 - rank]])


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in range(group.size())]
        torch.distributed.all_gather(parts, local, group=group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Every rank's queries used every rank's keys: a token's gradient is the sum over ranks.
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        pieces = grad.chunk(2 * ctx.group.size())
        rank = ctx.group.rank()
        return torch.cat([pieces[rank], pieces[-1 - rank]]), None


def gather_sequence(local: torch.Tensor, group: Any) -> torch.Tensor:
    """The whole sequence in its natural order, differentiably.

    Args:
        local: This rank's tokens, shape [s / n, ...], in the order of :func:`local_positions`.
        group: Context-parallel group of ``n`` ranks.

    Returns:
        Tensor of shape [s, ...].
    """
    return _GatherSequence.apply(local, group)


def patch_attention(patches: PatchSet) -> None:
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    patches.wrap(DotProductAttention, "__init__", _make_init)
    patches.wrap(DotProductAttention, "forward", _make_forward)
    # 0.16 concludes that TransformerEngine is there because its own wrapper module of that name can
    # be imported, and then compares types with a placeholder.
    patches.set(multi_latent_attention, "HAVE_TE", False)


def _make_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        single = config
        if config.context_parallel_size > 1:
            single = copy.copy(config)
            single.context_parallel_size = 1
        original(self, single, *args, **kwargs)
        self.config = config
        if v_channels is not None:
            # The output is as wide as the values. MLA expands its latent to one key and one value
            # per head, so there are no groups of queries to repeat them for.
            heads = self.num_attention_heads_per_partition
            self.hidden_size_per_partition = v_channels * heads
            self.num_query_groups_per_partition = heads
        if config.context_parallel_size > 1:
            # Our mask contains the window, in positions of the whole sequence.
            self._scalevec_window = self.scale_mask_softmax.window_size
            self.scale_mask_softmax.window_size = None

    return init


def _make_forward(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query, key, value: [s / n, batch, heads or groups, channels] on each of n ranks."""
        if self.config.context_parallel_size == 1:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        group = _context_parallel_group(self)
        mask = _context_parallel_mask(self, attention_mask, query.size(0), group)
        return original(
            self,
            query,
            gather_sequence(key, group),
            gather_sequence(value, group),
            mask,
            *args,
            **kwargs,
        )

    return forward


def _context_parallel_group(attention: Any) -> Any:
    from megatron.core import parallel_state

    group = getattr(attention.pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def _context_parallel_mask(
    attention: Any, given: torch.Tensor | None, local_length: int, group: Any
) -> torch.Tensor | None:
    """True where a query must not look; rows are this rank's tokens, columns the whole sequence.

    A mask from the data loader has already been cut to this rank's rows, and its columns are in
    natural order, as the gathered keys are. It is joined with the causal mask rather than trusted
    alone, since whether the loader makes one is an option.
    """
    from megatron.core.transformer.enums import AttnMaskType

    length = local_length * group.size()
    causal = attention.attn_mask_type == AttnMaskType.causal
    window = attention._scalevec_window
    if not causal and window is None:
        return given
    rows = local_positions(length, group.size(), group.rank())[:, None]
    columns = torch.arange(length)[None, :]
    mask = columns > rows if causal else torch.zeros(local_length, length, dtype=torch.bool)
    if window is not None:
        before, after = window
        if before >= 0:
            mask = mask | (columns < rows - before)
        if after >= 0:
            mask = mask | (columns > rows + after)
    mask = mask[None, None]
    return mask if given is None else mask | given.bool()
