"""A run over two nodes of two ranks each, from real rings; reports are carried by hand."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mp_agent.node.run.run import Run
from mp_agent.records.reports import decode_receipt, decode_report, encode_receipt, encode_report
from mp_agent.records.schema import Share
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.fake_rank import FakeRank

_REPORTS_AT_MOST = 50


class Node:
    """One node of two ranks: its directory, its ranks and its agent."""

    def __init__(self, base: Path, number: int, settings: Settings, stack: ExitStack) -> None:
        self.run_dir = locations.run_directory(base / f"node{number}", "llama")
        self.number = number
        self.settings = settings
        self._stack = stack
        self.ranks: list[FakeRank] = []

    def start_ranks(
        self, share_of: Callable[[int], Share | None] = lambda rank: None, **options: Any
    ) -> None:
        self.ranks = [
            self._stack.enter_context(
                FakeRank(
                    self.run_dir,
                    2 * self.number + local,
                    world_size=4,
                    local_rank=local,
                    local_world_size=2,
                    node_rank=self.number,
                    host=f"host{self.number}",
                    share=share_of(2 * self.number + local),
                    **{**options, "launch": f"launcher{self.number}"},
                )
            )
            for local in range(2)
        ]

    def restart(self) -> None:
        """Start the agent, again if need be."""
        self.run = Run(self.run_dir, self.settings)
        self._stack.callback(self.run.close)
        self.run.poll(0.0)

    def steps(self, count: int = 1, **values: Any) -> None:
        for rank in self.ranks:
            rank.steps(count, **values)


class Nodes:
    def __init__(self, root: Node, other: Node) -> None:
        self.root, self.other = root, other

    def poll(self, now_seconds: float = 0.0) -> None:
        for node in (self.other, self.root):
            node.run.poll(now_seconds)

    def push(self, now_seconds: float = 0.0) -> int:
        """Bring what is new to the root, as the transport would; return how many reports."""
        self.poll(now_seconds)
        count = 0
        while (report := self.other.run.next_report()) is not None:
            receipt = self.root.run.receive(decode_report(encode_report(report)))
            self.other.run.acknowledge(decode_receipt(encode_receipt(receipt)))
            count += 1
            assert count < _REPORTS_AT_MOST, "the same rows are asked for again and again"
        self.root.run.poll(now_seconds)
        return count
