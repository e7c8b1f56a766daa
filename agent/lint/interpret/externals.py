"""What calls of PyTorch's functions and classes return."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mp_agent.lint.interpret.base import key_of
from mp_agent.lint.interpret.values import (
    BF16,
    FP16,
    FP32,
    FP64,
    OTHER,
    Place,
    Value,
    ValueKind,
)

DTYPES = {
    "torch.float16": FP16,
    "torch.half": FP16,
    "torch.HalfTensor": FP16,
    "torch.cuda.HalfTensor": FP16,
    "torch.bfloat16": BF16,
    "torch.BFloat16Tensor": BF16,
    "torch.cuda.BFloat16Tensor": BF16,
    "torch.float32": FP32,
    "torch.float": FP32,
    "torch.FloatTensor": FP32,
    "torch.cuda.FloatTensor": FP32,
    "torch.float64": FP64,
    "torch.double": FP64,
    **{
        f"torch.{name}": OTHER
        for name in "int int8 int16 int32 int64 long short uint8 bool complex64 complex128".split()
    },
}
_AUTOCAST = re.compile(r"^torch\.(amp|cuda\.amp|cpu\.amp)(\.autocast_mode)?\.autocast$")
_SCALER = re.compile(r"^torch\.(amp|cuda\.amp|distributed\.fsdp)(\.\w+)?\.\w*GradScaler$")
_OPTIMIZER = re.compile(r"^(torch\.optim(\.\w+)?|apex\.optimizers|bitsandbytes\.optim)\.[A-Z]\w*$")
_SCHEDULER = re.compile(r"^torch\.optim\.(lr_scheduler|swa_utils)\.")
_LAYER = re.compile(r"^torch\.nn(\.modules(\.\w+)?|\.parallel)?\.[A-Z]\w*$")
_NO_LAYER = re.compile(r"\.(Parameter|ParameterList|ParameterDict|Buffer|Module)$")
_PRETRAINED = re.compile(
    r"^(torchvision\.models\.[\w.]*[a-z]\w*|timm\.create_model"
    r"|transformers\.\w*Model\w*\.(from_pretrained|from_config)|transformers\.\w+For\w+\.\w+)$"
)
_FACTORY = re.compile(
    r"^torch\.(zeros|ones|full|empty|rand|randn|tensor|as_tensor|arange|linspace|eye"
    r"|(zeros|ones|full|empty|rand|randn)_like)$"
)
_NO_GRAD = re.compile(r"^torch\.(no_grad|inference_mode|autograd\.(no_grad|inference_mode))$")
_PASSED_THROUGH = re.compile(
    r"^(list|tuple|iter|reversed|sorted|set|filter|itertools\.chain|tqdm|tqdm\.(auto\.)?tqdm"
    r"|torch\.compile|torch\.nn\.(\w+\.)*DataParallel"
    r"|torch\.distributed\.(fsdp|_composable)(\.\w+)*\.fully_shard)$"
)
_WRAPPER = re.compile(
    r"^(torch\.nn|apex)\.parallel\.(distributed\.)?DistributedDataParallel$"
    r"|^torch\.distributed\.fsdp\.(\w+\.)?FullyShardedDataParallel$"
)
_LOADER = re.compile(r"^torch\.utils\.data\.(dataloader\.)?DataLoader$")
_DATASET = re.compile(r"^torch\.utils\.data\.|^torchvision\.datasets\.")
_ACTIVATION = re.compile(
    r"^torch\.(?:nn\.functional\.|special\.)?(softmax|log_softmax|sigmoid|expit|logsigmoid)$"
)
_ACTIVATION_LAYERS = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}
_UPCAST = re.compile(r"^torch\.(nn\.functional\.|special\.)?(log_)?softmax$")
_ELEMENTWISE = re.compile(
    r"^torch\.(abs|neg|clamp|add|sub|mul|div|relu|sigmoid|tanh|exp|log|pow|square|sqrt|stack|cat"
    r"|sum|mean|matmul|bmm|mm|dot|vdot|inner|tensordot"
    r"|nn\.functional\.(relu|gelu|silu|linear|bilinear|dropout|layer_norm))$"
)


def external_result(
    name: str, arguments: Sequence[Value], keywords: Mapping[str, Value], place: Place
) -> Value:
    """Return what a call of something from another package returns."""
    key = key_of(place)
    if name == "torch.autocast" or _AUTOCAST.match(name):
        return autocast_value(name, arguments, keywords, place)
    if _SCALER.match(name):
        enabled = keywords.get("enabled")
        constant = enabled.constant if enabled and enabled.kind is ValueKind.CONSTANT else True
        maybe = enabled is not None and enabled.kind is not ValueKind.CONSTANT
        return Value(ValueKind.SCALER, key, name, constant=constant, maybe=maybe, place=place)
    if _OPTIMIZER.match(name) and not _SCHEDULER.match(name):
        given = _first(arguments, keywords, "params")
        return Value(ValueKind.OPTIMIZER, key, name, items=given, place=place)
    if _NO_GRAD.match(name):
        off = (
            bool(arguments)
            and arguments[0].kind is ValueKind.CONSTANT
            and not arguments[0].constant
        )
        return Value(ValueKind.CONTEXT if off else ValueKind.NO_GRAD, key)
    if _SCHEDULER.match(name):
        given = _first(arguments, keywords, "optimizer")
        return Value(ValueKind.SCHEDULER, key, name, items=given, place=place)
    if _LOADER.match(name):
        given = _first(arguments, keywords, "dataset")
        return Value(ValueKind.LOADER, key, name, items=given, place=place)
    if _WRAPPER.match(name) and (arguments or "module" in keywords):
        wrapped = arguments[0] if arguments else keywords["module"]
        return wrapped.with_(kind=ValueKind.MODEL, key=wrapped.key or key, wrapper=name)
    if _DATASET.match(name):
        return Value(key=key, name=name, items=tuple(arguments), place=place)
    if name in ("enumerate", "range"):
        return Value(key=key, name=name, items=tuple(arguments))
    if name in ("copy.copy", "copy.deepcopy") and arguments:
        return arguments[0].with_(key=key)
    if _PASSED_THROUGH.match(name):
        return arguments[0] if arguments else Value(ValueKind.SEQUENCE, key)
    if _LAYER.match(name) and not _NO_LAYER.search(name):
        kind = ValueKind.LOSS if name.endswith("Loss") else ValueKind.MODEL
        activation = _ACTIVATION_LAYERS.get(name.rpartition(".")[2], "")
        if name.endswith(".Sequential") and arguments:
            activation = arguments[-1].activation if arguments[-1].kind is ValueKind.MODEL else ""
        return Value(kind, key, name, asked_dtypes(keywords), place=place, activation=activation)
    if _PRETRAINED.match(name):
        return Value(ValueKind.MODEL, key, name, asked_dtypes(keywords), place=place)
    if name == "contextlib.nullcontext":
        return Value(ValueKind.CONTEXT, key)
    if name.startswith("numpy."):
        return Value(ValueKind.ARRAY, key)
    if _FACTORY.match(name):
        return Value(ValueKind.TENSOR, key, dtypes=asked_dtypes(keywords))
    if name.startswith("torch."):
        return _tensor(name, arguments, keywords, key)
    return Value(key=key)


def _first(
    arguments: Sequence[Value], keywords: Mapping[str, Value], name: str
) -> tuple[Value, ...]:
    """Return the first argument, by position or by name, alone; nothing where it is absent."""
    if arguments:
        return (arguments[0],)
    return (keywords[name],) if name in keywords else ()


def asked_dtypes(keywords: Mapping[str, Value]) -> frozenset[str]:
    """Return the types that a call asks for with `dtype` or `torch_dtype`."""
    for name in ("dtype", "torch_dtype"):
        if name in keywords:
            value = keywords[name]
            if value.kind is ValueKind.CONSTANT and isinstance(value.constant, str):
                found = DTYPES.get(f"torch.{value.constant}")
                return frozenset({found} if found else ())
            return value.dtypes
    return frozenset()


def autocast_value(
    name: str, arguments: Sequence[Value], keywords: Mapping[str, Value], place: Place
) -> Value:
    """Return an autocast context; its types are empty when they are unknown."""
    old = name.startswith(("torch.cuda.amp", "torch.cpu.amp"))
    positions = ("enabled", "dtype") if old else ("device_type", "dtype", "enabled")
    given = {**dict(zip(positions, arguments, strict=False)), **keywords}
    enabled, dtype = given.get("enabled"), given.get("dtype")
    device: object = None
    if old:
        device = name.split(".")[1]
    elif "device_type" in given:
        device = given["device_type"].constant
    if dtype is None or (dtype.kind is ValueKind.CONSTANT and dtype.constant is None):
        kind = {"cuda": FP16, "cpu": BF16}.get(str(device).partition(":")[0])
        dtypes = frozenset({kind} if kind else ())
    else:
        dtypes = dtype.dtypes
    constant = (
        enabled.constant if enabled is not None and enabled.kind is ValueKind.CONSTANT else True
    )
    return Value(
        ValueKind.AUTOCAST,
        key_of(place),
        name,
        dtypes,
        constant=bool(constant),
        maybe=enabled is not None and enabled.kind is not ValueKind.CONSTANT,
        place=place,
    )


def _tensor(
    name: str, arguments: Sequence[Value], keywords: Mapping[str, Value], key: str
) -> Value:
    dtypes = asked_dtypes(keywords)
    first = arguments[0] if arguments else keywords.get("input", Value())
    if not dtypes and "dtype" not in keywords and _ELEMENTWISE.match(name):
        dtypes = first.dtypes
    if not dtypes and "dtype" not in keywords and _UPCAST.match(name):
        dtypes = first.dtypes
    return Value(
        ValueKind.TENSOR,
        key,
        dtypes=dtypes,
        from_autocast=first.from_autocast and not dtypes & {FP32, FP64},
        form=tensor_form(name.rpartition(".")[2], first, arguments[1:]),
        activation=_activation(name, first),
    )


def _activation(name: str, first: Value) -> str:
    if match := _ACTIVATION.match(name):
        return match[1].replace("expit", "sigmoid")
    if name == "torch.exp" and first.activation == "log_softmax":
        return "softmax"
    kept = name.rpartition(".")[2] in ("squeeze", "unsqueeze", "reshape", "flatten", "transpose")
    return first.activation if kept else ""


def tensor_form(name: str, operand: Value, rest: Sequence[Value]) -> tuple[str, str] | None:
    """Return how a mean, sum, or square is made of its operand."""
    square = name == "square" or (name == "pow" and bool(rest) and rest[0].constant == 2)
    form = operand.form
    if square:
        if form and form[0] == "mean":
            return ("square of mean", form[1])
        return ("square", operand.key) if operand.key else None
    if name in ("mean", "sum"):
        if form and form[0] == "square":
            return (f"{name} of square", form[1])
        return (name, operand.key) if operand.key else None
    return None
