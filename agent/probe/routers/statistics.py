"""A row of statistics of one call of a router; on an accelerator without waiting for it."""

from math import log, nan

import torch

from mp_agent.probe.routers.routing import Routing

_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Bounds the scratch: each chunk of logits is widened to 32 bits."""
_ROUNDING = 0.01
"""By how much probabilities of 16 bits may miss a sum of 1."""


def router_row(routing: Routing) -> torch.Tensor | None:
    """Return float64 [C], the columns of `ROUTERS`, on the device of the load; None without tokens.

    Logits none of whose rows has a negative number, and each of whose rows adds up to 1, are taken
    for probabilities. Entropies are computed in at least 32 bits, and added in float64.
    """
    if not routing.tokens:
        return None
    load_E = routing.load_E.double()
    experts, total = len(load_E), load_E.sum()
    absent = torch.full_like(total, nan)
    return torch.stack(
        [
            torch.full_like(total, float(routing.tokens)),
            *_of_logits(routing.logits_TE, absent),
            # Without any choice there is no mean to compare with.
            (load_E.amax() * experts / total).masked_fill(total == 0, nan),
            torch.full_like(total, float(experts)),
            (load_E == 0).sum().double(),
            absent if routing.choices is None else routing.choices.double(),
            absent if routing.dropped is None else routing.dropped.double(),
        ]
    )


def _of_logits(logits_TE: torch.Tensor | None, absent: torch.Tensor) -> list[torch.Tensor]:
    """Return tokens that are not finite, those with an entropy, its sum, and the largest logit."""
    if logits_TE is None or not logits_TE.shape[-1]:
        return [absent] * 4
    experts = logits_TE.shape[-1]
    chunks = torch.split(logits_TE, max(1, _CHUNK_ELEMENTS // experts))
    likely = torch.stack([_are_probabilities(chunk_TE) for chunk_TE in chunks]).all()
    rows = torch.stack([_chunk(chunk_TE.to(absent.device), likely) for chunk_TE in chunks])
    nonfinite, entropy = rows[:, 0].sum(), rows[:, 1].sum()
    tokens = torch.full_like(absent, float(len(logits_TE))) - nonfinite
    largest = rows[:, 2].amax()
    largest = largest.masked_fill(likely | (largest < 0), nan)
    if experts == 1:  # whose logarithm is 0
        return [nonfinite, absent, absent, largest]
    return [nonfinite, tokens, entropy / log(experts), largest]


def _chunk(logits_TE: torch.Tensor, likely: torch.Tensor) -> torch.Tensor:
    """Return float64 [3]: tokens that are not finite, sum of entropies, largest magnitude."""
    values_TE = _widened(logits_TE)
    sound_T = values_TE.amax(dim=-1).isfinite()  # a NaN is the largest, -Inf alone masks an expert
    finite_TE = values_TE.isfinite()
    shares_TE = torch.where(likely, values_TE, values_TE.softmax(dim=-1))
    entropy_T = torch.special.entr(shares_TE).sum(dim=-1, dtype=torch.float64)
    return torch.stack(
        [
            (~sound_T).sum().double(),
            entropy_T.masked_fill(~sound_T, 0.0).sum(),
            values_TE.abs().masked_fill(~finite_TE, -1.0).amax().double(),
        ]
    )


def _are_probabilities(logits_TE: torch.Tensor) -> torch.Tensor:
    values_TE = _widened(logits_TE)
    near = (values_TE.sum(dim=-1) - 1.0).abs() <= _ROUNDING
    return (values_TE >= 0.0).all() & near.all()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()
