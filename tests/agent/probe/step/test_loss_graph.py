"""What the graph of a loss shows: inputs that its function does not take, broadcast targets."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mp_agent.probe.step.loss_graph import is_scaled, mistakes_of
from mp_agent.records.columns import LOSS_IN_16_BITS, LOSS_INPUT_MISMATCH, TARGETS_BROADCAST
from tests.subtests import each

_INPUTS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
_MAPPER = nn.Conv2d(2, 1, 1)
_MASKS = torch.ones(6, 3, 3)
_CLASSES = torch.tensor([0, 1, 2, 3, 0, 1])
_SHARES = torch.full((6, 4), 0.25)
_ONES = torch.ones(6, 4)
_VALUES = torch.linspace(-1.0, 1.0, 6)
_CLASSIFIER, _REGRESSION = nn.Linear(5, 4), nn.Linear(5, 1)


def _logits() -> Tensor:
    return F.linear(_INPUTS, _CLASSIFIER.weight, _CLASSIFIER.bias)


def _probabilities() -> Tensor:
    return _logits().softmax(-1)


def _outputs() -> Tensor:
    """Return outputs [6, 1]."""
    return F.linear(_INPUTS, _REGRESSION.weight, _REGRESSION.bias)


def _maps() -> Tensor:
    """Return outputs [6, 1, 3, 3] of images."""
    return F.conv2d(torch.ones(6, 2, 3, 3), _MAPPER.weight, _MAPPER.bias)


def _log_probabilities() -> Tensor:
    """Return those of actions, [6]."""
    made: Tensor = torch.distributions.Categorical(_probabilities()).log_prob(_CLASSES)
    return made


def _images() -> Tensor:
    """Return probabilities [2, 4, 7] of positions."""
    return torch.zeros(2, 4, 7, requires_grad=True).softmax(1)


def _tokens() -> Tensor:
    """Return probabilities [8] of positions, as a language model's loss is given them."""
    sequences = nn.Linear(5, 4)(torch.ones(2, 5, 5)).softmax(-1)
    return F.cross_entropy(sequences[:, :-1].reshape(-1, 4), torch.zeros(8, dtype=torch.long))


def _by_hand() -> Tensor:
    exponentials = (_logits() - _logits().max(1, keepdim=True).values).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def _scores() -> Tensor:
    """Return logits [2, 3, 4] of positions and classes."""
    return F.linear(torch.ones(2, 3, 5), _CLASSIFIER.weight)


def _autocast() -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(_probabilities(), _CLASSES)


_MISMATCHES = {
    "softmax twice": lambda: F.cross_entropy(_probabilities(), _CLASSES),
    "softmax twice, under autocast": _autocast,
    "softmax twice, smoothed": lambda: F.cross_entropy(
        _probabilities(), _CLASSES, label_smoothing=0.1
    ),
    "softmax twice, of shares": lambda: F.cross_entropy(_probabilities(), _SHARES),
    "softmax twice, of positions": lambda: F.cross_entropy(
        _images(), torch.zeros(2, 7, dtype=torch.long)
    ),
    "softmax twice, of tokens": _tokens,
    "softmax twice, one of two losses": lambda: (
        0.5 * F.cross_entropy(_probabilities(), _CLASSES) + F.mse_loss(_outputs(), _outputs())
    ),
    "softmax twice, accumulated": lambda: F.cross_entropy(_probabilities(), _CLASSES) / 4,
    "sigmoid before softmax": lambda: F.cross_entropy(_logits().sigmoid(), _CLASSES),
    "sigmoid twice": lambda: F.binary_cross_entropy_with_logits(_logits().sigmoid(), _SHARES),
    "softmax twice, clamped": lambda: F.cross_entropy(_probabilities().clamp(1e-7, 1.0), _CLASSES),
    "softmax twice, one by hand": lambda: F.cross_entropy(_by_hand(), _CLASSES),
    "softmax twice, one by hand in a line": lambda: F.cross_entropy(
        (logits := _logits()).exp() / logits.exp().sum(1)[:, None], _CLASSES
    ),
    "sigmoid twice, clamped": lambda: F.binary_cross_entropy_with_logits(
        _logits().sigmoid().clamp(min=1e-6), _SHARES
    ),
    "likelihood of clamped probabilities": lambda: F.nll_loss(
        _probabilities().clamp(min=1e-6), _CLASSES
    ),
    "likelihood of a softmax along the batch": lambda: F.nll_loss(
        _logits().log_softmax(0), _CLASSES
    ),
    "likelihood of logarithms of a softmax along the batch": lambda: F.nll_loss(
        _logits().softmax(-2).log(), _CLASSES
    ),
    "likelihood of a softmax along the batch, of positions": lambda: F.nll_loss(
        _scores().mT.log_softmax(0), torch.zeros(2, 3, dtype=torch.long)
    ),
    "likelihood of a softmax along the positions": lambda: F.nll_loss(
        _scores().log_softmax(1).view(-1, 4), torch.zeros(6, dtype=torch.long)
    ),
    "likelihood of probabilities": lambda: F.nll_loss(_probabilities(), _CLASSES),
    "likelihood of probabilities from their logarithms": lambda: F.nll_loss(
        _logits().log_softmax(-1).exp(), _CLASSES
    ),
    "likelihood of logits": lambda: F.nll_loss(_logits(), _CLASSES),
    "a mask up to 255": lambda: F.binary_cross_entropy_with_logits(_logits() + 5.0, 255.0 * _ONES),
    "a mask up to 255, accumulated": lambda: (
        F.binary_cross_entropy_with_logits(_logits() + 5.0, 255.0 * _ONES) / 4
    ),
    "divergence of probabilities, one of two terms": lambda: (
        F.cross_entropy(_logits(), _CLASSES) + 10.0 * F.kl_div(_probabilities(), _SHARES)
    ),
    "divergence of probabilities": lambda: F.kl_div(
        _probabilities(), _SHARES, reduction="batchmean"
    ),
}
_BROADCASTS = {
    "mean square": lambda: F.mse_loss(_outputs(), _VALUES),
    "mean square of targets with the dimension": lambda: F.mse_loss(
        _outputs().squeeze(-1), _VALUES.unsqueeze(1)
    ),
    "mean square of a sigmoid": lambda: F.mse_loss(_outputs().sigmoid(), _VALUES),
    "mean magnitude": lambda: F.l1_loss(_outputs(), _VALUES),
    "smooth magnitude": lambda: F.smooth_l1_loss(_outputs(), _VALUES),
    "huber": lambda: F.huber_loss(_outputs(), _VALUES),
    "square by hand": lambda: ((_outputs() - _VALUES) ** 2).mean(),
    "square by hand, of outputs without their dimension": lambda: (
        (_outputs().squeeze() - _VALUES.unsqueeze(1)) ** 2
    ).mean(),
    "square by hand, of one column of the outputs": lambda: (
        (_outputs()[:, 0] - _VALUES.unsqueeze(1)) ** 2
    ).mean(),
    "square by hand, of flat outputs": lambda: (
        (_outputs().view(-1) - _VALUES.unsqueeze(1)) ** 2
    ).sum(),
    "maps without the dimension of the outputs": lambda: F.mse_loss(_maps(), _MASKS),
    "maps by hand": lambda: ((_maps().sigmoid() - _MASKS) ** 2).mean(),
    "maps by hand, of outputs without their dimension": lambda: (
        (_maps()[:, 0] - _MASKS.unsqueeze(1)).abs().mean()
    ),
    "overlap of maps by hand": lambda: (
        1.0 - 2.0 * (_maps().sigmoid() * _MASKS).sum() / (_maps().sigmoid().sum() + _MASKS.sum())
    ),
    "cross-entropy by hand": lambda: -(_outputs().sigmoid().log() * _VALUES).mean(),
    "advantages": lambda: -(_log_probabilities() * _VALUES[:, None]).mean(),
    "weights of samples": lambda: (
        F.mse_loss(_outputs(), _VALUES[:, None], reduction="none") * _VALUES
    ).mean(),
    "magnitude by hand, the other way": lambda: 2.0 * (_VALUES - _outputs()).abs().mean(),
}
_IN_16_BITS = {
    "cross-entropy": lambda: F.cross_entropy(_logits().bfloat16(), _CLASSES),
    "cross-entropy that is cast later": lambda: F.cross_entropy(_logits().half(), _CLASSES).float(),
    "mean square": lambda: F.mse_loss(_outputs().bfloat16(), _VALUES.bfloat16().unsqueeze(1)),
    "square by hand": lambda: (_outputs().bfloat16() ** 2).mean(),
}
_RIGHT = {
    "cross-entropy": lambda: F.cross_entropy(_logits(), _CLASSES),
    "likelihood": lambda: F.nll_loss(_logits().log_softmax(-1), _CLASSES),
    "likelihood of logarithms": lambda: F.nll_loss(_probabilities().log(), _CLASSES),
    "likelihood of a single sample": lambda: F.nll_loss(_logits()[0].log_softmax(0), _CLASSES[0]),
    "likelihood of positions": lambda: F.nll_loss(
        _scores().mT.log_softmax(1), torch.zeros(2, 3, dtype=torch.long)
    ),
    "likelihood of positions, flattened": lambda: F.nll_loss(
        _scores().log_softmax(-1).view(-1, 4), torch.zeros(6, dtype=torch.long)
    ),
    "likelihood of positions, the other way around": lambda: F.nll_loss(
        _scores().mT.log_softmax(1).mT.reshape(-1, 4), torch.zeros(6, dtype=torch.long)
    ),
    "likelihood of as many samples as classes": lambda: F.nll_loss(
        _logits()[:4].log_softmax(0), _CLASSES[:4]
    ),
    "likelihood of both, samples and classes": lambda: (
        F.nll_loss(_logits().log_softmax(0), _CLASSES) + F.cross_entropy(_logits(), _CLASSES)
    ),
    "likelihood of a transposed matrix": lambda: F.nll_loss(
        _logits().log_softmax(0).T, torch.zeros(4, dtype=torch.long)
    ),
    "exponentials that are divided by a sum along the batch": lambda: F.cross_entropy(
        (logits := _logits()).exp() / logits.exp().sum(0), _CLASSES
    ),
    "logits that are clamped": lambda: F.cross_entropy(_logits().clamp(-5.0, 5.0), _CLASSES),
    "shares of scores": lambda: F.cross_entropy(
        (scores := _logits().relu() + 1.0) / scores.sum(1, keepdim=True), _CLASSES
    ),
    "divergence": lambda: F.kl_div(_logits().log_softmax(-1), _SHARES),
    "distillation": lambda: F.kl_div(
        _logits().log_softmax(-1), _probabilities().detach(), reduction="batchmean"
    ),
    "binary": lambda: F.binary_cross_entropy(_logits().sigmoid(), _SHARES),
    "binary of logits": lambda: F.binary_cross_entropy_with_logits(_logits(), _SHARES),
    "temperature of a sigmoid": lambda: F.cross_entropy(_logits().sigmoid() / 0.1, _CLASSES),
    "square of probabilities": lambda: F.mse_loss(_probabilities(), _SHARES),
    "accuracy that has a gradient": lambda: (1.0 - _SHARES * _probabilities()).mean(),
    "policy": lambda: torch.distributions.Categorical(_probabilities()).log_prob(_CLASSES).mean(),
    "entropy": lambda: -(_probabilities() * _logits().log_softmax(-1)).sum(),
    "outputs and targets of one shape": lambda: F.mse_loss(_outputs(), _VALUES.unsqueeze(1)),
    "outputs without their dimension": lambda: F.mse_loss(_outputs().squeeze(1), _VALUES),
    "energy distance": lambda: (
        2.0 * (_outputs() - _VALUES).abs().mean() - (_outputs() - _outputs().t()).abs().mean()
    ),
    "kernel of all pairs": lambda: torch.exp(-((_outputs() - _VALUES) ** 2) / 2.0).mean(),
    "ranking against a queue": lambda: F.softplus(-(_outputs() - _VALUES)).mean(),
    "pairs that are chosen": lambda: ((_outputs() - _VALUES) ** 2)[0, 1] + _outputs().mean(),
    "maps of one shape": lambda: (_maps().sigmoid() * _MASKS[:, None]).mean(),
    "maps and masks of several classes": lambda: (_maps() * torch.ones(6, 6, 3, 3)).tanh().mean(),
    "weights of a kernel's columns": lambda: (
        ((torch.ones(6, 1, requires_grad=True) * torch.ones(6, 6)).sum(0) - _VALUES) ** 2
    ).mean(),
    "risks of those at risk": lambda: (
        _outputs() - torch.log((_outputs().exp() * torch.ones(6, 6)).sum(0)[:, None])
    ).mean(),
    "frequencies": lambda: torch.sin(_outputs() * _VALUES).mean(),
    "weights of samples of their shape": lambda: (
        F.mse_loss(_outputs(), _VALUES[:, None], reduction="none") * _VALUES[:, None]
    ).mean(),
    "kernel around centres": lambda: torch.exp(
        -((_outputs().view(-1) - _VALUES[:, None]) ** 2)
    ).sum(),
    "mean of the outputs in each of several rows": lambda: (
        (_logits().mean(1) - _VALUES[:, None]) ** 2
    ).mean(),
    "transport": lambda: -torch.logsumexp(-((_outputs() - _VALUES) ** 2), 1).mean(),
    "expected risk": lambda: (torch.ones(6, 4) - _SHARES * _probabilities()).mean(),
    "scores gathered next to logsumexp": lambda: (
        F.nll_loss(_logits(), _CLASSES) + torch.logsumexp(_logits(), 1).mean()
    ),
    "all pairs on purpose": lambda: (_outputs()[:, 0][:, None] - _VALUES).abs().mean(),
    "all pairs of outputs": lambda: (_outputs() - _outputs().T).relu().mean(),
    "a batch of one, by hand": lambda: ((_outputs()[:1] - _VALUES[:1]) ** 2).mean(),
    "a batch of one": lambda: F.mse_loss(_outputs()[:1], _VALUES[:1]),
    "a centre per output": lambda: ((_outputs() - torch.ones(3)) ** 2).mean(),
    "targets from 0 to 1": lambda: F.binary_cross_entropy_with_logits(50.0 * _logits(), _ONES) / 2,
    "entropy that is maximized": lambda: -0.1 * F.cross_entropy(_logits(), _CLASSES),
    "16 bits that are cast before the loss": lambda: F.cross_entropy(
        _logits().bfloat16().float(), _CLASSES
    ),
    "a result that is cast": lambda: F.cross_entropy(_logits(), _CLASSES).bfloat16(),
    "products in 16 bits": lambda: F.mse_loss((_outputs().bfloat16() * 2).float(), _ONES[:, :1]),
    "no graph": lambda: _VALUES.mean(),
}


def _found(loss: Callable[[], Tensor]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(mistakes_of(loss()))


@each("name", _MISMATCHES)
def test_probabilities_in_place_of_logits_are_found(name):
    assert _found(_MISMATCHES[name]) == [LOSS_INPUT_MISMATCH]


@each("name", _BROADCASTS)
def test_targets_that_are_broadcast_against_outputs_are_found(name):
    assert _found(_BROADCASTS[name]) == [TARGETS_BROADCAST]


@pytest.mark.parametrize("name", _IN_16_BITS)
def test_a_loss_in_16_bits_is_found(name):
    assert _found(_IN_16_BITS[name]) == [LOSS_IN_16_BITS]


@each("name", _RIGHT)
def test_a_right_loss_is_left_alone(name):
    assert _found(_RIGHT[name]) == []


def test_a_negative_loss_counts_although_a_scaler_has_multiplied_it():
    scaler = torch.amp.GradScaler("cpu")
    loss = F.binary_cross_entropy_with_logits(_logits() + 5.0, 255.0 * _ONES)
    assert list(mistakes_of(scaler.scale(loss), scaled=True)) == [LOSS_INPUT_MISMATCH]
    assert list(mistakes_of(-1.0 * F.cross_entropy(_logits(), _CLASSES))) == []


def test_the_format_of_a_mean_is_left_to_autocast():
    loss = (_outputs().bfloat16() ** 2).mean()
    assert list(mistakes_of(loss, autocast=True)) == []


def test_a_model_is_not_searched_for_what_a_loss_does():
    """A gate of the model may do what a loss must not, as far from the loss as a model is deep."""
    gated = _probabilities().log_softmax(-1)
    for _ in range(60):
        gated = gated.tanh()
    assert _found(lambda: F.mse_loss(gated, _SHARES)) == []


@each(
    ("loss", "multiplied"),
    [
        (lambda: 128.0 * _outputs().mean(), True),
        (lambda: _outputs().mean() * torch.tensor(2.0) / 4, True),
        (lambda: _outputs().mean() + 0.01 * _logits().mean(), False),
        (lambda: _outputs().mean() / 4, False),
        (lambda: (_outputs() * 3.0).mean(), False),
        (lambda: _outputs().mean() * _logits().mean(), False),
    ],
)
def test_a_loss_that_may_be_scaled_by_hand_is_known(loss, multiplied):
    assert is_scaled(loss()) is multiplied


def test_saved_tensors_are_not_unpacked():
    """Their hooks may compute a part of the model again."""
    unpacked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = F.cross_entropy(_probabilities(), _CLASSES) * 2.0
    assert _found(lambda: loss) == [LOSS_INPUT_MISMATCH]
    assert is_scaled(loss)
    assert unpacked == []
