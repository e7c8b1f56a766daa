"""Rules on arithmetic that loses digits in 16 bits, and on what a loss is given."""

import re
from collections.abc import Iterator

import numpy as np

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.externals import asked_dtypes
from mp_agent.lint.interpret.values import (
    FP16,
    FP64,
    SIXTEEN_BITS,
    Operation,
    Trace,
    Value,
    ValueKind,
)
from mp_agent.lint.rules.events import parameters_of


def _find_cancelling_variance(trace: Trace) -> Iterator[Problem]:
    for operation in trace.of("<subtract>"):
        if "torch" not in operation.place.module.identifiers:
            continue  # NumPy's double precision
        left, right = operation.receiver.form, operation.arguments[0].form
        if left is None or right is None or left[1] != right[1]:
            continue
        wide = FP64 in operation.receiver.dtypes | operation.arguments[0].dtypes
        if (left[0], right[0]) == ("mean of square", "square of mean") and not wide:
            yield Problem(
                operation.place,
                "variance as E[x²] − E[x]² cancels: with a mean far from zero the result is noise, "
                "and may be negative",
            )


CANCELLING_VARIANCE = Rule(
    code="MP113",
    name="cancelling-variance",
    severity=FindingSeverity.WARNING,
    summary="Variance is computed as E[x²] − E[x]².",
    explanation="Both terms are about E[x]²; their difference keeps only the digits in which they "
    "differ. With 11 bits (FP16) or 8 bits (BF16) nothing is left once the mean is 32 (or 11) "
    "standard deviations from zero; FP32 reaches that at about 3000. A negative result becomes "
    "NaN in the square root. Double precision is not reported.",
    bad="""\
import torch


def variance(x: torch.Tensor) -> torch.Tensor:
    return (x**2).mean(-1) - x.mean(-1) ** 2
""",
    good="""\
import torch


def variance(x: torch.Tensor) -> torch.Tensor:
    return x.float().var(-1, correction=0)
""",
    remedy="Use `x.float().var(correction=0)`, or average `(x - x.mean()) ** 2`; over several "
    "parts, merge by Welford's (Chan's) formula.",
    alert="MpAgentLossNonFinite",
    find=_find_cancelling_variance,
)


_REDUCTION_NAMES = r"(sum|mean|norm|var|std|cumsum|prod|cumprod|nansum|nanmean|dot|vdot|inner)"
_REDUCTION_TARGET = re.compile(
    rf"^(?:torch\.{_REDUCTION_NAMES}|<tensor>\.{_REDUCTION_NAMES}|torch\.linalg\.(?:vector_norm|norm|matrix_norm)"
    r"|torch\.tensordot|torch\.nn\.functional\.bilinear)$"
)
_FP32_UNDER_AUTOCAST = re.compile(r"(sum|norm|prod)$")


def _find_low_precision_reduction(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        if _REDUCTION_TARGET.match(operation.target) is None:
            continue
        asked = asked_dtypes(operation.keywords)
        dtypes = asked if "dtype" in operation.keywords else _operand_of_reduction(operation).dtypes
        if not dtypes or not dtypes <= SIXTEEN_BITS:
            continue
        widened = operation.autocast is not None and not asked
        if widened and _FP32_UNDER_AUTOCAST.search(operation.target):
            continue
        if _operand_of_reduction(operation).kind is ValueKind.ARRAY:
            continue
        if trace.name.rpartition(":")[0].endswith(".backward") and dtypes == {"bfloat16"}:
            # What an autograd function returns has the dtype of its input, whatever it adds up in.
            continue
        yield Problem(
            operation.place,
            f"a reduction in {'/'.join(sorted(dtypes))}: the result overflows, or drops what is "
            "small against it",
        )


def _operand_of_reduction(operation: Operation) -> Value:
    if operation.target.startswith("<"):
        return operation.receiver
    return operation.argument(0, "input") or operation.receiver


LOW_PRECISION_REDUCTION = Rule(
    code="MP114",
    name="low-precision-reduction",
    severity=FindingSeverity.WARNING,
    summary="A sum, mean, norm, variance or inner product has 16 bits.",
    explanation="A sum of 65 505 ones is Inf in FP16. In BF16 a sum of 256 ones and one more is "
    "256: its spacing is 2 from there on. Kernels add up in FP32, but the result is rounded to "
    "the dtype asked for, and partial results on the way across ranks and blocks are, too. "
    "Autocast runs sums, products and norms in FP32; those are not reported.",
    bad="""\
import torch


def total(x: torch.Tensor) -> torch.Tensor:
    return x.half().sum()
""",
    good="""\
import torch


def total(x: torch.Tensor) -> torch.Tensor:
    return x.half().sum(dtype=torch.float32)
""",
    remedy="Reduce in FP32: `x.float().sum()` or `x.sum(dtype=torch.float32)`. Where a long sum "
    "must stay in 16 bits, sum it in chunks and those in FP32: "
    "`sum(part.sum().float() for part in x.split(256))`.",
    alert="MpAgentLossNonFinite",
    find=_find_low_precision_reduction,
)


_FUNCTION_NAMES = (
    r"(?:exp|exp2|expm1|log|log2|log10|log1p|pow|softmax|log_softmax|logsumexp|cosh|sinh)"
)
_FUNCTION_TARGET = re.compile(
    rf"^(?:torch\.(?:special\.|nn\.functional\.)?({_FUNCTION_NAMES})|<tensor>\.({_FUNCTION_NAMES}))$"
)
_MODULE = re.compile(r"^torch\.nn\.(?:\w+\.)*(?:Log)?Softmax$")


def _find_low_precision_function(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        name = _function(operation)
        if name is None:
            continue
        asked = asked_dtypes(operation.keywords)
        operand = _operand_of_function(operation)
        dtypes = asked if "dtype" in operation.keywords else operand.dtypes
        if operation.autocast is not None and not asked:
            continue
        if dtypes and dtypes <= SIXTEEN_BITS and operand.kind is not ValueKind.ARRAY:
            yield Problem(
                operation.place,
                f"{name} in {'/'.join(sorted(dtypes))}: its range or its digits do not suffice",
            )


def _function(operation: Operation) -> str | None:
    if operation.target == "<model>()" and _MODULE.match(operation.receiver.name):
        return "softmax"
    match = _FUNCTION_TARGET.match(operation.target)
    return None if match is None else match.group(1) or match.group(2)


def _operand_of_function(operation: Operation) -> Value:
    if operation.target.startswith("<tensor>"):
        return operation.receiver
    return operation.argument(0, "input") or operation.receiver


LOW_PRECISION_FUNCTION = Rule(
    code="MP115",
    name="low-precision-function",
    severity=FindingSeverity.WARNING,
    summary="exp, log, pow or softmax is computed in 16 bits.",
    explanation="`exp(11.1)` is Inf in FP16, `log` of what was rounded to zero is −Inf, `pow` "
    "leaves the range quickly, and probabilities below 6e-8 become zero. BF16 keeps the range but "
    "only two or three digits. Autocast runs all of them in FP32; those are not reported.",
    bad="""\
import torch


def attention(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.half(), dim=-1)
""",
    good="""\
import torch


def attention(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.half(), dim=-1, dtype=torch.float32)
""",
    remedy="Compute in FP32 (`.float()`, `dtype=torch.float32`) and cast the result, or leave the "
    "choice to autocast.",
    alert="MpAgentLossNonFinite",
    find=_find_low_precision_function,
)


_OPTIMIZER = re.compile(r"\.(Adam|AdamW|NAdam|RAdam|Adamax|RMSprop)$")
_DEFAULT = 1e-8


def _find_adam_epsilon(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        match = _OPTIMIZER.search(operation.target)
        if match is None or operation.result.kind is not ValueKind.OPTIMIZER:
            continue
        epsilon = _epsilon(operation)
        if epsilon is None or float(np.float16(epsilon)) != 0.0:
            continue
        groups = list(parameters_of(operation.argument(0, "params")))
        if groups and all(group.dtypes == {FP16} for group in groups):
            yield Problem(
                operation.place,
                f"eps={epsilon:g} is 0 in the FP16 state of {match.group(1)}: a gradient of zero "
                "divides by zero, and the weight becomes NaN",
            )


def _epsilon(operation: Operation) -> float | None:
    value = operation.argument(3, "eps")
    if value is None:
        return _DEFAULT
    number = value.constant
    return float(number) if value.kind is ValueKind.CONSTANT and _is_number(number) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


ADAM_EPSILON = Rule(
    code="MP116",
    name="adam-epsilon",
    severity=FindingSeverity.ERROR,
    summary="Adam's epsilon is zero in its 16-bit state.",
    explanation="The smallest FP16 number is 6e-8, so the default of 1e-8 is rounded to 0 when "
    "the state has the FP16 of the parameters. Where the second moment is 0 too, the update is "
    "0/0. BF16 represents 1e-8.",
    bad="""\
import torch

model = torch.nn.Linear(64, 64, dtype=torch.float16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
""",
    good="""\
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
""",
    remedy="Keep FP32 weights and state; if both must be FP16, use an epsilon of 1e-4 or more.",
    alert="MpAgentLossNonFinite",
    find=_find_adam_epsilon,
)


_CROSS_ENTROPY = re.compile(r"^torch\.nn\.(functional\.cross_entropy|(\w+\.)*CrossEntropyLoss)$")
_BINARY = re.compile(
    r"^torch\.nn\.(functional\.(binary_cross_entropy_with_logits|multilabel_soft_margin_loss)"
    r"|(\w+\.)*(BCEWithLogitsLoss|MultiLabelSoftMarginLoss))$"
)
_NEGATIVE_LIKELIHOOD = re.compile(r"^torch\.nn\.(functional\.nll_loss|(\w+\.)*NLLLoss)$")


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


_RUNNING_STATISTICS = re.compile(r"^torch\.nn\.(\w+\.)*(BatchNorm[123]d|SyncBatchNorm)$")
_OF_LAST_BATCH = 0.9


def _find_batch_norm_momentum(trace: Trace) -> Iterator[Problem]:
    for made in trace.operations:
        if not _RUNNING_STATISTICS.match(made.target):
            continue
        given, tracked = made.argument(2, "momentum"), made.argument(4, "track_running_stats")
        if given is None or given.kind is not ValueKind.CONSTANT or given.maybe:
            continue
        if tracked is not None and (tracked.kind is not ValueKind.CONSTANT or not tracked.constant):
            continue
        # 1.0 is given on purpose, to take statistics of one batch.
        if isinstance(given.constant, float) and _OF_LAST_BATCH <= given.constant < 1.0:
            yield _problem(
                made,
                f"momentum={given.constant:g} is the weight of the newest batch: running "
                "statistics are those of the last batch",
            )


BATCH_NORM_MOMENTUM = Rule(
    code="MP216",
    name="batch-norm-momentum",
    severity=FindingSeverity.WARNING,
    summary="Batch normalization is given TensorFlow's momentum.",
    explanation="In PyTorch `momentum` is the weight of the newest batch in the running "
    "statistics, 0.1 by default; in TensorFlow and Keras it is that of the past, 0.99. With 0.99, "
    "evaluation normalizes by the last training batch alone.",
    bad="""\
from torch import nn

block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.99))
""",
    good="""\
from torch import nn

block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.01))
""",
    remedy="Pass 1 minus TensorFlow's number.",
    alert="MpAgentBatchNormMomentum",
    find=_find_batch_norm_momentum,
)
