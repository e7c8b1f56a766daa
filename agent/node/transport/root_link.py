"""One run's tie to its root agent: where the root is, who may push, who is the root no more."""

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
"""How long the job's store is waited for before MASTER_ADDR has to do."""


class RootLink:
    """Follows the attempts of one run, pushes while another node holds rank 0."""

    def __init__(
        self,
        run: RunOnNode,
        settings: Settings,
        client: PushClient,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.run = run
        self.name = ""
        """Of the run, once it is seen."""
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
        """Name of the present attempt, by rank 0's clock; 0 while it is not known."""
        return self._note_file.attempt_unix_ns

    @property
    def superseded(self) -> bool:
        """Whether the run goes on under another root."""
        note = self._note_file.present
        return note is not None and note.superseded

    @property
    def collects(self) -> bool:
        """Whether this agent is the root, to which the others' rows belong."""
        return self.run.seen and self.run.is_root and not self.superseded

    @property
    def view(self) -> TransportView:
        """The account of what was sent and received."""
        return replace(
            self.pusher.counts,
            received_bytes=self._received.received_bytes,
            requests_refused=self._received.requests_refused,
            nodes_known=self._nodes_known(),
        )

    @property
    def senders(self) -> int:
        """How many other node agents push to this one."""
        if not self.collects:
            return 0
        identity = self.run.identity
        return -(-identity.world_size // max(identity.local_world_size, 1)) - 1

    @property
    def expects_reports(self) -> bool:
        """Whether this agent is the root of a run that has further nodes."""
        return self.collects and self._has_other_nodes()

    @property
    def final_report_pending(self) -> bool:
        """Whether the root, which takes what this node pushes, has not got its end yet."""
        return self.pusher.accepted_total > 0 and not self.pusher.final_accepted

    def accepts(self, token: str) -> bool:
        """Return whether a request with this token may speak for a node of the run."""
        given = token.encode(errors="surrogatepass")
        # All are compared, each in constant time: how long it takes says nothing.
        return any([hmac.compare_digest(given, own.encode()) for own in self._tokens()])

    def count_request(self, size: int, *, refused: bool) -> None:
        """Note that another node sent something."""
        self._received = replace(
            self._received,
            received_bytes=self._received.received_bytes + size,
            requests_refused=self._received.requests_refused + refused,
        )

    def retire(self, attempt_unix_ns: int) -> bool:
        """Be the root no more, if it is this attempt that others have left; return whether."""
        note = self._note_file.present
        if note is None or note.created_unix_ns != attempt_unix_ns:
            return False
        if not note.superseded:
            log.info("run %s: goes on under another root agent", self.run.name)
            self._note_file.write(replace(note, superseded=True))
        return True

    def follow_move(self, attempt_unix_ns: int, url: str) -> bool:
        """Push to the root at its new URL, if it is that of this attempt; return whether."""
        note = self._note_file.present
        if note is None or note.created_unix_ns != attempt_unix_ns or self.run.is_root:
            return False
        if note.url != url:
            self._note_file.write(replace(note, url=url))
        return True

    def tick(self, now_seconds: float, endpoint: Endpoint | None) -> None:
        """Look where the root is, and push what is due."""
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
        """Push what is left, if the root answers in time; then end."""
        if self.run.seen and not self.run.is_root:
            await self.pusher.stop(deadline_seconds)
        self.cancel()

    def cancel(self) -> None:
        """End at once."""
        self.pusher.cancel()
        self._notifier.stop()
        self._own_address.stop()

    def own_url(self) -> str:
        """Return the URL under which others reach this agent; "" when it is not known."""
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
        """Take up what the job's store told; a root that was left for another is told so."""
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
        """Say, once each, what keeps the nodes of the run apart."""
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
