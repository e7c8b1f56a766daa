"""Language models: a causal transformer, dense or with experts, and a GRU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.early_warning.tasks import Losses, OfStep, never, unchanged

VOCABULARY = 128
CONTEXT = 32
BATCH = 4
_SUCCESSORS = 4


class Language:
    """Each token has a few successors, of which one is drawn; the same sequences for a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._successors = torch.randint(
            VOCABULARY, (VOCABULARY, _SUCCESSORS), generator=self._generator
        )

    def batch(self, bad_share: float = 0.0) -> torch.Tensor:
        """Return tokens [BATCH, CONTEXT + 1], in a share of the rows drawn by no rule."""
        generator = self._generator
        token = torch.randint(VOCABULARY, (BATCH,), generator=generator)
        # The first successors are the likelier ones.
        draws = torch.rand(CONTEXT, BATCH, generator=generator).square() * _SUCCESSORS
        found = [token]
        for draw in draws.long():
            token = self._successors[token, draw]
            found.append(token)
        tokens = torch.stack(found, dim=1)
        bad = torch.randint(VOCABULARY, tokens.shape, generator=generator)
        rows = round(bad_share * BATCH)
        return torch.cat((bad[:rows], tokens[rows:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Width, depth and number of heads."""

    width: int
    layers: int
    heads: int = 4


SHAPES = (Shape(width=176, layers=3), Shape(width=208, layers=2))
_OF_EXPERTS = (Shape(width=128, layers=2), Shape(width=176, layers=1))
_EXPERTS = 8
_CAPACITY = 1.25
"""Tokens that an expert takes, in those that it gets where the load is even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What of a model the literature says keeps it stable, or does not."""

    qk_norm: bool = True
    """LayerNorm on queries and keys, which bounds the attention logits."""
    stream_dtype: torch.dtype = torch.float32
    """Dtype of the residual stream, and so of the gradients that flow along it."""
    logits_dtype: torch.dtype = torch.float32
    post_norm: bool = False
    """LayerNorm on the stream after each branch, as at first, rather than on its input."""
    balance: float | None = None
    """Weight of the loss that balances the experts; None: no experts."""
    router_gain: float = 1.0
    """What the router's logits are multiplied by."""
    autocast: bool = False
    """Whether the forward pass is in BF16."""
    z_loss: float = 1e-4


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

    def __init__(self, width: int, variant: Variant) -> None:
        super().__init__()
        self._variant = variant
        self.gain = 1.0
        """What a branch is multiplied by before it is added."""
        self.gradient_factor = 1.0
        self.norm = nn.LayerNorm(width) if variant.post_norm else nn.Identity()

    def forward(self, stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Return [B, T, width] in the dtype of the stream."""
        added: torch.Tensor = self.norm(stream + self.gain * branch)
        added = added.to(self._variant.stream_dtype)
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
            query, key, by_head(self.value(inputs)).to(query.dtype), is_causal=True
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def _mlp(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class TokenRouter(nn.Linear):
    """Returns the logits [tokens, experts] by which the experts of a token are chosen."""

    top_k = 1
    num_experts = _EXPERTS


class Experts(nn.Module):
    """Sends each token to one expert; those that find it full go past it."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.router = TokenRouter(width, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(_mlp(width, 2 * width) for _ in range(_EXPERTS))
        self._gain = gain
        self.balance = torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [B, T, width], and keep what balances the load: 1 where it is even."""
        tokens_TW = inputs.flatten(0, 1)
        shares_TE = (self._gain * self.router(tokens_TW).float()).softmax(dim=-1)
        weight_T, chosen_T = shares_TE.max(dim=-1)
        load_E = functional.one_hot(chosen_T, _EXPERTS).float().mean(dim=0)
        self.balance = _EXPERTS * (load_E * shares_TE.mean(dim=0)).sum()
        out_TW = torch.zeros_like(tokens_TW)
        capacity = int(_CAPACITY * len(tokens_TW) / _EXPERTS)
        for number, expert in enumerate(self.experts):
            own = (chosen_T == number).nonzero()[:capacity, 0]
            branch = expert(tokens_TW[own]) * weight_T[own, None]
            out_TW = out_TW.index_add(0, own, branch.to(out_TW.dtype))
        return out_TW.view_as(inputs)


class _Block(nn.Module):
    def __init__(self, shape: Shape, variant: Variant) -> None:
        super().__init__()
        width, after = shape.width, variant.post_norm
        self.attention_norm = nn.Identity() if after else nn.LayerNorm(width)
        self.attention = _Attention(shape, variant)
        self.after_attention = Stream(width, variant)
        self.mlp_norm = nn.Identity() if after else nn.LayerNorm(width)
        dense = variant.balance is None
        self.mlp = _mlp(width, 4 * width) if dense else Experts(width, variant.router_gain)
        self.after_mlp = Stream(width, variant)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        branch = self.attention(self.attention_norm(stream.float()))
        stream = self.after_attention(stream, branch)
        branch = self.mlp(self.mlp_norm(stream.float()))
        added: torch.Tensor = self.after_mlp(stream, branch)
        return added


class Transformer(nn.Module):
    """Blocks between embeddings and an output layer of its own weights."""

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


class TransformerTask:
    """Predicts the next token, with a z-loss that the script's own loss leaves out."""

    def __init__(
        self,
        seed: int,
        variant: Variant,
        *,
        gain: OfStep = unchanged,
        gradient_factor: OfStep = unchanged,
        bad_share: OfStep = never,
    ) -> None:
        shapes = SHAPES if variant.balance is None else _OF_EXPERTS
        self.model = Transformer(shapes[seed % len(shapes)], variant)
        self._variant, self._data = variant, Language(seed)
        self._gain, self._gradient_factor, self._bad_share = gain, gradient_factor, bad_share
        self._experts = [each for each in self.model.modules() if isinstance(each, Experts)]
        self._streams = [each for each in self.model.modules() if isinstance(each, Stream)]

    def losses(self, step: int) -> Losses:
        """Go forward with the next sequences."""
        tokens = self._data.batch(self._bad_share(step))
        # On the gradient of the last block's residual stream.
        self._streams[-1].gradient_factor = self._gradient_factor(step)
        for stream in self._streams:
            stream.gain = self._gain(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._variant.autocast):
            logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        normalizer = logits.float().logsumexp(dim=-1)
        whole = loss + self._variant.z_loss * normalizer.square().mean()
        for experts in self._experts:
            whole = whole + (self._variant.balance or 0.0) * experts.balance
        return Losses(trained=whole, course=loss.detach(), observed=loss.detach())


class _Recurrent(nn.Module):
    def __init__(self, hidden: int, embedding_dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden // 4, dtype=embedding_dtype)
        self.layers = nn.GRU(hidden // 4, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.layers(self.tokens(tokens).float())
        logits: torch.Tensor = self.head(states)
        return logits


_HIDDEN = (320, 352)


class RecurrentTask:
    """Predicts the next token by a GRU; the probe sees the loss by itself."""

    def __init__(
        self,
        seed: int,
        *,
        recurrent_gain: float = 1.0,
        embedding_dtype: torch.dtype = torch.float32,
    ) -> None:
        model = _Recurrent(_HIDDEN[seed % len(_HIDDEN)], embedding_dtype)
        with torch.no_grad():
            for name, weight in model.layers.named_parameters():
                if name.startswith("weight_hh"):
                    weight.mul_(recurrent_gain)
        self.model = model
        self._data = Language(seed)

    def losses(self, step: int) -> Losses:
        """Go forward with the next sequences."""
        tokens = self._data.batch()
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return Losses(trained=loss, course=loss.detach())
