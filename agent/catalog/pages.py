"""The pages of a node agent, as addresses below its own."""

from urllib.parse import quote

POSTMORTEMS = "/postmortem"
RUNBOOKS = "/runbooks"


def postmortem_path(run: str) -> str:
    """Return where a run's newest post-mortem is; with `.json` after it, for programs."""
    return f"{POSTMORTEMS}/{quote(run, safe='')}"
