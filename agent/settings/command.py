"""`mp-agent settings`: the settings in force, and the schema of a settings file."""

import json
from typing import Any

import click

from mp_agent.settings.fields import ENV_PREFIX, SECRETS, Settings
from mp_agent.settings.load import load_settings


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a settings file, of YAML or of the table in TOML."""
    schema = Settings.model_json_schema()
    for described in schema["properties"].values():
        described.pop("title", None)  # the name again
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Settings of mp_agent",
        "description": "A settings file, named by MP_AGENT_CONFIG; [tool.mp_agent] in TOML.",
    }


@click.command("settings")
@click.option("--schema", is_flag=True, help="Print the JSON schema of a settings file.")
def settings_command(schema: bool) -> None:
    """Show the settings in force here: each with its value, its default and its meaning.

    They come from the environment and the settings file; what cannot be used is logged and left
    out. `mp-agent doctor` says which of them comes from where.
    """
    if schema:
        click.echo(json.dumps(settings_schema(), indent=2))
        return
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from mp_agent.output import Console

    settings, _ = load_settings()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variable", no_wrap=True)
    for name in ("value", "default", "meaning"):
        table.add_column(name, overflow="fold")
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        value = "(hidden)" if name in SECRETS else _shown(getattr(settings, name))
        row = (ENV_PREFIX + name.upper(), value, _shown(default), field.description or "")
        changed = name not in SECRETS and getattr(settings, name) != default
        table.add_row(*map(escape, row), style="bold" if changed else None)
    Console().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
