"""What launchers leave in the environment of a rank."""

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job-7",
}
SRUN = {
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "6",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "3",
    "RANK": "3",
    "WORLD_SIZE": "6",
}
