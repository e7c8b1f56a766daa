"""Content negotiation by quality values (RFC 9110, 12.4.2)."""

from collections.abc import Mapping


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether a response may be compressed: `gzip` or `*` has a quality above 0.

    A named coding takes precedence over `*`; without any, the response is not compressed.
    """
    qualities = _qualities(accept_encoding)
    named = [qualities[name] for name in ("gzip", "x-gzip") if name in qualities]
    gzip = max(named, default=qualities.get("*", 0.0))
    # Explicitly preferred plain text is sent; with equal qualities gzip is shorter.
    return gzip > 0.0 and gzip >= qualities.get("identity", 0.0)


def wanted_types(accept: str) -> str:
    """Return an Accept header without the media types that the client refuses by `q=0`."""
    parts = (part.strip() for part in accept.split(","))
    return ",".join(part for part in parts if part and _quality(part) > 0.0)


def _qualities(header: str) -> Mapping[str, float]:
    """Return the quality of each token of a header, by its name in lower case."""
    parts = (part for part in header.split(",") if part.strip())
    return {part.partition(";")[0].strip().lower(): _quality(part) for part in parts}


def _quality(part: str) -> float:
    """Return the quality of a header's element; 1 by default, 0 if it is malformed."""
    for parameter in part.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            return _number(value.strip())
    return 1.0


def _number(text: str) -> float:
    """Return a quality value; 0 if it is malformed."""
    digits = text.replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit()) or len(text) > 5:
        return 0.0
    return min(float(text), 1.0)
