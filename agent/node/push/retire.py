"""Tells the root of an attempt that is over that the run goes on elsewhere."""

import asyncio
import time

from mp_agent.node.push.backoff import Backoff
from mp_agent.node.push.client import PushClient
from mp_agent.node.push.root import RootAddress


class Retirement:
    """Tells each root that was left once; again while it cannot be reached, for a bounded time."""

    def __init__(self, client: PushClient, limit_seconds: float) -> None:
        self._client = client
        self._limit_seconds = limit_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    def leave(self, run: str, root: RootAddress) -> None:
        """Begin to tell a root that its attempt of a run is over."""
        task = asyncio.get_running_loop().create_task(self._tell(run, root))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Give up what could not be told."""
        for task in self._tasks:
            task.cancel()

    async def _tell(self, run: str, root: RootAddress) -> None:
        backoff, until_seconds = Backoff(), time.monotonic() + self._limit_seconds
        query = {"run": run, "attempt": str(root.created_unix_ns)}
        while time.monotonic() < until_seconds:
            reply = await self._client.send_retirement(root.url, root.token, query)
            # Any answer but those means that it has no say in this run any more.
            if reply.status not in (0, 429) and reply.status < 500:
                return
            await asyncio.sleep(backoff.next_pause_seconds())
