"""What the commands before a run share: `script.py:function`, and a progress bar."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mp_agent.errors import CompareError
from mp_agent.output import Console


def is_target(text: str) -> bool:
    """Return whether a command line argument names a function, and no path or address."""
    place, _, function = text.rpartition(":")
    return bool(place) and function.isidentifier() and "//" not in place


def load_target(text: str) -> tuple[Any, Any, Any]:
    """Return the model, the batch and the loss that a function makes; None for no loss.

    The function gets no arguments and returns (model, batch) or (model, batch, loss). A script's
    directory is searched for its imports, as Python does when it runs it. Raises CompareError,
    naming the target, when there is no such function, when it fails, or returns something else.
    """
    place, _, name = text.rpartition(":")
    module = _module(place)
    make = getattr(module, name, None)
    if not callable(make):
        raise CompareError(f"{text}: {place} has no function {name}")
    try:
        made = make()
    except Exception as error:
        raise CompareError(f"{text}: raised {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise CompareError(
            f"{text}: returned {found}; it has to return (model, batch) or (model, batch, loss)"
        )
    return (*made, None) if len(made) == 2 else made


def _module(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(place)
        path = Path(place)
        if not path.is_file():
            raise CompareError(f"{place}: no such file")
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise CompareError(f"{place}: cannot be imported")
        module = importlib.util.module_from_spec(spec)
        # Classes of the script are found by their module's name when they are copied.
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    except CompareError:
        raise
    except Exception as error:
        raise CompareError(f"{place}: raised {type(error).__name__}: {error}") from error
    return module


@contextmanager
def progress_bar(shown: bool | None = None) -> "Iterator[ProgressBar]":
    """Show a bar while a comparison runs; shown: None for only on a terminal."""
    console = Console(file=sys.stderr)
    visible = console.is_terminal if shown is None else shown
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not visible) as progress:
        yield ProgressBar(progress)


class ProgressBar:
    """One line for each thing that is done with a candidate."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._longest: dict[str, int] = {}
        self._current: tuple[str, str] | None = None

    def __call__(self, candidate: str, stage: str, count: int) -> None:
        """Show how many calls or trials are over; a total is known from earlier candidates."""
        key = (candidate, stage)
        if key != self._current:
            self._finish()
            self._current = key
            total = self._longest.get(stage)
            self._tasks[key] = self._progress.add_task(f"{candidate}: {stage}", total=total)
        self._longest[stage] = max(count, self._longest.get(stage, 0))
        self._progress.update(self._tasks[key], completed=count)

    def _finish(self) -> None:
        if self._current is not None:
            done = self._tasks[self._current]
            completed = next(t.completed for t in self._progress.tasks if t.id == done)
            self._progress.update(done, total=completed)
