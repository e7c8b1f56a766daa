import errno
import socket

import pytest

from mp_agent.node import endpoint
from mp_agent.node.endpoint import Endpoint, open_listener
from mp_agent.settings import Settings


def test_a_given_port_that_is_taken_is_refused_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1, port {port}: Address already in use"):
            open_listener("127.0.0.1", port)


def test_the_default_port_gives_way_to_the_next_free_one(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(endpoint, "DEFAULT_PORT", taken.getsockname()[1])
        with open_listener("127.0.0.1", None) as listener:
            assert taken.getsockname()[1] < listener.getsockname()[1]
            assert listener.getsockname()[1] < taken.getsockname()[1] + endpoint.PORTS_TRIED


def test_when_all_usual_ports_are_taken_any_other_is_had(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(endpoint, "DEFAULT_PORT", taken.getsockname()[1])
        monkeypatch.setattr(endpoint, "PORTS_TRIED", 1)
        with open_listener("127.0.0.1", None) as listener:
            assert listener.getsockname()[1] not in endpoint.usual_ports()


def test_port_zero_takes_any():
    with open_listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("", "http://127.0.0.1:9464"),
        ("0.0.0.0", "http://127.0.0.1:9464"),
        ("::", "http://[::1]:9464"),
        ("10.1.2.3", "http://10.1.2.3:9464"),
        ("fe80::1", "http://[fe80::1]:9464"),
    ],
)
def test_the_url_can_be_opened_from_this_machine(bind, url):
    assert Endpoint(bind, 9464).url == url


def test_without_ipv4_the_url_is_that_of_ipv6(monkeypatch):
    monkeypatch.setattr(endpoint, "is_local", lambda host: ":" in host)
    assert Endpoint("", 9464).url == "http://[::1]:9464"
    assert Endpoint("", 9464).shown == "all addresses, port 9464, here http://[::1]:9464"


def test_the_port_of_the_agent_before_is_kept_where_the_choice_is_free():
    with open_listener("127.0.0.1", 0) as first:
        earlier = first.getsockname()[1]
    with open_listener("127.0.0.1", 0, earlier_port=earlier) as again:
        assert again.getsockname()[1] == earlier
        with open_listener("127.0.0.1", 0, earlier_port=earlier) as third:
            assert third.getsockname()[1] != earlier


def test_a_port_that_was_set_wins_over_the_one_before():
    with open_listener("127.0.0.1", 0) as first, open_listener("127.0.0.1", 0) as second:
        ports = first.getsockname()[1], second.getsockname()[1]
    with open_listener("127.0.0.1", ports[0], earlier_port=ports[1]) as listener:
        assert listener.getsockname()[1] == ports[0]


@pytest.mark.parametrize(
    ("bind", "shown"),
    [
        ("", "all addresses, port 9464, here http://127.0.0.1:9464"),
        ("0.0.0.0", "all addresses, port 9464, here http://127.0.0.1:9464"),
        ("10.1.2.3", "http://10.1.2.3:9464"),
    ],
)
def test_what_listens_on_all_addresses_is_not_said_to_listen_on_the_loopback(bind, shown):
    assert Endpoint(bind, 9464).shown == shown


def test_by_default_an_agent_is_reached_by_either_family():
    """A root of an IPv6-only cluster advertises an IPv6 address."""
    with open_listener(Settings().bind, 0) as listener:
        port = listener.getsockname()[1]
        hosts = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
        for host in hosts:
            socket.create_connection((host, port)).close()
            listener.accept()[0].close()


def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch):
    def create_server(address, *, family, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(address, family=family, **options)

    real = socket.create_server
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(socket, "create_server", create_server)
    with open_listener("", 0) as listener:
        assert listener.family == socket.AF_INET
