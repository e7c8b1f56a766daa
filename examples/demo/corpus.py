"""Real text that every machine has: the source of Python's own standard library.

Shapes: B batch, T characters of context.
"""

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

VOCABULARY_SIZE = 128
"""ASCII; the few other characters become a question mark."""

_CORPUS_BYTES = 2_000_000


def load_corpus(size: int = _CORPUS_BYTES) -> torch.Tensor:
    """Return the first `size` characters of the standard library as token ids, int64 [size]."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8").encode("ascii", "replace")
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


def batches(
    corpus: torch.Tensor, batch_size: int, context: int, rank: int, world_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Read the text from its beginning, over and over, the ranks taking turns.

    Yields tokens [B, T], the character after each of them [B, T], and their offsets in the text
    [B, T].
    """
    pieces = (len(corpus) - 1) // context
    for turn in itertools.count(rank, world_size):
        starts_B = (torch.arange(batch_size) + turn * batch_size) % pieces * context
        offsets_BT = starts_B.unsqueeze(1) + torch.arange(context)
        yield corpus[offsets_BT], corpus[offsets_BT + 1], offsets_BT
