"""Keeps errors of the probe, and its use of the thread's state, away from the training.

Torch's state of a thread, set aside while the probe computes, and restored in any case.
Grad mode, autocast and the user's modes (`TorchFunctionMode`, `TorchDispatchMode`) act on every
operation of a thread, the probe's among them: a mode that counts operations would count ours, one
that raises would stop us. Signal handlers may raise between any two lines, so nothing here relies
on having got to the end of something: `restore` compares with what was found and repairs the rest.

Isolates training from the probe: what fails in the probe stays in the probe.
What is raised *into* the probe does not: a signal handler of the script's, or another thread, may
raise while a hook runs, and what it raises is meant for the script.
"""

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from threading import RLock, get_ident
from time import perf_counter
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from mp_agent.probe import accelerator
from mp_agent.ring.interruptions import interruption_in, pass_on

_c: Any = torch._C


class ThreadState:
    """The state of the calling thread when it was made."""

    __slots__ = ("_autocast", "_function_modes_off", "_grad", "_inference", "_modes", "_without")

    def __init__(self) -> None:
        self._grad: bool = _c.is_grad_enabled()
        self._inference: bool = _c.is_inference_mode_enabled()
        kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)  # type: ignore[no-untyped-call]
        self._autocast = [kind for kind in kinds if _c.is_autocast_enabled(kind)]
        self._function_modes_off: bool = _c._is_torch_function_all_disabled()
        self._modes: Sequence[Any] = ()
        if count := _c._len_torch_dispatch_stack():
            self._modes = [_c._get_dispatch_stack_at(index) for index in range(count)]
        self._without = _c.DisableTorchFunction()

    @property
    def numbers_exist(self) -> bool:
        """Whether tensors hold numbers: not while shapes alone are traced, nor within `vmap`."""
        if any(map(_is_infrastructure, self._modes)):
            return False
        return _c._functorch.peek_interpreter_stack() is None  # of `torch.func`: vmap, grad, …

    def set_aside(self) -> None:
        """Compute without autograd, autocast and the user's modes from now on."""
        self._without.__enter__()  # first: a function mode sees what switches the others, too
        _c._set_grad_enabled(False)
        for kind in self._autocast:
            _c.set_autocast_enabled(kind, False)
        for _ in self._modes:
            _c._pop_torch_dispatch_stack(None)

    def restore(self) -> None:
        """Restore everything. May be called again when it was interrupted."""
        try:
            while (count := _c._len_torch_dispatch_stack()) < len(self._modes):
                _c._push_on_torch_dispatch_stack(self._modes[count])
        finally:
            try:
                for kind in self._autocast:
                    if not _c.is_autocast_enabled(kind):
                        _c.set_autocast_enabled(kind, True)
            finally:
                try:
                    if _c.is_inference_mode_enabled() != self._inference:
                        _c._InferenceMode(self._inference).__enter__()
                finally:
                    try:
                        if _c.is_grad_enabled() != self._grad:
                            _c._set_grad_enabled(self._grad)
                    finally:
                        if _c._is_torch_function_all_disabled() != self._function_modes_off:
                            self._without.__exit__(None, None, None)


def _is_infrastructure(mode: object) -> bool:
    """Return whether a mode is torch's own, for tensors without numbers (`FakeTensorMode`, …)."""
    return getattr(mode, "_mode_key", None) is not None


log = logging.getLogger("mp_agent")

FAILURES_AT_MOST = 10
"""Failures of one kind, one after another, after which that kind rests."""
REST_CALLS = 100
"""Calls that a kind sits out after its first `FAILURES_AT_MOST` failures; twice as many later."""
REST_CALLS_AT_MOST = 10_000
_TURN_SECONDS_AT_MOST = 1.0
"""No hook runs for so long, unless something is broken; the other thread is then not measured."""

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., None])
G = TypeVar("G", bound="_Shielded")


def _never_traced(function: F) -> F:
    disable: Callable[[F], F] = torch.compiler.disable
    return disable(function)


class _Failures:
    """Failures of one kind: how many in a row, and how many calls it sits out."""

    __slots__ = ("in_a_row", "logged", "rest", "rests")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.logged = False
        self.rest = 0
        self.rests = 0

    def add(self) -> bool:
        """Count one more; return whether the kind is suspended from now on."""
        self.in_a_row += 1
        if self.in_a_row < FAILURES_AT_MOST:
            return False
        self.rest = min(REST_CALLS << self.rests, REST_CALLS_AT_MOST)
        self.rests = min(self.rests + 1, REST_CALLS_AT_MOST.bit_length())
        return True

    def sits_out(self) -> bool:
        """Count a call; return whether it is one that the kind rests for."""
        if self.rest <= 0:
            return False
        self.rest -= 1
        return True


class Shield:
    """Runs the probe's own code inside training's calls.

    Nothing that it runs raises, runs again from within itself, or runs while a CUDA graph is being
    captured. Each kind of failure is logged once. A kind that failed `FAILURES_AT_MOST` times in a
    row rests for some calls before it is tried again; the others go on. Torch's state of the thread
    is the same afterwards, also when the script's signal handler raised, which passes.
    """

    def __init__(
        self,
        *,
        on_failure: Callable[[], None],
        on_capture: Callable[[Callable[..., None], Sequence[object]], None] = lambda *_: None,
        on_rest: Callable[[str], None] = lambda kind: None,
        on_device_error: Callable[[], None] = lambda: None,
    ) -> None:
        """Report what happens within the shield.

        on_capture: called in place of a function, with its arguments, while a graph is captured.
        on_rest: called with a kind that rests for the first time. on_device_error: called once,
        when a device has reported an error of what it ran earlier.
        """
        self.closed = False
        self._on_failure = on_failure
        self._on_capture = on_capture
        self._on_rest = on_rest
        self._on_device_error = on_device_error
        self._device_failed = False
        self._owner: int | None = None
        """Thread within `run`; out of date where an interruption struck on the way in or out."""
        self._turns = RLock()
        """Threads that train at the same time run their hooks one after the other."""
        self._failing: dict[str, _Failures] = {}
        self._seconds = 0.0
        self._since_seconds = 0.0
        self._later: list[Callable[[], None]] = []

    def later(self, function: Callable[[], None]) -> None:
        """Call `function` once the current hook has returned, on the same thread.

        It is code of the user's: neither shielded nor timed, and its own steps are watched.
        """
        self._later.append(function)

    @_never_traced
    def run(
        self, kind: str, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call `function`; a failure is logged under `kind`, counted and swallowed."""
        if self.closed or (self._owner == get_ident() and self._is_running()):
            return
        handled_before = sys.exc_info()[1]
        state: ThreadState | None = None
        left = False
        try:
            if not self._turns.acquire(timeout=_TURN_SECONDS_AT_MOST):
                return
            self._owner = get_ident()
            self._since_seconds = perf_counter()
            state = ThreadState()
            if accelerator.captures_graph():
                self._on_capture(function, args)
            elif state.numbers_exist:
                state.set_aside()
                failures = self._failing.get(kind)
                if failures is None:
                    function(*args, **kwargs)
                elif not failures.sits_out():
                    function(*args, **kwargs)
                    failures.in_a_row = 0
        except BaseException as error:
            self._swallow(kind, error, handled_before)
        finally:
            try:
                self._leave(state)
                left = True
            finally:
                if not left:  # a signal handler has raised within
                    self._leave(state)
        while self._later:
            self._later.pop(0)()

    def contain(
        self, kind: str, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call `function` from within `run`, such that its failure does not end what is run."""
        failures = self._failing.get(kind)
        if failures is not None and failures.sits_out():
            return
        handled_before = sys.exc_info()[1]
        try:
            function(*args, **kwargs)
        except BaseException as error:
            self._swallow(kind, error, handled_before)
        else:
            if failures is not None:
                failures.in_a_row = 0

    def pop_seconds(self) -> float:
        """Return the host time spent since the last call, up to now. Called from within `run`."""
        now_seconds = perf_counter()
        seconds = self._seconds + now_seconds - self._since_seconds
        self._seconds, self._since_seconds = 0.0, now_seconds
        return seconds

    def _leave(self, state: ThreadState | None) -> None:
        """Restore what was set aside, take the time, and release the turn; each just once."""
        try:
            if state is not None:
                state.restore()
        finally:
            if self._turns._is_owned():  # type: ignore[attr-defined]
                try:
                    self._seconds += perf_counter() - self._since_seconds
                finally:
                    self._owner = None
                    self._turns.release()

    def _is_running(self) -> bool:
        """Return whether this thread, which is noted as running something, really does."""
        frame = sys._getframe(1).f_back
        while frame is not None:
            if frame.f_code is _RUN and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def _swallow(
        self, kind: str, error: BaseException, handled_before: BaseException | None
    ) -> None:
        """Log and count the exception being handled; raise what interrupts the probe from outside.

        Logging and counting may fail, which is ignored.
        """
        found = interruption_in(error, handled_before)
        if found is not None:
            raise found from found.__cause__
        if accelerator.is_sticky_error(error):
            self._note_device_error(error)
            return
        failures = self._failing.setdefault(kind, _Failures())
        rests = failures.add()
        try:
            if not failures.logged:
                failures.logged = True
                log.warning("the probe failed in %s; training goes on", kind, exc_info=True)
            if rests and failures.rests == 1:
                log.warning(
                    "%s failed %d times in a row and rests; the rest of the probe goes on",
                    kind,
                    FAILURES_AT_MOST,
                )
                self._on_rest(kind)
            self._on_failure()
        except Exception as failure:
            pass_on(failure)

    def _note_device_error(self, error: BaseException) -> None:
        """Log an error of what the device ran earlier, once. It is no failure of the probe.

        The training gets the same error from its next operation.
        """
        if self._device_failed:
            return
        self._device_failed = True
        try:
            log.warning(
                "the device has reported an error of an earlier operation, after which it runs no "
                "more: %s",
                str(error).partition("\n")[0],
            )
            self._on_device_error()
        except Exception as failure:
            pass_on(failure)


_RUN = inspect.unwrap(Shield.run).__code__

Contain = Callable[..., None]
"""`Shield.contain`: a kind of failure, a function, and its arguments."""


class _Shielded(Protocol):
    _shield: Shield


def contained(
    kind: str | Callable[..., str],
) -> Callable[[Callable[Concatenate[G, P], None]], Callable[Concatenate[G, P], None]]:
    """Return a decorator of methods: as if each call were made by `self._shield.contain`.

    kind: of failures; or a function of the method's arguments that returns it.
    """

    def named(*args: object, **kwargs: object) -> str:
        return kind if isinstance(kind, str) else kind(*args, **kwargs)

    def wrap(method: Callable[Concatenate[G, P], None]) -> Callable[Concatenate[G, P], None]:
        @functools.wraps(method)
        def attempt(self: G, /, *args: P.args, **kwargs: P.kwargs) -> None:
            shield = self._shield
            failures = None
            if shield._failing:
                failures = shield._failing.get(named(*args, **kwargs))
                if failures is not None and failures.sits_out():
                    return
            handled_before = sys.exc_info()[1]
            try:
                method(self, *args, **kwargs)
            except BaseException as error:
                shield._swallow(named(*args, **kwargs), error, handled_before)
            else:
                if failures is not None:
                    failures.in_a_row = 0

        return attempt

    return wrap


def computed(
    function: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs
) -> torch.Tensor | None:
    """Return the plain tensor that `function` returns; None where torch lacks what that takes.

    What a device has failed in earlier, memory that has run out, and what interrupts the function
    from outside are raised.
    """
    handled_before = sys.exc_info()[1]
    try:
        found = function(*args, **kwargs)
    except Exception as error:
        foreign = any(_computes_by_itself(each) for each in args)
        if not foreign and not isinstance(error, TypeError | RuntimeError):
            raise
        if accelerator.is_sticky_error(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        if interruption_in(error, handled_before) is not None:
            raise
        return None
    return found if type(found) is torch.Tensor else None


class TensorRef(weakref.ref[torch.Tensor]):
    """A weak reference to a tensor of the script's that leaves `torch.utils.swap_tensors` possible.

    Torch refuses to swap tensors with weak references, and does so by `module.to()` with DTensors.
    """

    __slots__ = ()


def _weak_references(tensor: torch.Tensor) -> list[Any]:
    return [each for each in weakref.getweakrefs(tensor) if not isinstance(each, TensorRef)]


if getattr(torch.utils, "weakref", None) is weakref:
    _shown = ModuleType(weakref.__name__)
    vars(_shown).update(vars(weakref), getweakrefs=_weak_references)
    # In the function's globals: who has imported it already sees this, too.
    torch.utils.weakref = _shown  # type: ignore[attr-defined]


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a strided tensor are there: not where its storage was freed.

    FSDP does so to parameters that it has gathered. Torch reads freed memory, which ends the
    process. Of a subclass that computes by itself the memory is its own affair.
    """
    if _computes_by_itself(tensor):
        return True
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    elements = tensor.storage_offset() + last + 1 if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() >= elements * tensor.element_size()


def _computes_by_itself(value: object) -> bool:
    """Return whether operations on a tensor are code of its own class."""
    if not isinstance(value, torch.Tensor):
        return False
    return type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
