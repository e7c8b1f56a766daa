"""Everything that the probe asks of an accelerator's runtime.

None of it waits for a device, but for `HostCopy.numbers` where a copy has not arrived.

Callers use these functions through the module, so that tests can put a simulated device in place.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
Constant = Sequence[int] | npt.NDArray[np.int64]

SUPPORTED = ("cpu", "cuda")
"""Types of devices on which gradients are measured."""

_STREAMS_KEPT = 4
_CONSTANTS_KEPT = 64
_REPORTS_OF_ERRORS = ("CUDA error", "CUDA driver error", "HIP error", "Triton Error [")
"""How an error of a device begins, by what has called it.

Triton and torch's own calls of the driver raise the plain RuntimeError.
"""
_STICKY_ERRORS = frozenset((214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
"""Codes of cudaError_t after which every call fails: an earlier kernel, or the hardware, failed."""
_STICKY_MESSAGES = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "launch failure",
    "launch timed out",
    "uncorrectable",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
)


def is_on_host(device: torch.device) -> bool:
    """Return whether numbers on `device` can be read at once."""
    return device.type == "cpu"


def is_supported(device: torch.device) -> bool:
    """Return whether gradients on `device` can be measured and brought to the host."""
    return device.type in SUPPORTED


cuda_is_used: Callable[[], bool] = torch.cuda.is_initialized
"""Returns whether this process has made a call to a GPU."""


def computing_device() -> torch.device | None:
    """Return the GPU that this process computes on, whose losses the host must not wait for.

    Its gradients may be on the host all the same: FSDP offloads them.
    """
    return torch.device("cuda", torch.cuda.current_device()) if cuda_is_used() else None


def random_state() -> tuple[bytes, int, int]:
    """Return the state of the host's random numbers, and seed and offset of the current GPU's.

    The host knows all of it. Not to be called while a graph is captured.
    """
    on_host = torch.default_generator.get_state().numpy().tobytes()
    if not cuda_is_used():
        return on_host, 0, 0
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return on_host, generator.initial_seed(), generator.get_offset()


def pinned_zeros(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int64 zeros on the host to which `device` can copy while the host goes on.

    Making them may make the device wait. The default device of the script is of no account.
    """
    return torch.zeros(
        tuple(shape), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
    )


def register_host_memory(memory: memoryview, device: torch.device) -> bool:
    """Let `device` copy to this mapped memory while the host goes on; False where that is refused.

    It stays registered until the process ends, and must stay mapped as long.
    """
    if device.type != "cuda":
        return False
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    with torch.cuda.device(device):  # on another one it would take memory for a context
        refused = int(runtime.cudaHostRegister(address, len(memory), 0))
    if not refused:
        return True
    # The refusal is the runtime's last error, which the training's next kernel would raise.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def copy_to_host(target: torch.Tensor, values: torch.Tensor) -> None:
    """Begin to copy `values` to `target`, in the order of the current stream."""
    target.copy_(values, non_blocking=True)


class HostCopy:
    """Numbers on their way to the host, as they are now."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._host = values.to("cpu", copy=True)
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(values.device))

    @property
    def has_arrived(self) -> bool:
        """Whether `numbers` returns them without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[float]:
        """Return them; waits for a device that has not come so far."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor, of the host or of a device, on `device`; the host goes on.

    By way of pinned memory of its own: copies from other memory wait for the device, and what the
    script has pinned it may write to before the copy is made.
    """
    if is_on_host(values.device) and device.type == "cuda":
        pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        values = pinned.copy_(values)
    return values.to(device, non_blocking=True)


def common_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return where tensors, at least one, can be brought together: not on the host if one is not.

    Bringing numbers there would wait for a device, or give them before they have come.
    """
    elsewhere = (each.device for each in tensors if not is_on_host(each.device))
    return next(elsewhere, tensors[0].device)


def on_one_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors, at least one, on their common device."""
    device = common_device(tensors)
    return [sent(each, device) for each in tensors]


def current_stream(device: torch.device) -> Hashable:
    """Return the stream on which operations on `device` are queued now; None without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def wait_for_stream(device: torch.device, stream: Hashable) -> None:
    """Let what is queued on `device` from now on wait for what is queued on `stream` already."""
    if isinstance(stream, torch.cuda.Stream):
        torch.cuda.current_stream(device).wait_stream(stream)


class DeviceTimer:
    """The time on a device between two points of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin, self._end = self._event(), self._event()
        self._begin.record(torch.cuda.current_stream(device))

    def stop(self) -> None:
        """Set the second point here."""
        self._end.record(torch.cuda.current_stream(self._device))

    def has_begun(self) -> bool:
        """Return whether the device has come past the first point, or has failed."""
        try:
            passed: bool = self._begin.query()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True
        return passed

    def seconds(self) -> float | None:
        """Return the time; None until the device has come past the second point, or has failed."""
        try:
            passed: bool = self._end.query()  # type: ignore[no-untyped-call]
            return self._begin.elapsed_time(self._end) / 1000.0 if passed else None
        except RuntimeError:
            return None

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def start_timer(device: torch.device) -> DeviceTimer | None:
    """Return a timer that begins here; None where the host's clock is enough."""
    return DeviceTimer(device) if device.type == "cuda" else None


def captures_graph() -> bool:
    """Return whether operations are being recorded into a CUDA graph instead of being run.

    A device that has failed records none, and answers this question with its error, too.
    """
    try:
        return cuda_is_used() and torch.cuda.is_current_stream_capturing()
    except RuntimeError as error:
        if is_sticky_error(error):
            return False
        raise


def is_sticky_error(error: BaseException) -> bool:
    """Return whether a device reports that what it ran earlier has failed.

    Any call may be the one that reports it, and all later ones do too.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not any(map(text.__contains__, _REPORTS_OF_ERRORS)):
        return False
    code = getattr(error, "error_code", None)
    return code in _STICKY_ERRORS or any(words in text for words in _STICKY_MESSAGES)


class DeviceConstants:
    """Integers that are sent to a device once per stream.

    So no stream uses what another one may not have brought yet. Constants are distinguished by
    identity, and kept.
    """

    def __init__(self) -> None:
        self._by_stream: dict[Hashable, dict[int, tuple[Constant, torch.Tensor]]] = {}

    def on(self, device: torch.device, values: Constant) -> torch.Tensor:
        """Return `values` as int64 on `device`."""
        stream = (device, current_stream(device))
        known = kept_per_stream(self._by_stream, stream, dict)
        found = known.get(id(values))
        if found is None:
            while len(known) >= _CONSTANTS_KEPT:
                del known[next(iter(known))]
            tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
            found = known[id(values)] = (values, sent(tensor, device))
        return found[1]


def kept_per_stream(kept: dict[Hashable, T], stream: Hashable, make: Callable[[], T]) -> T:
    """Return what is kept for `stream`, made when it is new; of many streams the oldest gives way.

    A script that makes a new stream for every step would otherwise fill the device's memory.
    """
    if stream not in kept:
        while len(kept) >= _STREAMS_KEPT:
            del kept[next(iter(kept))]
        kept[stream] = make()
    return kept[stream]
