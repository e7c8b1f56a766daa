"""The version of mp_agent, and of torch that it needs, without importing torch."""

import re
import sys
from importlib.util import find_spec

from mp_agent.errors import TorchError

__version__ = "0.1.0"

TORCH_MINIMUM = (2, 6)
"""pyproject.toml says the same in the extra `torch`."""


def torch_problem() -> str | None:
    """Return what is wrong with the torch that is installed, in a sentence; None if nothing is."""
    needed = f"torch {'.'.join(map(str, TORCH_MINIMUM))} or newer is needed"
    if not _has_torch():
        return f"{needed}, and none is installed: pip install 'mp-agent[torch]'"
    installed = _torch_version()
    found = re.match(r"(\d+)\.(\d+)", installed)
    if found is not None and (int(found[1]), int(found[2])) < TORCH_MINIMUM:
        return f"{needed}, and {installed} is installed"
    return None


def _has_torch() -> bool:
    if "torch" in sys.modules:
        return sys.modules["torch"] is not None  # an import of it has been forbidden
    return find_spec("torch") is not None


def require_torch() -> None:
    """Raise TorchError, saying what is wrong, unless there is a torch that is new enough."""
    if problem := torch_problem():
        raise TorchError(problem)


def _torch_version() -> str:
    """Return the version of the loaded torch, else that of the package; empty where unknown."""
    if (torch := sys.modules.get("torch")) is not None:
        return str(getattr(torch, "__version__", ""))
    from importlib import metadata  # slow to import, and torch is loaded in nearly all cases

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # a build that was never installed
        return ""
