"""TensorBoard: event files in a directory per run."""

from collections.abc import Mapping

from tensorboardX import SummaryWriter

from mp_agent.exporters.trackers.client import TrackedRun, file_url


class TensorBoardClient:
    """Writes events into `tensorboard/<run>` below the directory for logs."""

    def __init__(self, run: TrackedRun) -> None:
        directory = run.directory / "tensorboard" / run.name.replace("/", "_")
        self.name = directory.name
        self.url = file_url(directory)
        self._writer = SummaryWriter(str(directory), flush_secs=10)

    def log(self, values: Mapping[str, float], step: int, time_unix_seconds: float) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time_unix_seconds)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()
