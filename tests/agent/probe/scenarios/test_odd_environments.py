"""Variables of schedulers with unexpected values: a name is made all the same."""

from mp_agent.probe.processes.rank_identity import make_identity
from tests.subtests import each

ODD = ["(", "[", "*", "-1", "", " ", "\udcff", "9" * 5000, "0x3", "٣", "1(x9999999),1(x9999999)"]
VARIABLES = [
    "JOB_COMPLETION_INDEX",
    "HOSTNAME",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_NODEID",
    "SLURM_LOCALID",
    "SLURM_RESTART_COUNT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
]
SETTINGS = [
    {"HOSTNAME": "train-llama-3", "JOB_COMPLETION_INDEX": "3"},
    {"RANK": "1", "WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"},
    {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
]


@each("variable", VARIABLES)
def test_an_odd_value_costs_no_telemetry(variable: str) -> None:
    for surroundings in SETTINGS:
        for value in ODD:
            identity = make_identity(environ={**surroundings, variable: value})
            assert identity.run and identity.launch, value
            assert 0 <= identity.rank < identity.world_size <= 2**20, value
            assert 0 <= identity.local_rank < identity.local_world_size, value
            assert abs(identity.attempt) < 10**4300
