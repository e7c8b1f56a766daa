"""What good runs looked like, as the file of a baseline holds it, and where a run differs."""

import os
import stat
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path

import msgspec
from msgspec import Struct

from mp_agent.errors import BaselineError

FORMAT = "mp_agent baseline"
VERSION = 1
WINDOWS_STEPS = (8, 64)
"""Numbers of steps whose median is compared with a band: what is far off, and what is a little."""

GRAD_NORM, LAYER_GRAD_NORM = "grad_norm", "layer_grad_norm"
PARAMETER, ELEMENTS = "parameter", "elements"
QUANTITIES = ("loss", GRAD_NORM, "learning_rate", "clip_max_norm")
"""What has a band by windows of steps."""
FACTS = (
    *("precision", "scaler", "autocast_format", "parameter_format", "master_format"),
    *("gradient_format", "matmul_format", "fp8_library"),
)
"""What is the same in a run from its first step to its last: one value per good run."""
_OFTEN_NONE = ("scaler", "autocast_format", "fp8_library")
"""Facts of which an empty value says that there is none; of others, that it is not known."""

_BYTES_MAX = 64 * 2**20


class Band(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Between which values a quantity lies, from a step to another one."""

    first: int
    last: int
    low: float
    high: float


class Baseline(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One or several good runs. Whatever is compared with a run is a field of it."""

    format: str = FORMAT
    version: int = VERSION
    runs: tuple[str, ...]
    world_sizes: tuple[int, ...]
    layers: dict[str, float]
    """Trained in all of them from the first samples, with the number of elements; 0: not known."""
    other_layers: tuple[str, ...] = ()
    """Trained in some, or later."""
    facts: dict[str, tuple[str, ...]] = {}
    bands: dict[str, tuple[tuple[Band, ...], ...]] = {}
    """By quantity, for each of `WINDOWS_STEPS`, ascending."""
    layer_bands: dict[str, tuple[Band, ...]] = {}
    """Of the gradient norms of layers, ascending."""

    def band(self, quantity: str, steps: int, step: int) -> Band | None:
        """Return the band of medians over so many steps; None where no good run was."""
        bands = self.bands.get(quantity)
        return None if bands is None else _band_at(bands[WINDOWS_STEPS.index(steps)], step)

    def layer_band(self, layer: str, step: int) -> Band | None:
        """Return the same of the gradient norm of a layer."""
        return _band_at(self.layer_bands.get(layer, ()), step)

    def noise_factor(self, world_size: int) -> float:
        """Return by how much gradient norms may lie outside their bands at a world size.

        A batch that is k times as large has gradients whose noise is √k times smaller.
        """
        ratio = max(world_size / max(self.world_sizes), min(self.world_sizes) / world_size, 1.0)
        return sqrt(ratio)

    def other_facts(self, facts: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return the facts that no good run had: what they are, and what they were."""
        return {
            name: (_formats(facts.get(name, "")) or "none", " or ".join(map(_shown, known)))
            for name, known in self.facts.items()
            if (facts.get(name) or name in _OFTEN_NONE)
            and _formats(facts.get(name, "")) not in map(_formats, known)
        }


def _band_at(bands: Sequence[Band], step: int) -> Band | None:
    index = bisect_right(bands, step, key=lambda band: band.first) - 1
    return bands[index] if index >= 0 and step <= bands[index].last else None


def _formats(text: str) -> str:
    """Return formats in the order of the alphabet: which one has most elements may vary."""
    return "+".join(sorted(text.split("+")))


def _shown(fact: str) -> str:
    return fact or "none"


def known_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Return those of a run's facts that a baseline holds."""
    return {name: facts.get(name, "") for name in FACTS if facts.get(name) or name in _OFTEN_NONE}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineDeparture:
    """Where a run first differs from its baseline, and in what."""

    quantity: str
    step: int
    value: str
    expected: str
    layer: str = ""


def read_baseline(path: Path) -> Baseline:
    """Return the baseline in a file. Raises BaselineError, naming the file, field and value."""
    try:
        content = _read(path)
        found = msgspec.json.decode(content, type=_Format)
        if (found.format, found.version) != (FORMAT, VERSION):
            raise BaselineError(
                f"{path}: format {found.format!r}, version {found.version!r}; "
                f"this release reads {FORMAT!r}, version {VERSION}"
            )
        baseline = msgspec.json.decode(content, type=Baseline)
    except OSError as error:
        raise BaselineError(f"{path}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BaselineError(f"{path}: {error}") from None
    if problem := _problem(baseline):
        raise BaselineError(f"{path}: {problem}")
    return baseline


class _Format(Struct, frozen=True):
    format: str = ""
    version: int = 0


def _read(path: Path) -> bytes:
    # Without waiting, as for the writer of a pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BaselineError(f"{path}: is no regular file")
        content = file.read(_BYTES_MAX + 1)
    if len(content) > _BYTES_MAX:
        raise BaselineError(f"{path}: holds more than {_BYTES_MAX} bytes")
    return content


def _problem(baseline: Baseline) -> str:
    if not baseline.runs:
        return "runs has value []: a baseline is of one run at least"
    if not baseline.world_sizes or min(baseline.world_sizes) < 1:
        return f"world_sizes has value {list(baseline.world_sizes)}: every run has a rank"
    for name, found in baseline.bands.items():
        if len(found) != len(WINDOWS_STEPS):
            return f"bands.{name} has {len(found)} lists of bands, not {len(WINDOWS_STEPS)}"
    places = {
        f"bands.{name}[{index}]": bands
        for name, found in baseline.bands.items()
        for index, bands in enumerate(found)
    }
    places |= {f"layer_bands.{name}": bands for name, bands in baseline.layer_bands.items()}
    for place, bands in places.items():
        last = None
        for index, band in enumerate(bands):
            values = msgspec.to_builtins(band)
            ordered = band.first <= band.last and (last is None or last < band.first)
            if not (ordered and isfinite(band.low) and band.low <= band.high):
                return f"{place}[{index}] has value {values}: not ascending"
            last = band.last
    return ""
