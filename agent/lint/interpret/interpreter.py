"""Statements: assignments, branches, loops, with-blocks, definitions."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from mp_agent.lint.interpret.base import Evaluator, FunctionScope, key_of
from mp_agent.lint.interpret.calls import union
from mp_agent.lint.interpret.expressions import ExpressionEvaluator, conditions, element
from mp_agent.lint.interpret.modules import (
    ACTIVATIONS,
    ClassInfo,
    FunctionInfo,
    ModuleInfo,
    Project,
)
from mp_agent.lint.interpret.values import NONE, Place, Trace, Value, ValueKind, joined

_HAVE_PARTS = frozenset({ValueKind.MODEL, ValueKind.UNKNOWN})
_TRAINED = frozenset({ValueKind.MODEL, ValueKind.PARAMETERS})


class AbstractInterpreter(ExpressionEvaluator):
    """Executes functions and modules on abstract values."""

    def block(self, body: list[ast.stmt], frame: FunctionScope) -> bool:
        """Execute statements; return whether the end of the block is never reached."""
        depth = len(self.state.path)
        ended = False
        for node in body:
            self.state.statements += 1
            method = getattr(self, f"_{type(node).__name__}", None)
            if method is not None:
                ended = bool(method(node, frame)) or ended
            if ended:
                break
        del self.state.path[depth:]
        return ended

    def _Expr(self, node: ast.Expr, frame: FunctionScope) -> None:
        self.evaluate(node.value, frame)

    def _Assign(self, node: ast.Assign, frame: FunctionScope) -> None:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)

    def _AnnAssign(self, node: ast.AnnAssign, frame: FunctionScope) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)

    def _AugAssign(self, node: ast.AugAssign, frame: FunctionScope) -> None:
        left, right = self.evaluate(node.target, frame), self.evaluate(node.value, frame)
        self.assign(
            node.target, self.binary(node.op, left, right, Place(frame.module, node)), frame
        )

    def assign(self, target: ast.expr, value: Value, frame: FunctionScope) -> None:
        """Bind a name, an attribute, or the parts of a tuple."""
        if isinstance(target, ast.Name):
            names = frame.names
            if target.id in frame.global_names:
                names = self.environment(frame.module)
            names[target.id] = value
        elif isinstance(target, ast.Attribute):
            base = self.evaluate(target.value, frame)
            self._set_attribute(base, value, target, Place(frame.module, target))
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Value(key=value.key), frame)
        elif isinstance(target, ast.Tuple | ast.List):
            exact = value.kind is ValueKind.SEQUENCE and len(value.items) == len(target.elts)
            for index, part in enumerate(target.elts):
                if exact:
                    item = value.items[index]
                elif value.kind in (ValueKind.TENSOR, ValueKind.PARAMETERS):
                    item = value.with_(key=f"{value.key}[{index}]", form=None, activation="")
                else:
                    item = Value(key=f"{value.key}[{index}]")
                self.assign(part, item, frame)

    def _set_attribute(
        self, base: Value, value: Value, target: ast.Attribute, place: Place
    ) -> None:
        self.state.heap[f"{base.key}.{target.attr}"] = value
        if target.attr == "grad":
            self.record("<grad>.set", place, base, (value,))
        elif base.kind in _HAVE_PARTS and value.kind is ValueKind.MODEL:
            self.record("<model>.set", place, base, (value,))
        elif base.kind in _TRAINED and target.attr.startswith("require"):
            self.record("<requires>.set", place, base, (value,))

    def _Return(self, node: ast.Return, frame: FunctionScope) -> bool:
        frame.returned.append(NONE if node.value is None else self.evaluate(node.value, frame))
        self._leave(node, frame, frame.loops_before)
        return True

    def _leave(self, node: ast.stmt, frame: FunctionScope, loops: int) -> None:
        """Record the end of all loops except so many outer ones."""
        if len(self.state.loops) > loops:
            kept = Value(ValueKind.CONSTANT, constant=loops)
            self.record("<leave>", Place(frame.module, node), arguments=(kept,))

    def _Raise(self, node: ast.Raise, frame: FunctionScope) -> bool:
        self.evaluate(node.exc, frame)
        self._leave(node, frame, 0)
        return True

    def _Break(self, node: ast.Break, frame: FunctionScope) -> bool:
        self._leave(node, frame, len(self.state.loops) - 1)
        return True

    def _Continue(self, node: ast.Continue, frame: FunctionScope) -> bool:
        return True

    def _Delete(self, node: ast.Delete, frame: FunctionScope) -> None:
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr == "grad":
                base = self.evaluate(target.value, frame)
                self.record("<grad>.set", Place(frame.module, target), base, (NONE,))

    def _Assert(self, node: ast.Assert, frame: FunctionScope) -> None:
        self.evaluate(node.test, frame)

    def _Global(self, node: ast.Global, frame: FunctionScope) -> None:
        frame.global_names.update(node.names)

    def _If(self, node: ast.If, frame: FunctionScope) -> bool:
        self.evaluate(node.test, frame)
        if _is_main(node.test):
            return self.block(node.body, frame)
        taken = self._decided(node.test, frame)
        names, before = frame.names, (dict(frame.names), dict(self.state.heap))
        ended = {}
        outcomes = []
        for arm, body in ((True, node.body), (False, node.orelse)):
            if taken is not None and taken is not arm:
                ended[arm] = True
                continue
            frame.names, self.state.heap = dict(before[0]), dict(before[1])
            self.state.path.extend(conditions(node.test, arm))
            ended[arm] = self.block(body, frame)
            del self.state.path[len(self.state.path) - len(conditions(node.test, arm)) :]
            if not ended[arm]:
                outcomes.append((frame.names, self.state.heap))
        frame.names = names
        if outcomes:
            # The same dictionary: it may be the environment of a module.
            merged = _merged(outcomes[0][0], outcomes[-1][0])
            names.clear()
            names.update(merged)
            self.state.heap = _merged(outcomes[0][1], outcomes[-1][1])
        if taken is None and ended[True] != ended[False]:
            # The rest of the enclosing block runs on the other arm alone.
            self.state.path.extend(conditions(node.test, ended[False]))
        return ended[True] and ended[False]

    def _decided(self, test: ast.expr, frame: FunctionScope) -> bool | None:
        """Return which arm is always taken, where a constant or a followed call decides."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand, frame)
            return None if inner is None else not inner
        if isinstance(test, ast.Name | ast.Attribute):
            value = self.evaluate(test, frame)
            if value.kind is ValueKind.CONSTANT and frame.function is not None and self.state.stack:
                return bool(value.constant) if not value.maybe else None
        if (
            isinstance(test, ast.Compare)
            and isinstance(test.ops[0], ast.Is | ast.IsNot)
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value is None
            and self.state.stack
        ):
            value = self.evaluate(test.left, frame)
            wanted = isinstance(test.ops[0], ast.Is)
            if value.kind is ValueKind.CONSTANT and not value.maybe:
                return (value.constant is None) == wanted
        return None

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: FunctionScope) -> None:
        place = Place(frame.module, node)
        if isinstance(node, ast.While):
            self.evaluate(node.test, frame)
            self.enter_loop()
            self.record("<loop>", place)
        else:
            over = self.evaluate(node.iter, frame)
            self.enter_loop()
            self.record("<loop>", place, over)
            self.assign(node.target, element(over, place), frame)
        self.block(node.body, frame)
        self.state.loops.pop()
        self.block(node.orelse, frame)

    _For = _AsyncFor = _While = _loop

    def _with(self, node: ast.With | ast.AsyncWith, frame: FunctionScope) -> bool:
        before = self.state.autocast, self.state.no_grad
        unsynchronized = []
        for item in node.items:
            place = Place(frame.module, item.context_expr)
            value = self.evaluate(item.context_expr, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, frame)
            self.enter_context(value, place)
            if value.kind is ValueKind.CONTEXT and value.name == "no_sync" and not value.maybe:
                self.record("<no_sync>.enter", place, value)
                unsynchronized.append((place, value))
        ended = self.block(node.body, frame)
        self.state.autocast, self.state.no_grad = before
        for place, value in unsynchronized:
            self.record("<no_sync>.exit", place, value)
        return ended

    _With = _AsyncWith = _with

    def enter_context(self, value: Value, place: Place) -> None:
        """Begin an autocast or a no_grad context."""
        if value.kind is ValueKind.AUTOCAST:
            self.state.autocast = value if value.constant else None
            if value.constant:
                self.record("<autocast>.enter", place, value)
        elif value.kind is ValueKind.NO_GRAD:
            self.state.no_grad = True

    def _Try(self, node: ast.Try, frame: FunctionScope) -> bool:
        ended = self.block(node.body, frame)
        for handler in node.handlers:
            self.state.path.append((f"except at line {handler.lineno}", True))
            handled = self.block(handler.body, frame)
            self.state.path.pop()
            ended = ended and handled
        if not ended:
            ended = self.block(node.orelse, frame)
        return self.block(node.finalbody, frame) or ended

    _TryStar = _Try

    def _Match(self, node: ast.Match, frame: FunctionScope) -> None:
        self.evaluate(node.subject, frame)
        subject = ast.unparse(node.subject)
        for index, case in enumerate(node.cases):
            depth = len(self.state.path)
            for other in range(index + 1):
                self.state.path.append((f"{subject} matches case {other}", other == index))
            self.block(case.body, frame)
            del self.state.path[depth:]

    def execute(self, function: FunctionInfo, frame: FunctionScope, place: Place) -> Value:
        """Execute a function under its decorators; return what it returns."""
        state = self.state
        before = state.autocast, state.no_grad
        depth = len(state.path)
        outer = FunctionScope(function.module, self.environment(function.module))
        manages = False
        for decorator in function.decorators:
            value = self.evaluate(decorator, outer)
            self.enter_context(value, Place(function.module, decorator))
            manages = manages or value.name.endswith("contextmanager")
        state.stack.append(function)
        frame.loops_before = len(state.loops)
        if isinstance(function.node, ast.Lambda):
            frame.returned.append(self.evaluate(function.node.body, frame))
        else:
            self.block(function.node.body, frame)
        state.stack.pop()
        state.autocast, state.no_grad = before
        del state.path[depth:]
        if manages:
            return frame.yielded or Value(ValueKind.CONTEXT, key_of(place))
        if frame.yields:
            return Value(key=key_of(place))
        return union(frame.returned, key_of(place))

    def _Yield(self, node: ast.Yield, frame: FunctionScope) -> Value:
        frame.yields = True
        frame.yielded = frame.yielded or self.state.autocast
        return self.evaluate(node.value, frame)

    def environment(self, module: ModuleInfo) -> dict[str, Value]:
        """Return the global names of a module, which is executed for it once."""
        environments = self.project.environments
        if module.path not in environments:
            trace_module(module, self.project, set(), follows=False)
        return environments[module.path]

    def class_attributes(self, klass: ClassInfo) -> Mapping[str, Value]:
        """Return the attributes that the constructors of a class and its bases set."""
        key = class_key(klass)
        known = self.project.attributes
        if key not in known:
            known[key] = {}
            constructor = self.method(klass, "__init__")
            if constructor is not None:
                other = AbstractInterpreter(self.project, Trace(klass.module, key), set())
                other.run(constructor, klass)
                prefix = f"{key}."
                known[key] = {
                    name[len(prefix) :]: value
                    for name, value in other.state.heap.items()
                    if name.startswith(prefix) and "." not in name[len(prefix) :]
                }
        return known[key]

    def output_activations(self, klass: ClassInfo) -> tuple[str, ...]:
        """Return the functions in which the outputs of a class's forward pass certainly end."""
        key = class_key(klass)
        known = self.project.activations
        if key not in known:
            known[key] = ("",)
            forward = self.method(klass, "forward")
            text = klass.module.source.text
            if forward is not None and any(word in text for word in ACTIVATIONS):
                other = AbstractInterpreter(self.project, Trace(klass.module, key), set())
                returned = other.run(forward, klass)
                several = returned.kind is ValueKind.SEQUENCE and not returned.maybe
                outputs = returned.items if several and returned.name != "dict" else (returned,)
                known[key] = tuple(output.activation for output in outputs)
        return known[key]

    def run(self, function: FunctionInfo, klass: ClassInfo | None) -> Value:
        """Execute a function alone, with arguments of which only the names are known."""
        node = function.node
        positional = [*node.args.posonlyargs, *node.args.args]
        names = {
            parameter.arg: Value(key=f"{function.identity}:{parameter.arg}")
            for parameter in [*positional, *node.args.kwonlyargs]
        }
        if klass is not None and positional:
            kind = ValueKind.MODEL if self.is_module(klass) else ValueKind.INSTANCE
            names[positional[0].arg] = Value(kind, class_key(klass), klass=klass)
        return self.execute(
            function,
            FunctionScope(function.module, names, function),
            Place(function.module, _of(node)),
        )


def class_key(klass: ClassInfo) -> str:
    """Return the key of `self` in the methods of a class."""
    return f"self:{klass.module.path}:{klass.qualified_name}:{klass.node.lineno}"


def trace_module(
    module: ModuleInfo, project: Project, followed: set[str], *, follows: bool = True
) -> Trace:
    """Execute the top level of a module; its names become the module's environment."""
    names: dict[str, Value] = {}
    project.environments[module.path] = names
    trace = Trace(module, "<module>", modules=[module])
    interpreter = AbstractInterpreter(project, trace, followed)
    interpreter.follows = follows
    frame = FunctionScope(module, names)
    interpreter.block(module.tree.body, frame)
    names.update(frame.names)
    return trace


def trace_function(function: FunctionInfo, project: Project, followed: set[str]) -> Trace:
    """Execute one function alone."""
    trace = Trace(function.module, function.identity, modules=[function.module])
    interpreter: Evaluator = AbstractInterpreter(project, trace, followed)
    assert isinstance(interpreter, AbstractInterpreter)
    interpreter.run(function, function.klass)
    return trace


def _merged(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    if one is other:
        return one
    names = {**other, **one}
    for name in one.keys() & other.keys():
        if one[name] is not other[name]:
            names[name] = joined(one[name], other[name])
    return names


def _of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> ast.expr | ast.stmt:
    return node


def _is_main(test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name):
        return False
    return test.left.id == "__name__" and isinstance(test.ops[0], ast.Eq)
