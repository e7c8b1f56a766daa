"""A program under `mp-agent run` cannot detect it: compared with `python`, by property."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from mp_agent.run_command import _interpreter_options
from tests.subtests import each

_UNMODIFIED = """
import sys
import helper_beside_the_script
import torch

assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "0.5"]
weight = torch.nn.Parameter(torch.ones(3))
(weight * 2).sum().backward()
torch.optim.SGD([weight], lr=float(sys.argv[2])).step()
"""

_SELF_PORTRAIT = """
import os, pickle, signal, sys, threading

class Example:
    pass

def child():
    print("child", __name__, Example.__module__, flush=True)

if __name__ == "__main__":
    print(sys.argv, sys.path, sys.flags, sys.orig_argv[1:])
    print(sorted(name for name in globals() if name.startswith("__")))
    print(__file__, __spec__ and __spec__.name, __package__, __doc__, __loader__.__class__)
    print(sys.modules["__main__"].__dict__ is globals(), __builtins__.__name__)
    print(pickle.dumps(Example()), pickle.loads(pickle.dumps(Example())).__class__ is Example)
    print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)])
    print(sys.excepthook, sys.exit, signal.set_wakeup_fd(-1), threading.active_count())
    print(os.getppid() == int(os.environ["PARENT"]), len(os.listdir("/proc/self/fd")))
    print(sys.stdin.read(), end="")
    import multiprocessing
    for method in ("spawn", "forkserver", "fork"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        print(method, process.exitcode)
"""


def _python(arguments: Sequence[str], directory: Path, *, watched: bool, **environ: str):
    run = ("-m", "mp_agent", "run") if watched else ()
    options = [argument for argument in arguments if argument in ("-u", "-O", "-P")]
    program = arguments[len(options) :]
    return subprocess.run(
        [sys.executable, *options, *run, *program],
        env={
            **os.environ,
            "MP_AGENT_DIR": str(directory / "shm"),
            "MP_AGENT_NODE_AGENT": "none",
            "MP_AGENT_RUN": "run-test",
            "PARENT": str(os.getpid()),
            **environ,
        },
        cwd=directory,
        input="typed in\n",
        capture_output=True,
        text=True,
    )


def _seen(arguments: Sequence[str], directory: Path, *, watched: bool, **environ: str):
    result = _python(arguments, directory, watched=watched, **environ)
    return result.returncode, result.stdout, re.sub(r"0x[0-9a-f]+", "0x…", result.stderr)


def _reader(directory: Path) -> RingReader:
    (path,) = locations.find_rings(locations.run_directory(directory / "shm", "run-test"))
    return RingReader.open(path)


@pytest.mark.slow
def test_an_unmodified_script_is_watched_with_its_own_arguments_and_imports(tmp_path):
    (tmp_path / "helper_beside_the_script.py").touch()
    (tmp_path / "train.py").write_text(_UNMODIFIED)
    result = _python([str(tmp_path / "train.py"), "--lr", "0.5"], tmp_path, watched=True)
    assert result.returncode == 0, result.stderr
    reader = _reader(tmp_path)
    assert reader.state.committed_sequence == 1
    assert reader.state.end_reason is EndReason.COMPLETED
    reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["train.py"], {}),
        (["./train.py", "--", "-h", "--help", "-m", "", "--version"], {"PYTHONUNBUFFERED": "1"}),
        (["train.py", "--help"], {"PYTHONSAFEPATH": "1"}),
        (["-u", "-O", "inside/train.py", "-h"], {}),
        (["-m", "inside.train", "--", "--lr", "1"], {}),
        (["-m", "inside", "-h"], {"PYTHONSAFEPATH": "1", "PYTHONPATH": "."}),
        (["-P", "-m", "train"], {"PYTHONPATH": "."}),
    ],
    ids=str,
)
def test_a_program_finds_itself_as_under_python(tmp_path, arguments, environ):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "__init__.py").touch()
    for path in (tmp_path / "train.py", inside / "train.py", inside / "__main__.py"):
        path.write_text(_SELF_PORTRAIT)
    plain = _seen(arguments, tmp_path, watched=False, **environ)
    assert _seen(arguments, tmp_path, watched=True, **environ) == plain
    assert plain[0] == 0, plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "sys.exit()",
        "sys.exit(3)",
        "sys.exit(256)",
        "sys.exit('no data')",
        "sys.exit((1, 2))",
        "raise SystemExit(4)",
        "exit(5)",
        "raise EOFError",
        "input(); input()",
        "raise BrokenPipeError",
        "raise KeyboardInterrupt",
        "raise OSError(32, 'Broken pipe')",
        "class Abort(BaseException): pass\nraise Abort('x')",
        "1 +",
        "os._exit(6)",
        "os.abort()",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.kill(os.getpid(), signal.SIGPIPE); os.write(1, b'x')",
        "import atexit; atexit.register(lambda: 1 / 0)",
        "threading.Thread(target=lambda: 1 / 0).start()",
        "threading.Thread(target=sys.exit, args=(7,)).start()",
        "import click; raise click.UsageError('mine')",
        "import click; raise click.exceptions.Exit(8)",
    ],
)
def test_a_program_ends_as_under_python(tmp_path, ending):
    (tmp_path / "end.py").write_text(f"import os, signal, sys, threading\n{ending}\n")
    plain = _seen(["end.py"], tmp_path, watched=False)
    watched = _seen(["end.py"], tmp_path, watched=True)
    assert watched == plain


@pytest.mark.slow
def test_a_program_that_is_not_there_is_named(tmp_path):
    for arguments in (["no_such_script.py"], ["-m", "no_such_module"], ["-m"]):
        plain = _seen(arguments, tmp_path, watched=False)
        assert _seen(arguments, tmp_path, watched=True) == plain
        assert plain[0] != 0


@pytest.mark.slow
def test_help_is_the_commands_own_only_in_front(tmp_path):
    result = _python(["--help"], tmp_path, watched=True)
    assert result.returncode == 0
    assert "MODULE" in result.stdout


@pytest.mark.slow
def test_an_interrupt_from_the_terminal_ends_the_program_by_the_signal(tmp_path):
    (tmp_path / "wait.py").write_text("import time\nprint('on', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "mp_agent", "run", str(tmp_path / "wait.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


@each(
    ("called", "options"),
    [
        (["-m", "mp_agent", "run", "-u"], []),
        (["-u", "-m", "mp_agent", "run"], ["-u"]),
        (["-um", "mp_agent"], ["-u"]),
        (["-X", "dev", "-Wignore", "/bin/mp-agent", "run", "-O"], ["-X", "dev", "-Wignore"]),
        (["-W", "error", "-bb", "bin/mp-agent"], ["-W", "error", "-bb"]),
        (["-Im", "mp_agent"], ["-I"]),
        (
            ["-uXdev", "--check-hash-based-pycs", "never", "x"],
            ["-uXdev", "--check-hash-based-pycs", "never"],
        ),
    ],
)
def test_options_of_the_interpreter_are_kept(called, options):
    assert _interpreter_options(called) == options
