"""A row of statistics of the logits of one attention, for a few heads and positions."""

from math import nan, sqrt

import torch

from mp_agent.probe.attention.picks import lowest_visible, spread, widened

BATCHES_AT_MOST = 2
HEADS_AT_MOST = 4
QUERIES_AT_MOST = 16
KEYS_AT_MOST = 2048


def attention_row(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    diagonal: int = 0,
    scale: float | None = None,
    offset: int = 0,
) -> torch.Tensor | None:
    """Return float64 [C], the columns of `ATTENTION`, on the device of `query`; None without any.

    query [..., Hq, L, E], key [..., H, S, E], mask broadcastable to [..., Hq, L, S]: as
    `scaled_dot_product_attention` takes them, with or without `enable_gqa`. The logits are
    query · key * scale + mask, in at least 32 bits. diagonal: with `is_causal`, the one up to which
    keys are visible. offset: which heads and queries are looked at; keys are spread over all, the
    first one always among them.
    """
    query_BHLE, key_BHSE = _of_four(query), _of_four(key)
    batch = max(query_BHLE.shape[0], key_BHSE.shape[0])
    heads, keys = key_BHSE.shape[1], key_BHSE.shape[2]
    if not query_BHLE.numel() or not key_BHSE.numel():
        return None
    query_BHLE = query_BHLE.expand(batch, max(heads, query_BHLE.shape[1]), -1, -1)
    members, queries = query_BHLE.shape[1] // heads, query_BHLE.shape[2]
    members_at_most = max(1, HEADS_AT_MOST // min(heads, HEADS_AT_MOST))
    some_heads, some_members, some_queries, some_batches = spread(
        (heads, members, queries, batch),
        (HEADS_AT_MOST, members_at_most, QUERIES_AT_MOST, BATCHES_AT_MOST),
        offset,
    )
    (some_keys,) = spread((keys,), (KEYS_AT_MOST,), 0)
    picked = (some_batches, some_heads, some_members, some_queries)
    few_queries = query_BHLE.reshape(batch, heads, members, queries, -1)[picked]
    few_keys = key_BHSE.expand(batch, -1, -1, -1).unsqueeze(2)[
        some_batches, some_heads, :, some_keys
    ]
    factor = 1.0 / sqrt(query.shape[-1]) if scale is None else scale
    logits = torch.matmul(widened(few_queries), widened(few_keys).mT) * factor
    visible = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None:
        mask_BHLS = _of_four(mask).expand(batch, heads * members, queries, keys)
        few_of_mask = mask_BHLS.reshape(batch, heads, members, queries, keys)[picked][
            ..., some_keys
        ]
        if mask.dtype is torch.bool:
            visible = visible & few_of_mask
        else:
            visible = visible & ~(few_of_mask <= lowest_visible(mask.dtype))
            logits = logits + widened(few_of_mask)
    if is_causal:
        rows = torch.arange(queries, device=query.device)[some_queries]
        columns = torch.arange(keys, device=query.device)[some_keys]
        visible = visible & (columns <= rows.unsqueeze(1) + diagonal)
    return _row(logits, visible)


def weights_row(logits: torch.Tensor, offset: int = 0) -> torch.Tensor | None:
    """Return the same row for logits [..., H, L, S] that exist as a tensor, with the mask added."""
    logits_BHLS = _of_four(logits)
    if not logits_BHLS.numel():
        return None
    batch, heads, queries, keys = logits_BHLS.shape
    some_heads, some_queries, some_batches = spread(
        (heads, queries, batch), (HEADS_AT_MOST, QUERIES_AT_MOST, BATCHES_AT_MOST), offset
    )
    (some_keys,) = spread((keys,), (KEYS_AT_MOST,), 0)
    few = logits_BHLS[some_batches, some_heads, some_queries, some_keys]
    return _row(widened(few), ~(few <= lowest_visible(logits.dtype)))


def _row(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    finite = logits.isfinite()
    counted = visible & finite
    largest = logits.double().masked_fill(~counted, -torch.inf).amax()
    return torch.stack(
        [
            visible.sum().double(),
            (visible & ~finite).sum().double(),
            largest.masked_fill(~counted.any(), nan),
        ]
    )


def _of_four(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of four dimensions; of more of them, the first of each."""
    while tensor.dim() > 4:
        tensor = tensor[0]
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor
