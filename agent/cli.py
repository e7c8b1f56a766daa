"""The `mp-agent` command: its sub-commands are imported when they are called."""

import os
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click
from click.shell_completion import CompletionItem

from mp_agent.errors import unknown_name
from mp_agent.version import __version__

_UNWRITABLE = 2
_INTERRUPTED = 130
"""As shells have it for SIGINT; 1 says of several commands that they have found something."""
_REFUSING = ("strict", "surrogateescape")
"""How Python treats what an encoding lacks: by default, and in the C locale."""
_NAME_WIDTH = 12
_PRINTERS = ("click.utils", "click._compat", "rich.console")


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """What help and completion show of a command, without importing it."""

    source: str
    """Its module below `mp_agent`, and its name there."""
    summary: str
    """One line of `mp-agent --help`."""
    example: str
    """What its own help ends with."""

    def load(self) -> click.Command:
        """Import the command."""
        module, _, name = self.source.partition(":")
        command: click.Command = getattr(import_module(f"mp_agent.{module}"), name)
        example = f"Example: {self.example}"
        if example not in (command.epilog or ""):
            command.epilog = "\n\n".join(filter(None, (command.epilog, example)))
        return command


GROUPS: dict[str, dict[str, CommandEntry]] = {
    "Before a run": {
        "check": CommandEntry(
            "lint.command:check_command",
            "Find mistakes in training code, without running it.",
            "mp-agent check train.py src/",
        ),
        "checklist": CommandEntry(
            "plan.checklist:checklist_command",
            "Go through nine points: fine, wrong, or not looked at.",
            "mp-agent checklist --steps 50 train.py",
        ),
        "compare": CommandEntry(
            "plan.commands:compare_command",
            "Compare precisions of a model, or two runs.",
            "mp-agent compare precision.py:make_model --dtype bf16 --html comparison.html",
        ),
        "recommend": CommandEntry(
            "plan.commands:recommend_command",
            "Recommend a precision for a model, with reasons.",
            "mp-agent recommend train.py:make_model --goal memory",
        ),
        "evaluate": CommandEntry(
            "plan.commands:evaluate_command",
            "Train a model in FP32 and by a plan, and compare.",
            "mp-agent evaluate train.py:make_model --precision bf16-autocast",
        ),
    },
    "During a run": {
        "run": CommandEntry(
            "run_command:run_command",
            "Run a Python program with mp_agent watching it.",
            "torchrun --nproc-per-node=8 -m mp_agent run train.py",
        ),
        "exec": CommandEntry(
            "node.commands.exec:exec_command",
            "Run a command together with a node agent.",
            "mp-agent exec torchrun --nproc-per-node=8 train.py",
        ),
        "node": CommandEntry(
            "node.commands.exec:node_command",
            "Watch every run on this machine until a signal.",
            "mp-agent node --dir /dev/shm/mp_agent-1000",
        ),
        "top": CommandEntry(
            "top:top_command",
            "Show the runs of a node agent in the terminal.",
            "mp-agent top --url http://node-7:9464 --sort grad_abs_max",
        ),
        "doctor": CommandEntry(
            "doctor.command:doctor_command",
            "Diagnose why metrics are missing.",
            "mp-agent doctor --prometheus http://prometheus:9090 --run llama-7b",
        ),
        "explain": CommandEntry(
            "alerting.commands:explain_command",
            "Explain an alert: its causes, and what to do.",
            "mp-agent explain MpAgentLossSpike",
        ),
        "dump": CommandEntry(
            "node.commands.flight:dump_command",
            "Write a flight record of a run now.",
            "mp-agent dump --run llama-7b",
        ),
    },
    "After a run": {
        "postmortem": CommandEntry(
            "node.commands.flight:postmortem_command",
            "Analyse how a run went wrong: where, why, what to do.",
            "mp-agent postmortem flight/llama-7b --html postmortem.html",
        ),
        "backtest": CommandEntry(
            "backtest.command:backtest_command",
            "Judge past runs from their logs.",
            "mp-agent backtest trainer_state.json --details",
        ),
        "tune": CommandEntry(
            "backtest.tune_command:tune_command",
            "Propose thresholds that keep healthy runs quiet.",
            "mp-agent tune runs/ --labels labels.yaml --output tuned.yaml",
        ),
        "baseline": CommandEntry(
            "runs.baseline:baseline_command",
            "Keep what good runs looked like, to judge others against it.",
            "mp-agent baseline save flight/llama-7b --output llama.baseline.json",
        ),
        "export": CommandEntry(
            "export:export_command",
            "Write the metrics of a run to a file.",
            "mp-agent export http://prometheus:9090 --run llama --start 6h --to parquet",
        ),
    },
    "Deployment": {
        "settings": CommandEntry(
            "settings.command:settings_command",
            "Show the settings in force, or their JSON schema.",
            "mp-agent settings --schema",
        ),
        "rules": CommandEntry(
            "alerting.commands:rules_command",
            "Write the Prometheus alerting rules.",
            "mp-agent rules --set grad_norm_high=200 --output mp_agent.rules.yaml",
        ),
        "alertmanager": CommandEntry(
            "alerting.alertmanager.command:alertmanager_command",
            "Write the Alertmanager configuration.",
            "mp-agent alertmanager --output alertmanager/ --receiver slack",
        ),
        "dashboards": CommandEntry(
            "exporters.dashboards:dashboards_command",
            "Write the Grafana dashboards.",
            "mp-agent dashboards --output dashboards/",
        ),
    },
}
"""All commands, by when they are needed."""

COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class _Commands(click.Group):
    """The commands. Where standard output cannot be written, they say so in one line.

    What their errors quote is shown safely: names of files come from others as well.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        entry = COMMANDS.get(name)
        return None if entry is None else entry.load()

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            context.fail(f"command {unknown_name(args[0], COMMANDS)}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, entries in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(_NAME_WIDTH), entry.summary) for name, entry in entries.items()]
                )

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(context, incomplete)
        return [
            CompletionItem(name, help=entry.summary)
            for name, entry in COMMANDS.items()
            if name.startswith(incomplete)
        ]

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            click.echo("\nmp-agent: interrupted", err=True)
            sys.exit(_INTERRUPTED)
        except click.ClickException as error:
            from mp_agent.inputs.addresses import shown_message
            from mp_agent.inputs.files import printable

            text = error.format_message()
            shown = printable(shown_message(text), keep="\n")
            if shown == text:
                raise
            safe = click.ClickException(shown)
            if isinstance(error, click.UsageError):
                safe = click.UsageError(shown, error.ctx)
            setattr(safe, "exit_code", error.exit_code)  # noqa: B010 - declared on the class
            raise safe from None

    def main(self, *arguments: Any, **options: Any) -> Any:
        if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in _REFUSING:
            # As on standard error: what the encoding of a locale lacks would be a traceback.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if not _of_printing(error):
                raise
            # What is still buffered would fail again when the interpreter flushes it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"mp-agent: the output cannot be written: {error.strerror}", err=True)
            sys.exit(_UNWRITABLE)


def _of_printing(error: OSError) -> bool:
    """Return whether an error is from what prints; any other, as of a script, has to be seen."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__") in _PRINTERS


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mp-agent")
def main() -> None:
    """Watch the numbers inside distributed PyTorch training."""
