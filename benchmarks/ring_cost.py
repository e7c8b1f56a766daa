"""What the ring costs the training process: microseconds per call, as a markdown table.

Run: python benchmarks/ring_cost.py [directory on tmpfs]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS, step_columns
from mp_agent.records.schema import Layer, RankIdentity, Schema, Share, family_columns
from mp_agent.records.steps import LayerTable, Phase, StepRecord
from mp_agent.ring.writer import RingWriter

ROUNDS, CALLS = 5, 2000
_STEP_COLUMNS = step_columns(guarded=False)
IDENTITY = RankIdentity(
    run="benchmark",
    attempt=0,
    launch="benchmark",
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    host="localhost",
    pid=1,
    created_unix_ns=1,
    torch_version="",
    version="",
)


def schema_of(shares: int, layers: int) -> Schema:
    """Return a schema of what the probe measures by default."""
    return Schema(
        step_columns=_STEP_COLUMNS,
        families=family_columns((GRADIENTS,)),
        shares=tuple(Share(group=str(index)) for index in range(shares)),
        layers=tuple(Layer(name=f"layer{index}", share=0, elements=1) for index in range(layers)),
    )


def best_microseconds(call: Callable[[], None]) -> float:
    """Return the time of one call, the best of some rounds."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append(time.perf_counter() - begin)
    return min(rounds) / CALLS * 1e6


def measure(directory: Path, shares: int, layers: int) -> dict[str, float]:
    """Return microseconds by kind of call."""
    schema, columns = schema_of(shares, layers), len(GRADIENT_COLUMN_NAMES)
    writer = RingWriter.create(directory / f"{shares}-{layers}.ring", IDENTITY)
    writer.write_schema(schema)
    record = StepRecord(
        sequence=1,
        step=1,
        time_unix_ns=1,
        values=np.zeros(len(_STEP_COLUMNS)),
        families={GRADIENTS.name: np.zeros((shares, columns))},
    )
    table = LayerTable(sequence=1, families={GRADIENTS.name: np.zeros((layers, columns))})
    calls: dict[str, Callable[[], None]] = {
        "stamp": lambda: writer.stamp(Phase.BACKWARD, sequence=1),
        "count": lambda: writer.count(probe_seconds=1e-6),
        "write_step, open": lambda: writer.write_step(record, complete=False),
        "write_step": lambda: writer.write_step(record),
        "write_layers": lambda: writer.write_layers(table),
    }
    figures = {name: best_microseconds(call) for name, call in calls.items()}
    writer.close()
    return figures


def main() -> None:
    """Print the table."""
    base = sys.argv[1] if len(sys.argv) > 1 else "/dev/shm"
    sizes = [(1, 200), (8, 1000)]
    with tempfile.TemporaryDirectory(dir=base) as directory:
        tables = [measure(Path(directory), *size) for size in sizes]
    heads = [f"{shares} shares, {layers} layers" for shares, layers in sizes]
    print("| µs per call | " + " | ".join(heads) + " |")
    print("|---" * (1 + len(sizes)) + "|")
    for name in tables[0]:
        print(f"| {name} | " + " | ".join(f"{table[name]:.1f}" for table in tables) + " |")


if __name__ == "__main__":
    main()
