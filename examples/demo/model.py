"""A small character-level transformer, with the two mistakes of the demo as switches.

Shapes: B batch, T characters of context, H heads, W width.
"""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 64
HEADS = 4
CONTEXT = 64


class Attention(nn.Module):
    """Causal self-attention with its softmax in FP32: [B, T, W] to [B, T, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT).triu(1).bool())

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTW.shape
        heads = self.query_key_value(x_BTW).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query = query * (WIDTH // HEADS) ** -0.5
        with torch.autocast("cpu", enabled=False):
            scores_BHTT = query.float() @ key.float().transpose(-2, -1)
            weights_BHTT = scores_BHTT.masked_fill(self.future, float("-inf")).softmax(-1)
        mixed = (weights_BHTT.to(value.dtype) @ value).transpose(1, 2)
        output: torch.Tensor = self.output(mixed.reshape(batch, length, WIDTH))
        return output


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a residual branch: [B, T, W] to [B, T, W]."""

    def __init__(self, *, normalised: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH) if normalised else nn.Identity()
        self.attention = Attention()
        self.feed_forward_norm = nn.LayerNorm(WIDTH) if normalised else nn.Identity()
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        x_BTW = x_BTW + self.attention(self.attention_norm(x_BTW))
        x_BTW = x_BTW + self.feed_forward(self.feed_forward_norm(x_BTW))
        return x_BTW


class CharTransformer(nn.Module):
    """Predicts the next character from the ones before it and from where they stand in the text.

    normalised_inputs:   the offset in the text is scaled to 0..1, else taken as it is.
    normalised_branches: residual branches begin with a LayerNorm.
    """

    def __init__(
        self,
        vocabulary_size: int,
        corpus_size: int,
        *,
        depth: int = 4,
        normalised_inputs: bool = True,
        normalised_branches: bool = True,
    ) -> None:
        super().__init__()
        self.offset_scale = 1.0 / corpus_size if normalised_inputs else 1.0
        self.characters = nn.Embedding(vocabulary_size, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.offset = nn.Linear(1, WIDTH)
        self.blocks = nn.Sequential(*(Block(normalised=normalised_branches) for _ in range(depth)))
        self.norm = nn.LayerNorm(WIDTH) if normalised_branches else nn.Identity()
        self.head = nn.Linear(WIDTH, vocabulary_size)

    def forward(self, tokens_BT: torch.Tensor, offsets_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character, [B, T, vocabulary]."""
        places = self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        offset = self.offset(offsets_BT.float().unsqueeze(-1) * self.offset_scale)
        x_BTW = self.characters(tokens_BT) + places + offset
        logits: torch.Tensor = self.head(self.norm(self.blocks(x_BTW)))
        return logits


def next_character_loss(logits: torch.Tensor, following_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the predictions, in FP32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), following_BT.flatten())
