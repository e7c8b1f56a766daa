"""The GPU panels find the run's GPUs in the series of dcgm-exporter."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tools.panel_queries import Asking, every_panel

_RANK = "mp_agent_rank_info"


@pytest.mark.e2e
def test_a_gpu_is_joined_to_its_ranks_however_its_uuid_is_written(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    """torch leaves out the prefix that DCGM writes; ranks may share a GPU."""
    asking = Asking(
        url="",
        run="llama",
        start_unix_seconds=0,
        end_unix_seconds=60,
        scrape_interval_seconds=15,
    )
    (panel,) = (p for board, p in every_panel() if (board.uid, p.id) == ("mp-agent-ranks", 30))
    expression = asking.filled_in(panel.queries[0].expression, 15)
    series = {
        f'{_RANK}{{job="a",run="llama",rank="0",gpu_uuid="604ac76c-d9cf"}}': "1x4",
        f'{_RANK}{{job="a",run="llama",rank="1",gpu_uuid="604ac76c-d9cf"}}': "1x4",
        f'{_RANK}{{job="a",run="llama",rank="2",gpu_uuid="GPU-7777"}}': "1x4",
        f'{_RANK}{{job="a",run="llama",rank="3",gpu_uuid=""}}': "1x4",
        f'{_RANK}{{job="a",run="other",rank="0",gpu_uuid="8888"}}': "1x4",
        'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-604ac76c-d9cf",gpu="0"}': "60x4",
        'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-7777",gpu="1"}': "70x4",
        'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-8888",gpu="2"}': "80x4",
    }
    found = {"0": ("GPU-604ac76c-d9cf", 60), "1": ("GPU-604ac76c-d9cf", 60), "2": ("GPU-7777", 70)}
    samples = [
        {"labels": f'{{UUID="{uuid}",rank="{rank}"}}', "value": value}
        for rank, (uuid, value) in found.items()
    ]
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "30s", "exp_samples": samples}],
    }
    file = tmp_path / "gpus.test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}), "utf-8")
    result = subprocess.run(
        [server("promtool"), "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
