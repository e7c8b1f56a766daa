"""Comet: a separate experiment, in the script's project."""

import os
from collections.abc import Mapping

# Comet reports errors in its own package to its maker unless it is given not to.
os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")

import comet_ml

from mp_agent.exporters.trackers.client import TrackedRun, file_url


class CometClient:
    """A Comet experiment; key, workspace, project and mode are those of the variables COMET_*.

    Offline it is written to `comet` below the directory for logs, as a file for `comet upload`.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.name = f"{run.name} (mp_agent)"
        directory = run.directory / "comet"
        directory.mkdir(parents=True, exist_ok=True)
        self._experiment = comet_ml.start(
            # Its own experiment: COMET_EXPERIMENT_KEY is that of the script.
            experiment_key=comet_ml.generate_guid(),
            mode="create",
            experiment_config=comet_ml.ExperimentConfig(
                name=self.name, offline_directory=str(directory), **_NOTHING_ELSE
            ),
        )
        archive = directory / f"{self._experiment.get_key()}.zip"
        self.url = self._experiment.url or file_url(archive)

    def log(self, values: Mapping[str, float], step: int, time_unix_seconds: float) -> None:
        """Log the numbers of a step; Comet buffers them."""
        self._experiment.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the experiment, which sends or writes what is buffered."""
        self._experiment.end()


_NOTHING_ELSE = {
    **dict.fromkeys(("log_code", "log_graph", "log_git_metadata", "log_git_patch"), False),
    **dict.fromkeys(("log_env_details", "log_env_gpu", "log_env_host", "log_env_cpu"), False),
    **dict.fromkeys(("log_env_network", "log_env_disk", "parse_args", "auto_log_co2"), False),
    **dict.fromkeys(("auto_output_logging", "auto_param_logging", "auto_metric_logging"), False),
    "display_summary_level": 0,
}
"""Arguments that disable Comet's automatic logs: those would describe the node agent."""
