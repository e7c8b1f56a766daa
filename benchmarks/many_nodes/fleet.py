"""One process that simulates many node agents: each pushes to the root over its own connection.

Run by `benchmarks.many_nodes.live`, which hands the plan over on stdin and reads the account.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf

from benchmarks.many_nodes.model import Model
from benchmarks.many_nodes.node import SimulatedNode
from mp_agent.node.transport.client import PushClient, Reply
from mp_agent.node.transport.pusher import Pusher
from mp_agent.node.transport.root_address import RootAddress
from mp_agent.settings import Settings

_SILENT_OF = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a fleet is to do."""

    model: Model
    numbers: tuple[int, ...]
    """The nodes that it simulates."""
    url: str
    token: str
    push_interval_seconds: float
    step_seconds: float
    steps: int
    """Steps that the ranks make."""
    sampled: tuple[int, ...]
    """Steps on which layers are looked at."""
    marks: tuple[int, ...]
    """Steps that end a stretch of time; requests are counted stretch by stretch."""
    silent: tuple[int, int] = (0, 0)
    """Steps from the first of which on, up to the second, every tenth agent does nothing."""
    drain_seconds: float = 0.0
    """After the last step: so long the agents go on, without new rows."""


@dataclass(slots=True)
class Stretch:
    """What was sent in a stretch of time."""

    requests: int = 0
    body_bytes: int = 0
    failures: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    latencies_seconds: list[float] = field(default_factory=list)


class CountingClient(PushClient):
    """The client as it is, with an account of what it sends."""

    def __init__(self, clock: "Clock") -> None:
        super().__init__()
        self._clock = clock

    async def send_rows(self, url: str, token: str, query: Mapping[str, str], body: bytes) -> Reply:
        begun = time.monotonic()
        reply = await super().send_rows(url, token, query, body)
        stretch = self._clock.stretch
        stretch.requests += 1
        stretch.body_bytes += len(body)
        stretch.latencies_seconds.append(time.monotonic() - begun)
        if not reply.ok:
            stretch.failures += 1
            reason = f"{reply.status} {reply.reason}"[:120]
            stretch.reasons[reason] = stretch.reasons.get(reason, 0) + 1
        return reply


class Clock:
    """The steps of the run by the machine's clock: all ranks end a step at the same moment."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.started_unix_seconds = inf
        self._stretches = [Stretch() for _ in (*plan.marks, plan.steps)]

    @property
    def step(self) -> int:
        """The last step that has ended; 0 before the start."""
        seconds = max(time.time() - self.started_unix_seconds, 0.0)
        return int(seconds / self._plan.step_seconds)

    @property
    def stretch(self) -> Stretch:
        """The present stretch."""
        step = self.step
        return self._stretches[sum(step >= mark for mark in self._plan.marks)]

    @property
    def stretches(self) -> Sequence[Stretch]:
        """All stretches, in order."""
        return self._stretches


class Agent:
    """One node agent: it looks at its ranks, and pushes when that is due."""

    def __init__(self, plan: Plan, number: int, clock: Clock) -> None:
        self._silent = range(*plan.silent) if number % _SILENT_OF == 0 else range(0)
        settings = Settings(push_interval_seconds=plan.push_interval_seconds)
        self._node = SimulatedNode(plan.model, number, settings, sampled=plan.sampled)
        self._node.url = f"http://node-{number:04d}.cluster.example:9464"
        self._client = CountingClient(clock)
        self._pusher = Pusher(self._node, self._client, plan.push_interval_seconds)
        self._root = RootAddress(url=plan.url, token=plan.token)

    def look(self, step: int) -> None:
        if step in self._silent:
            return
        now_seconds = time.monotonic()
        self._node.write(step)
        self._node.poll(now_seconds)
        self._pusher.tick(self._root, now_seconds)

    def prepare(self, steps: int) -> None:
        """Reduce all steps now: on one machine there is no time for it once the clock runs."""
        self._node.attempt.record(steps)

    @property
    def dropped(self) -> int:
        return self._node.member.lost + self._pusher.counts.reports_dropped

    async def stop(self) -> None:
        self._pusher.cancel()
        await self._client.close()


async def _start(agents: Sequence[Agent], until_unix_seconds: float) -> None:
    """Let one agent after the other begin to push; training starts once all ranks are there."""
    begun = time.time()
    for number, agent in enumerate(agents):
        due = begun + number / len(agents) * (until_unix_seconds - begun)
        await asyncio.sleep(max(due - time.time(), 0.0))
        agent.look(0)


async def drive(plan: Plan) -> None:
    """Simulate the nodes until the last step, and print the account."""
    clock = Clock(plan)
    gc.disable()  # a walk through the rows of all nodes takes longer than a step
    agents = [Agent(plan, number, clock) for number in plan.numbers]
    for agent in agents:
        agent.prepare(plan.steps)
    gc.freeze()
    gc.enable()
    print("ready", flush=True)
    started = clock.started_unix_seconds = float(sys.stdin.readline())
    await _start(agents, started)
    ends = started + (plan.steps + 1) * plan.step_seconds + plan.drain_seconds
    late_seconds = 0.0
    number = 0
    while time.time() < ends:
        # Agents look at their rings at any moment of a step, each at its own.
        due = started + number / len(agents) * plan.step_seconds
        await asyncio.sleep(max(due - time.time(), 0.0))
        late_seconds = max(late_seconds, time.time() - due)
        agents[number % len(agents)].look(min(clock.step, plan.steps))
        number += 1
    dropped = sum(agent.dropped for agent in agents)
    await asyncio.gather(*(agent.stop() for agent in agents))
    account = {
        "stretches": [asdict(stretch) for stretch in clock.stretches],
        "late_seconds": late_seconds,
        "dropped": dropped,
    }
    print(json.dumps(account), flush=True)


def main() -> None:
    """Simulate what stdin requests."""
    facts = json.loads(sys.stdin.readline())
    lists = {name: tuple(facts[name]) for name in ("numbers", "sampled", "marks", "silent")}
    asyncio.run(drive(Plan(**{**facts, **lists, "model": Model(**facts["model"])})))


if __name__ == "__main__":
    main()
