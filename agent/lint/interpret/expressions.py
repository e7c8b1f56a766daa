"""What expressions, conditions of branches, imports and definitions come to."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mp_agent.lint.interpret.base import FunctionScope, key_of
from mp_agent.lint.interpret.calls import CallEvaluator
from mp_agent.lint.interpret.externals import DTYPES, tensor_form
from mp_agent.lint.interpret.modules import ClassInfo, FunctionInfo
from mp_agent.lint.interpret.values import UNKNOWN, Place, Value, ValueKind, guessed, joined

Condition = tuple[str, bool]

_DEPRECATED_DECORATORS = ("torch.cuda.amp.", "torch.cpu.amp.")


@lru_cache(maxsize=50_000)
def conditions(test: ast.expr, arm: bool) -> tuple[Condition, ...]:
    """Return what holds on one arm of a test.

    `x is not None`, `x` and `not (x is None)` are the same question; both halves of an `and` hold
    on its true arm, both of an `or` fail on its false arm.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return conditions(test.operand, not arm)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == arm:
        # With the whole as well: the other arm knows only that.
        parts = [part for value in test.values for part in conditions(value, arm)]
        return (*parts, (ast.unparse(test), arm))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right, op = test.left, test.comparators[0], test.ops[0]
        negated = isinstance(op, ast.IsNot | ast.NotEq | ast.NotIn)
        if isinstance(op, ast.Is | ast.IsNot) and _is_none(right):
            return ((ast.unparse(left), arm == negated),)
        if negated:
            positive = {ast.IsNot: ast.Is(), ast.NotEq: ast.Eq(), ast.NotIn: ast.In()}[type(op)]
            return ((ast.unparse(ast.Compare(left, [positive], [right])), not arm),)
    return ((ast.unparse(test), arm),)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


_FACTS = frozenset("shape dtype device ndim is_cuda requires_grad names grad_fn".split())
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a / b,
}


class ExpressionEvaluator(CallEvaluator):
    """Evaluates expressions."""

    def evaluate(self, node: ast.expr | None, frame: FunctionScope) -> Value:
        """Return the value of an expression; what is not understood is UNKNOWN."""
        if node is None:
            return UNKNOWN
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is not None:
            value: Value = method(node, frame)
            return value
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.evaluate(child, frame)
        return Value(key=key_of(Place(frame.module, node)))

    def lookup(self, name: str, frame: FunctionScope) -> Value:
        """Return the value of a name."""
        scope: FunctionScope | None = frame
        while scope is not None:
            if name in scope.names:
                return guessed(self.resolved(scope.names[name]), name)
            scope = scope.outer
        environment = self.environment(frame.module)
        if name in environment:
            return guessed(self.resolved(environment[name]), name)
        if hasattr(builtins, name):
            return Value(ValueKind.EXTERNAL, name, name)
        return guessed(Value(key=f"{frame.module.path}:{name}"), name)

    def _Constant(self, node: ast.Constant, frame: FunctionScope) -> Value:
        return Value(ValueKind.CONSTANT, constant=node.value)

    def _Name(self, node: ast.Name, frame: FunctionScope) -> Value:
        return self.lookup(node.id, frame)

    def _Attribute(self, node: ast.Attribute, frame: FunctionScope) -> Value:
        return self.attribute(self.evaluate(node.value, frame), node.attr)

    def attribute(self, base: Value, name: str) -> Value:
        """Return the value of an attribute."""
        if base.kind is ValueKind.EXTERNAL:
            full = f"{base.name}.{name}"
            if full in DTYPES:
                return Value(ValueKind.DTYPE, full, full, frozenset({DTYPES[full]}))
            return self.resolved(Value(ValueKind.EXTERNAL, full, full, module=base.module))
        if base.kind is ValueKind.MODULE and base.module is not None:
            found = self.environment(base.module).get(name)
            if found is not None:
                return guessed(self.resolved(found), name)
            return self.resolved(
                Value(ValueKind.EXTERNAL, "", f"{base.name}.{name}", module=base.module)
            )
        key = f"{base.key}.{name}"
        if key in self.state.heap:
            return guessed(self.state.heap[key], name)
        if base.kind is ValueKind.PARAMETERS and name == "grad":
            return Value(ValueKind.TENSOR, key)
        if name == "module" and base.wrapper and not base.is_past_wrapper:
            return base.with_(wrapper=f"{base.wrapper}.module")
        if base.klass is not None:
            method = self.method(base.klass, name)
            if method is not None:
                return self._bound_method(base, method, key)
            found = self.class_attributes(base.klass).get(name)
            if found is not None:
                return guessed(found, name)
        if base.kind is ValueKind.TENSOR and name not in _FACTS:
            kept = base.activation if name in ("T", "mT", "data") else ""
            return base.with_(key=key, form=None, activation=kept)
        return guessed(Value(key=key), name)

    def _bound_method(self, base: Value, method: Any, key: str) -> Value:
        names = {
            name
            for decorator in method.decorators
            if isinstance(decorator, ast.Name | ast.Attribute)
            for name in [decorator.attr if isinstance(decorator, ast.Attribute) else decorator.id]
        }
        if names & {"property", "cached_property"}:
            return Value(key=key)
        if "staticmethod" in names:
            return Value(ValueKind.FUNCTION, key, function=method)
        return Value(ValueKind.BOUND, key, function=method, items=(base,))

    def _Call(self, node: ast.Call, frame: FunctionScope) -> Value:
        place = Place(frame.module, node)
        receiver = method = None
        if isinstance(node.func, ast.Attribute):
            receiver, method = self.evaluate(node.func.value, frame), node.func.attr
            function = self.attribute(receiver, method)
        else:
            function = self.evaluate(node.func, frame)
        arguments = []
        for argument in node.args:
            value = self.evaluate(argument, frame)
            arguments.append(UNKNOWN if isinstance(argument, ast.Starred) else value)
        keywords = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif value.name == "dict":
                given = zip(value.constant or (), value.items, strict=False)
                keywords.update({name: one for name, one in given if isinstance(name, str)})
        if _is_super(node.func):
            return Value(key=key_of(place))
        if function.kind is ValueKind.EXTERNAL and function.name in ("float", "int") and arguments:
            self.record(f"<host>{function.name}", place, arguments[0], arguments)
            return Value(ValueKind.ARRAY, key_of(place))
        plain = (
            ValueKind.EXTERNAL,
            ValueKind.FUNCTION,
            ValueKind.BOUND,
            ValueKind.CLASS,
            ValueKind.PARTIAL,
        )
        followed = function.kind in plain or function.kind in (
            ValueKind.MODEL,
            ValueKind.LOSS,
            ValueKind.INSTANCE,
        )
        if (
            receiver is not None
            and method is not None
            and (not followed or receiver.kind is ValueKind.TENSOR)
        ):
            if method == "enter_context" and arguments:
                self.enter_context(arguments[0], place)
                return arguments[0]
            result = self.call_method(receiver, method, arguments, keywords, place)
            if (
                isinstance(node.func, ast.Attribute)
                and receiver.kind in (ValueKind.MODEL, ValueKind.LOSS)
                and result.kind is receiver.kind
            ):
                self.assign(node.func.value, result, frame)
            return result
        return self.call(function, arguments, keywords, place, frame)

    def enter_context(self, value: Value, place: Place) -> None:
        """Begin what a context manager does, until the block around it ends."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value, frame: FunctionScope) -> None:
        """Bind a target to a value."""
        raise NotImplementedError

    def _BinOp(self, node: ast.BinOp, frame: FunctionScope) -> Value:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        return self.binary(node.op, left, right, Place(frame.module, node))

    def binary(self, op: ast.operator, left: Value, right: Value, place: Place) -> Value:
        """Return the value of an arithmetic operation; record subtractions and powers."""
        if left.kind is ValueKind.CONSTANT and right.kind is ValueKind.CONSTANT:
            return _folded(op, left.constant, right.constant)
        key = key_of(place)
        if isinstance(op, ast.Sub) and left.form and right.form:
            self.record("<subtract>", place, left, (right,))
        if isinstance(op, ast.MatMult) and self.state.autocast is not None:
            return Value(ValueKind.TENSOR, key)
        form = None
        if isinstance(op, ast.Pow):
            form = tensor_form("pow", left, (right,))
        elif isinstance(op, ast.Mult) and left.key and left.key == right.key:
            form = tensor_form("square", left, ())
        elif isinstance(op, ast.Div) and left.form and left.form[0].startswith("sum"):
            form = (left.form[0].replace("sum", "mean", 1), left.form[1])
        kinds = {left.kind, right.kind}
        if ValueKind.ARRAY in kinds and ValueKind.TENSOR not in kinds:
            return Value(ValueKind.ARRAY, key)
        tensor = left if left.kind is ValueKind.TENSOR else right
        other = right if tensor is left else left
        dtypes = tensor.dtypes if other.kind is ValueKind.CONSTANT else tensor.dtypes & other.dtypes
        if tensor.dtypes and other.dtypes and tensor.dtypes != other.dtypes:
            dtypes = frozenset()
        return Value(
            ValueKind.TENSOR if ValueKind.TENSOR in kinds else ValueKind.UNKNOWN,
            key,
            dtypes=dtypes if ValueKind.TENSOR in kinds else frozenset(),
            scaled=left.scaled or right.scaled,
            from_autocast=left.from_autocast or right.from_autocast,
            form=form,
        )

    def _IfExp(self, node: ast.IfExp, frame: FunctionScope) -> Value:
        self.evaluate(node.test, frame)
        values = []
        depth = len(self.state.path)
        for arm, part in ((True, node.body), (False, node.orelse)):
            self.state.path.extend(conditions(node.test, arm))
            values.append(self.evaluate(part, frame))
            del self.state.path[depth:]
        return joined(*values)

    def _BoolOp(self, node: ast.BoolOp, frame: FunctionScope) -> Value:
        values = [self.evaluate(value, frame) for value in node.values]
        result = values[0]
        for value in values[1:]:
            result = joined(result, value)
        return result

    def _Subscript(self, node: ast.Subscript, frame: FunctionScope) -> Value:
        base = self.evaluate(node.value, frame)
        self.evaluate(node.slice, frame)
        if base.kind is ValueKind.SEQUENCE:
            index = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(index, int) and -len(base.items) <= index < len(base.items):
                return base.items[index]
            return Value(key=f"{base.key}[{ast.unparse(node.slice)}]")
        key = f"{base.key}[{ast.unparse(node.slice)}]"
        if base.kind is ValueKind.TENSOR:
            return base.with_(key=key, form=None)
        return Value(key=key)

    def _sequence(self, node: ast.Tuple | ast.List, frame: FunctionScope) -> Value:
        items = tuple(self.evaluate(item, frame) for item in node.elts)
        return Value(ValueKind.SEQUENCE, key_of(Place(frame.module, node)), items=items)

    _Tuple = _List = _Set = _sequence

    def _Dict(self, node: ast.Dict, frame: FunctionScope) -> Value:
        values = tuple(self.evaluate(value, frame) for value in node.values)
        keys = tuple(key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        key = key_of(Place(frame.module, node))
        return Value(ValueKind.SEQUENCE, key, "dict", items=values, constant=keys)

    def _Starred(self, node: ast.Starred, frame: FunctionScope) -> Value:
        return self.evaluate(node.value, frame)

    def _Await(self, node: ast.Await, frame: FunctionScope) -> Value:
        return self.evaluate(node.value, frame)

    def _NamedExpr(self, node: ast.NamedExpr, frame: FunctionScope) -> Value:
        value = self.evaluate(node.value, frame)
        self.assign(node.target, value, frame)
        return value

    def _Lambda(self, node: ast.Lambda, frame: FunctionScope) -> Value:
        return Value(key=key_of(Place(frame.module, node)))

    def _JoinedStr(self, node: ast.JoinedStr, frame: FunctionScope) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.evaluate(part.value, frame)
        return UNKNOWN

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        frame: FunctionScope,
    ) -> Value:
        inner = FunctionScope(frame.module, {}, frame.function, frame)
        self.enter_loop()
        depth = len(self.state.path)
        for generator in node.generators:
            over = self.evaluate(generator.iter, frame)
            self.assign(generator.target, element(over, Place(frame.module, node)), inner)
            for test in generator.ifs:
                self.evaluate(test, inner)
                self.state.path.append((ast.unparse(test), True))
        if isinstance(node, ast.DictComp):
            self.evaluate(node.key, inner)
            result = self.evaluate(node.value, inner)
        else:
            result = self.evaluate(node.elt, inner)
        del self.state.path[depth:]
        self.state.loops.pop()
        if result.kind is ValueKind.PARAMETERS:
            return result
        return Value(ValueKind.SEQUENCE, key_of(Place(frame.module, node)), items=(result,))

    _ListComp = _SetComp = _GeneratorExp = _DictComp = _comprehension

    def _Import(self, node: ast.Import, frame: FunctionScope) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            name = alias.name if alias.asname else top
            frame.names[alias.asname or top] = self.imported(name, 0, frame)

    def _ImportFrom(self, node: ast.ImportFrom, frame: FunctionScope) -> None:
        for alias in node.names:
            base = node.module or ""
            if alias.name == "*":
                owner = self.resolved(self.imported(base, node.level, frame))
                if owner.kind is ValueKind.MODULE and owner.module is not None:
                    frame.names.update(_exported(self.environment(owner.module)))
                continue
            full = f"{base}.{alias.name}" if base else alias.name
            value = self.imported(full, node.level, frame)
            if value.name.startswith("torch."):
                owner = Value(ValueKind.EXTERNAL, name=value.name.rpartition(".")[0])
                value = self.attribute(owner, alias.name)
            frame.names[alias.asname or alias.name] = value

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: FunctionScope) -> None:
        info = frame.module.by_node.get(node)
        if isinstance(info, FunctionInfo):
            frame.names[node.name] = Value(ValueKind.FUNCTION, info.identity, function=info)
            self._record_decorators(info, frame)

    _FunctionDef = _AsyncFunctionDef = _function

    def _ClassDef(self, node: ast.ClassDef, frame: FunctionScope) -> None:
        info = frame.module.by_node.get(node)
        if isinstance(info, ClassInfo):
            frame.names[node.name] = Value(ValueKind.CLASS, node.name, node.name, klass=info)
            for method in info.methods.values():
                self._record_decorators(method, frame)

    def _record_decorators(self, function: FunctionInfo, frame: FunctionScope) -> None:
        """Record deprecated decorators; calls among them are evaluated for it."""
        for decorator in function.decorators:
            value = self.evaluate(decorator, frame)
            if value.kind is ValueKind.EXTERNAL and value.name.startswith(_DEPRECATED_DECORATORS):
                self.record(value.name, Place(frame.module, decorator))


def _exported(names: Mapping[str, Value]) -> dict[str, Value]:
    """Return the names that `from module import *` brings."""
    listed = names.get("__all__")
    if listed is None:
        return {name: value for name, value in names.items() if not name.startswith("_")}
    meant = {item.constant for item in listed.items}
    return {name: value for name, value in names.items() if name in meant}


def element(over: Value, place: Place) -> Value:
    """Return what iterating over a value yields."""
    if over.name == "enumerate" and over.items:
        items = (Value(key=f"index:{key_of(place)}"), element(over.items[0], place))
        return Value(ValueKind.SEQUENCE, f"each:{over.key}:{key_of(place)}", items=items)
    if over.kind is ValueKind.PARAMETERS:
        return over
    if over.kind is ValueKind.SEQUENCE and len(over.items) == 1:
        return over.items[0]
    return Value(key=f"each:{over.key}:{key_of(place)}")


def _folded(op: ast.operator, left: Any, right: Any) -> Value:
    function = _ARITHMETIC.get(type(op))
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if function is None or not numbers:
        return UNKNOWN
    try:
        return Value(ValueKind.CONSTANT, constant=function(left, right))
    except (ArithmeticError, ValueError):
        return UNKNOWN


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )
