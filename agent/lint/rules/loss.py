"""Rules on what a loss is given."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace

_CROSS_ENTROPY = re.compile(r"^torch\.nn\.(functional\.cross_entropy|(\w+\.)*CrossEntropyLoss)$")
_BINARY = re.compile(
    r"^torch\.nn\.(functional\.(binary_cross_entropy_with_logits|multilabel_soft_margin_loss)"
    r"|(\w+\.)*(BCEWithLogitsLoss|MultiLabelSoftMarginLoss))$"
)
_NEGATIVE_LIKELIHOOD = re.compile(r"^torch\.nn\.(functional\.nll_loss|(\w+\.)*NLLLoss)$")
_TAKES = "softmax, sigmoid"


def _find_activation_before_loss(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        name = operation.receiver.name if operation.target == "<loss>()" else operation.target
        given = operation.argument(0, "input")
        if given is None or not given.activation:
            continue
        activation = given.activation
        if _CROSS_ENTROPY.match(name) and activation in ("softmax", "sigmoid"):
            yield _problem(
                operation,
                f"cross entropy applies softmax itself: {activation} before "
                "it flattens the gradients, and the loss cannot come near 0",
            )
        elif _BINARY.match(name):
            yield _problem(
                operation,
                f"the loss applies the sigmoid itself: {activation} before "
                "it leaves predictions between 0.5 and 0.73",
            )
        elif _NEGATIVE_LIKELIHOOD.match(name) and activation in ("softmax", "sigmoid"):
            yield _problem(
                operation,
                f"NLLLoss expects log-probabilities, not {activation}: it "
                "averages probabilities without the logarithm",
            )


def _problem(operation: Operation, message: str) -> Problem:
    return Problem(operation.place, message)


ACTIVATION_BEFORE_LOSS = Rule(
    code="MP205",
    name="activation-before-loss",
    severity=FindingSeverity.ERROR,
    summary="A loss that takes logits is given the output of softmax or sigmoid.",
    explanation="`cross_entropy` and the losses with logits contain their activation. A second one "
    "before it squeezes the logits into the interval from 0 to 1: gradients get small, and with "
    "C classes the loss cannot fall below log(1 + (C − 1)/e), 1.46 for ten. `nll_loss` in turn "
    "wants `log_softmax`, not `softmax`. Models of the project whose forward pass certainly ends "
    "in the activation count. `log_softmax` before `cross_entropy` is superfluous, not wrong, "
    "and is not reported.",
    bad="""\
import torch
import torch.nn.functional as F


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 10)

    def forward(self, x):
        return F.softmax(self.layer(x), dim=-1)


def compute_loss(x, y):
    model = Classifier()
    return F.cross_entropy(model(x), y)
""",
    good="""\
import torch
import torch.nn.functional as F


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 10)

    def forward(self, x):
        return self.layer(x)


def compute_loss(x, y):
    model = Classifier()
    return F.cross_entropy(model(x), y)
""",
    remedy="Pass the output of the last layer; apply softmax or sigmoid where probabilities are "
    "read, outside of the loss.",
    alert="",
    no_alert="The loss falls and gradients are finite; the values depend on the task alone.",
    find=_find_activation_before_loss,
)
