"""The modules of a project, and the names in them."""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mp_agent.lint.interpret.values import Value
from mp_agent.lint.source import SourceText, UnreadableSource, read_source

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

FOLLOWED = re.compile(
    r"\.backward\(|autocast|unscale_|clip_grad|[Ss]caler|\w_cross_entropy|BCELoss"
    r"|_loss\(|\bcross_entropy|\.half\(|bfloat16|float16|\bhalf\b|zero_grad|\.grad\b|opt\w*\.step\("
    r"|\.eval\(\)|\.train\(|no_grad|inference_mode|DataLoader\(|DataParallel\(|optim\.\w+\(|no_sync"
)
"""What makes a function worth following into."""
RELEVANT = re.compile(
    r"float16|\bhalf\b|autocast|\bamp\b|unscale_|[Ss]caler|clip_grad|\.backward\(|detect_anomaly"
    r"|(?:Linear|Conv\dd|LSTM|GRU)\(|\.pow\(|square|\*\*\s*2|mean\(|cross_entropy|CrossEntropyLoss"
    r"|(?:criterion|loss_fn|loss_func|loss_function)\(.*(?:oftmax|igmoid)"
    r"|(?:oftmax|igmoid)\([^\n]*\n(?:[^\n]*\n){0,3}?[^\n]*(?:criterion|loss\w*)\("
    r"|optim\.\w+\(|_with_logits|BCEWithLogitsLoss|nll_loss|NLLLoss|torch\.save\(|bf16"
    r"|Accelerator\(|\bbetas\b|Adam(?:W|ax)?\(|\bmomentum\s*=|BatchNorm\w*\([^\n]*\.9"
    r"|CausalLM\b|LMHeadModel|\.(?:backward|zero_grad)\s*\n"
)
"""A function, or a file, without any of these cannot break a rule."""
ACTIVATIONS = ("oftmax", "igmoid")
"""A module without any of these has no model that ends in one."""
_CALLED = re.compile(r"(\w+)\(")
_CALLS_DEEP = 2
_RENAMED = re.compile(r"(?:autocast|binary_cross_entropy|clip_grad_\w+|GradScaler|float16)\s+as\s")


@dataclass(eq=False, slots=True)
class FunctionInfo:
    """One function or method; `qualified_name` is unique in its module."""

    module: ModuleInfo
    node: FunctionNode
    qualified_name: str
    klass: ClassInfo | None = None
    enclosing: FunctionInfo | None = None
    _reaches: dict[re.Pattern[str], bool] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Name in the project."""
        return f"{self.module.path}:{self.qualified_name}:{self.node.lineno}"

    def matches(self, pattern: re.Pattern[str]) -> bool:
        """Return whether the source of the function, decorators included, matches."""
        first = min((d.lineno for d in self.decorators), default=self.node.lineno)
        return self.module.source.matches(pattern, first, self.node.end_lineno or first)

    @property
    def decorators(self) -> list[ast.expr]:
        """Decorators, outermost first."""
        return [] if isinstance(self.node, ast.Lambda) else self.node.decorator_list

    @property
    def is_followed(self) -> bool:
        """Whether calls of it are followed."""
        return self.module.renames or self.reaches(FOLLOWED)

    def reaches(self, pattern: re.Pattern[str]) -> bool:
        """Return whether its source, or that of what it calls in its module, matches."""
        if pattern not in self._reaches:
            self._reaches[pattern] = any(
                function.matches(pattern) for function in (self, *self._called(_CALLS_DEEP))
            )
        return self._reaches[pattern]

    def _called(self, depth: int) -> set[FunctionInfo]:
        """Return the functions of the module that it calls, by their names alone."""
        found = {
            function
            for name in self.module.called_names(self)
            if not name.startswith("__")
            for function in self.module.functions_by_name.get(name, ())
        }
        if depth > 1:
            found |= {deeper for function in found for deeper in function._called(depth - 1)}
        return found


@dataclass(eq=False, slots=True)
class ClassInfo:
    """One class with its methods."""

    module: ModuleInfo
    node: ast.ClassDef
    qualified_name: str
    methods: dict[str, FunctionInfo] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class ModuleInfo:
    """One parsed file."""

    path: str
    name: str
    is_package: bool
    source: SourceText
    tree: ast.Module
    functions: list[FunctionInfo] = field(default_factory=list)
    classes: list[ClassInfo] = field(default_factory=list)
    functions_by_name: dict[str, list[FunctionInfo]] = field(default_factory=dict)
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    identifiers: frozenset[str] = frozenset()
    renames: bool = False
    """Whether relevant names have other names here: then every function is followed."""
    by_node: dict[ast.AST, FunctionInfo | ClassInfo] = field(default_factory=dict)

    _called_names: dict[FunctionInfo, set[str]] = field(default_factory=dict)
    _mentions: dict[frozenset[str], bool] = field(default_factory=dict)

    def mentions(self, words: frozenset[str]) -> bool:
        """Return whether a name contains one of these words; all names are searched only once."""
        if words not in self._mentions:
            self._mentions[words] = any(word in name for name in self.identifiers for word in words)
        return self._mentions[words]

    def called_names(self, function: FunctionInfo) -> set[str]:
        """Return the last names of what a function calls below its first line."""
        if function in self._called_names:
            return self._called_names[function]
        first, last = function.node.lineno, function.node.end_lineno or function.node.lineno
        names = set(_CALLED.findall("".join(self.source.lines[first:last])))
        self._called_names[function] = names
        return names


def is_relevant(source: SourceText) -> bool:
    """Return whether a file can break a rule, by itself or when others call its functions."""
    return any(pattern.search(source.text) for pattern in (RELEVANT, FOLLOWED, _RENAMED))


def parsed(text: str) -> ast.Module:
    """Return the tree of a file, without Python's warnings of what it may not mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def module_info(path: str, name: str, is_package: bool, source: SourceText) -> ModuleInfo:
    """Parse a file and list its definitions; raises SyntaxError, ValueError or RecursionError."""
    tree = parsed(source.text)
    module = ModuleInfo(path, name, is_package, source, tree)
    _Definitions(module).visit_body(tree.body, "", None, None)
    for function in module.functions:
        name = function.qualified_name.rpartition(".")[2]
        module.functions_by_name.setdefault(name, []).append(function)
    module.renames = _RENAMED.search(source.text) is not None
    module.identifiers = frozenset(source.identifiers())
    return module


class _Definitions:
    """Collects functions and classes, those within blocks and functions included."""

    def __init__(self, module: ModuleInfo) -> None:
        self._module = module

    def visit_body(
        self,
        body: list[ast.stmt],
        prefix: str,
        klass: ClassInfo | None,
        enclosing: FunctionInfo | None,
    ) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                info = FunctionInfo(self._module, node, prefix + node.name, klass, enclosing)
                self._module.functions.append(info)
                self._module.by_node[node] = info
                if klass is not None:
                    klass.methods.setdefault(node.name, info)
                self.visit_body(node.body, f"{prefix}{node.name}.", None, info)
            elif isinstance(node, ast.ClassDef):
                found = ClassInfo(self._module, node, prefix + node.name)
                self._module.classes.append(found)
                self._module.by_node[node] = found
                self.visit_body(node.body, f"{prefix}{node.name}.", found, enclosing)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._module.imports.append(node)
            else:
                for block in _blocks(node):
                    self.visit_body(block, prefix, klass, enclosing)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body


_NEVER_FOLLOWED = {"torch", "numpy"}
"""Packages whose names rules refer to: they stay names, in their own source as well."""
_INSTALLED = {"site-packages", "dist-packages"}


class Project:
    """Modules by path, parsed once."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleInfo | None] = {}
        self._roots: dict[str, Path] = {}
        self._found: dict[tuple[str, str], ModuleInfo | None] = {}
        self.environments: dict[str, dict[str, Value]] = {}
        """Global names of the modules that were executed, by path."""
        self.attributes: dict[str, dict[str, Value]] = {}
        """Attributes that constructors set, by the class's module and name."""
        self.activations: dict[str, tuple[str, ...]] = {}
        """What the forward passes of classes end in, likewise."""
        self.module_classes: dict[str, bool] = {}
        """Whether a class is an nn.Module, likewise."""

    def load(self, path: str, *, imported: bool = False) -> ModuleInfo | None:
        """Return the parsed file; None when it cannot be read or is no Python.

        Of imported files, those in which no rule is interested are None as well, packages aside.
        """
        path = os.path.abspath(path)
        if path not in self._modules:
            self._modules[path] = None
            try:
                source = read_source(path)
                name, is_package = module_name(path)
                if imported and not is_package and not is_relevant(source):
                    return None
                self._modules[path] = module_info(path, name, is_package, source)
            except (UnreadableSource, SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        return self._modules[path]

    def add(self, module: ModuleInfo) -> None:
        """Register a module that was parsed elsewhere."""
        self._modules[module.path] = module

    def find(self, name: str, importer: ModuleInfo) -> ModuleInfo | None:
        """Return the module of this dotted name, if it is of the importer's project."""
        top = name.partition(".")[0]
        if not top or top in _NEVER_FOLLOWED:
            return None
        root = self._roots.get(importer.path)
        if root is None:
            root = self._roots[importer.path] = search_root(importer)
        key = (str(root), name)
        if key not in self._found:
            self._found[key] = None
            self._found[key] = self._find(name, root, importer)
        return self._found[key]

    def _find(self, name: str, root: Path, importer: ModuleInfo) -> ModuleInfo | None:
        folder = Path(importer.path).parent
        file = module_file(name, root, importer)
        if file is None and name.partition(".")[0] not in sys.stdlib_module_names:
            file = module_file(name, folder, importer)  # a script in the folder of a package
        return None if file is None else self.load(file, imported=True)


def module_name(path: str) -> tuple[str, bool]:
    """Return the dotted name of a file by the packages around it, and whether it is a package."""
    file = Path(path)
    is_package = file.stem == "__init__"
    parts = [] if is_package else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), is_package


def search_root(module: ModuleInfo) -> Path:
    """Return the folder in which the module's top package, or the script, lies."""
    folder = Path(module.path).parent
    levels = module.name.count(".") + (1 if module.is_package else 0)
    for _ in range(levels):
        folder = folder.parent
    return folder


def module_file(name: str, root: Path, importer: ModuleInfo) -> str | None:
    """Return the file of a module below the importer's search root; None where there is none.

    An installed package has no other packages in its project.
    """
    top = name.partition(".")[0]
    if not top or (root.name in _INSTALLED and top != importer.name.partition(".")[0]):
        return None
    base = root.joinpath(*name.split("."))
    for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if candidate.is_file():
            return str(candidate)
    return None


def imported_names(module: ModuleInfo) -> Iterator[str]:
    """Yield the dotted names that a module imports; of `from a import b` also `a.b`."""
    for node in module.imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = absolute_name(node.module or "", node.level, module)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def absolute_name(name: str, level: int, importer: ModuleInfo) -> str:
    """Return the dotted name that a relative import means."""
    if not level:
        return name
    parts = importer.name.split(".")
    kept = parts[: len(parts) - level + (1 if importer.is_package else 0)]
    return ".".join([*kept, *([name] if name else [])])
