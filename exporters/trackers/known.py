"""Which trackers there are, and which packages they need."""

from importlib import import_module
from typing import cast

from mp_agent.exporters.trackers.client import OpenClient

_CLIENTS = {
    "wandb": ("mp_agent.exporters.trackers.wandb", "WandbClient"),
    "mlflow": ("mp_agent.exporters.trackers.mlflow", "MlflowRunClient"),
    "tensorboard": ("mp_agent.exporters.trackers.tensorboard", "TensorBoardClient"),
}
"""Module and class, by the name in the setting `trackers`."""


def open_client_of(tracker: str) -> OpenClient:
    """Return what opens a run in a tracker. Raises ImportError where its package is missing."""
    module, name = _CLIENTS[tracker]
    return cast(OpenClient, getattr(import_module(module), name))
