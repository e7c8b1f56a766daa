"""Gives word to other node agents: once each, again while they cannot be reached."""

import asyncio
import time
from collections.abc import Mapping

from mp_agent.node.push.backoff import Backoff
from mp_agent.node.push.client import PushClient


class Messenger:
    """Delivers each message in the background; what is under way ends with `stop`."""

    def __init__(self, client: PushClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self, url: str, path: str, token: str, query: Mapping[str, str], *, limit_seconds: float
    ) -> None:
        """Begin to deliver a message; give up after `limit_seconds`."""
        task = asyncio.get_running_loop().create_task(
            self._deliver(url, path, token, query, limit_seconds)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Give up what could not be delivered."""
        for task in self._tasks:
            task.cancel()

    async def _deliver(
        self, url: str, path: str, token: str, query: Mapping[str, str], limit_seconds: float
    ) -> None:
        backoff, until_seconds = Backoff(), time.monotonic() + limit_seconds
        while time.monotonic() < until_seconds:
            reply = await self._client.send_message(url, path, token, query)
            # Any answer but those means that it was heard, or does not matter there any more.
            if reply.status not in (0, 429) and reply.status < 500:
                return
            await asyncio.sleep(backoff.next_pause_seconds())
