"""Counts how far apart the code lies: `python -m tools.locality` prints the table.

Modules and lines are those that the wheel ships. One step is an `optimizer.step()` of a single
linear layer on a CPU, on a step that measures no layers.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
SHIPPED = {"agent": "mp_agent", "exporters": "mp_agent.exporters", "alerting": "mp_agent.alerting"}
"""Directories with the packages that they become."""

_OWN = str(Path(".editable") / "mp_agent")
_WARM_UP = 4
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}


def shipped_modules(root: Path = ROOT) -> Mapping[str, Path]:
    """Return the files of all shipped modules and packages by name."""
    found = {}
    for directory, package in SHIPPED.items():
        for path in sorted((root / directory).rglob("*.py")):
            parts = path.relative_to(root / directory).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def importers(modules: Mapping[str, Path]) -> Mapping[str, set[str]]:
    """Return for each module the shipped modules that import it."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for importer, path in modules.items():
        for name in _imports(ast.parse(path.read_text("utf-8"))):
            if name in found and name != importer:
                found[name].add(importer)
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def step_calls() -> Mapping[str, int]:
    """Return calls, modules, and frames down to the ring of one `optimizer.step()`.

    Calls `mp_agent.init()` in this process.
    """
    import torch

    import mp_agent
    from mp_agent.ring.writer import RingWriter

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mp_agent.init()
    steps: list[list[tuple[str, str]]] = []
    depths: list[int] = []

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        module = frame.f_code.co_filename
        if event != "call" or _OWN not in module or frame.f_code.co_name in _COMPREHENSIONS:
            return
        steps[-1].append((module, frame.f_code.co_name))
        if frame.f_code is RingWriter.write_step.__code__:
            depths.append(sum(_OWN in one.f_code.co_filename for one in _stack(frame)))

    for step in range(10):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        steps.append([])
        sys.setprofile(profile if step >= _WARM_UP else None)
        optimizer.step()
        sys.setprofile(None)
    mp_agent.shutdown()
    calls = min(steps[_WARM_UP:], key=len)  # what is looked at once a second is of no step
    return {
        "calls of one step": len(calls),
        "modules of one step": len({module for module, _ in calls}),
        "own frames from the hook to the ring": max(depths),
    }


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def file_counts(root: Path = ROOT) -> Mapping[str, int]:
    """Return what is counted without running anything."""
    modules = shipped_modules(root)
    used_by = importers(modules)
    folders: dict[Path, int] = defaultdict(int)
    for path in modules.values():
        folders[path.parent] += path.name != "__init__.py"
    tests = [path for path in (root / "tests").rglob("*.py")]
    return {
        "shipped modules": len(modules),
        "shipped lines": sum(map(_lines, modules.values())),
        "modules under probe": sum(name.startswith("mp_agent.probe") for name in modules),
        "modules with one importer": sum(len(users) == 1 for users in used_by.values()),
        "folders of at most three modules": sum(count <= 3 for count in folders.values()),
        "test lines": sum(map(_lines, tests)),
    }


def _lines(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


if __name__ == "__main__":
    for title, count in {**file_counts(), **step_calls()}.items():
        print(f"{count:>8,}  {title}")
