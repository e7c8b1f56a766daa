"""What is read from the columns of FP8 operands, of all of a run and of each layer alike."""

from collections.abc import Callable, Mapping

Columns = Mapping[str, float]
Quantity = Callable[[Columns], float | None]

OPERANDS = ("input", "weight", "gradient")


def flushed(operand: str) -> Quantity:
    """Return the share of an operand's non-zero elements that a cast to FP8 rounds to zero."""

    def read(values: Columns) -> float | None:
        elements = values.get(f"{operand}_elements", 0.0)
        lost = values.get(f"{operand}_flushed_elements", 0.0)
        return lost / elements if elements > 0.0 else None

    return read


def saturated(values: Columns) -> float | None:
    """Return the share of the tensors with delayed scaling whose amax was beyond the range."""
    tensors = values.get("scaled_tensors", 0.0)
    return values.get("saturated_tensors", 0.0) / tensors if tensors > 0.0 else None
