"""Calls: what is called, what it returns, and following into functions of the project."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from mp_agent.lint.interpret.base import (
    MAX_DEPTH,
    MAX_STATEMENTS,
    Evaluator,
    FunctionScope,
    key_of,
)
from mp_agent.lint.interpret.externals import external_result
from mp_agent.lint.interpret.methods import method_result, method_target
from mp_agent.lint.interpret.modules import ClassInfo, FunctionInfo, absolute_name
from mp_agent.lint.interpret.values import NONE, UNKNOWN, Place, Value, ValueKind, joined

_TRAINED_BY = frozenset({ValueKind.OPTIMIZER, ValueKind.SCALER, ValueKind.SCHEDULER})
_KEPT = _TRAINED_BY | {ValueKind.MODEL, ValueKind.LOSS, ValueKind.LOADER}
"""What a constructor may do no more with than keep it for the methods."""
_MODULE_BASES = frozenset({"Module", "LightningModule", "PreTrainedModel", "Sequential"})


class CallEvaluator(Evaluator):
    """Evaluates calls."""

    def call(
        self,
        function: Value,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        place: Place,
        frame: FunctionScope,
    ) -> Value:
        """Record a call and return its value."""
        match function.kind:
            case ValueKind.EXTERNAL:
                result = external_result(function.name, arguments, keywords, place)
                if function.name == "functools.partial" and arguments:
                    result = Value(ValueKind.PARTIAL, key_of(place), items=tuple(arguments)).with_(
                        constant=tuple(keywords.items())
                    )
                self.record(function.name, place, UNKNOWN, arguments, keywords, result)
                return result
            case ValueKind.PARTIAL:
                merged = {**dict(function.constant or ()), **keywords}
                target, *bound = function.items
                return self.call(target, [*bound, *arguments], merged, place, frame)
            case ValueKind.FUNCTION if function.function is not None:
                return self.follow(function.function, None, arguments, keywords, place)
            case ValueKind.BOUND if function.function is not None:
                return self.follow(function.function, function.items[0], arguments, keywords, place)
            case ValueKind.CLASS if function.klass is not None:
                return self._construct(function.klass, arguments, keywords, place)
            case ValueKind.MODEL | ValueKind.LOSS:
                return self._apply(function, arguments, keywords, place)
        if function.kind is ValueKind.INSTANCE and function.klass is not None:
            method = self.method(function.klass, "__call__")
            if method is not None:
                return self.follow(method, function, arguments, keywords, place)
        self.record("<unseen>", place, function, arguments, keywords)
        return Value(key=key_of(place))

    def call_method(
        self,
        receiver: Value,
        method: str,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        place: Place,
    ) -> Value:
        """Record a call of a method that is no code of the project, and return its value."""
        result = method_result(receiver, method, arguments, keywords, place)
        target = method_target(receiver, method, len(arguments) + len(keywords))
        if target is not None:
            self.record(target, place, receiver, arguments, keywords, result)
        return result

    def _apply(
        self,
        model: Value,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        place: Place,
    ) -> Value:
        role = "<loss>()" if model.kind is ValueKind.LOSS else "<model>()"
        autocast = self.state.autocast
        result = Value(
            ValueKind.TENSOR,
            key_of(place),
            dtypes=model.dtypes if autocast is None else frozenset(),
            from_autocast=autocast is not None and model.kind is ValueKind.MODEL,
            activation=model.activation,
        )
        if model.klass is not None:
            result = _with_activations(result, self.output_activations(model.klass))
        self.record(role, place, model, arguments, keywords, result)
        forward = self.method(model.klass, "forward") if model.klass is not None else None
        if forward is not None:
            self.follow(forward, model, arguments, keywords, place)
        return result

    def _construct(
        self,
        klass: ClassInfo,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        place: Place,
    ) -> Value:
        kind = ValueKind.INSTANCE
        if self.is_module(klass):
            named_loss = klass.node.name.endswith(("Loss", "Criterion"))
            kind = ValueKind.LOSS if named_loss else ValueKind.MODEL
        made = Value(kind, f"new:{key_of(place)}", klass.node.name, klass=klass, place=place)
        self.record("<new>", place, UNKNOWN, arguments, keywords, made)
        constructor = self.method(klass, "__init__")
        if constructor is not None:
            given = (*arguments, *keywords.values())
            keeps = any(value.kind in _KEPT for value in given)
            self.follow(constructor, made, arguments, keywords, place, matters=keeps)
        return made

    def follow(
        self,
        function: FunctionInfo,
        receiver: Value | None,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        place: Place,
        *,
        matters: bool = False,
    ) -> Value:
        """Execute a function of the project at its call, if it matters; return what it returns."""
        state = self.state
        limited = (
            function in state.stack
            or len(state.stack) >= MAX_DEPTH
            or state.statements >= MAX_STATEMENTS
        )
        if limited or not self.follows or not (matters or function.is_followed):
            passed = (*arguments, *keywords.values())
            if limited or any(value.kind in _TRAINED_BY for value in passed):
                self.record("<unseen>", place, receiver or UNKNOWN, arguments, keywords)
            return Value(key=key_of(place))
        self.followed.add(function.identity)
        given = [receiver, *arguments] if receiver is not None else list(arguments)
        names = _bound(function, given, keywords)
        frame = FunctionScope(function.module, names, function)
        return self.execute(function, frame, place)

    def execute(self, function: FunctionInfo, frame: FunctionScope, place: Place) -> Value:
        """Execute the body of a function in a frame."""
        raise NotImplementedError

    def method(self, klass: ClassInfo | None, name: str, depth: int = 0) -> FunctionInfo | None:
        """Return a method of a class or of its bases in the project."""
        if klass is None or depth > MAX_DEPTH:
            return None
        if name in klass.methods:
            return klass.methods[name]
        for base in self.bases(klass):
            found = self.method(base.klass, name, depth + 1)
            if found is not None:
                return found
        return None

    def bases(self, klass: ClassInfo) -> list[Value]:
        """Return the base classes of a class."""
        frame = FunctionScope(klass.module, self.environment(klass.module))
        return [
            self.resolved(self.evaluate(base, frame))
            for base in klass.node.bases
            if isinstance(base, ast.Name | ast.Attribute)
        ]

    def is_module(self, klass: ClassInfo) -> bool:
        """Return whether a class derives from nn.Module, or from what is named like one."""
        key = f"{klass.module.path}:{klass.qualified_name}:{klass.node.lineno}"
        known = self.project.module_classes
        if key not in known:
            known[key] = False
            known[key] = any(
                self.is_module(base.klass)
                if base.klass is not None
                else base.name.rpartition(".")[2] in _MODULE_BASES
                or base.name.startswith("torch.nn.modules.")
                for base in self.bases(klass)
            )
        return known[key]

    def resolved(self, value: Value, depth: int = 0) -> Value:
        """Return what an imported name stands for in the project; itself if it is of elsewhere."""
        if value.kind is not ValueKind.EXTERNAL or value.module is None or depth > MAX_DEPTH:
            return value
        module = self.project.find(value.name, value.module)
        if module is not None:
            return Value(ValueKind.MODULE, value.name, value.name, module=module)
        package, _, name = value.name.rpartition(".")
        owner = self.project.find(package, value.module) if package else None
        if owner is None:
            return value
        found = self.environment(owner).get(name)
        return value if found is None else self.resolved(found, depth + 1)

    def imported(self, name: str, level: int, frame: FunctionScope) -> Value:
        """Return the value of an imported dotted name."""
        full = absolute_name(name, level, frame.module)
        return Value(ValueKind.EXTERNAL, full, full, module=frame.module)


def _bound(
    function: FunctionInfo, given: Sequence[Value], keywords: Mapping[str, Value]
) -> dict[str, Value]:
    arguments = function.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    names = {parameter.arg: value for parameter, value in zip(positional, given, strict=False)}
    names.update(keywords)
    defaults = dict(
        zip(
            [parameter.arg for parameter in positional[-len(arguments.defaults) :]],
            arguments.defaults,
            strict=False,
        )
        if arguments.defaults
        else ()
    )
    defaults.update(
        {
            parameter.arg: default
            for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        }
    )
    for parameter in [*positional, *arguments.kwonlyargs]:
        if parameter.arg not in names:
            default = defaults.get(parameter.arg)
            if isinstance(default, ast.Constant):
                names[parameter.arg] = (
                    NONE
                    if default.value is None
                    else Value(ValueKind.CONSTANT, constant=default.value)
                )
            else:
                names[parameter.arg] = Value(key=f"{function.identity}:{parameter.arg}")
    return names


def _with_activations(output: Value, activations: Sequence[str]) -> Value:
    """Return the output of a model, or its outputs where one of several ends in an activation."""
    if len(activations) == 1:
        return output.with_(activation=output.activation or activations[0])
    if not any(activations):
        return output
    items = tuple(
        output.with_(key=f"{output.key}[{index}]", activation=activation)
        for index, activation in enumerate(activations)
    )
    return Value(ValueKind.SEQUENCE, output.key, items=items)


def union(values: Sequence[Value], key: str) -> Value:
    """Return what is known of one of several values."""
    if not values:
        return Value(key=key)
    result = values[0]
    for value in values[1:]:
        result = joined(result, value)
    return result
