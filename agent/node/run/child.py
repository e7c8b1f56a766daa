"""A child process that works for the node agent, within bounds, without delaying it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mp_agent.ring import locations

_OUTPUT_BYTES_MAX = 1 << 20
_REASON_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """What a child printed, or why there is nothing."""

    printed: bytes = b""
    problem: str = ""

    @property
    def unreadable(self) -> "Ended":
        """The same as an end whose output is not what was expected, with what it is."""
        return Ended(problem=_with_output(0, self.printed))


def _with_output(status: int, printed: bytes) -> str:
    text = printed.decode(errors="replace").strip()[-_REASON_LENGTH_MAX:]
    return f"exit status {status}: {text}" if text else f"exit status {status}"


@dataclass(slots=True)
class Child:
    """A Python program that runs in a separate process; it limits itself."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    """Standard output and error, in a file: a full pipe would block the process."""
    seconds_max: float
    deadline_seconds: float

    def poll(self, now_seconds: float) -> Ended | None:
        """Return how it ended; None while it runs. After its time it is killed."""
        status = self.process.poll()
        if status is None and now_seconds < self.deadline_seconds:
            return None
        if status is None:
            self.close()
            return Ended(problem=f"it took more than {self.seconds_max:g} s")
        self.output.seek(0)
        printed = self.output.read(_OUTPUT_BYTES_MAX)
        self.close()
        if status == 0:
            return Ended(printed)
        return Ended(problem=_with_output(status, printed))

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.output.close()


def start_child(
    arguments: Sequence[str], *, seconds_max: float, now_seconds: float
) -> Child | Ended:
    """Start Python with some arguments; the result says why if that fails."""
    try:
        with ExitStack() as stack:
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_environment(),
            )
            stack.pop_all()
    except (OSError, ValueError) as error:
        return Ended(problem=str(error))
    return Child(process, output, seconds_max, now_seconds + seconds_max)


def _environment() -> dict[str, str]:
    """Return this process's variables, with the mp_agent that runs here on the import path."""
    environment = dict(os.environ)
    environment.pop("MP_AGENT_ATTACH", None)
    # One thread: the others would be taken from the training.
    environment.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    found = str(Path(locations.__file__).parents[2])
    paths = filter(None, (environment.get("PYTHONPATH"), found))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
