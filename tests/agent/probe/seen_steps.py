"""Steps on their way to a ring, and device events that come when the test says."""

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
    """Events that have happened once `now` has come to their number."""

    def __init__(self) -> None:
        self.now = 0
        self.marks = 0

    def mark(self, device: torch.device) -> "Mark":
        self.marks += 1
        return Mark(self, self.marks)


class Mark:
    def __init__(self, clock: Clock, number: int) -> None:
        self.clock, self.number = clock, number

    def query(self) -> bool:
        return self.clock.now >= self.number


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
