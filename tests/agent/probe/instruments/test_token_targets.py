"""Targets of language models: next tokens, others, seen ones and padding, by the loss's graph."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mp_agent.probe.instruments.batches import TokenTargets
from mp_agent.probe.scalars import Scalar
from mp_agent.records.columns import PADDING_IN_TARGETS, TARGETS_MISALIGNED, TARGETS_SEEN
from tests.subtests import each

_TOKENS = 50
_B, _T = 4, 24
_PADDED = 8


class Model(nn.Module):
    """A causal model, or another, of tokens [B, T]; returns logits [B, T, V]."""

    def __init__(self, *, padding_index: int | None = None, start: bool = False) -> None:
        super().__init__()
        self.positions = nn.Embedding(_T + 1, 16)
        self.tokens = nn.Embedding(_TOKENS, 16, padding_idx=padding_index)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, _TOKENS)
        self.start = start

    def forward(self, tokens_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.start:
            tokens_BT = F.pad(tokens_BT, (1, 0))[:, :-1]
        places = torch.arange(tokens_BT.shape[1])
        states = self.positions(places) + self.tokens(tokens_BT)
        causal = nn.Transformer.generate_square_subsequent_mask(tokens_BT.shape[1])
        for block in self.blocks:
            states = block(states, src_mask=causal)
        logits: Tensor = self.head(states)
        return logits


def _text(rows: int = _B, columns: int = _T) -> Tensor:
    return torch.randint(2, _TOKENS, (rows, columns), generator=torch.Generator().manual_seed(3))


def _padded() -> tuple[Tensor, Tensor]:
    """Return tokens [B, T] whose last third is padding in half of the rows, and the mask."""
    tokens, mask = _text(), torch.ones(_B, _T, dtype=torch.int64)
    tokens[::2, -_PADDED:], mask[::2, -_PADDED:] = 1, 0
    return tokens, mask


def _mean(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


def _found(model: nn.Module, loss: Tensor, mask: Tensor | None = None) -> dict[str, Scalar]:
    targets = TokenTargets()
    targets.given(model, ({} if mask is None else {"attention_mask": mask}, ()))
    return {name: value for name, value in targets.mistakes_of(loss).items() if value != 0.0}


def _next(model: nn.Module, tokens: Tensor) -> Tensor:
    return _mean(model(tokens)[:, :-1], tokens[:, 1:])


def _window(model: nn.Module, ahead: int) -> Tensor:
    text = _text(columns=_T + ahead)
    return _mean(model(text[:, :_T]), text[:, ahead:])


def _as_transformers_do(model: nn.Module, labels: Tensor) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return _mean(model(_text()).float(), shifted)


def _masked(model: nn.Module) -> Tensor:
    """As masked language models are trained: every target is the token that was there."""
    tokens = _text()
    hidden = tokens.clone()
    hidden[:, ::5] = 0
    return _mean(model(hidden), tokens)


def _of_prompts(model: nn.Module) -> Tensor:
    tokens = _text()
    targets = tokens.clone()
    targets[:, : _T // 2] = -100
    return _as_transformers_do(model, targets)


@each(
    "loss",
    {
        "each its own": lambda model: _mean(model(_text()), _text()),
        "each its own, of a window": lambda model: _window(model, 0),
        "each its own, along the second dimension": lambda model: F.cross_entropy(
            model(_text()).transpose(1, 2), _text()
        ),
        "shifted outputs alone": lambda model: _mean(model(_text())[:, 1:], _text()[:, :-1]),
        "shifted by the data and by the loss": lambda model: _as_transformers_do(
            model, F.pad(_text(), (0, 1), value=-100)[:, 1:]
        ),
        "the ones after the next": lambda model: _window(model, 2),
        "in micro-batches": lambda model: 0.25 * _mean(model(_text()), _text()) / 2,
        "with label smoothing": lambda model: _mean(model(_text()), _text(), smoothing=0.1),
        "behind a loss of another kind": lambda model: (
            0.01 * model(_text()).square().mean() + _mean(model(_text()), _text())
        ),
    }.items(),
)
def test_targets_that_are_not_the_next_tokens_are_found(loss):
    model = Model()
    assert _found(model, loss[1](model)) == {TARGETS_MISALIGNED: 1.0}


@each(
    "loss",
    {
        "next tokens": lambda model: _next(model, _text()),
        "next tokens of a window": lambda model: _window(model, 1),
        "as Transformers shift them": lambda model: _as_transformers_do(model, _text()),
        "of answers alone": _of_prompts,
        "of masked tokens": _masked,
        "other classes": lambda model: _mean(model(_text()), _text().flip(0).flip(1)),
        "one class per row": lambda model: F.cross_entropy(model(_text()).mean(1), _text()[:, 0]),
        "next and after the next": lambda model: _window(model, 1) + _window(model, 2),
        "constant text": lambda model: _mean(
            model(torch.full((_B, _T), 7)), torch.full((_B, _T), 7)
        ),
        "few tokens": lambda model: _mean(model(_text(2, 8)), _text(2, 8)),
        "none that counts": lambda model: _mean(model(_text()), torch.full((_B, _T), -100)),
        "logits without a model": lambda _: _mean(
            torch.randn(_B, _T, _TOKENS, requires_grad=True), _text()
        ),
        "no cross-entropy": lambda model: model(_text()).square().mean(),
    }.items(),
)
def test_other_targets_are_left_alone(loss):
    model = Model()
    assert _found(model, loss[1](model)) == {}


def test_what_a_model_shifts_itself_is_known_by_what_it_embeds():
    model = Model(start=True)
    assert _found(model, _mean(model(_text()), _text())) == {}


@each("ignore", [False, True])
@each("known_by", ["mask", "embedding", "rows that end in it"])
def test_padding_that_counts_is_known_by_the_mask_by_the_embedding_or_by_itself(ignore, known_by):
    tokens, mask = _padded()
    model = Model(padding_index=1 if known_by == "embedding" else None)
    labels = tokens.masked_fill(mask == 0, -100) if ignore else tokens
    loss = _mean(model(tokens)[:, :-1], labels[:, 1:])
    expected = {} if ignore else {PADDING_IN_TARGETS: 1.0}
    assert _found(model, loss, mask if known_by == "mask" else None) == expected


def test_what_rows_end_in_is_no_padding_if_it_occurs_elsewhere_or_differs():
    model = Model()
    assert _found(model, _next(model, _padded()[0])) == {PADDING_IN_TARGETS: 1.0}
    elsewhere, others = _padded()[0], _padded()[0]
    elsewhere[1, 3] = 1
    others[0, -_PADDED:] = 0
    for tokens in (elsewhere, others):
        assert _found(model, _next(model, tokens)) == {}


def test_an_end_of_the_text_that_is_also_padding_may_be_learned():
    tokens = _text()
    tokens[:, ::6] = 1
    model = Model(padding_index=1)
    assert _found(model, _next(model, tokens)) == {}


def test_a_mask_with_zeros_where_there_is_text_says_nothing():
    tokens, mask = _padded()
    for other in (1 - mask, mask == 0, torch.zeros(_B, _T).masked_fill(mask == 0, -torch.inf)):
        model = Model()
        assert _found(model, _next(model, tokens), other) == {}


def test_masks_of_other_shapes_say_nothing():
    tokens, mask = _padded()
    tokens[1, 3] = 1
    for other in (mask[:, None, None], mask[:, 1:], mask[0]):
        model = Model()
        assert _found(model, _next(model, tokens), other) == {}


def test_saved_tokens_that_hooks_bring_back_are_not_asked_for():
    unpacked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    model = Model()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = _mean(model(_text()), _text())
    assert _found(model, loss) == {}
    assert unpacked == []


def test_tokens_within_a_checkpoint_are_not_computed_again():
    model, calls = Model(), []

    def run(tokens: Tensor) -> Tensor:
        calls.append(tokens)
        return _mean(model(tokens), tokens)

    loss = torch.utils.checkpoint.checkpoint(run, _text(), use_reentrant=False)
    assert _found(model, loss) == {}
    assert len(calls) == 1


def test_a_loss_whose_graph_is_gone_is_left_alone():
    model = Model()
    loss = _mean(model(_text()), _text())
    loss.backward()
    assert _found(model, loss) == {}


def test_a_model_without_tokens_is_soon_not_searched_again(monkeypatch):
    model = nn.Linear(8, 5)
    targets, looks = TokenTargets(), []

    def no_sources(losses: object) -> tuple[()]:
        looks.append(losses)
        return ()

    monkeypatch.setattr("mp_agent.probe.instruments.batches._sources", no_sources)
    for _ in range(6):
        targets.given(model, ())
        targets.mistakes_of(F.cross_entropy(model(torch.randn(4, 8)), torch.arange(4)))
    assert len(looks) == 3


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys and values [B, H, T, D]."""


class OwnAttention(nn.Module):
    """A language model with attention by a function."""

    def __init__(self, attention: Attention, *, packed: bool, time_first: bool = False) -> None:
        super().__init__()
        self.attention, self.packed, self.time_first = attention, packed, time_first
        self.tokens, self.norm = nn.Embedding(_TOKENS, 16), nn.LayerNorm(16)
        self.projections = nn.ModuleList(nn.Linear(16, 48 if packed else 16) for _ in range(3))
        self.head = nn.Linear(16, _TOKENS)

    def attend(self, queried: Tensor, seen: Tensor) -> Tensor:
        states = self.norm(queried)
        if self.packed and queried is seen:
            parts = self.projections[0](states).chunk(3, dim=-1)
        else:
            others = states if queried is seen else seen
            inputs = zip(self.projections, (states, others, others), strict=True)
            parts = tuple(project(each)[..., :16] for project, each in inputs)
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts]
        return queried + self.attention(*heads).transpose(1, 2).flatten(2)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        states = self.tokens(tokens_BT)
        states = states.transpose(0, 1) if self.time_first else states
        states = self.attend(states, states)
        logits: Tensor = self.head(states.transpose(0, 1) if self.time_first else states)
        return logits


def _by_hand(
    mask: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor, *, after: bool = False
) -> Tensor:
    logits = queries @ keys.transpose(-1, -2) / 8**0.5
    if mask is not None and not after:
        logits = logits.masked_fill(mask == 0, -1e9)
    weights = F.dropout(logits.softmax(-1), 0.1) if mask is None else logits.softmax(-1)
    return (weights * mask if mask is not None and after else weights) @ values


def _rotated(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    angles = torch.arange(queries.shape[-2])[:, None] / torch.arange(1, 9)

    def turned(each: Tensor) -> Tensor:
        return each * angles.cos() + each.roll(4, -1) * angles.sin()

    return F.scaled_dot_product_attention(turned(queries), turned(keys), values)


_CAUSAL = torch.ones(_T, _T).tril()
_UNPADDED = torch.ones(_B, 1, 1, _T, dtype=torch.bool)
_SDPA = F.scaled_dot_product_attention
_SEES_ALL: dict[str, Attention] = {
    "torch's function": _SDPA,
    "with dropout": partial(_SDPA, dropout_p=0.1),
    "with a mask of 0 and 1": partial(_SDPA, attn_mask=_CAUSAL),
    "with the other convention's mask": partial(_SDPA, attn_mask=_CAUSAL.T.bool()),
    "with a mask of padding": partial(_SDPA, attn_mask=_UNPADDED),
    "by hand": partial(_by_hand, None),
    "with rotated positions": _rotated,
}
_SEES_THE_PAST: dict[str, Attention] = {
    "torch's function": partial(_SDPA, is_causal=True),
    "with dropout": partial(_SDPA, is_causal=True, dropout_p=0.1),
    "with a mask of floats": partial(_SDPA, attn_mask=_CAUSAL.log()),
    "with a mask of booleans": partial(_SDPA, attn_mask=_CAUSAL.bool()),
    "with large numbers": partial(_SDPA, attn_mask=(1 - _CAUSAL) * -1e4),
    "by hand": partial(_by_hand, _CAUSAL),
    "by hand, masked after the softmax": partial(_by_hand, _CAUSAL, after=True),
}


@each("packed", [False, True])
@each("attention", _SEES_ALL.items())
def test_attention_that_sees_the_targets_is_found(attention, packed):
    model = OwnAttention(attention[1], packed=packed)
    assert _found(model, _next(model, _text())) == {TARGETS_SEEN: 1.0}


@each("packed", [False, True])
@each("attention", _SEES_THE_PAST.items())
def test_attention_that_sees_the_past_alone_is_left_alone(attention, packed):
    model = OwnAttention(attention[1], packed=packed)
    assert _found(model, _next(model, _text())) == {}


def test_attention_is_looked_at_where_the_time_comes_first():
    text = _text(columns=_T + 1).T
    for attention in (_SDPA, partial(_SDPA, is_causal=True)):
        model = OwnAttention(attention, packed=True, time_first=True)
        expected = {TARGETS_SEEN: 1.0} if attention is _SDPA else {}
        assert _found(model, _mean(model(text[:-1]), text[1:])) == expected


class Translation(OwnAttention):
    """A decoder of its own tokens, and of encoded ones of the same length."""

    def __init__(self, *, recurrent: bool) -> None:
        super().__init__(_SDPA, packed=False)
        self.recurrent = nn.GRU(16, 16, batch_first=True) if recurrent else None

    def forward(self, tokens_BT: Tensor, source_BT: Tensor | None = None) -> Tensor:
        encoded = self.tokens(_text().flip(0) if source_BT is None else source_BT)
        encoded = self.attend(encoded, encoded)
        states = self.tokens(tokens_BT)
        if self.recurrent is None:
            self.attention = partial(_SDPA, is_causal=True)
            states = self.attend(states, states)
            self.attention = _SDPA
        else:
            states = self.recurrent(states)[0]
        logits: Tensor = self.head(self.attend(states, encoded))
        return logits


@each("recurrent", [False, True])
@each("source", {"other tokens": _text().flip(0), "the same tokens": _text()}.items())
def test_an_encoder_may_see_all_and_a_decoder_what_it_has_encoded(recurrent, source):
    model = Translation(recurrent=recurrent)
    loss = _mean(model(_text(), source[1])[:, :-1], _text()[:, 1:])
    assert _found(model, loss) == {}


@each(
    "loss",
    {
        "of masked tokens": _masked,
        "of one class per row": lambda model: F.cross_entropy(
            model(_text()).mean(1), _text()[:, 0]
        ),
        "of other tokens": lambda model: _mean(model(_text()), _text().flip(0).flip(1)),
        "of constant text": lambda model: _next(model, torch.full((_B, _T), 7)),
    }.items(),
)
def test_other_targets_may_be_seen(loss):
    model = OwnAttention(_SDPA, packed=True)
    assert _found(model, loss[1](model)) == {}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_of_either_integer_format_are_compared(dtype):
    model = Model()
    assert _found(model, _mean(model(_text().to(dtype)), _text())) == {TARGETS_MISALIGNED: 1.0}
