"""DNS rebinding: the port answers under the agent's names and addresses alone."""

import asyncio
import socket
from pathlib import Path

import pytest

from mp_agent.node.http.auth import HostNames, access, host_names
from mp_agent.node.http.server import MetricsServer
from mp_agent.node.http.status import status_routes
from mp_agent.node.transport.client import PATHS
from mp_agent.settings import Settings
from tests.agent.node.http.test_server import Exposed

ADDRESSES = ("10.4.5.6:9464", "[fd00::7]:9464", "127.0.0.1", "[::1]:9464", "[fe80::1%25eth0]:9464")
"""Prometheus scrapes the IP addresses of pods; `kubectl port-forward` and ssh serve localhost."""
NAMES = ("localhost:9464", "LOCALHOST.", "job:9464", "gpu-node-1", "mp-agent.training.svc:9464")
FOREIGN = (
    "rebind.attacker.example",
    "rebind.attacker.example:9464",
    "127.0.0.1.nip.io",
    "localhost.attacker.example",
    "user@localhost",
    "0x7f.0.0.1",
    "attacker.example/localhost",
    "localhost attacker.example",
    "[attacker.example]",
    "metrics.training",
    "agent.ml",
    "xn--lcalhost-0za.example",
    "agent.internal.attacker.example",
    "[fe80::1%attacker.example/]",
)


def answered(*requests: bytes, settings: Settings | None = None) -> list[bytes]:
    """Return the raw answers of a served port to raw requests."""

    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer

    async def run() -> list[bytes]:
        exposed = Exposed()
        routes = status_routes(exposed.report, lambda run: {"run": run})
        server = MetricsServer(exposed.expose, routes)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener, access(settings or Settings()))
        try:
            return [await ask(listener.getsockname()[1], request) for request in requests]
        finally:
            await server.stop()

    return asyncio.run(run())


def get(path: str, *hosts: str, version: str = "1.1") -> bytes:
    """Return a request for a path that names these hosts."""
    lines = [f"GET {path} HTTP/{version}", *(f"Host: {host}" for host in hosts)]
    return "\r\n".join((*lines, "Connection: close", "", "")).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/snapshot", "/api/v1/history?run=a"])
def test_a_page_under_an_attackers_name_reads_nothing(path: str) -> None:
    for answer in answered(*(get(path, host) for host in FOREIGN)):
        # A host that is no host at all, the HTTP library may refuse before.
        assert status(answer) in (400, 421)
    (refusal,) = answered(get(path, FOREIGN[0]))
    assert status(refusal) == 421
    assert b"rebind.attacker.example" in refusal
    assert b"MP_AGENT_ALLOWED_HOSTS" in refusal


def test_scrapes_by_address_and_by_name_are_answered() -> None:
    hosts = (*ADDRESSES, *NAMES, socket.gethostname(), f"{socket.gethostname()}:9464")
    answers = answered(*(get("/metrics", host) for host in hosts))
    assert [status(answer) for answer in answers] == [200] * len(hosts)


def test_a_request_without_a_host_is_no_browsers() -> None:
    old, empty = answered(get("/metrics", version="1.0"), get("/metrics", "", version="1.0"))
    assert (status(old), status(empty)) == (200, 200)


def test_an_absolute_target_and_a_second_host_do_not_get_around_it() -> None:
    target, absolute, repeated = answered(
        get("http://rebind.attacker.example/metrics", "localhost"),
        get("http://localhost/metrics", "rebind.attacker.example"),
        get("/metrics", "localhost", "rebind.attacker.example"),
    )
    assert (status(target), status(absolute), status(repeated)) == (421, 421, 400)


def test_probes_and_what_needs_the_token_are_answered_under_any_name() -> None:
    (probe,) = answered(get("/healthz", "rebind.attacker.example"))
    assert status(probe) == 200
    # There is no such route in this server: it is the router that answers, not the check.
    for answer in answered(*(get(path, "rebind.attacker.example") for path in PATHS)):
        assert status(answer) == 404


def test_a_setting_admits_further_names() -> None:
    settings = Settings(allowed_hosts=("agent.example.com", "*.training"))
    hosts = ("agent.example.com:443", "AGENT.example.com.", "metrics.training", "example.com")
    answers = answered(*(get("/metrics", host) for host in hosts), settings=settings)
    assert [status(answer) for answer in answers] == [200, 200, 200, 421]
    (any_host,) = answered(get("/metrics", FOREIGN[0]), settings=Settings(allowed_hosts=("*",)))
    assert status(any_host) == 200


def test_a_foreign_host_is_refused_before_the_password_is_asked_for() -> None:
    settings = Settings(basic_auth_user="scraper", basic_auth_password="secret")
    foreign, own = answered(
        get("/metrics", FOREIGN[0]), get("/metrics", "localhost"), settings=settings
    )
    assert (status(foreign), status(own)) == (421, 401)


def test_the_names_of_a_node_come_from_settings_launcher_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-3")
    resolver, hosts = tmp_path / "resolv.conf", tmp_path / "hosts"
    resolver.write_text("nameserver 10.0.0.1\nsearch hpc.example.edu svc.cluster.example.com\n")
    hosts.write_text("10.1.2.3 node-3.ib.example.edu node-3 # fabric\n10.9.9.9 api.partner.com\n")
    names = host_names(
        Settings(advertise="train-3.example.net", root="https://root.example.org:9464"),
        {"MASTER_ADDR": "node-0.hpc.example.edu"},
        resolver_file=resolver,
        hosts_file=hosts,
    )
    own = (
        "node-3.hpc.example.edu",
        "node-3.ib.example.edu",
        "train-3.example.net",
        "root.example.org",
        "node-0.hpc.example.edu",
        "mp-agent.training.svc.cluster.example.com",
    )
    assert [name for name in own if not names.accepts(name)] == []
    foreign = ("evil.hpc.example.edu", "api.partner.com", "node-3.attacker.example", "example.net")
    assert [name for name in foreign if names.accepts(name)] == []


def test_names_that_the_public_dns_lacks_belong_to_no_attacker() -> None:
    names = HostNames((), (), ())
    for name in ("agent.local", "vm.c.project.internal", "pc.home.arpa", "a.localhost", "trainer"):
        assert names.accepts(name), name
    for name in ("local.example", "internal.example.com", "notlocal", "x.notlocal"):
        assert names.accepts(name) == ("." not in name), name
