"""Rules on policies that are trained on what they generate."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeGuard

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.externals import asked_dtypes
from mp_agent.lint.interpret.modules import ModuleInfo
from mp_agent.lint.interpret.values import BF16, Operation, Place, Trace, Value, ValueKind

_DRIFT = "trainer and sampler drift apart by its rounding"


def _find_reinforcement_in_bf16(trace: Trace) -> Iterator[Problem]:
    configured = [one for one in trace.operations if _SAMPLING_CONFIG.match(one.target)]
    for operation in configured:
        if _is_true(operation.keywords.get("bf16")):
            name = operation.target.rpartition(".")[2]
            yield Problem(operation.place, f"{name} trains in BF16: {_DRIFT}")
    if trace.name.endswith("<module>"):
        for node in _options(trace.module):
            place = Place(trace.module, node)
            yield Problem(place, f"the policy's format is given as BF16: {_DRIFT}")
    if configured or any(map(_has_policy_loop, trace.modules)):
        in_fp16 = any(_is_true(one.keywords.get("fp16")) for one in configured)
        found = (one for one in trace.operations if _trains_in_bf16(one))
        for operation in () if in_fp16 else found:
            place = operation.receiver.place or operation.place
            yield Problem(place, f"a policy trains in BF16 on what it generates: {_DRIFT}")
            break


_SAMPLING_CONFIG = re.compile(r"^trl\.(\w+\.)*(GRPO|RLOO|PPO|PPOv2|OnlineDPO|NashMD|XPO)Config$")
"""Trainers of TRL that train on what a sampler generates; DPO and its like get fixed pairs."""


def _is_true(value: Value | None) -> bool:
    return value is not None and value.kind is ValueKind.CONSTANT and value.constant is True


_WRAPPERS = {
    "accelerate.Accelerator": "mixed_precision",
    "lightning.Fabric": "precision",
    "lightning.fabric.Fabric": "precision",
    "lightning_fabric.Fabric": "precision",
}
"""Classes that train in a format that an argument names, and that argument."""
_FSDP_FORMAT = re.compile(
    r"^torch\.distributed\.(fsdp|_composable)(\.\w+)*\.MixedPrecision(Policy)?$"
)
_UNTRAINED = re.compile(
    r"(?<![a-z])(ref|reference|reward|rm|judge|teacher|critic|value|base|old|verifier|draft|embed\w*"
    r"|gen|generator|sampler|infer\w*|rollout)(?![a-z])"
)
"""Names of models that are not the policy, or only a copy that samples."""


def _trains_in_bf16(operation: Operation) -> bool:
    """Return whether an operation gives what is trained the format BF16."""
    target, keywords = operation.target, operation.keywords
    if target == "<autocast>.enter":
        return operation.receiver.dtypes == {BF16} and not operation.no_grad
    if target in _WRAPPERS:
        named = keywords.get(_WRAPPERS[target])
        return named is not None and str(named.constant).startswith("bf16")
    if _FSDP_FORMAT.match(target):
        dtype = keywords.get("param_dtype")
        return dtype is not None and dtype.dtypes == {BF16}
    config = operation.argument(-1, "config", "config_params")
    engine = target == "deepspeed.initialize" and _is_true(_item(_item(config, "bf16"), "enabled"))
    loaded = target.endswith(".from_pretrained") and asked_dtypes(keywords) == {BF16}
    cast = target in ("<model>.to", "<model>.bfloat16") and operation.result.dtypes == {BF16}
    return (engine or loaded or cast) and not _UNTRAINED.search(_assigned(operation.place))


def _item(value: Value | None, key: str) -> Value | None:
    """Return what a dictionary has under a key."""
    if value is None or value.name != "dict":
        return None
    return dict(zip(value.constant or (), value.items, strict=False)).get(key)


def _assigned(place: Place) -> str:
    """Return the last name of what an expression is assigned to, or called on; empty for none."""
    node = place.node
    for statement in ast.walk(place.module.tree):
        if isinstance(statement, ast.Assign) and node in ast.walk(statement.value):
            return ast.unparse(statement.targets[0]).rpartition(".")[2].lower()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return ast.unparse(node.func.value).rpartition(".")[2].lower()
    return ""


_OBJECTIVE = re.compile(r"(^|_)advantages?($|_)")
_PROBABILITY = re.compile(r"log_?p(s|rob\w*)?($|_)|logprob")
_TOKENS = re.compile(r"^(tokenizer|input_ids|prompts?|completions?|responses?)($|_)")


@lru_cache(maxsize=1000)
def _has_policy_loop(module: ModuleInfo) -> bool:
    """Return whether a module weighs log-probabilities of generated tokens by advantages.

    And trains, all by its names; where actions are no tokens there is no sampler and no tokenizer.
    """
    names = _names(module)
    return (
        "backward" in names
        and not names.isdisjoint(("generate", "vllm", "sglang"))
        and all(
            any(pattern.search(name) for name in names)
            for pattern in (_OBJECTIVE, _PROBABILITY, _TOKENS)
        )
    )


def _names(module: ModuleInfo) -> frozenset[str]:
    """Return the names in the code of a module, its imports and its texts of one word included."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
                found.update(name.split("."))
            case ast.Constant(value=str(name)) if name.isidentifier():
                found.add(name)
    return frozenset(name.lower() for name in found)


_TRAINER = re.compile(r"\bverl[./]trainer[./]main_ppo|\bopenrlhf[./]cli[./]train_(ppo|rloo|grpo)")
_OTHER_TRAINER = re.compile(r"\btrain_(sft|dpo|kto|rm|prm|kd)\b|sft_trainer|main_(eval|generation)")
_BF16_OPTION = re.compile(
    r"(^|\s)--([\w.]*\.)?(bf16(\s|$)|param_dtype[ =]bf16\b)"
    r"|\bactor_rollout_ref\.actor\.[\w.]*dtype[ =](bf16|bfloat16)\b"
)
_ACTOR_FORMAT = re.compile(r"(^|\.)actor\.(fsdp_config|megatron)\.[\w.]*dtype$")
_FORMATS = ("bf16", "bfloat16")
_FORMAT_OPTION = re.compile(r"--[\w.]*(dtype|precision|bf16)\b")
_POLICY_OPTIONS = re.compile(r"--[\w.]*advantage"), re.compile(r"--[\w.]*(vllm|sglang|rollout)")


def _options(module: ModuleInfo) -> Iterator[ast.expr]:
    """Yield what gives verl or OpenRLHF the format BF16, or an own command line by default."""
    text = module.source.text
    if all(pattern.search(text) for pattern in _POLICY_OPTIONS):
        yield from (node for node in ast.walk(module.tree) if _defaults_to_bf16(node))
    if _TRAINER.search(text) or "actor_rollout_ref" in text:
        yield from _outermost(module.tree)


def _defaults_to_bf16(node: ast.AST) -> TypeGuard[ast.Call]:
    if not _is_argument(node) or not _FORMAT_OPTION.search(_text(node)):
        return False
    default = {one.arg: one.value for one in node.keywords}.get("default")
    return isinstance(default, ast.Constant) and default.value in (True, *_FORMATS)


def _is_argument(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "add_argument"


def _outermost(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the largest expressions that give a trainer the format BF16."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # the text of a documentation
        command = _text(child)
        if _is_argument(child) or _OTHER_TRAINER.search(command):
            continue
        if isinstance(child, ast.expr) and (_BF16_OPTION.search(command) or _sets_format(child)):
            yield child
        else:
            yield from _outermost(child)


def _text(node: ast.AST) -> str:
    """Return the words of a command: of a text, of a list, or of the arguments of a call."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or "{}" for part in parts)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Call(args=parts):
            return " ".join(map(_text, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{_text(left)} {_text(right)}"
    return ""


def _sets_format(node: ast.expr) -> bool:
    """Return whether a dictionary in a configuration of verl has BF16 for the actor."""
    return isinstance(node, ast.Dict) and any(
        _ACTOR_FORMAT.search(path) and value in _FORMATS for path, value in _leaves(node)
    )


def _leaves(node: ast.Dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in zip(node.keys, node.values, strict=True):
        path = f"{prefix}{str(key.value) if isinstance(key, ast.Constant) else '?'}"
        if isinstance(value, ast.Dict):
            yield from _leaves(value, f"{path}.")
        elif isinstance(value, ast.Constant):
            yield path, value.value


REINFORCEMENT_IN_BF16 = Rule(
    code="MP120",
    name="reinforcement-in-bf16",
    severity=FindingSeverity.WARNING,
    summary="Reinforcement learning on generated sequences is configured in BF16.",
    explanation="The sampler and the trainer compute the same log-probabilities by different "
    "kernels. BF16 keeps 8 significant bits, FP16 11: the rounding of both sides adds up over the "
    "tokens of a sequence, and the weights of importance sampling with it. FP16 was reported to "
    "make the mismatch 24 times smaller (arXiv 2510.26788). Reported of configurations of TRL "
    "whose trainer samples from the policy (GRPO, RLOO, PPO, online DPO), of options for verl and "
    "OpenRLHF that a Python file passes on, of command lines with advantages and a sampler whose "
    "format is BF16 by default, and of loops written by hand: a module with `backward`, "
    "`generate`, vLLM or SGLang, log-probabilities and advantages that trains a model under BF16 "
    "autocast, or with weights in BF16. What a configuration file or a shell script says is not "
    "seen.",
    bad="""\
from trl import GRPOConfig, GRPOTrainer


def train(model, data, reward):
    config = GRPOConfig(output_dir="out", bf16=True, use_vllm=True)
    GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data).train()
""",
    good="""\
from trl import GRPOConfig, GRPOTrainer


def train(model, data, reward):
    config = GRPOConfig(output_dir="out", fp16=True, use_vllm=True)
    GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data).train()
""",
    remedy="Train and sample in FP16: `fp16=True` in TRL, `dtype=float16` of actor and rollout in "
    "verl, `--param_dtype fp16` in OpenRLHF, FP16 autocast with a GradScaler and FP32 weights in a "
    "loop of your own. Watch `mp_agent_logprobs_k3`; where the model overflows in FP16, keep BF16 "
    "and correct by the importance weights.",
    alert="MpAgentTrainInferenceMismatch",
    find=_find_reinforcement_in_bf16,
)
