"""A progress bar for a comparison, on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mp_agent.output import Console


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
