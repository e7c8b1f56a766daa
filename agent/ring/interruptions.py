"""Distinguishes exceptions that interrupt our code from outside from failures of our code.

Signal handlers, and `PyThreadState_SetAsyncExc`, raise into whatever code is running: while a hook
runs, into ours. Such an exception is meant for the training script and must reach it.
"""

import dis
import signal
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, TracebackType

_RAISING = frozenset({"RAISE_VARARGS", "RERAISE"})
_RAISED_BARE_BY_C = (StopIteration, StopAsyncIteration, MemoryError, AssertionError, LookupError)
"""Builtin exceptions that extension code raises without arguments."""
_LIBRARIES = frozenset({"torch", "numpy", "pydantic", "pydantic_core", "msgspec", "mp_agent"})


def pass_on(error: BaseException) -> None:
    """Raise `error` again if it came from outside; do nothing if our own code failed."""
    found = interruption_in(error)
    if found is not None:
        raise found


def interruption_in(
    error: BaseException, handled_before: BaseException | None = None
) -> BaseException | None:
    """Return what interrupted the code that raised `error`; None when that code failed by itself.

    It is `error` itself, or an exception during whose handling `error` was raised. `handled_before`
    is the exception that was being handled when the code was entered, which does not count.
    """
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and current is not handled_before and id(current) not in seen:
        if not isinstance(current, (Exception, GeneratorExit)) or _came_from_outside(current):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


def _came_from_outside(error: BaseException) -> bool:
    trace = error.__traceback__
    handlers: frozenset[CodeType] | None = None
    caller: FrameType | None = None
    innermost: TracebackType | None = None
    while trace is not None:
        frame = trace.tb_frame
        if caller is not None:
            if handlers is None:
                handlers = frozenset(_handler_codes())
            if frame.f_code in handlers or _was_called_for_a_signal(frame, caller):
                return True
        caller, innermost, trace = frame, trace, trace.tb_next
    return innermost is not None and _was_sent(error, innermost)


def _was_called_for_a_signal(frame: FrameType, interrupted: FrameType) -> bool:
    """Return whether `frame` was called with a signal's number and the frame that it interrupted.

    Recognises a handler that has unregistered itself, and functions that wrap handlers.
    """
    code = frame.f_code
    names = code.co_varnames[
        : code.co_argcount + bool(code.co_flags & 0x04) + code.co_kwonlyargcount
    ]
    values: list[object] = []
    for name in names:
        value = frame.f_locals.get(name)
        values += value if isinstance(value, tuple) else (value,)
    return any(
        value is interrupted and isinstance(before, int) and 0 < before < signal.NSIG
        for before, value in pairwise(values)
    )


def _handler_codes() -> Iterator[CodeType]:
    """Yield the code of each Python function that is a registered signal handler."""
    for number in signal.valid_signals():
        yield from _codes_of(signal.getsignal(number))


def _codes_of(handler: object) -> Iterator[CodeType]:
    for _ in range(8):  # wrappers of wrappers end somewhere
        if isinstance(handler, partial):
            handler = handler.func
        handler = getattr(handler, "__func__", handler)
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            yield code
            handler = getattr(handler, "__wrapped__", None)
        elif handler is not None and not isinstance(handler, int):
            handler = vars(type(handler)).get("__call__")
        else:
            return


def _was_sent(error: BaseException, innermost: TracebackType) -> bool:
    """Return whether another thread sent `error`, by `PyThreadState_SetAsyncExc`.

    It is then raised by an instruction that raises nothing, and made without arguments; only a
    class of the script's own may give itself some. Extension code that fails names its reason.
    """
    code = innermost.tb_frame.f_code.co_code
    if dis.opname[code[innermost.tb_lasti]] in _RAISING:
        return False
    if not error.args:
        return not isinstance(error, _RAISED_BARE_BY_C)
    origin = type(error).__module__.partition(".")[0]
    foreign = origin not in sys.stdlib_module_names and origin not in _LIBRARIES
    return foreign and isinstance(type(error).__init__, FunctionType)
