"""A node agent that is protected and one under fire, with a real Prometheus and raw sockets."""

import math
import os
import random
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from mp_agent.ring import locations
from mp_agent.settings import Settings
from mp_agent.settings.load import HANDOVER_VARIABLE
from tests.agent.node.agent_process import StartAgent, get, scrape, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.waiting import wait_until
from tools.servers.running import read_json, serving

PASSWORD = "a password with spaces"
REQUESTS = 10_000


@dataclass(frozen=True)
class Certificates:
    """Files of an authority, of the agent and of a scraper."""

    authority: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    for name in ("agent", "client"):
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    names = ("authority.pem", "agent.pem", "agent.key", "client.pem", "client.key")
    return Certificates(*(folder / name for name in names))


def healths(
    server: Callable[[str], Path], folder: Path, address: str, schemes: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return how a Prometheus that scrapes the agent in several ways finds it, by way."""
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [address]}], **scheme}
        for name, scheme in schemes.items()
    ]
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    arguments = [
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]

    with serving(server("prometheus"), arguments, folder / "prometheus.log") as url:

        def scraped() -> dict[str, dict[str, Any]] | None:
            targets = read_json(f"{url}/api/v1/targets")["data"]["activeTargets"]
            known = {one["scrapePool"]: one for one in targets if one["health"] != "unknown"}
            return known if len(known) == len(schemes) else None

        return wait_until(scraped, what="a scrape in every way")


@pytest.mark.e2e
def test_prometheus_scrapes_over_tls_only_with_client_certificate_and_password(
    server: Callable[[str], Path],
    start: StartAgent,
    start_rank: StartRank,
    run_dir: Path,
    certificates: Certificates,
    tmp_path: Path,
) -> None:
    start_rank().steps(2, loss=1.0)
    agent = start(
        tls_certificate=certificates.certificate,
        tls_key=certificates.key,
        tls_client_ca=certificates.authority,
        basic_auth_user="scraper",
        basic_auth_password=PASSWORD,
    )
    status = wait_for_status(run_dir, pid=agent.pid)
    assert status.url.startswith("https://")
    address = status.url.removeprefix("https://")
    trusting = {"ca_file": str(certificates.authority)}
    showing = {
        "cert_file": str(certificates.client_certificate),
        "key_file": str(certificates.client_key),
    }
    password = {"username": "scraper", "password": PASSWORD}

    found = healths(
        server,
        tmp_path,
        address,
        {
            "whole": {
                "scheme": "https",
                "tls_config": trusting | showing,
                "basic_auth": password,
            },
            "no-password": {"scheme": "https", "tls_config": trusting | showing},
            "no-certificate": {
                "scheme": "https",
                "tls_config": trusting,
                "basic_auth": password,
            },
            "plain": {"basic_auth": password},
        },
    )
    assert found["whole"]["health"] == "up", found["whole"]["lastError"]
    assert "401" in found["no-password"]["lastError"]
    assert found["no-certificate"]["health"] == "down"
    assert found["plain"]["health"] == "down"


@pytest.mark.slow
def test_a_secret_is_in_no_process_list_no_status_file_and_no_log(
    start: StartAgent, start_rank: StartRank, run_dir: Path, settings: Settings
) -> None:
    start_rank().steps(1)
    agent = start(basic_auth_user="scraper", basic_auth_password=PASSWORD, token="tell-nobody")
    wait_for_status(run_dir, pid=agent.pid)
    listed = Path(f"/proc/{agent.pid}/cmdline").read_bytes()
    written = [path for path in (run_dir, settings.log_dir) for path in path.rglob("*")]
    texts = [listed, *(path.read_bytes() for path in written if path.is_file())]
    for secret in (PASSWORD, "tell-nobody"):
        assert not any(secret.encode() in text for text in texts)


def _noise(random_: random.Random) -> bytes:
    """Return a request that is wrong in some way: path, headers, body, framing, or all of it."""
    kind = random_.randrange(8)
    path = "".join(chr(random_.randrange(33, 127)) for _ in range(random_.randrange(1, 60)))
    junk = random_.randbytes(random_.randrange(1, 400))
    known = random_.choice(["/metrics", "/", "/sd", "/api/v1/rows", "/api/v1/history", "/healthz"])
    if kind == 0:
        return junk
    if kind == 1:
        return b"GET /" + path.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 2:
        return b"GET " + known.encode() + b" HTTP/1.1\r\n" + junk + b"\r\n\r\n"
    if kind == 3:
        head = f"POST {known} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(junk)}\r\n\r\n"
        return head.encode() + junk
    if kind == 4:
        head = f"POST {known} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        return head.encode() + junk
    if kind == 5:
        length = random_.choice(["-1", "99999999999", "x", "1e9", "0x10"])
        return f"POST {known} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    if kind == 6:
        method = random_.choice(["PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT", "BREW", "get"])
        query = f"?run={path}&{path}={path}"
        return f"{method} {known}{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    header = "X" * random_.randrange(8000, 20000)
    return f"GET {known} HTTP/1.1\r\nHost: x\r\n{header}: {header}\r\n\r\n".encode()


@pytest.mark.slow
def test_ten_thousand_bad_requests_and_half_open_connections_leave_it_serving(
    start: StartAgent, start_rank: StartRank, run_dir: Path
) -> None:
    start_rank().steps(3, loss=1.5)
    agent = start(token="the-token")
    status = wait_for_status(run_dir, pid=agent.pid)
    address = ("127.0.0.1", status.port)
    random_ = random.Random(7)
    before = _resident_bytes(agent.pid)
    half_open = [socket.create_connection(address) for _ in range(100)]
    for number in range(REQUESTS):
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(_noise(random_))
            if number % 10 == 0:
                client.shutdown(socket.SHUT_WR)
                _read_to_the_end(client)
    assert scrape(status)["loss"] == 1.5
    assert agent.poll() is None
    assert _resident_bytes(agent.pid) - before < 64 * 2**20
    for client in half_open:
        client.close()
    assert locations.read_status(run_dir) is not None


def _read_to_the_end(client: socket.socket) -> None:
    try:
        while client.recv(1 << 16):
            pass
    except OSError:
        return


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_settings_that_contradict_serve_nothing_rather_than_serve_unprotected(
    start: StartAgent, start_rank: StartRank, run_dir: Path, certificates: Certificates
) -> None:
    start_rank().steps(1)
    agent = start(tls_certificate=certificates.certificate)
    status = wait_for_status(run_dir, pid=agent.pid)
    assert status.port == 0
    assert agent.poll() is None


@pytest.mark.slow
def test_settings_that_json_lacks_a_number_for_keep_the_protection(
    start: StartAgent, start_rank: StartRank, run_dir: Path, certificates: Certificates
) -> None:
    start_rank().steps(1)
    infinite = dict.fromkeys(
        [name for name, field in Settings.model_fields.items() if field.annotation is float],
        math.inf,
    )
    agent = start(
        **{**infinite, "time_scale": 1.0, "root_core_share": 1.0},
        tls_certificate=certificates.certificate,
        tls_key=certificates.key,
    )
    status = wait_for_status(run_dir, pid=agent.pid)
    assert status.url.startswith("https://")
    with pytest.raises(OSError):
        get(f"http://127.0.0.1:{status.port}/metrics")
    context = ssl.create_default_context(cafile=str(certificates.authority))
    with urllib.request.urlopen(f"{status.url}/metrics", context=context) as answer:
        assert b"mp_agent_steps_total" in answer.read()


@pytest.mark.slow
@pytest.mark.parametrize("handover", ["", "{", '{"port": null, "linger_seconds": null}'])
def test_an_agent_that_cannot_read_its_settings_serves_nothing_and_says_so(
    start_rank: StartRank,
    run_dir: Path,
    settings: Settings,
    handover: str,
    tmp_path: Path,
) -> None:
    start_rank().steps(1)
    environment = {**os.environ, HANDOVER_VARIABLE: handover, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "mp_agent.node", "--run-dir", str(run_dir)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "serves nothing" in ended.stderr and HANDOVER_VARIABLE in ended.stderr
    assert "Traceback" not in ended.stderr
    assert locations.read_status(run_dir) is None


def test_a_guard_that_cannot_be_used_closes_the_port(
    start_rank: StartRank, run_dir: Path, settings: Settings, tmp_path: Path
) -> None:
    start_rank().steps(1)
    environment = {
        **os.environ,
        "MP_AGENT_PORT": "0",
        "MP_AGENT_TLS_CERTIFICATE": "relative.pem",
        "MP_AGENT_TLS_KEY": "relative.key",
    }
    command = [sys.executable, "-m", "mp_agent.node", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        lines = iter(agent.stderr.readline, "")
        warning = next(line for line in lines if "no metrics are served" in line)
        status = wait_for_status(run_dir, pid=agent.pid)
        agent.kill()
    assert "tls_certificate, tls_key" in warning
    assert status.port == 0


def test_a_plain_request_at_a_tls_port_gets_nothing(
    start: StartAgent, start_rank: StartRank, run_dir: Path, certificates: Certificates
) -> None:
    start_rank().steps(1)
    agent = start(tls_certificate=certificates.certificate, tls_key=certificates.key)
    status = wait_for_status(run_dir, pid=agent.pid)
    with socket.create_connection(("127.0.0.1", status.port), timeout=20) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"mp_agent" not in client.recv(1 << 16)
    context = ssl.create_default_context(cafile=str(certificates.authority))
    with (
        socket.create_connection(("127.0.0.1", status.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
    ):
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in client.recv(1 << 16)
