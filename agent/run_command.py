"""`mp-agent run train.py …`: an unmodified program, run as Python runs it, and watched."""

import os
import site
import sys
from collections.abc import Sequence
from pathlib import Path

import click

ATTACH_VARIABLE = "MP_AGENT_ATTACH"

_START_FILE = "mp_agent_attach.pth"
_WITH_VALUE = "WX"
"""Interpreter options that take a value."""

_WITHOUT_START_FILE = """\
import sys
import mp_agent_attach, runpy
module, sys.argv = sys.argv[1], sys.argv[2:]
if module:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
else:
    if not getattr(sys.flags, "safe_path", False):
        import os
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class _Program(click.Command):
    """Passes all arguments from the program's name on to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse no option but `--help`, and that only in front."""
        if not args or args[0] in ctx.help_option_names:
            return super().parse_args(ctx, args or ["--help"])
        ctx.params["program"] = tuple(args[1:] if args[0] == "--" else args)
        return []


@click.command(
    "run",
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="{SCRIPT | -m MODULE} [ARG]…")
def run_command(program: tuple[str, ...]) -> None:
    """Run a Python program, and its children, with mp_agent watching those that train.

    Under torchrun: `torchrun --nproc-per-node 8 -m mp_agent run train.py …`. This process becomes
    `python SCRIPT …` or `python -m MODULE …` with MP_AGENT_ATTACH set, which does the same for
    programs that are started otherwise.
    """
    os.environ[ATTACH_VARIABLE] = "1"
    command = [sys.executable, *_interpreter_options(sys.orig_argv[1:]), *_called(program)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def _called(program: Sequence[str]) -> list[str]:
    """Return the command line of Python for the program."""
    if _reads_start_file():
        return list(program)
    if program[:1] == ("-m",):
        return ["-c", _WITHOUT_START_FILE, program[1] if program[1:] else "", *program[1:]]
    return ["-c", _WITHOUT_START_FILE, "", *program]


def _reads_start_file() -> bool:
    """Return whether an interpreter of this installation attaches automatically when it starts."""
    directories = [] if sys.flags.no_site else site.getsitepackages()
    if site.ENABLE_USER_SITE:
        directories.append(site.getusersitepackages())
    return any(Path(directory, _START_FILE).is_file() for directory in directories)


def _interpreter_options(arguments: Sequence[str]) -> list[str]:
    """Return the options with which this interpreter was called itself, such as `-u -X dev`."""
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument in ("-", "--"):
            break
        if argument.startswith("--"):
            options += [argument, *([] if "=" in argument else [next(rest, "")])]
            continue
        for place, letter in enumerate(argument[1:], 1):
            if letter in "mc":
                return options + ([argument[:place]] if place > 1 else [])
            if letter in _WITH_VALUE:
                options += [argument] if argument[place + 1 :] else [argument, next(rest, "")]
                break
        else:
            options.append(argument)
    return options
