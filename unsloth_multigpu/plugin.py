"""The one line, and the one Session that it opens."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.config import ENV_LOG_DIR_OF_RUN, ENV_RECEIPT, MultiGPUConfig, translate_legacy
from unsloth_multigpu.errors import ConfigError, LaunchError, SetupError
from unsloth_multigpu.launch.identity import SINGLE_PROCESS, read_identity
from unsloth_multigpu.launch.spawned import is_helper
from unsloth_multigpu.logs import Console
from unsloth_multigpu.patching import PatchRegistry, PatchRow
from unsloth_multigpu.report import RunReport
from unsloth_multigpu.session import Session, open_session
from unsloth_multigpu.start import needs_supervisor, ranks_to_start, start_this_command, this_command


@dataclass(frozen=True)
class MultiGPUStatus:
    """Where this process stands.

    Args:
        is_enabled: `enable_multi_gpu` is in effect.
        launcher: Who started the ranks: "unsloth_multigpu", "notebook", "torchrun", "slurm", "openmpi" or "none".
        log_dir: Folder with the logs of ranks above 0; None where another launcher keeps them.
        patches: Every function of another library that is steered, and whether it is.
        report: Figures of the last training; None before the first, or with one rank.
    """

    is_enabled: bool
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: str = "none"
    log_dir: str | None = None
    config: MultiGPUConfig | None = None
    patches: tuple[PatchRow, ...] = ()
    report: RunReport | None = None


# The session that is open, or the last one that was.
_session: Session | None = None


def enable_multi_gpu(
    num_gpus: int | None = None,
    batch_size_per_gpu: int | None = None,
    enable_ddp: bool | None = None,
    *,
    global_batch: str | None = None,
    sync: str | None = None,
    balance: str | None = None,
    device: str | None = None,
    seed_per_rank: bool | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    max_tokens_per_micro_batch: int | None = None,
    micro_batch_overhead_tokens: float | None = None,
    micro_batch_floor_tokens: float | None = None,
    rank_speeds: Sequence[float] | None = None,
    grad_compression: str | None = None,
    sync_bucket_mb: float | None = None,
    max_staleness_steps: int | None = None,
    sync_every_steps: int | None = None,
    outer_learning_rate: float | None = None,
    outer_momentum: float | None = None,
    gradient_aggregation: str | None = None,
    verify_every: int | None = None,
    replay: bool = False,
    hang_timeout_s: float | None = None,
    resume: str | None = None,
    grace_s: float | None = None,
    on_nan: str | None = None,
    inexact: str | None = None,
    nnodes: str | int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    **legacy: Any,
) -> None:
    """Makes this script train on every GPU. Call it first, before `import unsloth`.

    In a script that you started as `python train.py`, this process becomes the supervisor of `num_gpus` ranks of the
    same command; the call does not return there, and the process ends with the ranks' exit code. In a rank, and with
    one device, it returns. Under torchrun, accelerate launch, srun or mpirun it joins the ranks that these started.

    What is left out comes from the variable UNSLOTH_MULTIGPU_<NAME>, then from the default in brackets.

    Args:
        num_gpus: Ranks on this machine [all visible accelerators; where there is none, this process alone].
        batch_size_per_gpu: Samples of one micro-batch per rank [the script's]. The step's samples grow with the ranks.
        enable_ddp: One process per device [True]. False = the older plugin's serial path: this process alone, with a
            copy of the model per device, which compute one after the other. Legacy, slower than one GPU.
        global_batch: "keep" = a step sees the samples of the one-process run, "scale" = N times as many ["keep"].
        sync: How gradients meet: "ddp", "allreduce", "parameter_server", "local_sgd" or "diloco" ["ddp"].
        balance: How a step's samples are dealt: "auto", "tokens" or "off" ["auto"].
        device: "auto", "cpu", "cuda" or "xpu" ["auto"].
        seed_per_rank: Each rank draws its own dropout masks and augmentations [True].
        timeout_s: Limit of a collective and of a wait for another rank, in seconds [1800].
        max_restarts: Times that all ranks are started again after one failed [0].
        log_dir: Folder of rank_N.log ["logs"].
        max_tokens_per_micro_batch: Most tokens of a micro-batch, rows x longest row [what equal numbers of rows reach].
        micro_batch_overhead_tokens: What a micro-batch costs whatever is in it, in tokens [measured].
        micro_batch_floor_tokens: Smaller micro-batches take as long as one of so many tokens [measured].
        rank_speeds: How fast each rank computes, relative to the others [measured].
        grad_compression: "bf16", "fp16" or "powersgd": smaller gradients on the wire, no longer exact [none].
        sync_bucket_mb: MiB of a message of "allreduce" and "parameter_server", 0 = one for each tensor [25].
        max_staleness_steps: Makes "parameter_server" asynchronous: steps a rank may be ahead of the slowest [together].
        sync_every_steps: Steps of "local_sgd" and "diloco" between two meetings [16].
        outer_learning_rate: Of the step of "diloco" at a meeting [0.7].
        outer_momentum: Its Nesterov momentum [0.9].
        gradient_aggregation: "weighted", "mean" or "sum" of the shards with enable_ddp=False ["weighted"].
        verify_every: Steps between two comparisons of all ranks' weights, 0 = never [100].
        replay: In a notebook: where a model was loaded before, ranks above 0 run those cells too [False].
        hang_timeout_s: Without progress for so long while it trains, a rank is called hung and the run ends, 0 = never
            [120].
        resume: "auto" goes on from the last whole checkpoint of this training, "off" does what the script says ["off"].
        grace_s: Seconds from SIGTERM, SIGUSR1 or Ctrl-C until the run ends, to finish a step and to save [30].
        on_nan: "raise", "skip" the step on all ranks, or "off", when the gradient is not finite ["raise"].
        inexact: "warn", with its size, or "raise", where ranks share a micro-batch whose loss cannot be shared exactly
            ["warn"].
        nnodes: Nodes of the run, "2" or "MIN:MAX" ["1"].
        rdzv_endpoint: HOST:PORT where nodes meet [none].
        rdzv_id: Name of the run among those that meet there [none].
        legacy: Arguments of the older plugin, each with a DeprecationWarning that names the replacement.

    Raises:
        ConfigError: A value that cannot be used, or a second call with other values.
        SetupError: This machine or this place cannot do what was asked.
        VersionError: A library outside the supported range.
    """
    global _session
    _refuse_replay()
    # Here the parameters are all there is; `legacy` stands for the rest.
    arguments = {name: value for name, value in locals().items() if name not in ("legacy", "replay")}
    arguments.update(translate_legacy(legacy))
    config = _as_verified(MultiGPUConfig.resolve(_in_config_types(arguments)))
    if (active := active_session()) is not None:
        _check_same_call(active.config, config)
        return
    if is_helper():
        _refuse_unsteered_training()
        return
    if config.memory_optimization:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from unsloth_multigpu.notebook.start import find_shell

    shell = find_shell()
    console = Console(debug=config.debug, is_notebook=shell is not None)
    try:
        _session = _open_here(config, console, shell, replay=replay)
    except BaseException:
        console.close()
        raise


def _refuse_replay() -> None:
    """Raises in a worker of a notebook that runs a cell from before the line again, in which an earlier call failed."""
    from unsloth_multigpu.notebook.start import find_program

    program = find_program()
    if program is not None:
        program.refuse_replay()


def _refuse_unsteered_training() -> None:
    """In a helper, where this call does nothing: should it turn out to be a rank, it does not train by itself."""
    from unsloth_multigpu.hooks.trainer import unsteered_train_patch

    def is_lone() -> bool:
        try:
            return is_multi_gpu_enabled() or is_helper()
        except LaunchError:
            return False  # A rank whose variables other libraries have completed since.

    PatchRegistry([unsteered_train_patch(is_lone)]).apply()


def _open_here(config: MultiGPUConfig, console: Console, shell: Any, *, replay: bool) -> Session:
    """Opens the session of this process: a rank, a notebook's kernel, or alone. A supervisor does not return."""
    from unsloth_multigpu.notebook.start import Opening, find_program, open_notebook

    had_workers = _session is not None and _session.had_workers
    identity = read_identity(os.environ)
    if identity is None:
        if shell is None and needs_supervisor(config, config.num_gpus or 1):
            this_command()  # A refusal comes before devices are counted and warned of.
        num_ranks = ranks_to_start(config)
        if needs_supervisor(config, num_ranks):
            if shell is not None:
                opening = Opening(open_session, disable_multi_gpu, replay=replay, had_workers=had_workers)
                return open_notebook(config, num_ranks, console, shell, opening)
            start_this_command(config, num_ranks)
        identity = SINGLE_PROCESS
    program = find_program()
    if program is not None:
        return program.open_session(open_session, config, identity, console)
    session = open_session(config, identity, console)
    session.had_workers = had_workers
    return session


def disable_multi_gpu() -> None:
    """Takes every patch out again. The process stays the rank that it is; without a session nothing happens."""
    if (session := active_session()) is not None:
        session.close()


def active_session() -> Session | None:
    """What `enable_multi_gpu` has opened in this process."""
    return None if _session is None or _session.is_closed else _session


def is_multi_gpu_enabled() -> bool:
    """True between `enable_multi_gpu` and `disable_multi_gpu`."""
    return active_session() is not None


def get_active_config() -> MultiGPUConfig | None:
    """The options in effect, or None if not enabled."""
    return None if (session := active_session()) is None else session.config


def get_multi_gpu_status() -> MultiGPUStatus:
    """Where this process stands; see `MultiGPUStatus`."""
    if (session := active_session()) is None:
        return MultiGPUStatus(is_enabled=False)
    identity = session.identity
    return MultiGPUStatus(
        is_enabled=True,
        rank=identity.rank,
        local_rank=identity.local_rank,
        world_size=identity.world_size,
        launcher=identity.launcher,
        log_dir=os.environ.get(ENV_LOG_DIR_OF_RUN),
        config=session.config,
        patches=tuple(session.registry.rows()),
        report=session.report,
    )


def _in_config_types(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that may be given in a second type: numpy's integers, a path, a list of speeds, a number of nodes."""
    given = {
        name: int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value
        for name, value in arguments.items()
    }
    speeds, nodes, log_dir = given["rank_speeds"], given["nnodes"], given["log_dir"]
    return {
        **given,
        "rank_speeds": tuple(speeds) if isinstance(speeds, list) else speeds,
        "nnodes": str(nodes) if isinstance(nodes, int) and not isinstance(nodes, bool) else nodes,
        "log_dir": os.fspath(log_dir) if isinstance(log_dir, os.PathLike) else log_dir,
    }


def _as_verified(config: MultiGPUConfig) -> MultiGPUConfig:
    """`unsloth-multigpu verify` chooses the number of ranks, and looks at the weights of rank 0 for all of them."""
    if ENV_RECEIPT not in os.environ:
        return config
    if not config.enable_ddp:
        raise SetupError(
            "verify compares one process with several ranks; enable_ddp=False, the legacy path, is one process.",
            hint="Leave enable_ddp out for this comparison.",
        )
    from unsloth_multigpu.proof.receipt import ReceiptRequest

    request = ReceiptRequest.read(os.environ)
    assert request is not None
    # Two runs on this machine, as they would go by themselves.
    alone: dict[str, Any] = {"max_restarts": 0, "nnodes": "1", "rdzv_endpoint": None, "rdzv_id": None, "resume": "off"}
    return dataclasses.replace(config, num_gpus=request.num_gpus, verify_every=1, **alone)


def _check_same_call(active: MultiGPUConfig, wanted: MultiGPUConfig) -> None:
    if active != wanted:
        differing = [n for n, value in vars(active).items() if value != getattr(wanted, n)]
        before, now = (", ".join(f"{n}={getattr(c, n)!r}" for n in differing) for c in (active, wanted))
        raise ConfigError(
            f"enable_multi_gpu() is in effect with {before}; this call asks for {now}.",
            hint="Call it once, or disable_multi_gpu() first.",
        )
