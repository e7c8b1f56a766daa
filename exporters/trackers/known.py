"""Which trackers there are."""

import os
from collections.abc import MutableMapping
from importlib import import_module
from typing import cast
from urllib.parse import urlsplit

from mp_agent.exporters.trackers.client import OpenClient, TrackedRun, TrackerClient
from mp_agent.inputs.addresses import is_loopback

_CLIENTS = {
    "comet": ("mp_agent.exporters.trackers.comet", "CometClient"),
    "wandb": ("mp_agent.exporters.trackers.wandb", "WandbClient"),
    "mlflow": ("mp_agent.exporters.trackers.mlflow", "MlflowRunClient"),
    "tensorboard": ("mp_agent.exporters.trackers.tensorboard", "TensorBoardClient"),
}
"""Module and class, by the name in the setting `trackers`."""


_ADDRESSES = {
    "comet": "COMET_URL_OVERRIDE",
    "wandb": "WANDB_BASE_URL",
    "mlflow": "MLFLOW_TRACKING_URI",
}
"""The variable that names a tracker's server."""


def go_direct_to_this_machine(tracker: str, environ: MutableMapping[str, str]) -> None:
    """Exempt a tracker's server from the environment's proxies where it is on this machine."""
    try:
        host = urlsplit(environ.get(_ADDRESSES.get(tracker, ""), "")).hostname or ""
    except ValueError:
        return
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY", "")
    if is_loopback(host) and host not in exempt.split(","):
        environ["no_proxy"] = environ["NO_PROXY"] = ",".join(filter(None, (exempt, host)))


def open_client(tracker: str, run: TrackedRun) -> TrackerClient:
    """Open a run in a tracker, whose package is imported, which may take seconds.

    Raises ImportError where the package is missing, and whatever the tracker raises.
    """
    module, name = _CLIENTS[tracker]
    go_direct_to_this_machine(tracker, os.environ)
    return cast(OpenClient, getattr(import_module(module), name))(run)
