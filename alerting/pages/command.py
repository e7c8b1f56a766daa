"""`mp-agent explain`: an alert's runbook in the terminal."""

import re

import click
from rich.markdown import Markdown

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.pages import PREFIX, condition_named, runbook_text
from mp_agent.alerting.site import usable_values
from mp_agent.errors import unknown_name
from mp_agent.output import Console, refuse
from mp_agent.settings import load_settings

_FOLDED = re.compile(r"<details><summary>(.*?)</summary>(.*?)</details>", re.DOTALL)


@click.command("explain")
@click.argument("alert")
def explain_command(alert: str) -> None:
    """Explain an alert: how bad it is, how to confirm it, likely causes, what to do.

    ALERT is its name, in any case, with or without MpAgent: `mp-agent explain LossSpike`. The
    numbers are those that the settings have in force here.
    """
    condition = condition_named(alert)
    if condition is None:
        short = "" if alert.startswith(PREFIX) else PREFIX
        known = (condition.name.removeprefix(short) for condition in CONDITIONS)
        refuse("explain", unknown_name(alert, known))
    settings, _ = load_settings()
    values = usable_values(settings, time_scale=settings.time_scale)[0]
    text = _FOLDED.sub(r"### \1\n\2", runbook_text(condition, values))
    Console().print(Markdown(text))
