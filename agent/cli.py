"""The `mp-agent` command: each sub-command is declared with the feature that it belongs to."""

import click

from mp_agent.alerting.alertmanager.command import alertmanager_command
from mp_agent.alerting.rules.command import rules_command
from mp_agent.backtest.command import backtest_command
from mp_agent.backtest.tuning.command import tune_command
from mp_agent.compare.command import compare_command
from mp_agent.doctor.command import doctor_command
from mp_agent.export.command import export_command
from mp_agent.exporters.dashboards import dashboards_command
from mp_agent.lint.command import check_command
from mp_agent.node.commands.exec import exec_command
from mp_agent.node.commands.flight import dump_command, postmortem_command
from mp_agent.node.commands.node import node_command
from mp_agent.probe.command import run_command
from mp_agent.top import top_command
from mp_agent.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mp-agent")
def main() -> None:
    """Watch the numbers inside distributed PyTorch training."""


for command in (
    check_command,
    run_command,
    exec_command,
    node_command,
    doctor_command,
    dump_command,
    postmortem_command,
    compare_command,
    backtest_command,
    tune_command,
    export_command,
    rules_command,
    alertmanager_command,
    dashboards_command,
    top_command,
):
    main.add_command(command)
