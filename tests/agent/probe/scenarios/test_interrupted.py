"""Signal handlers and other threads raise into hooks: training gets just what was raised."""

import ctypes
import gc
import inspect
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mp_agent.probe import isolation
from mp_agent.probe.processes.callbacks import ConditionCallbacks
from mp_agent.ring.interruptions import interruption_in
from mp_agent.ring.reader import RingReader

HITS = 20
"""Signals that have to arrive within a hook."""
STRIDE = 13
"""Of the places in a step's hooks, every so manieth is struck."""


class Stop(Exception):
    """An exception of a training script's own."""

    def __init__(self) -> None:
        super().__init__("stop now")


KINDS = (TimeoutError, RuntimeError, AttributeError, KeyError, Stop, KeyboardInterrupt)


class Training:
    """Steps with autocast and clipping."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(5, 6)
        self.steps = 0
        self.optimizer.register_step_post_hook(self._count)

    def step(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(self.inputs).float().pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def _count(self, *_: object) -> None:
        self.steps += 1


class Strike:
    """A profiler that sends this process a signal at one place within the hooks."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._depth = 0
        self.places = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        hook = frame.f_code is isolation._RUN
        self._depth += hook and event == "call"
        # An interpreter that lets go of a half used generator looks for no signals in it.
        generator = event in ("call", "return") and frame.f_code.co_flags & inspect.CO_GENERATOR
        # What is raised in a callback of the garbage collector gets nowhere: hypothesis has one.
        collector = frame.f_code.co_name == "gc_callback"
        if self._depth and not generator and not collector:
            self.places += 1
            if self.places == self._place:
                self.where = f"{event} in {frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGALRM)
        self._depth -= hook and event == "return"


class RunningHook:
    """A profiler that says whether its thread is within a hook.

    Another thread cannot look itself: the frames of a running thread may be gone while it reads
    them, which ends the interpreter.
    """

    is_running = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is isolation._RUN and event in ("call", "return"):
            self.is_running = event == "call"


@pytest.fixture
def alarm() -> Iterator[Callable[[Any], object]]:
    """Register a handler of SIGALRM until the test is over."""
    before = signal.getsignal(signal.SIGALRM)
    yield partial(signal.signal, signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def thread_state() -> tuple[object, ...]:
    """What torch keeps per thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._is_torch_function_all_disabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


@pytest.mark.slow
def test_an_exception_at_any_place_of_a_hook_gets_through_and_leaves_no_trace(watch, alarm):
    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("time is up")

    alarm(handler)
    watched = watch()
    training = Training()
    training.step()
    before = thread_state()
    counting = Strike(0)
    sys.setprofile(counting)
    training.step()
    sys.setprofile(None)
    assert counting.places > 500
    reached = 0
    for place in range(1, counting.places, STRIDE):
        strike = Strike(place)
        try:
            sys.setprofile(strike)
            training.step()
        except TimeoutError:
            reached += 1
            assert thread_state() == before, strike.where
        else:
            assert not strike.where, f"swallowed: {strike.where}"
        finally:
            sys.setprofile(None)
    assert reached > 0.8 * counting.places / STRIDE
    for _ in range(20):
        training.step()
    reader = RingReader.open(watched.writer.path)
    assert reader.schema is not None
    records, lost = reader.steps_after(0)
    state = reader.state
    reader.close()
    assert state.probe_errors == 0
    assert len(records) + lost + state.records_dropped >= training.steps
    last = [record.sequence for record in records[-20:]]
    assert last == list(range(last[0], last[0] + 20))


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Remove callbacks of the garbage collector: what they raise, Python prints and drops."""
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


@pytest.mark.usefixtures("no_gc_callbacks")
def test_every_signal_handlers_exception_reaches_the_script(watch, alarm):
    raised: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if _within_an_import(frame):
            return
        raised.append(_within_a_hook(frame))
        raise random.choice(KINDS)()

    alarm(handler)
    watch()
    training = Training()
    training.step()
    before, seen, torn = thread_state(), 0, 0
    while sum(raised) < HITS:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(50e-6, 3e-3))
            training.step()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KINDS:
            seen += 1
            torn += raised[-1] and thread_state() != before
            # What torch's own context managers leave when they are interrupted themselves.
            torch.set_grad_enabled(True)
            torch.set_autocast_enabled("cpu", False)
    assert seen == len(raised)
    assert torn == 0


@pytest.mark.usefixtures("no_gc_callbacks")
def test_what_another_thread_sends_reaches_the_script(watch):
    watch()
    training = Training()
    training.step()
    own = threading.get_ident()
    for kind in (TimeoutError, Stop):
        hook = RunningHook()
        sender = threading.Thread(target=_send, args=(own, kind, hook))
        sender.start()
        with pytest.raises(kind):
            sys.setprofile(hook)
            while True:
                training.step()
        sys.setprofile(None)
        sender.join()
        assert torch.is_grad_enabled()


def test_a_callback_that_is_interrupted_passes_it_on_and_one_that_fails_does_not(alarm, tmp_path):
    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise TimeoutError

    failures: list[int] = []
    watch = ConditionCallbacks(
        tmp_path,
        [lambda _: 1 / 0, lambda _: signal.raise_signal(signal.SIGALRM)],
        logs=False,
        on_failure=lambda: failures.append(1),
    )
    alarm(handler)
    with pytest.raises(TimeoutError):
        event: Any = object()
        watch.deliver([event])
    assert failures == [1]


_NOTHING: dict[str, int] = {}


class _Callable:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise ValueError("a handler that is an object")


def _rebinding(reason: str, number: int, frame: FrameType | None) -> None:
    del frame
    raise ValueError(reason)


@pytest.mark.parametrize(
    "handler",
    [
        _Callable(),
        partial(_rebinding, "a handler that is partial and rebinds its arguments"),
        lambda *arguments: 1 / 0,
        lambda *arguments: _Callable()(*arguments),
    ],
)
def test_handlers_of_all_kinds_are_known_from_failures_of_the_probe(alarm, handler):
    alarm(handler)
    with pytest.raises(Exception) as caught:
        signal.raise_signal(signal.SIGALRM)
    assert interruption_in(caught.value) is caught.value


def test_a_handlers_exception_that_was_handled_on_the_way_is_found(alarm):
    alarm(_Callable())
    with pytest.raises(OSError, match="no such file") as caught:
        try:
            signal.raise_signal(signal.SIGALRM)
        except ValueError:
            raise OSError("no such file") from None
    assert str(interruption_in(caught.value)) == "a handler that is an object"


def test_failures_while_the_script_handles_an_interruption_are_failures(alarm):
    alarm(_Callable())
    try:
        signal.raise_signal(signal.SIGALRM)
    except ValueError as handled:
        try:
            raise RuntimeError("of the probe")
        except RuntimeError as error:
            assert interruption_in(error, handled) is None


@pytest.mark.parametrize(
    "fail",
    [
        lambda: _NOTHING["absent"],
        lambda: next(iter(())),
        lambda: torch.ones(2) + torch.ones(3),
        lambda: _raise(Stop()),
        lambda: int("none"),
    ],
)
def test_failures_of_the_probes_own_are_none(fail):
    with pytest.raises(Exception) as caught:
        fail()
    assert interruption_in(caught.value) is None


def _raise(error: Exception) -> None:
    raise error


def _within_an_import(frame: FrameType | None) -> bool:
    """Return whether Python imports: it may drop what is raised there, and keep its import lock.

    torch 2.6 imports within each step. A lock that was kept would stop the threads of later tests.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _within_a_hook(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is isolation._RUN:
            return True
        frame = frame.f_back
    return False


def _send(thread: int, kind: type[Exception], hook: RunningHook) -> None:
    while not hook.is_running:
        time.sleep(0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
