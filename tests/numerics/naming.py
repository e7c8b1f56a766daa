"""Names under which a run shows the layers of a reference."""

from collections.abc import Callable

import numpy as np

from tests.agent.gradient_reference import reference_union
from tests.numerics.training import Reference, Rows


def renamed(reference: Reference, rename: Callable[[str], str]) -> Reference:
    return [
        {label: {rename(name): row for name, row in rows.items()} for label, rows in step.items()}
        for step in reference
    ]


def united(rows: Rows, prefixes: list[str], name: str) -> Rows:
    """Layers that cannot be told apart have one name: the norm of their union."""
    united: Rows = {}
    for layer, row in rows.items():
        prefix = next((p for p in prefixes if layer.startswith(f"{p}.")), None)
        key = layer if prefix is None else name + layer.removeprefix(f"{prefix}.")
        if key in united:
            row = reference_union(np.stack([united[key], row]))
        united[key] = row
    return united
