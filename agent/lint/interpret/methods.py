"""What methods of tensors, models, scalers and optimizers return, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mp_agent.lint.interpret.base import key_of
from mp_agent.lint.interpret.externals import asked_dtypes, tensor_form
from mp_agent.lint.interpret.values import (
    BF16,
    FP16,
    FP32,
    FP64,
    SIXTEEN_BITS,
    Place,
    Value,
    ValueKind,
)

_CASTS = {
    "half": FP16,
    "bfloat16": BF16,
    "float": FP32,
    "double": FP64,
}
_TO = frozenset({"to", "type", "astype", "_to"})
_KEEPING = frozenset(
    """abs add sub mul div neg clamp clone contiguous view reshape transpose permute squeeze
    unsqueeze expand expand_as repeat flatten chunk split index_select gather masked_fill t
    masked_fill_ relu relu_ sigmoid tanh exp log pow square sqrt rsqrt sum mean norm var std max
    min softmax log_softmax cumsum cumprod prod detach cuda to requires_grad_ unflatten narrow
    select roll flip add_ mul_ div_ sub_ neg_ zero_ fill_ pin_memory logsumexp""".split()
)
_SHAPING = frozenset(
    """clone contiguous view reshape resize transpose permute squeeze unsqueeze flatten index_select
    t detach cuda requires_grad_ narrow select pin_memory""".split()
)
"""What keeps the values of the elements."""
_ACTIVATIONS = frozenset({"softmax", "log_softmax", "sigmoid"})
_HOST = frozenset(
    "size dim numel nelement stride element_size data_ptr get_device is_contiguous backward "
    "is_floating_point storage_offset type untyped_storage register_hook items keys".split()
)
"""Methods that return no tensor."""
_SAME_OBJECT = frozenset(
    "cuda to train eval requires_grad_ contiguous half bfloat16 float double type "
    "share_memory apply to_empty cpu".split()
)
_OTHER_ROLE = re.compile(r"(accelerator|fabric|engine|strategy|plugin|booster|manager|deepspeed)")
"""What has a `backward` or a `step` of its own."""
_FILE = re.compile(r"^.*\.(py|ipynb):")
_ROLES = {
    ValueKind.SCALER: "<scaler>",
    ValueKind.OPTIMIZER: "<optimizer>",
    ValueKind.MODEL: "<model>",
    ValueKind.LOSS: "<model>",
    ValueKind.TENSOR: "<tensor>",
    ValueKind.UNKNOWN: "<tensor>",
    ValueKind.SCHEDULER: "<scheduler>",
    ValueKind.LOADER: "<loader>",
    ValueKind.INSTANCE: "<instance>",
}


def method_target(receiver: Value, method: str, count: int) -> str | None:
    """Return the role and method that a call has for rules; None if they do not care."""
    if method == "unscale_" or (method in ("scale", "update") and _is_scaler(receiver)):
        return f"<scaler>.{method}"
    if method == "step" and _is_scaler(receiver) and count:
        return "<scaler>.step"
    if method == "backward" and (
        receiver.kind not in (ValueKind.TENSOR, ValueKind.UNKNOWN)
        or (receiver.kind is ValueKind.UNKNOWN and _OTHER_ROLE.search(_name(receiver)))
        or receiver.key.startswith("self:")
    ):
        return None
    role = _ROLES.get(receiver.kind)
    return f"{role}.{method}" if role else None


def _name(value: Value) -> str:
    """Return the key of a value without the path of its file, which names no role."""
    return _FILE.sub("", value.key).lower()


def _is_scaler(receiver: Value) -> bool:
    return receiver.kind is ValueKind.SCALER or (
        receiver.kind is ValueKind.UNKNOWN and "scaler" in receiver.key.rpartition(".")[2].lower()
    )


def method_result(
    receiver: Value,
    method: str,
    arguments: Sequence[Value],
    keywords: Mapping[str, Value],
    place: Place,
) -> Value:
    """Return what a method of something that is no code of the project returns."""
    key = key_of(place)
    if method in ("autocast", "compute_loss_context_manager", "autocast_smart_context_manager"):
        return Value(ValueKind.AUTOCAST, key, constant=True, maybe=True, place=place)
    if method == "no_sync":
        return Value(ValueKind.CONTEXT, key, "no_sync", place=place)
    if method == "scale" and _is_scaler(receiver):
        first = arguments[0] if arguments else Value()
        return first.with_(kind=ValueKind.TENSOR, key=key, scaled=True, form=None)
    if receiver.kind in (ValueKind.MODEL, ValueKind.LOSS):
        return _of_model(receiver, method, arguments, keywords, place)
    if receiver.kind in (ValueKind.TENSOR, ValueKind.UNKNOWN):
        return _of_tensor(receiver, method, arguments, keywords, place)
    if receiver.kind in (ValueKind.SEQUENCE, ValueKind.PARAMETERS):
        return receiver if method in ("values", "copy") else Value(key=key)
    if receiver.kind is ValueKind.ARRAY:
        return Value(ValueKind.ARRAY, key)
    return Value(key=key)


def cast_dtypes(
    receiver: Value, method: str, arguments: Sequence[Value], keywords: Mapping[str, Value]
) -> frozenset[str] | None:
    """Return the types that a cast may result in (empty: unknown); None where it is no cast."""
    if method in _CASTS and not arguments:
        return frozenset({_CASTS[method]})
    if method not in _TO:
        return None
    if "dtype" in keywords:
        return asked_dtypes(keywords)
    for value in arguments:
        if value.kind is ValueKind.DTYPE:
            return value.dtypes
        if value.kind is ValueKind.TENSOR and value.dtypes:
            return value.dtypes
    known = all(
        value.kind is ValueKind.CONSTANT or "device" in _name(value) or "rank" in _name(value)
        for value in arguments
    )
    return receiver.dtypes if known else frozenset()


def _of_model(
    receiver: Value,
    method: str,
    arguments: Sequence[Value],
    keywords: Mapping[str, Value],
    place: Place,
) -> Value:
    if method in ("parameters", "named_parameters"):
        return Value(ValueKind.PARAMETERS, key_of(place), receiver.key, receiver.dtypes)
    if method == "forward":
        return Value(ValueKind.TENSOR, key_of(place), dtypes=receiver.dtypes)
    dtypes = cast_dtypes(receiver, method, arguments, keywords)
    if dtypes is not None:
        return receiver.with_(dtypes=dtypes, maybe=False)
    return receiver if method in _SAME_OBJECT else Value(key=f"{receiver.key}.{method}()")


def _of_tensor(
    receiver: Value,
    method: str,
    arguments: Sequence[Value],
    keywords: Mapping[str, Value],
    place: Place,
) -> Value:
    key = key_of(place)
    dtypes = cast_dtypes(receiver, method, arguments, keywords)
    if dtypes is not None:
        explicit = bool(dtypes) and dtypes <= SIXTEEN_BITS and dtypes != receiver.dtypes
        moved = method in _TO and dtypes == receiver.dtypes
        return receiver.with_(
            kind=ValueKind.TENSOR
            if dtypes or receiver.kind is ValueKind.TENSOR
            else ValueKind.UNKNOWN,
            key=key,
            dtypes=dtypes,
            cast=place if explicit else (receiver.cast if moved else None),
            from_autocast=receiver.from_autocast and moved,
            form=None,
            constant=None,
        )
    if method in ("item", "tolist", "numpy"):
        return Value(ValueKind.ARRAY, key)
    if method == "cpu":
        return receiver.with_(kind=ValueKind.ARRAY, key=key)
    if method in ("parameters", "named_parameters"):
        return Value(ValueKind.PARAMETERS, key, receiver.key, receiver.dtypes)
    form = tensor_form(method, receiver, arguments)
    asked = asked_dtypes(keywords)
    if method in _KEEPING:
        kept = asked if "dtype" in keywords or asked else receiver.dtypes
        return receiver.with_(
            key=key,
            dtypes=kept,
            form=form,
            activation=_activation(receiver, method),
            constant=None,
            kind=ValueKind.TENSOR if kept or form else receiver.kind,
            from_autocast=receiver.from_autocast and not asked,
        )
    if receiver.kind is ValueKind.TENSOR and method not in _HOST:
        return Value(ValueKind.TENSOR, key, form=form, from_autocast=receiver.from_autocast)
    return Value(key=key, form=form)


def _activation(receiver: Value, method: str) -> str:
    if method in _ACTIVATIONS:
        return method
    return receiver.activation if method in _SHAPING else ""
