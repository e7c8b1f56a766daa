"""Sequences of a small language, random but the same for a seed."""

import torch

from benchmarks.early_warning.model import CONTEXT, VOCABULARY

BATCH = 8
_SUCCESSORS = 4


class Language:
    """Each token has a few successors, of which one is drawn."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._successors = torch.randint(
            VOCABULARY, (VOCABULARY, _SUCCESSORS), generator=self._generator
        )

    def batch(self) -> torch.Tensor:
        """Return tokens [BATCH, CONTEXT + 1]."""
        generator = self._generator
        token = torch.randint(VOCABULARY, (BATCH,), generator=generator)
        # The first successors are the likelier ones.
        draws = torch.rand(CONTEXT, BATCH, generator=generator).square() * _SUCCESSORS
        found = [token]
        for draw in draws.long():
            token = self._successors[token, draw]
            found.append(token)
        return torch.stack(found, dim=1)
