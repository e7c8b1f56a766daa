"""Which trackers there are."""

from importlib import import_module
from typing import cast

from mp_agent.exporters.trackers.client import OpenClient, TrackedRun, TrackerClient

_CLIENTS = {
    "comet": ("mp_agent.exporters.trackers.comet", "CometClient"),
    "wandb": ("mp_agent.exporters.trackers.wandb", "WandbClient"),
    "mlflow": ("mp_agent.exporters.trackers.mlflow", "MlflowRunClient"),
    "tensorboard": ("mp_agent.exporters.trackers.tensorboard", "TensorBoardClient"),
}
"""Module and class, by the name in the setting `trackers`."""


def open_client(tracker: str, run: TrackedRun) -> TrackerClient:
    """Open a run in a tracker, whose package is imported, which may take seconds.

    Raises ImportError where the package is missing, and whatever the tracker raises.
    """
    module, name = _CLIENTS[tracker]
    return cast(OpenClient, getattr(import_module(module), name))(run)
