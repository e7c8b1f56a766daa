"""MLflow: the script's run where MLFLOW_RUN_ID names it, else a separate run."""

import os
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric

from mp_agent.exporters.trackers.client import TrackedRun, file_url

_EXPERIMENT = "mp_agent"


class MlflowRunClient:
    """A run at MLFLOW_TRACKING_URI, in MLFLOW_EXPERIMENT_NAME or the experiment `mp_agent`."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        self._owned = not self._run_id
        if self._owned:
            created = self._client.create_run(self._experiment(), run_name=run.name)
            self._run_id = created.info.run_id
        info = self._client.get_run(self._run_id).info
        self.name = info.run_name or self._run_id
        self.url = _url(info.experiment_id, self._run_id, info.artifact_uri or "")

    def log(self, values: Mapping[str, float], step: int, time_unix_seconds: float) -> None:
        """Log the numbers of a step in one request."""
        milliseconds = int(time_unix_seconds * 1000)
        metrics = [Metric(name, value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the run, unless it is the script's."""
        if self._owned:
            self._client.set_terminated(self._run_id)

    def _experiment(self) -> str:
        if identifier := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return identifier
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


def _url(experiment: str, run_id: str, artifacts: str) -> str:
    """Return the run's page where there is a server, else its files where they are local."""
    address = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    if address.startswith(("http://", "https://")):
        return f"{address}/#/experiments/{experiment}/runs/{run_id}"
    return file_url(artifacts) if artifacts.startswith("/") else artifacts
