"""Rules on the targets of language models: those that are the inputs, those that are padding."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Place, Trace, Value
from mp_agent.lint.rules.events import method_of
from mp_agent.lint.rules.syntax import classes_used, code_without_comments

_CROSS_ENTROPY = re.compile(r"^torch\.nn\.(functional\.cross_entropy|(\w+\.)*CrossEntropyLoss)$")
_SHAPING = frozenset("view reshape flatten contiguous to cuda long transpose permute type".split())
"""Methods that keep which token is where, or move outputs and targets alike."""
_CAUSAL = re.compile(r"\b(tril|triu)\b|causal|subsequent_mask", re.IGNORECASE)
_SHIFTS = re.compile(
    r"\[[^\]\n]*\b1\s*:|\[[^\]\n]*:\s*-\s*1|\broll\(|shift|narrow\(|mask_token|masked|autoencod"
    r"|recon|diffusion|denois",
    re.IGNORECASE,
)


def _find_targets_are_inputs(trace: Trace) -> Iterator[Problem]:
    for loss in trace.operations:
        name = loss.receiver.name if loss.target == "<loss>()" else loss.target
        output, target = loss.argument(0, "input"), loss.argument(1, "target")
        if _CROSS_ENTROPY.match(name) is None or output is None or target is None:
            continue
        output, target = _origin(trace, loss, output), _origin(trace, loss, target)
        for call in trace.of("<model>()"):
            if (
                call.index < loss.index
                and _is_output(output, call)
                and call.arguments
                and "each:" in target.key
                and _origin(trace, call, call.arguments[0]).key == target.key
                and _is_causal(call.receiver)
                and not any(_SHIFTS.search(code_without_comments(one)) for one in trace.modules)
            ):
                yield Problem(
                    loss.place,
                    "the targets are the model's inputs, not shifted: it learns to repeat the "
                    "token that it is given, and not to predict the next one",
                )


def _origin(trace: Trace, before: Operation, value: Value) -> Value:
    """Return what a tensor was before its shape, its device or its type changed."""
    for one in reversed(trace.operations[: before.index]):
        if one.result.key == value.key and one.receiver.key and method_of(one) in _SHAPING:
            value = one.receiver
    return value


def _is_output(value: Value, call: Operation) -> bool:
    """Return whether a value is what a model returns, or its logits."""
    key = call.result.key
    return value.key == key or value.key in (f"{key}.logits", f"{key}[0]")


def _is_causal(model: Value) -> bool:
    """Return whether a model of the project certainly looks at no later token."""
    return model.klass is not None and any(
        _CAUSAL.search(ast.unparse(one)) for one in classes_used(model.klass)
    )


TARGETS_ARE_INPUTS = Rule(
    code="MP223",
    name="targets-are-inputs",
    severity=FindingSeverity.ERROR,
    summary="A causal language model is trained on its inputs as targets, not shifted by one.",
    explanation="At each position a causal model sees the tokens up to that one, and is to predict "
    "the next. With the same tokens as targets it has only to copy the one that it sees: the loss "
    "falls to almost 0 within a few hundred steps, and what it generates repeats its input. "
    "Reported where the tokens that the model is called with come from a loop over data and are "
    "the targets of the cross-entropy of its output, its class has a causal mask, and no code of "
    "the script shifts, masks or rolls anything. Models of transformers shift `labels` "
    "by themselves.",
    bad="""\
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layer(self.embedding(x), mask))


def train(loader):
    model = Decoder(1000, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens in loader:
        loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layer(self.embedding(x), mask))


def train(loader):
    model = Decoder(1000, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens in loader:
        output = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(output.transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    remedy="Call the model with `tokens[:, :-1]`, and compare its output with `tokens[:, 1:]`.",
    alert="MpAgentTargetsMisaligned",
    find=_find_targets_are_inputs,
)


_CAUSAL_MODEL = re.compile(r"\b\w+ForCausalLM\b|\b\w+LMHeadModel\b")
_TRAINS = re.compile(r"\.backward\(|\bTrainer\(")
_LEAVES_OUT = re.compile(
    r"-\s*100\b|ignore_index|DataCollatorFor|masked_fill|\bwhere\(|SFT|label_pad|loss_mask"
    r"|pad_token_id\s*\]|==\s*[\w.]*pad|!=\s*[\w.]*pad|group_texts|packing|MaskedLM|Seq2SeqLM"
    r"|compute_loss|Trainer\):|CrossEntropyLoss|cross_entropy",
)
"""What leaves padding out of the loss, pads nothing, or is another task."""
_COLLATES = re.compile(r"\b(data_collator|collate_fn)\s*=\s*(\w+)")
"""What makes batches may set labels, too; where it is not seen, nothing is certain."""


def _find_padding_counts(trace: Trace) -> Iterator[Problem]:
    if trace.name != "<module>":
        return
    code = code_without_comments(trace.module)
    if not (_CAUSAL_MODEL.search(code) and _TRAINS.search(code)) or _LEAVES_OUT.search(code):
        return
    defined = {one.node.name for one in trace.module.classes} | {*trace.module.functions_by_name}
    if {name for _, name in _COLLATES.findall(code)} - defined - {"default_data_collator", "None"}:
        return
    nodes = list(ast.walk(trace.module.tree))
    if any(isinstance(node, ast.Call) and _pads(node) for node in nodes):
        for node in nodes:
            for place in _copied_labels(node):
                yield Problem(
                    Place(trace.module, place),
                    "labels are a copy of padded input_ids: padding tokens are targets as any "
                    "others, and the loss is the mean over them as well",
                )


def _pads(call: ast.Call) -> bool:
    """Return whether a call of a tokenizer certainly pads."""
    padding = next((one.value for one in call.keywords if one.arg == "padding"), None)
    if not isinstance(padding, ast.Constant) or "token" not in ast.unparse(call.func).lower():
        return False
    if padding.value == "max_length":
        return True
    several = bool(call.args) and isinstance(call.args[0], ast.Subscript | ast.ListComp)
    return several and padding.value in (True, "longest")


def _copied_labels(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.Assign(
            targets=[ast.Subscript(slice=ast.Constant(value="labels"))], value=value
        ) if _is_input_ids(value):
            yield node
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if ast.unparse(key or value) == "'labels'" and _is_input_ids(value):
                    yield value
        case ast.Call(func=function, keywords=keywords):
            for one in keywords:
                called = ast.unparse(function).lower()
                if one.arg == "labels" and "model" in called and _is_input_ids(one.value):
                    yield node


def _is_input_ids(value: ast.expr) -> bool:
    while True:
        match value:
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _COPIES:
                value = inner
            case ast.Subscript(value=inner, slice=ast.Slice(lower=None, upper=None, step=None)):
                value = inner
            case ast.Subscript(slice=ast.Constant(value="input_ids")):
                return True
            case ast.Attribute(attr="input_ids") | ast.Name(id="input_ids"):
                return True
            case _:
                return False


_COPIES = frozenset("clone copy detach to squeeze long flatten".split())

PADDING_COUNTS = Rule(
    code="MP224",
    name="padding-counts",
    severity=FindingSeverity.WARNING,
    summary="The labels of a causal language model include padding.",
    explanation="Causal language models of transformers leave out targets of −100 alone, and not "
    "the padding that `attention_mask` hides. Labels that are a copy of padded `input_ids` make "
    "padding tokens targets: they are most of what the loss is the mean of where texts are short, "
    "it looks small, and texts get less weight the more padding is in their batch. "
    "`DataCollatorForLanguageModeling(tokenizer, mlm=False)` replaces the labels by ones with "
    "−100 for the padding token, and so for the end of the text where both are the same token. "
    "Reported where a file tokenizes with padding, and nothing in it leaves targets out.",
    bad="""\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")


def tokenize(examples):
    tokens = tokenizer(examples["text"], truncation=True, padding="max_length", max_length=512)
    tokens["labels"] = tokens["input_ids"].copy()
    return tokens


def train(dataset):
    Trainer(model=model, train_dataset=dataset.map(tokenize, batched=True)).train()
""",
    good="""\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")


def tokenize(examples):
    tokens = tokenizer(examples["text"], truncation=True, padding="max_length", max_length=512)
    tokens["labels"] = [
        [token if kept else -100 for token, kept in zip(*row, strict=True)]
        for row in zip(tokens["input_ids"], tokens["attention_mask"], strict=True)
    ]
    return tokens


def train(dataset):
    Trainer(model=model, train_dataset=dataset.map(tokenize, batched=True)).train()
""",
    remedy="Set the labels to −100 where `attention_mask` is 0, or use a collator that does.",
    alert="MpAgentPaddingInTargets",
    find=_find_padding_counts,
)
