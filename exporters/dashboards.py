"""`mp-agent dashboards`: the Grafana dashboards of this version."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import click


def dashboards() -> Mapping[str, str]:
    """Return the dashboards' JSON by file name."""
    folder = files("mp_agent") / "dashboards"
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(folder.iterdir(), key=lambda path: path.name)
        if path.name.endswith(".json")
    }


@click.command("dashboards")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory to write into; without it the dashboards are listed.",
)
def dashboards_command(output: Path | None) -> None:
    """Write the Grafana dashboards, to import or to provision."""
    found = dashboards()
    if output is None:
        for name, text in found.items():
            click.echo(f"{name}: {json.loads(text)['title']}")
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
    click.echo(f"{len(found)} dashboards in {output}")
