"""`python -m mp_agent.probe.processes.rendezvous`: finds the root agent by the job's store.

A separate process, detached and of lower priority, started by rank 0 and by local rank 0 of every
node of a run of several nodes. Training never waits for it, and it ends by itself: when it knows,
when the rank that started it is gone, or after `LIFE_SECONDS`.
"""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from mp_agent.errors import RingError
from mp_agent.inputs import addresses
from mp_agent.probe.processes.launchers import Store, connect, is_listened_on
from mp_agent.ring import locations
from mp_agent.ring.files import open_standard_streams
from mp_agent.ring.reader import RingReader
from mp_agent.ring.run_files import RootNote, is_base_url, read_root_note, write_root_note

LIFE_SECONDS = 600.0
FOLLOW_SECONDS = 60.0
"""How long a newer answer is awaited: under torchrun the one of the attempt before stands
until rank 0 of the new attempt has given its own."""

_POLL_SECONDS = 0.25
_POLL_SECONDS_MAX = 4.0
_POLL_GROWTH = 1.3
_TOKEN_BYTES = 32
_NICENESS = 5
"""Above training's, yet not so far that it never runs where data loaders keep all cores busy."""
_ANSWER_CHARACTERS_MAX = 4096

T = TypeVar("T")


class RootLocation(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 leaves in the store."""

    attempt: int
    created_unix_ns: int
    """When rank 0's ring was made; names the attempt."""
    url: str
    token: str


class _NoAnswer(Exception):
    """What is unavailable, and why."""


class Rendezvous:
    """Exchanges the root's address at the store, for the rank whose ring is `reader`'s."""

    def __init__(self, reader: RingReader, connect: Callable[[str, int], Store]) -> None:
        self._reader = reader
        self._identity = reader.identity
        self._run_dir = reader.path.parent.parent
        self._connect = connect
        self._key = f"mp_agent/root/{self._identity.run}"
        self._deadline = time.monotonic() + LIFE_SECONDS
        self._known_unix_ns = 0
        self._host = os.environ.get("MASTER_ADDR", "")
        self._note = RootNote(
            asked_by_unix_ns=self._identity.created_unix_ns,
            address=addresses.address_toward(self._host) if self._host else "",
        )

    def meet(self) -> None:
        """Publish the root agent's URL, or read it, and write it down for this node's agent."""
        try:
            store = self._store()
            if self._identity.rank == 0:
                self._publish(store)
            else:
                self._follow(store)
        except (_NoAnswer, RuntimeError) as problem:
            self._give_up(str(problem))

    def _store(self) -> Store:
        host, port = self._host, os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise _NoAnswer("MASTER_ADDR and MASTER_PORT are not set")
        what = f"no store answers at {host}, port {port}"
        if addresses.is_local(host):
            # Connecting to a free port of this machine could occupy it: TCP may choose that
            # very port for the client, which is then connected to itself.
            self._await(lambda: is_listened_on(int(port)), what)

        def connected() -> Store | None:
            try:
                return self._connect(host, int(port))
            except RuntimeError:
                return None

        return self._await(connected, what)

    def _publish(self, store: Store) -> None:
        url = self._await(self._own_url, "no node agent serves on the node of rank 0")
        # A secret that was set outlives the run, and every client of the store can read it.
        has_token = bool(os.environ.get("MP_AGENT_TOKEN"))
        answer = RootLocation(
            attempt=self._identity.attempt,
            created_unix_ns=self._identity.created_unix_ns,
            url=url,
            token="" if has_token else secrets.token_urlsafe(_TOKEN_BYTES),
        )
        # First here: the root must know the token before any client uses it.
        self._write(answer)
        store.set(self._key, msgspec.json.encode(answer).decode())

    def _own_url(self) -> str:
        status = locations.read_status(self._run_dir)
        if status is None or not status.port or not locations.agent_running(self._run_dir):
            return ""
        host = status.advertise or self._note.address
        return addresses.base_url(host, status.port, tls=_speaks_tls(status)) if host else ""

    def _follow(self, store: Store) -> None:
        """Write the answer down, and again if a newer one comes soon."""
        earlier = read_root_note(self._run_dir)
        self._known_unix_ns = earlier.created_unix_ns if earlier else 0
        what = "rank 0 has not said where its node agent is"
        self._write(self._await(lambda: self._new_answer(store), what))
        self._deadline = min(self._deadline, time.monotonic() + FOLLOW_SECONDS)
        while True:
            self._write(self._await(lambda: self._new_answer(store), "no other answer"))

    def _new_answer(self, store: Store) -> RootLocation | None:
        """Return the store's answer, unless it is the one that this node has already."""
        if not store.check([self._key]):
            return None
        text = store.get(self._key)[:_ANSWER_CHARACTERS_MAX]
        try:
            answer = msgspec.json.decode(text, type=RootLocation)
        except msgspec.DecodeError as error:
            raise _NoAnswer(f"what rank 0 has said cannot be read: {error}") from error
        if not is_base_url(answer.url):
            raise _NoAnswer(f"rank 0 has said {answer.url!r}, which is no URL")
        if answer.created_unix_ns == self._known_unix_ns:
            return None
        self._known_unix_ns = answer.created_unix_ns
        return answer

    def _write(self, answer: RootLocation) -> None:
        note = replace(
            self._note,
            attempt=answer.attempt,
            created_unix_ns=answer.created_unix_ns,
            url=answer.url,
            token=answer.token,
        )
        write_root_note(self._run_dir, note)

    def _await(self, ask: Callable[[], T | None], what: str) -> T:
        """Return the first true answer. Raises _NoAnswer, saying `what`, when it is too late."""
        pause_seconds = _POLL_SECONDS
        while not (found := ask()):
            if time.monotonic() >= self._deadline or not self._reader.writer_alive():
                raise _NoAnswer(what)
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * _POLL_GROWTH, _POLL_SECONDS_MAX)
        return found

    def _give_up(self, problem: str) -> None:
        """Write down what to try without an answer, unless there was one or the run is over."""
        note = read_root_note(self._run_dir)
        answered = note is not None and note.asked_by_unix_ns == self._note.asked_by_unix_ns
        if answered or not self._reader.writer_alive():
            return
        # The nodes of a job have the same settings: what this one speaks, the root speaks.
        tls = _speaks_tls(locations.read_status(self._run_dir))
        url = addresses.base_url(self._host, addresses.DEFAULT_PORT, tls=tls) if self._host else ""
        write_root_note(self._run_dir, replace(self._note, url=url, problem=problem))


def _speaks_tls(status: locations.AgentStatus | None) -> bool:
    return status is not None and status.url.startswith("https:")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exchange the root's address with the other nodes, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ring", type=Path, required=True, help="of the rank that asks")
    parser.add_argument("--ready-fd", type=int, help="closed once this process is detached")
    options = parser.parse_args(arguments)
    open_standard_streams()
    os.nice(_NICENESS)
    if os.fork() > 0:
        os._exit(0)
    if options.ready_fd is not None:
        os.close(options.ready_fd)
    os.setsid()
    try:
        reader = RingReader.open(options.ring)
        Rendezvous(reader, connect).meet()
    except (OSError, RingError):
        # The run's directory is gone: so is the run.
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
