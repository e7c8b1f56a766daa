"""A script that calls `init()` in odd places, each in a separate process; prints which failed."""

import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch._dynamo  # which needs a working directory, and optimizers need it
import yaml  # noqa: F401 - before the cases, as torch is

import mp_agent

SECONDS_AT_MOST = 60


def deleted_directory() -> None:
    directory = tempfile.mkdtemp()
    os.chdir(directory)
    os.rmdir(directory)


def unsearchable_directory() -> None:
    directory = tempfile.mkdtemp()
    os.chdir(directory)
    os.chmod(directory, 0)
    setattr(os, "stat", _refuse)  # noqa: B010 - as it is for users other than root


def no_temporary_directory() -> None:
    tempfile.tempdir = None
    setattr(tempfile, "gettempdir", _refuse)  # noqa: B010


def no_temporary_directory_disabled() -> None:
    no_temporary_directory()
    os.environ["MP_AGENT_ENABLED"] = "false"


def nested_brackets() -> None:
    for name in ("EXPORTERS", "THRESHOLDS", "ALERTS"):
        os.environ[f"MP_AGENT_{name}"] = "[" * 3000


def settings_in_a_pipe() -> None:
    path = os.path.join(tempfile.mkdtemp(), "settings.yaml")
    os.mkfifo(path)
    os.environ["MP_AGENT_CONFIG"] = path


def settings_without_end() -> None:
    os.environ["MP_AGENT_CONFIG"] = "/dev/zero"


def settings_in_a_loop() -> None:
    _settings("tool = 3")
    os.remove("pyproject.toml")
    os.symlink("pyproject.toml", "pyproject.toml")


def settings_that_are_no_table() -> None:
    _settings("tool = 3")


def settings_nested_too_deeply() -> None:
    _settings("a = " + "[" * 5000)


def settings_that_are_no_text() -> None:
    _settings(b"\xff\xfe[tool")


def settings_that_multiply() -> None:
    text, last = "a: &a [x,x,x,x,x,x,x,x,x]\n", "a"
    for name in "bcdefghij":
        text += f"{name}: &{name} [{','.join(['*' + last] * 9)}]\n"
        last = name
    _settings(text, "settings.yaml")
    os.environ["MP_AGENT_CONFIG"] = os.path.abspath("settings.yaml")


def no_descriptors() -> None:
    from mp_agent.probe import api  # noqa: F401 - nothing could be imported later

    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        pass


def no_standard_streams() -> None:
    for fd in (0, 2):
        os.close(fd)
    sys.stderr = sys.stdin = None


def names_that_are_no_text() -> None:
    for name in (b"MP_AGENT_RUN", b"TORCHELASTIC_RUN_ID", b"HOSTNAME", b"MP_AGENT_ADVERTISE"):
        os.environb[name] = b"\xff\xfe"


def warnings_are_errors() -> None:
    warnings.simplefilter("error")


def logging_raises() -> None:
    class Raising(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("not logged")

    logging.getLogger().addHandler(Raising())
    logging.getLogger().setLevel(0)
    os.environ["MP_AGENT_PORT"] = "tcp://10.0.0.1"


def no_excepthook() -> None:
    del sys.excepthook


def imports_fail() -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("mp_agent.probe"):
                raise RuntimeError(name)

    sys.meta_path.insert(0, Finder())


def torch_is_half_there() -> None:
    sys.modules["torch.distributed.fsdp"] = None  # type: ignore[assignment]


def modules_that_answer_with_errors() -> None:
    class Odd:
        def __getattr__(self, name: str) -> object:
            raise ZeroDivisionError(name)

    for name in ("megatron.core.parallel_state", "opentelemetry"):
        sys.modules[name] = Odd()  # type: ignore[assignment]
    os.environ["MP_AGENT_EXPORTERS"] = "otlp"


def little_stack_left() -> None:
    sys.setrecursionlimit(75)


def no_interpreter() -> None:
    sys.executable = None  # type: ignore[assignment]
    os.environ["MP_AGENT_NODE_AGENT"] = "spawn"


def an_empty_interpreter() -> None:
    no_interpreter()
    sys.executable = ""


def no_process_can_be_made() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("refused")

    subprocess.Popen = refuse  # type: ignore[assignment, misc]
    os.environ["MP_AGENT_NODE_AGENT"] = "spawn"


def no_arguments() -> None:
    sys.argv = []


def ranks_that_are_none() -> None:
    os.environ.update(RANK="-1", WORLD_SIZE="0", LOCAL_RANK="1e9", MASTER_PORT="(")


def shared_memory_that_is_none() -> None:
    os.environ["MP_AGENT_DIR"] = "/dev/null/rings"


CASES: tuple[Callable[[], None], ...] = (
    deleted_directory,
    unsearchable_directory,
    no_temporary_directory,
    no_temporary_directory_disabled,
    nested_brackets,
    settings_in_a_pipe,
    settings_without_end,
    settings_in_a_loop,
    settings_that_are_no_table,
    settings_nested_too_deeply,
    settings_that_are_no_text,
    settings_that_multiply,
    no_descriptors,
    no_standard_streams,
    names_that_are_no_text,
    warnings_are_errors,
    logging_raises,
    no_excepthook,
    imports_fail,
    torch_is_half_there,
    modules_that_answer_with_errors,
    little_stack_left,
    no_interpreter,
    an_empty_interpreter,
    no_process_can_be_made,
    no_arguments,
    ranks_that_are_none,
    shared_memory_that_is_none,
)


def main() -> None:
    """Go through all cases."""
    for case in CASES:
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS_AT_MOST)
            code = 1
            try:
                case()
                train_watched()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            print(case.__name__, os.waitstatus_to_exitcode(status), flush=True)


def train_watched() -> None:
    """Call everything that scripts call, and train."""
    mp_agent.init()
    sys.setrecursionlimit(1000)
    mp_agent.on_condition(print)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        mp_agent.observe(loss=loss, step=step)
        optimizer.step()
    with mp_agent.phase("eval"):
        model(torch.ones(1, 4))
    mp_agent.shutdown()


def _settings(content: str | bytes, name: str = "pyproject.toml") -> None:
    """Work in a directory with these settings."""
    os.chdir(tempfile.mkdtemp())
    with open(name, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "refused")


if __name__ == "__main__":
    main()
