"""How the commands write their files: as a whole or not at all."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import click


def write_whole(path: Path, text: str, *, encoding: str = "utf-8") -> None:
    """Write a file; until it is whole, the one before it stays. A device is written as it stands.

    Line endings are written as `text` has them.

    Raises click.ClickException, naming the path, when it cannot be written.
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
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
