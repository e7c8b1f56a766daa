"""Reads one file into text: any declared encoding, byte order marks, notebooks."""

import io
import re
import tokenize

from mp_agent.inputs.files import read_file
from mp_agent.lint.source.text import SourceText

_DECLARATION = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
MAX_BYTES = 8_000_000
"""Larger files are data: parsing one takes about 100 times its size in memory."""


class UnreadableSource(Exception):
    """A file cannot be read as Python; the message is the reason alone."""


def read_source(path: str) -> SourceText:
    """Return the decoded text of a file; raises UnreadableSource."""
    return SourceText(decoded(read_bytes(path)))


def read_bytes(path: str) -> bytes:
    """Return the content of a regular file; raises UnreadableSource."""
    try:
        return read_file(path, MAX_BYTES)
    except OSError as error:
        raise UnreadableSource(error.strerror or str(error)) from error


def encoding_of(content: bytes) -> str:
    """Return the encoding of source text; raises SyntaxError where it is unknown."""
    try:
        return tokenize.detect_encoding(io.BytesIO(content).readline)[0]
    except SyntaxError:
        # It wants the line of the declaration in UTF-8, which Python's parser does not.
        for line in content.splitlines()[:2]:
            if match := _DECLARATION.match(line):
                return match.group(1).decode()
        raise


def decoded(content: bytes) -> str:
    """Return source text as Python itself decodes it; raises UnreadableSource."""
    try:
        return content.decode(encoding_of(content))
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableSource(f"cannot be decoded: {error}") from error
