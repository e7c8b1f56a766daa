"""Finds and parses the modules that code imports, as far as they belong to the same project."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from mp_agent.lint.interpret.modules import ModuleInfo, is_relevant, module_info
from mp_agent.lint.interpret.values import Value
from mp_agent.lint.source.files import UnreadableSource, read_source

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
        file = module_file(name, root, importer)
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
