"""`mp-agent node`: a node agent that runs outside the job, for every run on the machine."""

from pathlib import Path

import click


@click.command("node")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of shared memory to watch; the setting `dir` by default.",
)
def node_command(directory: Path | None) -> None:
    """Watch every run that appears on this machine, until a signal ends it.

    For jobs with node_agent = "external": a sidecar container, a resident unit. The settings are
    those of the environment and the settings file.
    """
    from mp_agent.node.main import end_process, watch_directory

    watch_directory(directory, detached=False)
    end_process(0)
