"""How the commands show and write: safe for terminals, and files as a whole or not at all."""

import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click
import rich.console
from rich.segment import Segment

from mp_agent.inputs.files import printable

WRONG_USE = 2
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
"""What file systems without hard links say."""


class UnwritableError(click.ClickException):
    """A file cannot be written. Ends a command with 2: other statuses speak of what it found."""

    exit_code = WRONG_USE


class OutputPath(click.Path):
    """A path to write to. An empty one, as of a variable that is not set, would be this folder.

    `-` would be a file of that name where an option does not offer standard output.
    """

    def __init__(self, *, directory: bool = False, allow_dash: bool = False) -> None:
        super().__init__(
            path_type=Path, file_okay=not directory, dir_okay=directory, allow_dash=allow_dash
        )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail("it is empty.", param, ctx)
        if value == "-" and not self.allow_dash:
            self.fail("'-' is not standard output here; './-' names a file.", param, ctx)
        return super().convert(value, param, ctx)


class Console(rich.console.Console):
    """A console that shows what a terminal would interpret in a text by escapes.

    Names of runs, layers, hosts and files, and what servers answer, come from others.
    """

    def render(
        self,
        renderable: rich.console.RenderableType,
        options: rich.console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        """Yield the segments of what is printed; only styles and rich itself may control."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)


def refuse(command: str, problem: object) -> NoReturn:
    """Say on one line of standard error why a command does nothing, and exit with 2."""
    click.echo(f"mp-agent {command}: {printable(str(problem))}", err=True)
    sys.exit(WRONG_USE)


def write_whole(
    path: Path, text: str, *, encoding: str = "utf-8", errors: str = "backslashreplace"
) -> None:
    """Write a file; until it is whole, the one before it stays. A device is written in place.

    Line endings are written as `text` has them. errors: what becomes of characters that the
    encoding does not have, such as the bytes of a file name that is no UTF-8.

    Raises UnwritableError, naming the path, when it cannot be written.
    """
    with _unwritable(path):
        content = text.encode(encoding, errors)
        if path.exists() and not path.is_file():
            # Without waiting for the reader of a pipe, which may never come.
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(fd, True)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            return
        target = Path(os.path.realpath(path))  # resolve() raises where links form a circle
        with _partial(target) as partial:
            with os.fdopen(os.open(partial, _NEW, 0o666), "wb") as file:
                file.write(content)
            if target.exists():
                shutil.copymode(target, partial)
            os.replace(partial, target)


def keep_inputs(inputs: Iterable[str | Path | None], *outputs: Path | None) -> None:
    """Raise UnwritableError, naming it, for an output that would take the place of an input."""
    read = [path for path in inputs if path is not None]
    for output in filter(None, outputs):
        for path in read:
            # A path that is none, such as an address, is no such file.
            with suppress(OSError, ValueError):
                if os.path.samefile(output, path):
                    name = printable(str(output))
                    raise UnwritableError(f"{name} cannot be written: it is what is read")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or directory to, which then becomes `path`, all or nothing.

    What has come to be at `path` is not replaced. Raises UnwritableError, naming the path.
    """
    with _unwritable(path), _partial(path) as partial:
        yield partial
        if partial.is_dir():
            os.rename(partial, path)
            return
        try:
            # Unlike a rename, it fails if the file is there by now.
            os.link(partial, path)
        except OSError as error:
            if error.errno not in _NO_LINKS or os.path.lexists(path):
                raise
            os.rename(partial, path)


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yield an unforeseeable path next to `target`, and remove what remains there."""
    partial = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
    finally:
        with suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)


@contextmanager
def _unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnwritableError(f"{printable(str(path))} cannot be written: {reason}") from error
