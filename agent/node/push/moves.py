"""A root agent that is started again on another port tells the agents of the other nodes."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from mp_agent.node.push.messenger import Messenger
from mp_agent.node.push.notes import Notes
from mp_agent.node.push.runs import RunOnNode
from mp_agent.node.push.wire import MOVE_PATH

log = logging.getLogger("mp_agent.node")


class Moves:
    """Keeps in the note of a run where its nodes are, for the agent after this one."""

    def __init__(self, run: RunOnNode, notes: Notes, messenger: Messenger) -> None:
        self._run = run
        self._notes = notes
        self._messenger = messenger

    def tick(self, own_url: str, token: str) -> None:
        """Compare the note with how things are; own_url: "" while nothing is listened on."""
        note = self._notes.present
        if note is None or note.problem or not note.url or not own_url:
            return
        if note.url != own_url:
            log.info("run %s: tells the other nodes that it moved to %s", self._run.name, own_url)
            self._tell(note.nodes, own_url, token)
        nodes = {**note.nodes, **self._nodes()}
        if (note.url, note.nodes) != (own_url, nodes):
            self._notes.write(replace(note, url=own_url, nodes=nodes))

    def _tell(self, nodes: Mapping[str, str], own_url: str, token: str) -> None:
        attempt = str(self._notes.attempt_unix_ns)
        query = {"run": self._run.name, "attempt": attempt, "url": own_url}
        for url in nodes.values():
            self._messenger.send(url, MOVE_PATH, token, query, limit_seconds=inf)

    def _nodes(self) -> dict[str, str]:
        own = self._run.identity.node_rank
        known = (node for node in self._run.nodes if node.url and node.node_rank != own)
        return {str(node.node_rank): node.url for node in known}
