"""Rules on what a checkpoint holds."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace, ValueKind

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
