"""The `mp-agent` command: each sub-command is declared with the feature that it belongs to."""

import os
import sys
import traceback
from typing import Any

import click

from mp_agent.advice.command import recommend_command
from mp_agent.alerting.alertmanager.command import alertmanager_command
from mp_agent.alerting.rules.command import rules_command
from mp_agent.backtest.command import backtest_command
from mp_agent.backtest.tuning.command import tune_command
from mp_agent.compare.command import compare_command
from mp_agent.doctor.command import doctor_command
from mp_agent.evaluate.command import evaluate_command
from mp_agent.export import export_command
from mp_agent.exporters.dashboards import dashboards_command
from mp_agent.inputs.addresses import shown_message
from mp_agent.inputs.files import printable
from mp_agent.lint.command import check_command
from mp_agent.node.commands.exec import exec_command
from mp_agent.node.commands.flight import dump_command, postmortem_command
from mp_agent.node.commands.node import node_command
from mp_agent.probe.command import run_command
from mp_agent.top import top_command
from mp_agent.version import __version__

_UNWRITABLE = 2
_PRINTERS = ("click.utils", "click._compat", "rich.console")


class _Commands(click.Group):
    """The commands. Where standard output cannot be written, they say so in one line.

    What their errors quote is shown safely: names of files come from others as well.
    """

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.ClickException as error:
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


EXAMPLES = {
    "alertmanager": "mp-agent alertmanager --output alertmanager/ --receiver slack",
    "backtest": "mp-agent backtest trainer_state.json --details",
    "check": "mp-agent check train.py src/",
    "compare": "mp-agent compare precision.py:make_model --dtype bf16 --html comparison.html",
    "dashboards": "mp-agent dashboards --output dashboards/",
    "doctor": "mp-agent doctor --prometheus http://prometheus:9090 --run llama-7b",
    "dump": "mp-agent dump --run llama-7b",
    "evaluate": "mp-agent evaluate train.py:make_model --precision bf16-autocast",
    "exec": "mp-agent exec torchrun --nproc-per-node=8 train.py",
    "export": "mp-agent export http://prometheus:9090 --run llama --start 6h --to parquet",
    "node": "mp-agent node --dir /dev/shm/mp_agent-1000",
    "postmortem": "mp-agent postmortem flight/llama-7b --html postmortem.html",
    "recommend": "mp-agent recommend train.py:make_model --goal memory",
    "rules": "mp-agent rules --set grad_norm_high=200 --output mp_agent.rules.yaml",
    "run": "torchrun --nproc-per-node=8 -m mp_agent run train.py",
    "top": "mp-agent top --url http://node-7:9464 --sort grad_abs_max",
    "tune": "mp-agent tune runs/ --labels labels.yaml --output tuned.yaml",
}
"""What the help of each command ends with."""

for command in (
    check_command,
    run_command,
    exec_command,
    node_command,
    doctor_command,
    dump_command,
    postmortem_command,
    compare_command,
    recommend_command,
    evaluate_command,
    backtest_command,
    tune_command,
    export_command,
    rules_command,
    alertmanager_command,
    dashboards_command,
    top_command,
):
    if example := EXAMPLES.get(str(command.name)):
        command.epilog = "\n\n".join(filter(None, (command.epilog, f"Example: {example}")))
    main.add_command(command)
