"""`mp-agent run train.py …`: an unmodified script, watched."""

import runpy
import sys
from pathlib import Path

import click


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as if by python, with mp_agent watching it.

    Under torchrun: `torchrun --nproc-per-node 8 -m mp_agent run train.py …`.
    """
    import mp_agent

    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    mp_agent.init()
    runpy.run_path(script, run_name="__main__")
