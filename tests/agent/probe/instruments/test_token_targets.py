"""Targets of language models: next tokens, others, and padding, as the graph of a loss has them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mp_agent.probe.instruments.batches import TokenTargets
from mp_agent.probe.scalars import Scalar
from mp_agent.records.columns import PADDING_IN_TARGETS, TARGETS_MISALIGNED
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
        for block in self.blocks:
            states = block(states)
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_of_either_integer_format_are_compared(dtype):
    model = Model()
    assert _found(model, _mean(model(_text().to(dtype)), _text())) == {TARGETS_MISALIGNED: 1.0}
