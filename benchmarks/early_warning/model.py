"""A small causal transformer whose residual stream can be kept in FP16."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 128
CONTEXT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Width, depth and number of heads."""

    width: int
    layers: int
    heads: int = 4


SHAPES = (Shape(width=64, layers=2), Shape(width=48, layers=3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What of a model the literature says keeps it stable, or does not."""

    qk_norm: bool = True
    """LayerNorm on queries and keys, which bounds the attention logits."""
    stream_dtype: torch.dtype = torch.float32
    """Dtype of the residual stream, and so of the gradients that flow along it."""
    branch_gain: float = 1.0
    """What each branch is multiplied by before it is added to the stream."""
    logits_dtype: torch.dtype = torch.float32


class _Grown(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class Stream(nn.Module):
    """Adds a branch to the residual stream; a module, so that its output is measured."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self._variant = variant
        self.gradient_factor = 1.0

    def forward(self, stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Return [B, T, width] in the dtype of the stream."""
        added = (stream + self._variant.branch_gain * branch).to(self._variant.stream_dtype)
        if self.gradient_factor == 1.0:
            return added
        grown: torch.Tensor = _Grown.apply(added, self.gradient_factor)  # type: ignore[no-untyped-call]
        return grown


class _Attention(nn.Module):
    def __init__(self, shape: Shape, variant: Variant) -> None:
        super().__init__()
        self._heads = shape.heads
        head = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.query_norm = nn.LayerNorm(head) if variant.qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(head) if variant.qk_norm else nn.Identity()
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        batch, length, width = inputs.shape

        def by_head(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, length, self._heads, -1).transpose(1, 2)

        query = self.query_norm(by_head(self.query(inputs)))
        key = self.key_norm(by_head(self.key(inputs)))
        mixed = functional.scaled_dot_product_attention(
            query, key, by_head(self.value(inputs)), is_causal=True
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class _Block(nn.Module):
    def __init__(self, shape: Shape, variant: Variant) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = _Attention(shape, variant)
        self.after_attention = Stream(variant)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.after_mlp = Stream(variant)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        branch = self.attention(self.attention_norm(stream.float()))
        stream = self.after_attention(stream, branch)
        branch = self.down(functional.gelu(self.up(self.mlp_norm(stream.float()))))
        added: torch.Tensor = self.after_mlp(stream, branch)
        return added


class Transformer(nn.Module):
    """Pre-norm blocks between embeddings and an output layer of its own weights."""

    def __init__(self, shape: Shape, variant: Variant) -> None:
        super().__init__()
        self._variant = variant
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(_Block(shape, variant) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, VOCABULARY]; tokens: [B, T]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.tokens(tokens) + self.positions(places)
        stream = stream.to(self._variant.stream_dtype)
        for block in self.blocks:
            stream = block(stream)
        logits: torch.Tensor = self.head(self.norm(stream.float()))
        return logits.to(self._variant.logits_dtype)

    @property
    def last_stream(self) -> Stream:
        """Where the residual stream of the last block ends."""
        last = self.blocks[-1]
        assert isinstance(last, _Block)
        return last.after_mlp
