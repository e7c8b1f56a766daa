"""Rules on which parameters an optimizer holds, and on its state in a checkpoint."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace, Value, ValueKind
from mp_agent.lint.rules.events import (
    is_made_in,
    loop_of,
    method_of,
    models_of,
    repeats,
    steps,
    text_of,
    within,
)

_OLD = "the optimizer made before steps the old ones"
_SHARDING = re.compile(r"^torch\.distributed\.(fsdp|_composable)(\.\w+)*\.fully_shard$")
_FSDP = re.compile(r"^torch\.distributed\.fsdp\.(\w+\.)?FullyShardedDataParallel$")
_ADAPTERS = re.compile(r"^peft\.(\w+\.)*get_peft_model$")
_WITH_PARAMETERS = re.compile(
    r"\.(Linear|Bilinear|LazyLinear|(Lazy)?Conv(Transpose)?[123]d|Embedding|EmbeddingBag|LSTM|GRU|RNN"
    r"|LayerNorm|BatchNorm[123]d|MultiheadAttention|Transformer\w*)$"
)


def _find_stale_optimizer(trace: Trace) -> Iterator[Problem]:
    for made in trace.operations:
        models = models_of(made.result)
        if made.result.kind is not ValueKind.OPTIMIZER or not models or not _has_whole(made):
            continue
        for change in trace.operations[made.index + 1 :]:
            reason = _replaces(change, made, models)
            if (
                reason
                and change.compatible(made)
                and change.loops == made.loops
                and not _is_repaired(trace, change, made)
            ):
                yield Problem(change.place, reason)


def _has_whole(made: Operation) -> bool:
    """Return whether an optimizer is given all parameters of its models, not a part of them."""
    given = made.argument(0, "params")
    return given is not None and given.kind is ValueKind.PARAMETERS


def _replaces(change: Operation, made: Operation, models: set[str]) -> str:
    """Return how a call replaces parameters that an optimizer holds; empty if it does not."""
    if change.target == "<model>.set":
        return _new_layer(change, made, models)
    if not change.arguments or change.arguments[0].key not in models:
        return ""
    text = text_of(change)
    if _SHARDING.match(change.target):
        return f"`{text}` replaces the parameters by shards: {_OLD}"
    if _FSDP.match(change.target) and _flattens(change):
        return f"`{text}` replaces the parameters by flat ones: {_OLD}"
    if _ADAPTERS.match(change.target):
        return (
            f"`{text}` freezes the parameters that the optimizer holds, and adds those of the "
            "adapters, which it does not hold"
        )
    return ""


def _new_layer(change: Operation, made: Operation, models: set[str]) -> str:
    layer = change.arguments[0]
    key = change.receiver.key
    inside = any(key == model or key.startswith(f"{model}.") for model in models)
    if not inside or layer.maybe or layer.place is None or not _has_parameters(layer):
        return ""
    if layer.place.module is not made.place.module:
        return ""
    if _position(layer) <= (made.place.node.lineno, made.place.node.col_offset):
        return ""
    node = change.place.node
    return (
        f"`{ast.unparse(node)}` becomes a new layer after the optimizer was made, which does not "
        "hold its parameters: it is never trained"
    )


def _has_parameters(layer: Value) -> bool:
    """Return whether a layer of PyTorch has parameters, or layers in it that have some."""
    assert layer.place is not None
    source = layer.place.module.source
    text = source.excerpt(source.span(layer.place.node))
    return layer.klass is None and any(
        _WITH_PARAMETERS.search(f".{name}") for name in re.findall(r"(\w+)\(", text)
    )


def _position(value: Value) -> tuple[int, int]:
    assert value.place is not None
    return value.place.node.lineno, value.place.node.col_offset


def _flattens(change: Operation) -> bool:
    keeps = change.keywords.get("use_orig_params")
    return keeps is None or (keeps.kind is ValueKind.CONSTANT and keeps.constant is False)


def _is_repaired(trace: Trace, change: Operation, made: Operation) -> bool:
    """Return whether a later optimizer or group has the new parameters, or the layer is frozen."""
    return any(
        one.result.kind is ValueKind.OPTIMIZER
        or method_of(one) in ("add_param_group", "requires_grad_")
        or (one.target == "<unseen>" and made.result.key in {v.key for v in one.arguments})
        for one in trace.operations[change.index + 1 :]
    )


STALE_OPTIMIZER = Rule(
    code="MP208",
    name="stale-optimizer",
    severity=FindingSeverity.ERROR,
    summary="An optimizer is made before the model's parameters are replaced.",
    explanation="An optimizer keeps the parameter objects that it was given. A new head "
    "(`model.fc = Linear(…)`), `fully_shard`, `FullyShardedDataParallel` without "
    "`use_orig_params=True` and `get_peft_model` put other objects into the model: the new ones "
    "get gradients and no steps. `model.to(device)`, `half()`, DDP, `torch.compile` and "
    "`convert_sync_batchnorm` keep the objects and are not reported.",
    bad="""\
import torch
import torchvision

model = torchvision.models.resnet18()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.fc = torch.nn.Linear(512, 10)
""",
    good="""\
import torch
import torchvision

model = torchvision.models.resnet18()
model.fc = torch.nn.Linear(512, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    remedy="Make the optimizer last, or give it the new parameters with `add_param_group`.",
    alert="MpAgentParametersWithoutOptimizer",
    find=_find_stale_optimizer,
)


_COUNTS = re.compile(r"^(start_|global_)?(epoch|step|iteration|iter|it)s?(_num)?$")
_RESUMES = re.compile(
    r"(start|resume|begin|first|last|init)\w*\s*=[^=\n]*\[\s*['\"](start_|global_)?"
    r"(epoch|step|iteration|iter|it)s?['\"]\s*\]"
    r"|^\s*[\w.]+\s*=[^=\n]*\[\s*['\"](epoch|step|iteration|iter)s?['\"]\s*\]\s*\+\s*1\b",
    re.MULTILINE,
)
_OPTIMIZER_STATE = re.compile(r"opt\w*(\[\w+\])?\.(load_)?state_dict")
_STATEFUL = re.compile(r"optim\.(\w+\.)?(Adam\w*|NAdam|RAdam|RMSprop|Adagrad|Adadelta)\(")
_MOMENTUM = re.compile(r"momentum\s*=\s*0?\.\d*[1-9]")


def _find_resume_without_optimizer(trace: Trace) -> Iterator[Problem]:
    for save in trace.of("torch.save"):
        saved = save.argument(0, "obj")
        if saved is None or saved.name != "dict" or not _counts_and_weights(save):
            continue
        text = save.place.module.source.text
        if (
            _RESUMES.search(text)
            and "torch.load(" in text
            and (_STATEFUL.search(text) or _MOMENTUM.search(text))
            and not _OPTIMIZER_STATE.search(text)
        ):
            yield Problem(
                save.place,
                "the checkpoint has the epoch or step that training resumes at, but not the "
                "optimizer's state: its moments start from zero",
            )


def _counts_and_weights(save: Operation) -> bool:
    saved = save.argument(0, "obj")
    assert saved is not None
    keys = [str(key) for key in saved.constant or ()]
    if len(keys) != len(saved.items) or any("opt" in key.lower() for key in keys):
        return False
    weights = any(
        value.kind is ValueKind.UNKNOWN and value.key.endswith(".state_dict()")
        for value in saved.items
    )
    return weights and any(_COUNTS.match(key) for key in keys)


RESUME_WITHOUT_OPTIMIZER = Rule(
    code="MP213",
    name="resume-without-optimizer",
    severity=FindingSeverity.WARNING,
    summary="A checkpoint to resume from lacks the state of the optimizer.",
    explanation="After a restart Adam's moments and SGD's momentum are zero: the first steps are "
    "too large or go elsewhere, and the loss rises for a while after every resumption. Reported "
    "where one module saves weights with an epoch or a step, sets its start from them, trains "
    "with an optimizer that has state, and neither saves nor loads it anywhere.",
    bad="""\
import torch


def train(model, loader, path, epochs):
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    start_epoch = checkpoint["epoch"]
    for epoch in range(start_epoch, epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "epoch": epoch + 1}, path)
""",
    good="""\
import torch


def train(model, loader, path, epochs):
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start_epoch = checkpoint["epoch"]
    for epoch in range(start_epoch, epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1}, path)
""",
    remedy="Save `optimizer.state_dict()` (and those of the schedule and the scaler), and load it.",
    alert="",
    no_alert="The loss rises as after many restarts; the probe does not know what a checkpoint "
    "holds.",
    find=_find_resume_without_optimizer,
)


_WITH_BETAS = re.compile(r"^torch\.optim\.(\w+\.)*(Adam|AdamW|Adamax|NAdam|RAdam)$")


def _find_swapped_betas(trace: Trace) -> Iterator[Problem]:
    for made in trace.operations:
        given = made.keywords.get("betas")
        if given is None and _WITH_BETAS.match(made.target):
            given = made.argument(2)
        if made.result.kind is not ValueKind.OPTIMIZER or given is None:
            continue
        numbers = [each.constant for each in given.items if each.kind is ValueKind.CONSTANT]
        if len(numbers) != 2 or len(given.items) != 2 or given.maybe:
            continue
        first, second = numbers
        if not (isinstance(first, float) and isinstance(second, float)):
            continue
        # Betas next to one another, as (0.96, 0.95), are meant: the probe leaves them out as well.
        if first > second and 1.0 - second >= 1.5 * (1.0 - first):
            yield Problem(
                made.place,
                f"betas=({first:g}, {second:g}): the first is of the gradient's average, and less "
                "than the second, which is of its square's",
            )


SWAPPED_BETAS = Rule(
    code="MP215",
    name="swapped-betas",
    severity=FindingSeverity.WARNING,
    summary="Adam's betas are in the wrong order.",
    explanation="The first beta is that of the average of gradients, 0.9 by default, the second "
    "that of the average of their squares, 0.999. In the other order the direction is an average "
    "of a thousand steps, divided by the size of the last ten: steps are large where gradients are "
    "small, and go where the loss was to be lowered long ago.",
    bad="""\
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.999, 0.9))
""",
    good="""\
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999))
""",
    remedy="Give the smaller beta first.",
    alert="MpAgentBetasSwapped",
    find=_find_swapped_betas,
)


_KEEPS_STATE = re.compile(r"^torch\.optim\.(\w+\.)*(?!SGD$|LBFGS$)[A-Z]\w+$")
_SGD = re.compile(r"^torch\.optim\.(\w+\.)*SGD$")


def _find_remade_optimizer(trace: Trace) -> Iterator[Problem]:
    for made in trace.operations:
        models = models_of(made.result)
        if made.result.kind is not ValueKind.OPTIMIZER or not models or not _keeps_state(made):
            continue
        loop = loop_of(trace, made.loops[-1]) if made.loops else None
        if loop is None or not repeats(trace, made, loop) or _restores(trace, loop):
            continue
        if any(is_made_in(trace, Value(key=model), loop) for model in models):
            continue
        own = [step for step, optimizer in steps(trace) if optimizer.key == made.result.key]
        if own and all(
            step.loops == made.loops and set(made.path) <= set(step.path) for step in own
        ):
            yield Problem(
                made.place,
                f"`{text_of(made)}` makes a new optimizer for each step: what the last one kept of "
                "the gradients before is lost",
            )


def _keeps_state(made: Operation) -> bool:
    if _SGD.match(made.target):
        return made.argument(2, "momentum") is not None
    return _KEEPS_STATE.match(made.target) is not None


def _restores(trace: Trace, loop: Operation) -> bool:
    """Return whether each pass begins with weights of its own, as adaptation to one sample does."""
    return any(method_of(one) == "load_state_dict" for one in within(trace, loop.loops[-1]))


REMADE_OPTIMIZER = Rule(
    code="MP217",
    name="remade-optimizer",
    severity=FindingSeverity.WARNING,
    summary="An optimizer is made again for each step.",
    explanation="Momentum and Adam's averages are state of the optimizer. One that is made within "
    "the loop over batches begins without any at every step: there is no momentum, and Adam moves "
    "each weight by the learning rate, whatever the size of its gradient. The loss falls all the "
    "same, only worse. Reported where the model is made before the loop, and each step of the "
    "optimizer is in the pass that makes it; not for SGD without momentum, which keeps nothing, "
    "nor in loops that load weights.",
    bad="""\
import torch


def train(model, loader, lr):
    for inputs, targets in loader:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch


def train(model, loader, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    remedy="Make the optimizer once, before the loop; set another rate in its `param_groups`.",
    alert="MpAgentOptimizerStateLost",
    find=_find_remade_optimizer,
)
