"""Addresses: credentials are used, and never shown."""

import base64

import pytest

from mp_agent.errors import SourceError
from mp_agent.inputs.addresses import address_of, shown_address, shown_message
from tests.subtests import each


def test_user_and_password_become_a_header_percent_encoded_or_not():
    plain = address_of("http://user:secret@prometheus:9090/prefix/")
    assert (plain.url, plain.host) == ("http://prometheus:9090/prefix", "prometheus")
    assert base64.b64decode(plain.authorization.removeprefix("Basic ")) == b"user:secret"
    encoded = address_of("https://us%3Aer:s%40cr%2Fet%C3%BC@[::1]:9090")
    assert encoded.url == "https://[::1]:9090"
    decoded = base64.b64decode(encoded.authorization.removeprefix("Basic "))
    assert decoded == "us:er:s@cr/etü".encode()
    assert "secret" not in repr(plain)


@each(
    "address",
    [
        "http://user:secret@prometheus:9090/x",
        "HTTP://user:secret@prometheus:9090/x",
        "http://user:sec/ret@prometheus:9090/x",
        "http://user:1?secret@prometheus:9090/x",
        "http://user:1#secret@prometheus:9090/x",
        "http:/user:secret@prometheus:9090/x",
        "ftp://user:secret@prometheus:9090/x",
        "user:secret@prometheus:9090/x",
        "http://prometheus:9090/x?token=secret",
        "http://prometheus:9090/x?secret",
        "http://prometheus:9090/x#secret",
    ],
)
def test_no_secret_is_shown_of_any_address(address):
    shown = shown_address(address)
    assert "secret" not in shown and "ret@" not in shown
    assert "prometheus:9090/x" in shown
    assert "secret" not in shown_message(f"{address!r} cannot be asked") or "://" not in address


def test_what_is_no_address_is_shown_as_it_is():
    for path in ("runs/a.csv", "C:/runs/a.csv", "step:1@loss/../x", "user@host"):
        assert shown_address(path) == path or "@" in path


@each(
    "address",
    [
        "ftp://host",
        "http://",
        "http://host:0",
        "http://host:port",
        "http://user:sec/ret@host",
        "http://user:1?secret@host",
        "http://user:1#secret@host",
        "http://host/a b",
        "http://[::1",
        "user:secret@host",
    ],
)
def test_an_unusable_address_is_refused_without_its_secret(address):
    with pytest.raises(SourceError) as caught:
        address_of(address)
    assert "sec" not in str(caught.value).replace("percent", "")
    assert caught.value.__cause__ is None


def test_addresses_within_messages_are_redacted():
    message = "OSError('https://user:secret@host/x?key=secret') and <http://a:secret@b>"
    assert shown_message(message) == "OSError('https://host/x?key=***') and <http://b>"


def test_long_words_and_long_schemes_in_a_message_are_read_at_once() -> None:
    """In time that grows with the square of its length, this word would take an hour."""
    word = "x" * 1_000_000
    assert shown_message(word) == word
    hidden = shown_message(f"{'a' * 100}://user:secret@host/")
    assert hidden.endswith("://host") and "secret" not in hidden
