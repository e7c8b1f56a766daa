"""Files of unknown origin: regular ones alone, up to a size, in the encodings that logs have."""

import codecs
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEXT_BYTES_MAX = 256 << 20
"""Of a text that is read as a whole."""
STREAM_BYTES_MAX = 4 << 30
"""Of a file that is read piece by piece."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Those that begin like another one after it."""
_UNMARKED_BYTES = 64


def open_regular(path: str | Path, bytes_max: int = STREAM_BYTES_MAX) -> BinaryIO:
    """Return a regular file of at most `bytes_max`, opened for reading.

    Opening never waits, as it would for a pipe. Raises OSError, also for what is no such file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        # Before opening it: that alone may have an effect on a device.
        raise _not_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(fd, "rb")
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path)
        if status.st_size > bytes_max:
            raise _too_large(path, status.st_size, bytes_max)
    except BaseException:
        file.close()
        raise
    return file


def read_file(path: str | Path, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
    """Return what a regular file holds. Raises OSError, also for one that is too large."""
    with open_regular(path, bytes_max) as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        # It has grown since, or is one of the kernel's, whose size is 0.
        raise _too_large(path, len(content), bytes_max)
    return content


def read_text(path: str | Path, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """Return what a regular file holds as text; bytes of no character are replaced.

    Raises OSError, also for one that is too large.
    """
    content = read_file(path, bytes_max)
    return content.decode(encoding_of(content), "replace")


def read_lines(path: str | Path, characters_max: int) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without its end; longer ones are left out.

    Never holds more than a line of that length. Raises OSError.
    """
    with open_regular(path) as file:
        encoding = encoding_of(file.read(_UNMARKED_BYTES))
        file.seek(0)
        lines = io.TextIOWrapper(file, encoding, errors="replace", newline="\n")
        number, whole = 1, True
        while line := lines.readline(characters_max):
            ended = line.endswith("\n")
            if whole and (ended or len(line) < characters_max):
                yield number, line.removesuffix("\n").removesuffix("\r")
            whole = ended
            number += ended


def check_text(path: str | Path) -> None:
    """Raise ValueError for a file that begins as no text does, such as a compressed one.

    Raises OSError for what `open_regular` refuses.
    """
    with open_regular(path) as file:
        head = file.read(_UNMARKED_BYTES)
    encoding = encoding_of(head)
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        is_text = "\0" not in decoder.decode(head)
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise ValueError("is no text: is it compressed?")


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text that begins with these bytes: UTF-8 unless they show another.

    Windows' shells write UTF-16, with a byte order mark or without.
    """
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    begin = head[:_UNMARKED_BYTES]
    if len(begin) >= 4:
        if not any(begin[1::2]) and all(begin[0::2]):
            return "utf-16-le"
        if not any(begin[0::2]) and all(begin[1::2]):
            return "utf-16-be"
    return "utf-8"


def _not_regular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))


def _too_large(path: str | Path, size: int, bytes_max: int) -> OSError:
    return OSError(errno.EFBIG, f"holds {size} bytes, more than {bytes_max}", str(path))
