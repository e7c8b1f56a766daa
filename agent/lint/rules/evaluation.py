"""Rules on the mode in which a model is evaluated."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace, Value
from mp_agent.lint.rules.events import backwards, common_loops, loop_of, method_of
from mp_agent.lint.rules.syntax import classes_used, code_without_comments

_SWITCHES = re.compile(
    r"\.eval\b|\.train\(\s*[^)\s]|set_train|(eval\w*|train\w*)_mode|\btraining\s*=(?!\s*self\.training)|update_bn|track_running_stats"
    r"|lightning|fastai|\bignite\b|catalyst|pseudo|monte_?carlo|mc_?dropout|bayes"
    r"|recalibrat|precise_bn",
    re.IGNORECASE,
)
"""What may switch modes, or evaluates in training mode on purpose."""
_MODES = re.compile(
    r"Dropout\w*\((?!(p=)?0(\.0*)?[,)])|dropout\(|BatchNorm\w*\(|DropPath\(|drop_path\(",
    re.IGNORECASE,
)
_WITH_MODES = re.compile(
    r"^torchvision\.models\.(\w+\.)*(resnet|resnext|wide_resnet|vgg|alexnet|densenet|mobilenet"
    r"|efficientnet|shufflenet|googlenet|inception|mnasnet|regnet|squeezenet)\w*$"
)
_LOADER = re.compile(r"load|(\b|_)dl(\b|_)|batch|iter\b|data", re.IGNORECASE)
_HARMLESS = re.compile(
    r"^(torch|torchsummary|torchinfo|torchvision|thop|wandb|copy|tqdm|print|len|isinstance|hasattr"
    r"|getattr|sum|id|type|repr|str|next|list)(\.|$)"
    r"|^<tensor>\.(add_graph|watch|append|info|debug|write|log)$"
)


def _find_evaluated_in_training_mode(trace: Trace) -> Iterator[Problem]:
    passes = list(backwards(trace))
    calls = [one for one in trace.of("<model>()") if one.loops]
    for call in calls:
        loop = loop_of(trace, call.loops[-1])
        if (
            call.no_grad
            and loop is not None
            and (_is_evaluation(loop, call, passes) or _takes_test_data(call))
            and not _is_discarded(call, loop)
            and _has_modes(call.receiver)
            and any(_trains(one, call.receiver, passes) for one in calls)
            and not _may_switch(trace, call.receiver)
        ):
            yield Problem(
                call.place,
                "the model is evaluated in training mode, which nothing here ever leaves: with "
                "dropout, or with the statistics of each batch, which also enter its running ones",
            )


_TEST = re.compile(r"^(\w+_)?(test|val|valid|validation|dev)(_\w+)?$|^\w*(Test|Val)$")


def _takes_test_data(call: Operation) -> bool:
    """Return whether all that a model is given is named as data that it is not trained on."""
    node = call.place.node
    return (
        isinstance(node, ast.Call)
        and bool(node.args)
        and all(isinstance(one, ast.Name) and _TEST.match(one.id) for one in node.args)
        and not node.keywords
    )


def _is_evaluation(loop: Operation, call: Operation, passes: list[Operation]) -> bool:
    """Return whether a loop goes over batches that it does not train on."""
    node = loop.place.node
    if not isinstance(node, ast.For) or any(call.loops[-1] in one.loops for one in passes):
        return False
    over = ast.unparse(node.iter)
    return not over.startswith("range(") and _LOADER.search(over) is not None


def _is_discarded(call: Operation, loop: Operation) -> bool:
    """Return whether the output is not used: such passes estimate statistics."""
    return call.place.module is loop.place.module and any(
        isinstance(one, ast.Expr) and one.value is call.place.node
        for one in ast.walk(loop.place.node)
    )


def _trains(call: Operation, model: Value, passes: list[Operation]) -> bool:
    return (
        call.receiver.key == model.key
        and not call.no_grad
        and any(
            one.index > call.index and common_loops(one, call) == call.loops == one.loops
            for one in passes
        )
    )


def _has_modes(model: Value) -> bool:
    """Return whether a model certainly has dropout or batch normalization, and begins to train."""
    if model.klass is not None:
        return any(_MODES.search(ast.unparse(one)) for one in classes_used(model.klass))
    if model.place is None:
        return False
    if model.name.startswith("torch.nn."):
        return _MODES.search(ast.unparse(model.place.node)) is not None
    return _WITH_MODES.match(model.name) is not None


def _may_switch(trace: Trace, model: Value) -> bool:
    """Return whether code that is not seen gets the model, or words of the code switch modes."""
    if any(_SWITCHES.search(code_without_comments(module)) for module in trace.modules):
        return True
    for one in trace.operations:
        given = (*one.arguments, *one.keywords.values())
        if one.target == "<unseen>" and one.receiver.key == model.key:
            return True
        if not any(value.key == model.key for value in given):
            continue
        if one.target != "<new>" and _HARMLESS.match(one.target) is None:
            return True
    return any(
        method_of(one) in ("eval", "apply") and one.receiver.key == model.key
        for one in trace.operations
    )


EVALUATED_IN_TRAINING_MODE = Rule(
    code="MP220",
    name="evaluated-in-training-mode",
    severity=FindingSeverity.WARNING,
    summary="A model with dropout or batch normalization is evaluated in training mode.",
    explanation="Under `no_grad` a model is still in the mode that it was put in. In training mode "
    "dropout leaves out units, so that metrics are worse than the model is and differ from run to "
    "run; batch normalization uses the statistics of the batch, so that a prediction depends on "
    "what else is in it, and takes the validation data into its running statistics. Reported "
    "where the layers are seen, the same model is trained, its outputs over a loader, or for data "
    "that are named as a test's, are used, and "
    "no code of the script switches any mode, nor is the model given to code that is not seen.",
    bad="""\
import torch


def fit(loader, validation_loader, epochs):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for x in validation_loader:
                print(model(x).mean())
""",
    good="""\
import torch


def fit(loader, validation_loader, epochs):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        model.train()
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x in validation_loader:
                print(model(x).mean())
""",
    remedy="Call `model.eval()` before the evaluation, and `model.train()` at the start of each "
    "epoch.",
    alert="MpAgentEvaluatedInTrainingMode",
    find=_find_evaluated_in_training_mode,
)
