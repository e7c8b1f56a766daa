import socket

import pytest

from mp_agent.node import listen
from mp_agent.node.listen import Endpoint, open_listener


def test_a_given_port_that_is_taken_is_refused_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1, port {port}: Address already in use"):
            open_listener("127.0.0.1", port)


def test_the_default_port_gives_way_to_the_next_free_one(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(listen, "DEFAULT_PORT", taken.getsockname()[1])
        with open_listener("127.0.0.1", None) as listener:
            assert taken.getsockname()[1] < listener.getsockname()[1]
            assert listener.getsockname()[1] < taken.getsockname()[1] + listen.PORTS_TRIED


def test_port_zero_takes_any():
    with open_listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:9464"),
        ("::", "http://[::1]:9464"),
        ("10.1.2.3", "http://10.1.2.3:9464"),
        ("fe80::1", "http://[fe80::1]:9464"),
    ],
)
def test_the_url_can_be_opened_from_this_machine(bind, url):
    assert Endpoint(bind, 9464).url == url


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
