"""The state of every generator of random numbers that a model may draw from."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Randomness:
    """States at one moment: torch's on the CPU and on CUDA devices, Python's and NumPy's."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @classmethod
    def now(cls) -> "Randomness":
        """Return the present state."""
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if started else (),
            random.getstate(),
            np.random.get_state(legacy=False),
        )

    def restore(self) -> None:
        """Make it the present state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)
