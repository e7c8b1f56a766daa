"""What the commands before a run share: `script.py:function`, and a progress bar."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mp_agent.errors import CompareError, MpAgentError
from mp_agent.inputs.files import printable
from mp_agent.output import Console, refuse

CRASHED = 3
"""Exit status where code of the user's own raised: 1 is a verdict, 2 a wrong use."""
_OURS = str(Path(__file__).absolute().parents[1])
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_OF_OTHERS = tuple(
    str(Path(path).absolute())
    for path in (*map(sysconfig.get_paths().get, _LIBRARIES), _OURS)
    if path
)
"""Where Python, installed packages and mp_agent itself are."""


@contextmanager
def running_own_code(command: str) -> Iterator[None]:
    """End a command with 2 where it is used wrongly, with 3 where the user's own code raises.

    Of such an exception its frames in that code are shown, without mp_agent's and the libraries';
    of a model that is a library's alone, the library's.
    """
    try:
        yield
    except MpAgentError as error:
        refuse(command, error)
    except (Exception, SystemExit) as error:
        frames = _own_frames(error)
        if isinstance(error, RecursionError) and not (frames and frames[-1] in frames[:-1]):
            refuse(command, CompareError("what the model takes or returns is nested too deeply"))
        frames = frames or _model_frames(error)
        if not frames:
            raise
        lines = [
            f"mp-agent {command}: the code under test raised an exception\n",
            *traceback.format_list(frames),
            *traceback.format_exception_only(error),
        ]
        click.echo(printable("".join(lines), keep="\n"), err=True, nl=False)
        sys.exit(CRASHED)


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception that are in the user's code, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if Path(frame.filename).is_file() and _is_own(frame.filename)]


def _model_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception from the call of a model on, if a library raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename.startswith(_OURS)]
    rest = frames[ours[-1] + 1 :] if ours else []
    return rest if any(frame.name == "forward" for frame in rest) else []


def _is_own(file: str) -> bool:
    return not str(Path(file).absolute()).startswith(_OF_OTHERS)


def is_target(text: str) -> bool:
    """Return whether a command line argument names a function, and no path or address."""
    place, _, function = text.rpartition(":")
    return bool(place) and function.isidentifier() and "//" not in place


def load_target(text: str) -> tuple[Any, Any, Any]:
    """Return the model, the batch and the loss that a function makes; None for no loss.

    The function gets no arguments and returns (model, batch) or (model, batch, loss). A script's
    directory is searched for its imports, as Python does when it runs it. Raises CompareError,
    naming the target, when there is no such function, or it needs arguments or returns something
    else, or the script is no Python. What the script or the function raises is raised.
    """
    with redirect_stdout(sys.stderr):  # standard output is for the result
        made = _function(text)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise CompareError(
            f"{text}: returned {found}; it has to return (model, batch) or (model, batch, loss)"
        )
    return (*made, None) if len(made) == 2 else made


def _function(text: str) -> Callable[[], Any]:
    place, _, name = text.rpartition(":")
    try:
        module = _module(place)
    except (SyntaxError, RecursionError, MemoryError) as error:
        if _own_frames(error):
            raise
        why = str(error) or "it is nested too deeply"
        raise CompareError(f"{place}: cannot be read as Python: {why}") from error
    make: Callable[[], Any] | None = getattr(module, name, None)
    if make is None or not callable(make):
        raise CompareError(f"{text}: {place} has no function {name}")
    _check_arguments(text, make)
    return make


def _check_arguments(text: str, make: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return  # one of C's may have none
    try:
        signature.bind()
    except TypeError as error:
        raise CompareError(f"{text}: is called without arguments: {error}") from error


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(f"{error.name}.")):
                raise CompareError(f"{place}: no such module") from error
            raise
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
    return module


@contextmanager
def progress_bar(shown: bool | None = None) -> "Iterator[ProgressBar]":
    """Show a bar while a comparison runs; shown: None for only on a terminal."""
    console = Console(file=sys.stderr)
    visible = console.is_terminal if shown is None else shown
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"))
    with (
        redirect_stdout(sys.stderr),  # standard output is for the result
        Progress(*columns, TimeElapsedColumn(), console=console, disable=not visible) as progress,
    ):
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
