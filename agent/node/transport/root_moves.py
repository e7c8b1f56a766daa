"""Notifies the other nodes when the root agent has restarted on another port."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from mp_agent.node.transport.client import Backoff, PushClient
from mp_agent.node.transport.root_note import RootNoteFile
from mp_agent.node.transport.run_protocol import RunOnNode
from mp_agent.node.transport.wire import MOVE_PATH

log = logging.getLogger("mp_agent.node")


class Notifier:
    """Notifies other node agents, with retries, in the background until `stop`."""

    def __init__(self, client: PushClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self, url: str, path: str, token: str, query: Mapping[str, str], *, limit_seconds: float
    ) -> None:
        """Start to deliver a message; give up after `limit_seconds`."""
        task = asyncio.get_running_loop().create_task(
            self._deliver(url, path, token, query, limit_seconds)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Cancel all messages in progress."""
        for task in self._tasks:
            task.cancel()

    async def _deliver(
        self, url: str, path: str, token: str, query: Mapping[str, str], limit_seconds: float
    ) -> None:
        backoff, until_seconds = Backoff(), time.monotonic() + limit_seconds
        while time.monotonic() < until_seconds:
            reply = await self._client.send_message(url, path, token, query)
            # Any other status means that it was delivered, or is obsolete there.
            if reply.status not in (0, 429) and reply.status < 500:
                return
            await asyncio.sleep(backoff.next_pause_seconds())


class RootMoves:
    """Records the nodes' URLs in the note of a run, so that a successor can notify them."""

    def __init__(self, run: RunOnNode, notes: RootNoteFile, messenger: Notifier) -> None:
        self._run = run
        self._note_file = notes
        self._notifier = messenger

    def tick(self, own_url: str, token: str) -> None:
        """Update the note and notify the nodes if the URL has changed; own_url: "" if not known."""
        note = self._note_file.present
        if note is None or note.problem or not note.url or not own_url:
            return
        if note.url != own_url:
            log.info(
                "run %s: the root agent moved to %s; notifying the other nodes",
                self._run.name,
                own_url,
            )
            self._notify_nodes(note.nodes, own_url, token)
        nodes = {**note.nodes, **self._nodes()}
        if (note.url, note.nodes) != (own_url, nodes):
            self._note_file.write(replace(note, url=own_url, nodes=nodes))

    def _notify_nodes(self, nodes: Mapping[str, str], own_url: str, token: str) -> None:
        attempt = str(self._note_file.attempt_unix_ns)
        query = {"run": self._run.name, "attempt": attempt, "url": own_url}
        for url in nodes.values():
            self._notifier.send(url, MOVE_PATH, token, query, limit_seconds=inf)

    def _nodes(self) -> dict[str, str]:
        own = self._run.identity.node_rank
        known = (node for node in self._run.nodes if node.url and node.node_rank != own)
        return {str(node.node_rank): node.url for node in known}
