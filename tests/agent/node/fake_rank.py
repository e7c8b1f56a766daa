"""A process that writes a ring as a rank would, without torch; commands through a pipe say what.

Locks and deaths are only seen from another process, so tests of the node agent need a real one.
It is forked, which takes milliseconds.
"""

import gc
import json
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mp_agent.records.schema import RankIdentity, Share
from mp_agent.records.steps import EndReason, Phase
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter
from tests.agent.node.builders import (
    gradient_row,
    layer_table,
    make_identity,
    make_record,
    make_schema,
)


class FakeRank:
    """The test's handle on such a process; use as a context manager."""

    def __init__(
        self,
        run_dir: Path,
        rank: int = 0,
        *,
        layers: tuple[str, ...] = ("weight",),
        share: Share | None = None,
        **identity: Any,
    ) -> None:
        self.identity = make_identity(rank, **identity)
        self.path = locations.ring_path(run_dir, self.identity)
        world_size = self.identity.world_size
        share = share or Share(group="ddp", replica_index=rank, replica_count=world_size)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # what other libraries left for the collector may not survive a fork
            _obey(commands, answers, self.path, self.identity, share, layers)
        os.close(commands)
        os.close(answers)
        self._gone = False
        self._answer()

    def __enter__(self) -> "FakeRank":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def steps(self, count: int = 1, *, gradients: dict[str, float] | None = None, **values: float):
        """Write the next steps, all alike."""
        self._send(write="steps", count=count, gradients=gradients or {}, values=values)

    def open_step(self, *, gradients: dict[str, float] | None = None, **values: float) -> None:
        """Write the next step as one under way."""
        self._send(write="open", gradients=gradients or {}, values=values)

    def finish_step(self, *, gradients: dict[str, float] | None = None, **values: float) -> None:
        """Write the step under way once more, now complete."""
        self._send(write="finish", gradients=gradients or {}, values=values)

    def layer_table(self, **columns: float) -> None:
        """Write the layers of the last step; all rows alike."""
        self._send(write="layers", columns=columns)

    def new_schema(self, *layers: str) -> None:
        """Go on with other parameters."""
        self._send(write="new_schema", layers=layers)

    def count(self, **counts: float) -> None:
        self._send(write="count", counts=counts)

    def end(self, reason: EndReason = EndReason.COMPLETED) -> None:
        """Say that the rank ended; the process goes on."""
        self._send(write="end", reason=reason.value)

    def exit(self) -> None:
        """Leave, without saying anything more."""
        os.write(self._commands, b"\n")
        self._wait()

    def kill(self) -> None:
        """Kill the process, as the kernel kills one that is out of memory."""
        if not self._gone:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    @property
    def running(self) -> bool:
        return not self._gone and os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def _wait(self) -> None:
        os.waitpid(self.pid, 0)
        self._gone = True
        os.close(self._commands)
        os.close(self._answers)

    def _send(self, **command: Any) -> None:
        os.write(self._commands, json.dumps(command).encode() + b"\n")
        self._answer()

    def _answer(self) -> None:
        answer = os.read(self._answers, 100)
        assert answer == b"done", f"the fake rank answered {answer!r}"


class _Writer:
    """The other side: what the process does on each command."""

    def __init__(
        self, path: Path, identity: RankIdentity, share: Share, layers: tuple[str, ...]
    ) -> None:
        self.ring = RingWriter.create(path, identity)
        self.share = share
        self.sequence = 0
        self.new_schema(layers)

    def obey(self, command: dict[str, Any]) -> None:
        getattr(self, command.pop("write"))(**command)

    def new_schema(self, layers: Sequence[str]) -> None:
        facts = {"strategy": "ddp", "precision": "fp16", "device": "cpu"}
        self.schema = make_schema(self.share, layers=tuple(layers), **facts)
        self.ring.write_schema(self.schema)

    def steps(self, count: int, gradients: dict[str, float], values: dict[str, float]) -> None:
        for _ in range(count):
            self._write(gradients, values, complete=True)

    def open(self, gradients: dict[str, float], values: dict[str, float]) -> None:
        self._write(gradients, values, complete=False)

    def finish(self, gradients: dict[str, float], values: dict[str, float]) -> None:
        self.sequence -= 1
        self._write(gradients, values, complete=True)

    def layers(self, columns: dict[str, float]) -> None:
        rows = np.stack([gradient_row(elements=4.0, **columns) for _ in self.schema.layers])
        self.ring.write_layers(layer_table(self.sequence, rows))

    def count(self, counts: dict[str, Any]) -> None:
        self.ring.count(**counts)

    def end(self, reason: int) -> None:
        self.ring.end(EndReason(reason))

    def _write(
        self, gradients: dict[str, float], values: dict[str, float], *, complete: bool
    ) -> None:
        self.sequence += 1
        self.ring.stamp(Phase.OPTIMIZER, sequence=self.sequence)
        row = gradient_row(**{"elements": 4.0, "sum_squares": 1.0, **gradients})
        record = make_record(self.sequence, {"step_seconds": 0.01, "skipped": 0.0, **values}, [row])
        self.ring.write_step(record, complete=complete)


def _obey(commands: int, answers: int, *plan: Any) -> None:
    """Write as commanded until an empty line; never returns."""
    try:
        writer = _Writer(*plan)
        os.write(answers, b"done")
        for line in os.fdopen(commands):
            if not line.strip():
                os._exit(0)
            writer.obey(json.loads(line))
            os.write(answers, b"done")
    except BaseException:
        traceback.print_exc()
    os._exit(1)
