"""Sequences of two small languages, random but the same for a seed."""

import torch

from benchmarks.early_warning.model import CONTEXT, VOCABULARY

BATCH = 16
_TOKENS = VOCABULARY // 2
"""Of each language; the second one has tokens of its own."""
_SUCCESSORS = 4


class Languages:
    """Each token has a few successors, of which one is drawn."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._successors = torch.randint(
            _TOKENS, (2, _TOKENS, _SUCCESSORS), generator=self._generator
        )

    def batch(self, shift: float) -> torch.Tensor:
        """Return tokens [BATCH, CONTEXT + 1]; shift: share of sequences in the second language."""
        generator = self._generator
        language = (torch.rand(BATCH, generator=generator) < shift).long()
        token = torch.randint(_TOKENS, (BATCH,), generator=generator)
        # The first successors are the likelier ones.
        draws = torch.rand(CONTEXT, BATCH, generator=generator).square() * _SUCCESSORS
        found = [token]
        for draw in draws.long():
            token = self._successors[language, token, draw]
            found.append(token)
        return torch.stack(found, dim=1) + _TOKENS * language[:, None]
