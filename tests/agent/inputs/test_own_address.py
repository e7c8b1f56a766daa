import socket

import pytest

from mp_agent.inputs.addresses import (
    address_toward,
    base_url,
    is_any_address,
    is_local,
    is_loopback,
)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("head", "http://head:9464"),
        ("10.0.0.1", "http://10.0.0.1:9464"),
        ("::1", "http://[::1]:9464"),
    ],
)
def test_urls_have_ipv6_in_brackets(host, url):
    assert base_url(host, 9464) == url


def test_the_address_toward_this_machine_is_this_machine():
    assert address_toward("127.0.0.1") == "127.0.0.1"


def test_a_name_that_others_know_is_kept_where_it_resolves_to_loopback_here(monkeypatch):
    def resolve(host: str, port: int, **options: int):
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert address_toward("head.cluster") == "head.cluster"


def test_there_is_no_address_toward_a_host_that_does_not_exist(monkeypatch):
    def resolve(host: str, port: int, **options: int):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert address_toward("nowhere.invalid") == ""
    assert not is_local("nowhere.invalid")


def test_own_addresses_are_local_and_others_are_not():
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)],
)
def test_loopback_is_known_by_number_and_name(host, expected):
    assert is_loopback(host) is expected


def test_any_address_is_known():
    assert [is_any_address(host) for host in ("0.0.0.0", "::", "", "10.0.0.1")] == [
        True,
        True,
        True,
        False,
    ]
