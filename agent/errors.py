"""What mp_agent raises, and only before training starts or in its own processes; `FailureLog`.

MpAgentError
├── SettingError      a setting's value cannot be used (also a ValueError)
├── RingError         a ring file cannot be read: other version, truncated, foreign owner
├── ReportError       what another node agent sent cannot be read, or contradicts itself
│   └── ReportTooLarge  it has more than a root accepts
├── FlightError       a flight record cannot be read: absent, truncated, other version
├── BaselineError     the file of a baseline cannot be read: absent, other version, a wrong value
├── CompareError      a model or two runs cannot be compared (also a ValueError)
├── AdviceError       a precision cannot be recommended or measured (also a ValueError)
├── SourceError       a server cannot be asked, or a text from outside cannot be used
│   ├── AnswerTooLarge  its answer is larger than what is read
│   └── LogError        a training log cannot be read: absent, of no known format
│       └── NothingToJudge  it holds no number that a condition looks at
├── TorchError        torch is absent, or too old for what was asked
└── CatalogError      a metric or condition record contradicts itself (also a ValueError)
"""

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

log = logging.getLogger("mp_agent.node")

T = TypeVar("T")


class MpAgentError(Exception):
    """Base of every error that mp_agent raises on purpose."""


class SettingError(MpAgentError, ValueError):
    """A setting's value cannot be used; the message names the field and the value."""


class RingError(MpAgentError):
    """A ring file cannot be read; the message names the file and what is wrong with it."""


class ReportError(MpAgentError):
    """What another node agent sent cannot be read; the message names what is wrong with it."""


class ReportTooLarge(ReportError):
    """A report exceeds a limit; without its layer tables, or in parts, it may not."""


class FlightError(MpAgentError):
    """A flight record cannot be read; the message names the path and what is wrong with it."""


class BaselineError(MpAgentError):
    """The file of a baseline cannot be used; the message names the file, field and value."""


class CompareError(MpAgentError, ValueError):
    """A model or two runs cannot be compared; the message names the argument or the module."""


class AdviceError(MpAgentError, ValueError):
    """A precision cannot be recommended or measured; the message names the argument or field."""


class SourceError(MpAgentError):
    """A server cannot be asked, or what it or a file holds cannot be used; shows no credentials."""


class AnswerTooLarge(SourceError):
    """A server's answer is larger than what is read."""


class LogError(SourceError):
    """A training log cannot be read; the message names the path, and the line and field."""


class NothingToJudge(LogError):
    """A training log can be read, but holds no number that a condition looks at."""


class TorchError(MpAgentError):
    """What was asked needs torch, or a newer one; the message says which, and how to install it."""


class CatalogError(MpAgentError, ValueError):
    """A record of a catalog contradicts itself; the message names the record."""


class FailureLog:
    """Logs each kind of failure of a node agent once."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def note(self, message: str, subject: object, *, kind: str = "") -> None:
        """Log the current exception; `message` and `kind` identify its kind."""
        if (message, kind) not in self._known:
            self._known.add((message, kind))
            log.exception(message, subject)

    def contain(self, make: Callable[[], T], message: str, subject: object) -> T | None:
        """Return what `make` returns; None, which is logged, where it raises."""
        try:
            return make()
        except Exception:
            self.note(message, subject)
            return None


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return that a name is unknown, with the known one that was probably meant, else some."""
    import difflib  # an error is rare, and the trainer imports this module

    names = tuple(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    some = f"known: {', '.join(names[:_NAMES_SHOWN])}{more}"
    return f"{name!r} is unknown; {f'did you mean {near[0]}?' if near else some}"


_NAMES_SHOWN = 40
