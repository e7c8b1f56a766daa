"""What a variant of training is, and all that there are."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.numerics.training import Reference

Train = Callable[[Path, int], Reference]


@dataclass(frozen=True)
class Variant:
    """strategy, unsupported: what the probe has to say of it."""

    name: str
    train: Train
    strategy: str
    unsupported: tuple[str, ...] = ()


VARIANTS: dict[str, Variant] = {}


def variant(strategy: str, *unsupported: str) -> Callable[[Train], Train]:
    def register(function: Train) -> Train:
        VARIANTS[function.__name__] = Variant(function.__name__, function, strategy, unsupported)
        return function

    return register
