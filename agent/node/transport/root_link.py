"""How this node finds its run's root agent, follows it when it moves, and reports to it."""

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from mp_agent.inputs import addresses
from mp_agent.node.endpoint import Endpoint
from mp_agent.node.transport.client import MOVE_PATH, RETIRE_PATH, Backoff, PushClient, RunOnNode
from mp_agent.node.transport.pusher import Pusher
from mp_agent.node.transport.root_address import OwnAddress, RootAddress, advice, locate
from mp_agent.records.views import TransportView
from mp_agent.ring.run_files import RootNote, read_root_note, write_root_note
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")


class RootNoteFile:
    """Keeps the last note, which may be of an earlier attempt."""

    def __init__(self, run: RunOnNode) -> None:
        self.last: RootNote | None = None
        self._run = run

    @property
    def present(self) -> RootNote | None:
        """The note, if it is of the current attempt."""
        note = self.last
        if note is None or not self._run.seen:
            return None
        return note if note.asked_by_unix_ns in self._run.created_unix_ns else None

    @property
    def attempt_unix_ns(self) -> int:
        """Identifies the current attempt, by rank 0's clock; 0 until it is known."""
        note = self.present
        return note.created_unix_ns if note else 0

    def read(self) -> RootNote | None:
        """Read the note; return the previous one if that was of an attempt that is now over."""
        note, before = read_root_note(self._run.run_dir), self.last
        if note is None or note == before:
            return None
        self.last = note
        over = before is not None and before.created_unix_ns not in (0, note.created_unix_ns)
        return before if over else None

    def write(self, note: RootNote) -> None:
        """Replace the note, also for a successor of this agent; a full directory is only logged."""
        self.last = note
        try:
            write_root_note(self._run.run_dir, note)
        except OSError as error:
            log.warning(
                "run %s: the note of the root address cannot be written: %s", self._run.name, error
            )


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


STORE_SECONDS = 30.0
"""Time to wait for the job's store before MASTER_ADDR is used."""


class RootLink:
    """Follows the attempts of one run; pushes while another node holds rank 0."""

    def __init__(
        self,
        run: RunOnNode,
        settings: Settings,
        client: PushClient,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.run = run
        self.name = ""
        """Name of the run, once it is seen."""
        self.pusher = Pusher(run, client, settings.push_interval_seconds)
        self._settings = settings
        self._environ = environ
        self._notifier = Notifier(client)
        self._note_file = RootNoteFile(run)
        self._moves = RootMoves(run, self._note_file, self._notifier)
        self._root: RootAddress | None = None
        self._session = ""
        self._session_seconds = 0.0
        self._endpoint: Endpoint | None = None
        self._own_address = OwnAddress(settings, environ)
        self._received = TransportView()
        self._pace_seconds: float | None = None
        self._logged_advice: set[str] = set()

    @property
    def attempt_unix_ns(self) -> int:
        """Identifies the current attempt, by rank 0's clock; 0 until it is known."""
        return self._note_file.attempt_unix_ns

    @property
    def superseded(self) -> bool:
        """Whether another agent has become the root of the run."""
        note = self._note_file.present
        return note is not None and note.superseded

    @property
    def collects(self) -> bool:
        """Whether this agent is the root and receives the other nodes' rows."""
        return self.run.seen and self.run.is_root and not self.superseded

    @property
    def view(self) -> TransportView:
        """Counts of what was sent and received."""
        return replace(
            self.pusher.counts,
            received_bytes=self._received.received_bytes,
            requests_refused=self._received.requests_refused,
            nodes_known=self._nodes_known(),
            push_interval_seconds=self._push_interval_seconds(),
        )

    @property
    def senders(self) -> int:
        """Number of other node agents that push to this one."""
        if not self.collects:
            return 0
        identity = self.run.identity
        return -(-identity.world_size // max(identity.local_world_size, 1)) - 1

    @property
    def expects_reports(self) -> bool:
        """Whether this agent is the root of a run with further nodes."""
        return self.collects and self._has_other_nodes()

    @property
    def final_report_pending(self) -> bool:
        """Whether the root accepts this node's reports but does not have the final one yet."""
        return self.pusher.accepted_total > 0 and not self.pusher.final_accepted

    def accepts(self, token: str) -> bool:
        """Return whether a token authorises a request for this run."""
        if self._is_known(token):
            return True
        # Another node may have got the attempt's token since the note was read.
        self._follow_note()
        return self._is_known(token)

    def count_request(self, size: int, *, refused: bool) -> None:
        """Count a request of another node."""
        self._received = replace(
            self._received,
            received_bytes=self._received.received_bytes + size,
            requests_refused=self._received.requests_refused + refused,
        )

    def follow_pace(self, pace_seconds: float) -> None:
        """At the root, wait for rows of nodes that push this often."""
        self._pace_seconds = pace_seconds
        self.run.follow_pace(pace_seconds)

    def retire(self, attempt_unix_ns: int) -> bool:
        """Give up the root role if the request is for this attempt; return whether it is."""
        note = self._note_file.present
        if note is None or note.created_unix_ns != attempt_unix_ns:
            return False
        if not note.superseded:
            log.info("run %s: another agent has become the root", self.run.name)
            self._note_file.write(replace(note, superseded=True))
        return True

    def follow_move(self, attempt_unix_ns: int, url: str) -> bool:
        """Push to the root's new URL if it is for this attempt; return whether it is."""
        note = self._note_file.present
        if note is None or note.created_unix_ns != attempt_unix_ns or self.run.is_root:
            return False
        if note.url != url:
            self._note_file.write(replace(note, url=url))
        return True

    def tick(self, now_seconds: float, endpoint: Endpoint | None) -> None:
        """Update the root's address, and push what is due."""
        if not self.run.seen:
            return
        self._endpoint, self.name = endpoint, self.run.name
        if self.run.session != self._session:
            self._session, self._session_seconds = self.run.session, now_seconds
            self.pusher.begin()
        passed_seconds = now_seconds - self._session_seconds
        waited = passed_seconds >= STORE_SECONDS
        self._follow_note()
        self._follow_root(waited=waited)
        self.run.url = self.own_url()
        if self.expects_reports:
            self._moves.tick(self.run.url, next(iter(self._tokens()), ""))
        if waited and (self._has_other_nodes() or not self.run.is_root):
            self._advise(passed_seconds)
        if not self.run.is_root and self._root is not None and self._root.token:
            self.pusher.tick(self._root, now_seconds)

    async def stop(self, deadline_seconds: float) -> None:
        """Push what is left, if the root answers in time; then cancel."""
        if self.run.seen and not self.run.is_root:
            await self.pusher.stop(deadline_seconds)
        self.cancel()

    def cancel(self) -> None:
        """Cancel everything in progress."""
        self.pusher.cancel()
        self._notifier.stop()
        self._own_address.stop()

    def own_url(self) -> str:
        """Return the URL at which other nodes reach this agent; "" if it is not known."""
        endpoint = self._endpoint
        host = (
            ""
            if endpoint is None
            else self._own_address.toward_others(endpoint, self._note_file.last)
        )
        if endpoint is None or not host:
            return ""
        return addresses.base_url(host, endpoint.port, tls=endpoint.tls)

    def _has_other_nodes(self) -> bool:
        identity = self.run.identity
        return identity.world_size > identity.local_world_size

    def _has_unreported(self) -> bool:
        known = sum(len(node.ranks) for node in self.run.nodes)
        return known < self.run.identity.world_size

    def _nodes_known(self) -> int | None:
        if not self.collects:
            return None
        return len(self.run.nodes) if self._has_other_nodes() else 1

    def _push_interval_seconds(self) -> float | None:
        return self._pace_seconds if self.run.is_root else self.pusher.interval_seconds

    def _is_known(self, token: str) -> bool:
        given = token.encode(errors="surrogatepass")
        # All are compared, each in constant time, against timing attacks.
        return any([hmac.compare_digest(given, own.encode()) for own in self._tokens()])

    def _tokens(self) -> list[str]:
        note = self._note_file.present
        known = (self._settings.token.get_secret_value(), note.token if note else "")
        return [token for token in known if token]

    def _follow_note(self) -> None:
        """Read the note from the job's store; notify a root that was replaced by another."""
        left = self._note_file.read()
        if left is None or not left.token or left.url == self.own_url():
            return
        query = {"run": self.name, "attempt": str(left.created_unix_ns)}
        limit_seconds = 2 * self._settings.linger_seconds
        self._notifier.send(left.url, RETIRE_PATH, left.token, query, limit_seconds=limit_seconds)

    def _follow_root(self, *, waited: bool) -> None:
        root = locate(self._settings, self._note_file.present, self._environ, waited=waited)
        if root == self._root:
            return
        self._root = root
        self.pusher.begin()
        if root is not None and not self.run.is_root:
            known = "is" if root.created_unix_ns or self._settings.root else "is assumed to be"
            log.info("run %s: the root agent %s at %s", self.run.name, known, root.url)

    def _advise(self, passed_seconds: float) -> None:
        """Log, once each, what prevents the nodes of the run from exchanging rows."""
        may_be_starting = passed_seconds < 2 * STORE_SECONDS
        found = advice(
            self._note_file.present,
            self._root,
            is_root=self.run.is_root,
            has_token=bool(self._tokens()),
            root_setting=self._settings.root,
            has_unreported=not may_be_starting and self.expects_reports and self._has_unreported(),
        )
        for text in found:
            if text not in self._logged_advice:
                self._logged_advice.add(text)
                log.warning("run %s: %s", self.run.name, text)
