"""Statements that bring names into being: imports, functions, classes."""

from __future__ import annotations

import ast

from mp_agent.lint.interpret.base import FunctionScope
from mp_agent.lint.interpret.expressions import ExpressionEvaluator
from mp_agent.lint.interpret.modules import ClassInfo, FunctionInfo
from mp_agent.lint.interpret.values import Place, Value, ValueKind

_DEPRECATED_DECORATORS = ("torch.cuda.amp.", "torch.cpu.amp.")


class DefinitionEvaluator(ExpressionEvaluator):
    """Executes imports and definitions."""

    def _Import(self, node: ast.Import, frame: FunctionScope) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            name = alias.name if alias.asname else top
            frame.names[alias.asname or top] = self.imported(name, 0, frame)

    def _ImportFrom(self, node: ast.ImportFrom, frame: FunctionScope) -> None:
        for alias in node.names:
            base = node.module or ""
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
