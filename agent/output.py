"""How the commands write their files: as a whole or not at all."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import click


class UnwritableError(click.ClickException):
    """A file cannot be written. Ends a command with 2: other statuses speak of what it found."""

    exit_code = 2


def printable(text: str) -> str:
    """Return text on one line, with escapes for what a terminal or a file would interpret."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def write_whole(path: Path, text: str, *, encoding: str = "utf-8") -> None:
    """Write a file; until it is whole, the one before it stays. A device is written as it stands.

    Line endings are written as `text` has them.

    Raises UnwritableError, naming the path, when it cannot be written.
    """
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding=encoding, newline="")
            return
        partial.write_text(text, encoding=encoding, newline="")
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error}"
        raise UnwritableError(f"{printable(str(path))} cannot be written: {reason}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
