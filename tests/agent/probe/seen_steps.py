"""Steps on their way to a ring, and copies from a device that come when the test says."""

from collections import deque

import torch

from mp_agent.probe.step.open_step import ObservedStep
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENT_POSITIONS, STEP_COLUMN_NAMES
from mp_agent.records.schema import Layer, Schema, Share, family_columns

CPU = torch.device("cpu")
SCHEMA = Schema(
    step_columns=STEP_COLUMN_NAMES,
    families=family_columns(),
    shares=(Share(group="a"), Share(group="b")),
    layers=tuple(Layer(name=f"layer{index}", share=0, elements=4) for index in range(3)),
)


class Clock:
    """Copies to the host that are made once `now` has come to their number."""

    def __init__(self) -> None:
        self.marks = 0
        self._now = 0
        self._queue: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()

    @property
    def now(self) -> int:
        return self._now

    @now.setter
    def now(self, now: int) -> None:
        self._now = now
        self._make_copies()

    def copy_to_host(self, target: torch.Tensor, values: torch.Tensor) -> None:
        self.marks += 1
        self._queue.append((self.marks, target, values.clone()))
        self._make_copies()

    def _make_copies(self) -> None:
        while self._queue and self._queue[0][0] <= self._now:
            _, target, values = self._queue.popleft()
            target.copy_(values)


def step(
    sequence: int, *, nan_elements: float = 0.0, **scalars: float | torch.Tensor
) -> ObservedStep:
    columns = len(GRADIENT_COLUMN_NAMES)
    totals_GC = torch.arange(2 * columns, dtype=torch.float64).reshape(2, columns) + sequence
    totals_GC[:, GRADIENT_POSITIONS["nan_elements"]] = nan_elements
    totals_GC[:, GRADIENT_POSITIONS["inf_elements"]] = 0.0
    return ObservedStep(
        sequence=sequence,
        step=sequence,
        time_unix_ns=sequence,
        scalars=scalars,
        shares=2,
        totals_GC=totals_GC,
        rows_LC=torch.full((3, columns), float(sequence), dtype=torch.float64),
    )
