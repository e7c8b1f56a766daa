import io
import os
import secrets
import stat
from pathlib import Path

import click
import pytest
from rich.table import Table
from rich.text import Text

from mp_agent.inputs.files import printable
from mp_agent.output import Console, UnwritableError, new_file, write_whole


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("before")
    path.chmod(0o640)
    write_whole(path, "after")
    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["rules.yaml"]


def test_what_fails_in_the_middle_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "rules.yaml"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(click.ClickException, match=r"rules.yaml cannot be written: No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["rules.yaml"]


def test_a_link_stays_one(tmp_path):
    target = tmp_path / "target"
    target.write_text("before")
    link = tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, "after")
    assert link.is_symlink() and target.read_text() == "after"


def test_links_in_a_circle_make_way_for_the_file(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    write_whole(link, "after")
    assert link.read_text() == "after"


def test_a_device_is_written_to():
    write_whole(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()


def test_text_that_has_no_encoding_leaves_nothing_half_written(tmp_path):
    path = tmp_path / "page.html"
    with pytest.raises(UnwritableError, match=r"page.html cannot be written: .*surrogates"):
        write_whole(path, "run \udcff", errors="strict")
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_no_utf_8_is_written_with_escapes(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, "run \udcff")
    assert path.read_text() == r"run \udcff"


def test_a_link_that_waits_where_a_partial_file_could_be_is_not_followed(tmp_path, monkeypatch):
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("kept")
    folder.mkdir()
    monkeypatch.setattr(secrets, "token_hex", lambda count: "guessed")
    (folder / ".page.html.guessed.partial").symlink_to(victim)
    with pytest.raises(UnwritableError, match="File exists"):
        write_whole(folder / "page.html", "text")
    assert victim.read_text() == "kept"


def test_a_new_file_never_replaces_what_came_meanwhile(tmp_path):
    path = tmp_path / "export.csv"
    with pytest.raises(UnwritableError, match="File exists"), new_file(path) as partial:
        partial.write_text("ours")
        path.write_text("theirs")
    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["export.csv"]


def test_a_console_escapes_what_a_terminal_would_obey_and_keeps_its_own_styles():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=60, color_system="standard")
    table = Table("a heading that is wide enough for escapes")
    table.add_row(Text("llama\x1b]0;owned\x9b2J\u202e"))
    console.print(table)
    console.print(Text("two\nlines", style="bold"))
    shown = written.getvalue()
    assert r"llama\x1b]0;owned\x9b2J\u202e" in shown
    assert "\x1b[1mtwo\x1b[0m\n" in shown
    assert "\x1b]" not in shown and "\x9b" not in shown and "\u202e" not in shown


def test_an_unwritable_file_is_wrong_use_not_a_finding(tmp_path):
    with pytest.raises(UnwritableError) as caught:
        write_whole(tmp_path / "missing" / "page.html", "")
    assert caught.value.exit_code == 2


def test_what_a_terminal_would_obey_is_escaped():
    assert printable("llama 7b <ü>") == "llama 7b <ü>"
    assert printable("a\x1b[2J\nb\udcff\u202e") == r"a\x1b[2J\nb\udcff\u202e"


def test_a_pipe_that_no_process_reads_is_not_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UnwritableError, match="pipe cannot be written: "):
        write_whole(path, "text")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(path, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
