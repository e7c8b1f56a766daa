"""Connects one run to its root agent: locates the root, pushes, and hands the root role over."""

import hmac
import logging
import os
from collections.abc import Mapping
from dataclasses import replace

from mp_agent.node.endpoint import Endpoint
from mp_agent.node.transport.client import PushClient
from mp_agent.node.transport.pusher import Pusher
from mp_agent.node.transport.root_address import OwnAddress, RootAddress, advice, locate
from mp_agent.node.transport.root_moves import Notifier, RootMoves
from mp_agent.node.transport.root_note import RootNoteFile
from mp_agent.node.transport.run_protocol import RunOnNode
from mp_agent.node.transport.wire import RETIRE_PATH
from mp_agent.records.views import TransportView
from mp_agent.ring import address
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

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
        given = token.encode(errors="surrogatepass")
        # All are compared, each in constant time, against timing attacks.
        return any([hmac.compare_digest(given, own.encode()) for own in self._tokens()])

    def count_request(self, size: int, *, refused: bool) -> None:
        """Count a request of another node."""
        self._received = replace(
            self._received,
            received_bytes=self._received.received_bytes + size,
            requests_refused=self._received.requests_refused + refused,
        )

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
        waited = now_seconds - self._session_seconds >= STORE_SECONDS
        self._follow_note()
        self._follow_root(waited=waited)
        self.run.url = self.own_url()
        if self.expects_reports:
            self._moves.tick(self.run.url, next(iter(self._tokens()), ""))
        if waited and (self._has_other_nodes() or not self.run.is_root):
            self._advise()
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
        return address.base_url(host, endpoint.port, tls=endpoint.tls)

    def _has_other_nodes(self) -> bool:
        identity = self.run.identity
        return identity.world_size > identity.local_world_size

    def _nodes_known(self) -> int | None:
        if not self.collects:
            return None
        return len(self.run.nodes) if self._has_other_nodes() else 1

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

    def _advise(self) -> None:
        """Log, once each, what prevents the nodes of the run from exchanging rows."""
        found = advice(
            self._note_file.present,
            self._root,
            is_root=self.run.is_root,
            has_token=bool(self._tokens()),
        )
        for text in found:
            if text not in self._logged_advice:
                self._logged_advice.add(text)
                log.warning("run %s: %s", self.run.name, text)
