"""What a tracker says of its run is untrusted text: only plain addresses are shown."""

from pathlib import Path

import pytest

from mp_agent.exporters.trackers.client import (
    NAME_MAX,
    URL_MAX,
    file_url,
    shown_name,
    shown_url,
)
from tests.subtests import each


@pytest.mark.parametrize(
    "url",
    [
        "https://wandb.ai/team/project/runs/1a2b3c4d",
        "http://mlflow.example:5000/#/experiments/1/runs/0a1b",
        "https://[2001:db8::1]:8443/run",
        "file:///tmp/mp_agent-1000/tensorboard/llama",
        "file:///tmp/a%20directory",
    ],
)
def test_an_address_of_a_page_or_of_files_stays_as_it_is(url: str) -> None:
    assert shown_url(url) == url


@each(
    ("url", "shown"),
    [
        ("https://user:secret@host.example/run", "https://host.example/run"),
        ("https://secret@host.example:8443/run", "https://host.example:8443/run"),
        ("https://wandb.ai/team/run?apiKey=secret", "https://wandb.ai/team/run"),
        ("https://host.example/run?key=secret#/runs/1", "https://host.example/run#/runs/1"),
        ("file://localhost/tmp/runs", "file:///tmp/runs"),
        ("HTTPS://Host.Example/Run", "https://host.example/Run"),
    ],
)
def test_user_password_and_query_are_left_out(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@each(
    "url",
    [
        "",
        "javascript:alert(1)",
        "JavaScript://host.example/%0aalert(1)",
        "data:text/html,<script>alert(1)</script>",
        "ftp://host.example/run",
        "//host.example/run",
        "/tmp/runs",
        "https://",
        "https:///run",
        "https://:443/run",
        "https://host.example:port/run",
        "https://host.example:99999/run",
        "https://[2001:db8::1/run",
        "file://elsewhere/share",
        "file:relative",
        "https://host.example/a b",
        'https://host.example/"onclick="alert(1)',
        "https://host.example/'",
        "https://host.example/<b>",
        "https://host.example/|Runbook>",
        "https://host.example/{{ . }}",
        "https://host.example/\\",
        "https://host.example/\n",
        "https://host.example/\u202e",
        "https://b\u00fccher.example/",
        "https://host.example/" + "a" * URL_MAX,
    ],
)
def test_anything_else_is_no_address(url: str) -> None:
    assert shown_url(url) == ""


def test_the_longest_address_is_shown_whole() -> None:
    start = "https://host.example/"
    url = start + "a" * (URL_MAX - len(start))
    assert shown_url(url) == url


def test_a_name_is_printable_and_not_long() -> None:
    assert shown_name("llama\x1b[31m\n (mp_agent)") == "llama[31m (mp_agent)"
    assert shown_name("\u202e<b>") == "<b>"  # text: escaped where it is shown
    assert shown_name("x" * 1000) == "x" * NAME_MAX


def test_the_address_of_a_directory_is_shown(tmp_path: Path) -> None:
    directory = tmp_path / "a directory's <name>"
    assert shown_url(file_url(directory)) == directory.as_uri() == file_url(str(directory))
