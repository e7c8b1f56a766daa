"""The settings: name, type, default and meaning of each."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mp_agent.settings.kinds import (
    AbsolutePath,
    Address,
    Exporters,
    GuardPolicies,
    HeaderSecret,
    Host,
    HostPatterns,
    RouterPatterns,
    Texts,
    Thresholds,
    Trackers,
)

ENV_PREFIX = "MP_AGENT_"
SECRETS = ("token", "basic_auth_password")
"""Settings whose values no message shows; each travels in its own variable."""
GUARDS = ("tls_certificate", "tls_key", "tls_client_ca", "basic_auth_user", "basic_auth_password")
"""Settings that restrict who may read the agent's port."""
_INTEGER_MAX = 2**53
"""Beyond it there are integers that no float is equal to."""


def default_directory() -> Path:
    """Return where shared memory lies unless it is set: one directory per user."""
    return Path("/dev/shm") / f"mp_agent-{os.getuid()}"


def _temporary_directory() -> Path:
    """Return where logs and flight records lie unless it is set; in shared memory, if must be."""
    try:
        directory = tempfile.gettempdir()
    except OSError:  # none is writable, or the working directory is gone
        return default_directory()
    if not os.path.isabs(directory):
        return default_directory()
    return Path(directory) / f"mp_agent-{os.getuid()}"


class Settings(BaseSettings):
    """All settings. Every field is `MP_AGENT_<NAME>` in the environment."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=False,
        # A value that is refused may be a secret.
        hide_input_in_errors=True,
    )

    enabled: bool = Field(True, description="False disables mp_agent: everything is a no-op.")
    run: str = Field(
        "",
        description="Name of the run; empty: torchrun's rendezvous id, the scheduler's job id, "
        "else a name made from the launcher.",
        max_length=200,
    )
    node_agent: Literal["spawn", "external", "none"] = Field(
        "spawn",
        description="spawn: local rank 0 starts the node agent; external: it runs outside the "
        "job; none: rings only.",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the node agent; empty: 9464 or the next free one of 16, else any; "
        "0: any free one.",
    )
    bind: str = Field(
        "",
        description="Address that the node agent listens on; empty: all of them, IPv4 and IPv6; "
        "0.0.0.0: all IPv4.",
    )
    linger_seconds: float = Field(
        120.0,
        ge=0,
        description="How long the node agent serves the last state after the end of the run.",
    )
    exit_wait_seconds: float = Field(
        30.0, ge=0, description="Longest wait at a normal exit for the last state to be exported."
    )
    layer_interval: int = Field(
        100,
        ge=1,
        le=_INTEGER_MAX,
        description="Steps between two measurements of every layer: 10 in the first 100 steps, 5 "
        "for 50 steps after a step with non-finite gradients or one that was skipped.",
    )
    measure_activations: bool = Field(
        False,
        description="Measure the outputs of modules on the steps on which layers are measured, by "
        "hooks that are there for one forward pass, and find where the first non-finite gradient "
        "of the backward pass after it arose. Not within what torch.compile has compiled.",
    )
    measure_attention: bool = Field(
        False,
        description="Measure the largest attention logits of a few heads and positions, and the "
        "logits that cross_entropy is given, on the steps on which layers are measured. Not where "
        "torch.compile is used.",
    )
    measure_routers: bool = Field(
        False,
        description="Measure how the routers of mixtures of experts distribute tokens, where their "
        "class is known, on the steps on which layers are measured, by hooks that are there for "
        "one forward pass. Not within what torch.compile has compiled.",
    )
    routers: RouterPatterns = Field(
        default_factory=dict,
        description="Modules that are routers although their class is not known, by patterns of "
        "their names, each with the number of experts that it chooses for a token: "
        "`{*.gate: 2}`. They return the logits. Any turns measure_routers on.",
    )
    measure_fp8: bool = Field(
        False,
        description="Measure what FP8 flushes to zero of the inputs, weights and output gradients "
        "of linear layers, whether or not they are in FP8 yet, and Transformer Engine's scales and "
        "amax, on the steps on which layers are measured. Not within what torch.compile has "
        "compiled.",
    )
    measure_tensors: bool = Field(
        True,
        description="Measure the tensors that the script gives to mp_agent.watch_tensor, on the "
        "steps on which layers are measured. Without such a call it costs nothing.",
    )
    measure_step_parts: bool = Field(
        False,
        description="Time the data, forward, backward and optimizer parts of steps by the host's "
        "clock, with one hook on the outermost module of the model.",
    )
    measure_local_gradients: bool | Literal["after_trouble"] = Field(
        False,
        description="Measure each rank's own gradients before they are reduced over the ranks: "
        "their norm, and NaN and Inf, so that the rank where these began is named. One hook per "
        "parameter; under DDP, FSDP2, Megatron-Core (one measurement per bucket, no hook) and "
        "without a wrapper, not under FSDP1 and DeepSpeed. "
        "after_trouble: only while layers are measured more often after a step with non-finite "
        "gradients or one that was skipped; there are no hooks otherwise.",
    )
    measure_updates: bool = Field(
        False,
        description="Measure weights, their updates and the optimizer's state when layers are "
        "measured.",
    )
    measure_distribution: bool = Field(
        False,
        description="Measure how the gradients are distributed over the exponents, and what FP16 "
        "loses of them at the loss scale, when layers are measured.",
    )
    update_copy_mib: float = Field(
        256.0,
        ge=0,
        description="Memory, per rank, for the copy of the weights that updates are compared with "
        "while a sampled step lasts, in MiB; the updates of layers beyond it are not measured.",
    )
    overhead_budget: float = Field(
        0.01,
        gt=0,
        description="Share of the step time that measuring may take, on the host and on the "
        "device. Beyond it, layers are measured less often, then gradients only on every n-th "
        "step. 1 or more is no limit.",
    )
    fused_kernels: bool = Field(
        True,
        description="Measure gradients on a GPU by Triton kernels where they can be compiled. "
        "False, the same on all ranks of a run: by stock operations of torch.",
    )
    window_seconds: float = Field(
        120.0, ge=1e-3, description="Window for the largest and smallest gradient norm."
    )
    max_series: int = Field(
        20_000,
        ge=100,
        le=_INTEGER_MAX,
        description="Maximum number of series that one node agent exports.",
    )
    rank_series: int | None = Field(
        None,
        ge=0,
        le=_INTEGER_MAX,
        description="Maximum number of series that one node agent exports of the healthy ranks of "
        "a run, the worst first. Of the others it exports `mp_agent_rank_up` alone; ranks in "
        "trouble keep all of theirs. Without a value there is no limit.",
    )
    exporters: Exporters = Field(("prometheus",), description="Enabled exporters.")
    trackers: Trackers = Field(
        (),
        description="Experiment trackers to which the root agent sends metrics of the run and "
        "conditions: wandb, mlflow, tensorboard, comet.",
    )
    otlp_span_events: bool = Field(
        False, description="Send critical conditions by OTLP as span events in addition to logs."
    )
    otlp_exit_wait_seconds: float = Field(
        5.0,
        ge=0,
        description="Longest wait at a normal exit for the last state to be pushed by OTLP; "
        "exit_wait_seconds limits it too.",
    )
    dir: AbsolutePath = Field(
        default_factory=default_directory,
        description="Directory for shared memory; should be on tmpfs for low cost.",
    )
    log_dir: AbsolutePath = Field(
        default_factory=_temporary_directory,
        description="Directory for the node agent's log files.",
    )
    merge_deadline_seconds: float = Field(
        10.0, gt=0, description="How long a step waits for ranks before it is merged without them."
    )
    root: Address = Field(
        "",
        description="host:port or URL of the root node agent; empty: found through the job's own "
        "store, else at MASTER_ADDR.",
    )
    advertise: Host = Field(
        "",
        description="Name or address under which other nodes and Prometheus reach this node; "
        "empty: the one from which it reaches MASTER_ADDR.",
    )
    token: HeaderSecret = Field(
        SecretStr(""),
        description="Secret that the node agents of a run share; empty: rank 0 generates one "
        "and distributes it through the job's own store.",
    )
    tls_certificate: AbsolutePath | None = Field(
        None, description="Certificate (PEM, with its chain) of the agent's port; empty: HTTP."
    )
    tls_key: AbsolutePath | None = Field(
        None, description="Private key (PEM) of `tls_certificate`."
    )
    tls_client_ca: AbsolutePath | None = Field(
        None,
        description="CA (PEM) that must have issued a client's certificate; empty: no "
        "client certificates.",
    )
    tls_ca: AbsolutePath | None = Field(
        None,
        description="CA (PEM) that node agents trust when they connect to each other; empty: "
        "the system's CAs.",
    )
    basic_auth_user: str = Field(
        "", description="User name for basic auth of scrapers; empty: no basic auth."
    )
    basic_auth_password: SecretStr = Field(
        SecretStr(""), description="Password of `basic_auth_user`."
    )
    allowed_hosts: HostPatterns = Field(
        (),
        description="Further host names under which the agent's port may be asked, such as that of "
        "an ingress; `*.example.com`: all of a domain; `*`: any. Addresses, names without a dot "
        "and the agent's own names need no entry.",
    )
    push_interval_seconds: float = Field(
        5.0,
        gt=0,
        description="Shortest time between two pushes of a node's merged rows to the root, which "
        "lengthens it, to 30 s at most, where it would take more than `root_core_share`.",
    )
    root_core_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Share of one processor core that the root agent may take; the nodes push "
        "less often where it would be more.",
    )
    sd_dir: AbsolutePath | None = Field(
        None, description="Shared directory into which file_sd targets are written; empty: none."
    )
    flight_dir: AbsolutePath = Field(
        default_factory=lambda: _temporary_directory() / "flight",
        description="Directory for flight records.",
    )
    flight_steps: int = Field(
        200,
        ge=1,
        le=_INTEGER_MAX,
        description="Maximum number of steps per rank in a flight record; a rank keeps 1024.",
    )
    flight_records_max: int = Field(
        10, ge=0, le=_INTEGER_MAX, description="Flight records kept per run; 0 disables them."
    )
    flight_bytes_max: int = Field(
        256 * 2**20,
        ge=2**20,
        le=_INTEGER_MAX,
        description="Maximum total size in bytes of the flight records of a run.",
    )
    check_script: bool = Field(
        False,
        description="Let the node agent check the main script, and what it imports of its "
        "project, once per start, as `mp-agent check` does.",
    )
    thresholds: Thresholds = Field(
        default_factory=dict, description="Overrides of the conditions' thresholds, by name."
    )
    alerts: Texts = Field(
        default_factory=dict,
        description="Overrides of the alerts' windows, severities and selectors, in the syntax "
        "of `mp-agent rules --set`: `{stall_window: 20m, MpAgentLossSpike: off}`.",
    )
    baseline: AbsolutePath | None = Field(
        None,
        description="File that `mp-agent baseline save` made of good runs; the root agent judges "
        "the run against it. Empty: none.",
    )
    guard: GuardPolicies = Field(
        default_factory=dict,
        description="Policies by which the guard acts on updates that would harm the training: "
        "names, `true` for skip_nonfinite, clip_spikes and hold_learning_rate, or a table with "
        "parameters, `{clip_spikes: {factor: 3}}`; empty: no guard.",
    )
    guard_dry_run: bool = Field(
        False, description="Only log and count what the guard would have done."
    )
    reduction: Literal["agents", "process_group"] = Field(
        "agents",
        description="Who merges the ranks' columns: agents: the node agents alone; process_group: "
        "the ranks as well, by collectives of a group of their own, so that "
        "`mp_agent.global_statistics()` has them on every rank.",
    )
    reduction_interval: int = Field(
        10, ge=1, le=_INTEGER_MAX, description="Steps between two reductions by the ranks."
    )
    time_scale: float = Field(
        1.0,
        ge=1e-6,
        le=1e6,
        description="Factor for the windows and delays of the conditions that the node agent "
        "evaluates, as `mp-agent rules --time-scale` for the rules; for demonstrations.",
    )
    _refused_guards: tuple[str, ...] = PrivateAttr(())

    @property
    def refused_guards(self) -> tuple[str, ...]:
        """Those of `GUARDS` that were set to a value that cannot be used; nothing is served then.

        Without them the port would be more open than it was asked to be.
        """
        return self._refused_guards

    def with_refused_guards(self, names: Iterable[str]) -> "Settings":
        """Return the same settings, and that these guards were refused."""
        copy = self.model_copy()
        copy._refused_guards = tuple(sorted(set(names)))
        return copy

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read values from arguments alone: `load_settings` has checked the other sources."""
        return (init_settings,)
