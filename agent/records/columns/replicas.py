"""Bits of what ranks hold, by which copies are compared. They are never merged into numbers."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.family import ColumnFamily

WEIGHTS = ColumnFamily(
    name="weights",
    row="elements of parameters, before the optimizer's step",
    columns=(
        sampled("bits", Algebra.SUM, "their bits, as integers of 32 bits, summed modulo 2^32"),
        sampled(
            "varied",
            Algebra.MAX,
            "1 if elements differ from each other, so that equal bits on two ranks show a copy; 0 "
            "if they are all the same; absent where ranks may begin with equal tensors that are no "
            "copies, and where a wrapper says which are",
        ),
        sampled("elements", Algebra.SUM, "elements looked at"),
    ),
    key="bits",
    required=("bits", "elements"),
    size="elements",
    compares_replicas=True,
    compared_only=True,
)
"""Sums over layers stay exact in a float64 up to 2^21 layers."""

STATE = ColumnFamily(
    name="state",
    row="elements of what a checkpoint holds and no optimizer steps: frozen parameters, buffers",
    columns=(
        sampled("bits", Algebra.SUM, "bits of a part of them, summed modulo 2^32"),
        sampled("varied", Algebra.MAX, "1 if elements of that part differ from each other"),
        sampled(
            "copied",
            Algebra.MAX,
            "1 if a wrapper made copies of the tensor and leaves them to the script, -1 if it is "
            "local to each rank by design, 0 if neither is known",
            signed=True,
        ),
    ),
    key="bits",
    required=("bits",),
    size="bits",
    of_parameters=False,
    of_some_ranks=True,
    compared_only=True,
)
