"""Text that can be written as UTF-8, whatever an environment put into it."""


def as_utf8(name: str) -> str:
    """Return a name that can be written as UTF-8: lone surrogates become question marks."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode("utf-8")
