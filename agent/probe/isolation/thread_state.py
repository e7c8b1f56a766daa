"""Torch's state of a thread, set aside while the probe computes, and restored in any case.

Grad mode, autocast and the user's modes (`TorchFunctionMode`, `TorchDispatchMode`) act on every
operation of a thread, the probe's among them: a mode that counts operations would count ours, one
that raises would stop us. Signal handlers may raise between any two lines, so nothing here relies
on having got to the end of something: `restore` compares with what was found and repairs the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_c: Any = torch._C


class ThreadState:
    """The state of the calling thread when it was made."""

    __slots__ = ("_autocast", "_function_modes_off", "_grad", "_inference", "_modes", "_without")

    def __init__(self) -> None:
        self._grad: bool = _c.is_grad_enabled()
        self._inference: bool = _c.is_inference_mode_enabled()
        self._autocast = [kind for kind in _device_types() if _c.is_autocast_enabled(kind)]
        self._function_modes_off: bool = _c._is_torch_function_all_disabled()
        self._modes: Sequence[Any] = ()
        if count := _c._len_torch_dispatch_stack():
            self._modes = [_c._get_dispatch_stack_at(index) for index in range(count)]
        self._without = _c.DisableTorchFunction()

    @property
    def numbers_exist(self) -> bool:
        """Whether tensors hold numbers: not while shapes alone are traced, nor within `vmap`."""
        return not any(map(_is_infrastructure, self._modes)) and not _is_transforming()

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
            self._restore_modes()
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

    def _restore_modes(self) -> None:
        while (count := _c._len_torch_dispatch_stack()) < len(self._modes):
            _c._push_on_torch_dispatch_stack(self._modes[count])


def _device_types() -> tuple[str, ...]:
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    return ("cpu", "cuda") if initialized() else ("cpu",)


def _is_infrastructure(mode: object) -> bool:
    """Return whether a mode is torch's own, for tensors without numbers (`FakeTensorMode`, …)."""
    return getattr(mode, "_mode_key", None) is not None


def _is_transforming() -> bool:
    """Return whether the thread is within `torch.func`'s vmap, grad and the like."""
    return _c._functorch.peek_interpreter_stack() is not None
