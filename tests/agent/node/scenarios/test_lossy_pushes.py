"""The end of a run over two nodes whose pushes are lost, repeated and damaged on their way."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from mp_agent.node.transport.client import PendingReport, unpack
from mp_agent.records.node_report import Receipt
from mp_agent.records.reports import decode_receipt, encode_receipt
from mp_agent.records.steps import EndReason
from mp_agent.settings import Settings
from tests.agent.node.expanded import expanded
from tests.agent.node.scenarios.two_nodes import Node, Nodes
from tests.agent.node.shown import shown

STEPS, PER_ROUND = 24, 3
TOKENS = 7.0
_ROUND_SECONDS = 3.0
_ROUNDS_AT_MOST = 200
DEADLINE_SECONDS = 20.0


@pytest.fixture
def nodes(tmp_path: Path, settings: Settings) -> Iterator[Nodes]:
    with ExitStack() as stack:
        pair = Nodes(*(Node(tmp_path, number, settings, stack) for number in range(2)))
        for node in (pair.root, pair.other):
            node.start_ranks()
            node.restart()
        yield pair


class LossyNetwork:
    """Carries reports as the transport does, badly; reports that were on their way come again."""

    def __init__(self, nodes: Nodes, seed: int) -> None:
        self._nodes = nodes
        self._chance = random.Random(seed)
        self._pending = PendingReport(nodes.other.run)
        self._earlier: list[bytes] = []

    def push(self) -> None:
        """Send until nothing is left, or something goes wrong."""
        while (body := asyncio.run(self._pending.next_body())) is not None:
            fate = self._chance.choice(
                ["well", "well", "lost", "unanswered", "damaged", "repeated"]
            )
            if fate == "lost":
                return
            if fate == "damaged":
                self._pending.refused()
                return
            receipt = self._receive(body)
            self._earlier.append(body)
            if fate == "repeated":
                self._receive(self._chance.choice(self._earlier))
            if fate == "unanswered":
                return
            self._pending.answered(decode_receipt(encode_receipt(receipt)))
            if not receipt.accepted:
                return

    def _receive(self, body: bytes) -> Receipt:
        return self._nodes.root.run.receive(unpack(body))


def _work(nodes: Nodes, network: LossyNetwork, now_seconds: float) -> None:
    nodes.other.run.poll(now_seconds)
    network.push()
    nodes.root.run.poll(now_seconds)


@pytest.mark.parametrize("seed", range(12))
def test_the_end_comes_with_the_last_rows(nodes: Nodes, seed: int):
    network = LossyNetwork(nodes, seed)
    now_seconds = 0.0
    for _ in range(STEPS // PER_ROUND):
        for node in (nodes.root, nodes.other):
            node.steps(PER_ROUND, tokens=TOKENS)
        now_seconds += _ROUND_SECONDS
        _work(nodes, network, now_seconds)
    for node in (nodes.root, nodes.other):
        for rank in node.ranks:
            rank.end(EndReason.COMPLETED)
    for _ in range(_ROUNDS_AT_MOST):
        now_seconds += _ROUND_SECONDS
        _work(nodes, network, now_seconds)
        if nodes.root.run.end is not EndReason.RUNNING:
            break
    values = shown(nodes.root.run)
    assert values["run_end_info{completed}"] == 1
    assert values["steps_total"] == STEPS
    assert values["tokens_total"] == 4 * STEPS * TOKENS
    assert _dropped(values) == 0


def test_where_the_last_rows_do_not_come_the_end_says_so(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(2, tokens=TOKENS)
    nodes.push()
    for node in (nodes.root, nodes.other):
        node.steps(3, tokens=TOKENS)
        for rank in node.ranks:
            rank.end(EndReason.COMPLETED)
    nodes.poll(3.0)
    pending = PendingReport(nodes.other.run)
    body = asyncio.run(pending.next_body())
    assert body is not None
    report = expanded(unpack(body))
    # A gap: the root refuses the rows.
    nodes.root.run.receive(replace(report, after=3, steps=report.steps[1:]))
    nodes.root.run.poll(3.0)
    end_before = nodes.root.run.end
    nodes.root.run.poll(3.0 + DEADLINE_SECONDS)
    assert (end_before, nodes.root.run.end) == (EndReason.RUNNING, EndReason.COMPLETED)
    values = shown(nodes.root.run, 3.0 + DEADLINE_SECONDS)
    assert values["tokens_total"] == (4 * 2 + 2 * 3) * TOKENS
    assert _dropped(values) == 2 * 3


def _dropped(values: dict[str, float]) -> float:
    (value,) = (value for key, value in values.items() if key.startswith("records_dropped_total"))
    return value
