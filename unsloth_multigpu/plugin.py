"""`enable_multi_gpu()`, the other public functions about the session, and the one global `Session`."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from unsloth_multigpu.errors import ConfigError, LaunchError, MultiGPUError
from unsloth_multigpu.logs import Console
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.program import Program, find_shell, find_worker_program
from unsloth_multigpu.report import RunReport
from unsloth_multigpu.session import Session, open_session
from unsloth_multigpu.strategy import Strategy
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, is_helper, read_identity

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, repr=False)
class MultiGPUStatus:
    """State of `unsloth_multigpu` in this process.

    Args:
        is_enabled: `enable_multi_gpu` is in effect.
        launcher: What started the ranks: "unsloth_multigpu", "notebook", "torchrun", "slurm" or "none".
        log_dir: Folder with the logs of ranks above 0; None if another launcher keeps them.
        patches: State of the patch of each function of another library: "landed", "waiting for import", ...
        report: Figures of the last training; None before the first, or if this package did not take part in it.
    """

    is_enabled: bool
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: str = "none"
    log_dir: str | None = None
    config: MultiGPUConfig | None = None
    patches: Mapping[str, str] = field(default_factory=dict)
    report: RunReport | None = None

    def __repr__(self) -> str:
        if not self.is_enabled:
            return "MultiGPUStatus(not enabled)"
        defaults = vars(MultiGPUConfig())
        given = {} if self.config is None else {n: v for n, v in vars(self.config).items() if v != defaults[n]}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        logs = "" if self.log_dir is None else f"logs {self.log_dir}/rank_N.log"
        report = "" if self.report is None else self.report.summary()
        facts = [f"rank {self.rank} of {self.world_size}", f"launcher {self.launcher}", options, logs, report]
        return f"MultiGPUStatus({'; '.join(fact for fact in facts if fact)})"


# The open session, or the last one that was closed.
_session: Session | None = None


def enable_multi_gpu(
    num_gpus: int | None = None,
    batch_size_per_gpu: int | None = None,
    enable_ddp: bool | None = None,
    *,
    global_batch: str | None = None,
    strategy: str | Strategy | None = None,
    shard: str | None = None,
    balance: str | None = None,
    resume: str | None = None,
    replay: bool = False,
    **others: Any,
) -> None:
    """Makes this script train on every GPU. Call it first, before `import unsloth`.

    In a script started as `python train.py`, this process becomes the supervisor: it starts the same command as
    `num_gpus` ranks, does not return, and exits with the ranks' exit code. In a rank, and with one device, the call
    returns. Under torchrun, accelerate launch or srun it joins the ranks that these started.

    An option that is left out is read from the variable UNSLOTH_MULTIGPU_<NAME>, the YAML file UNSLOTH_MULTIGPU_CONFIG
    or pyproject.toml, in this order; else it has the default in brackets. These are the everyday options;
    `unsloth-multigpu run --help` and docs/options.md list all of them.

    Args:
        num_gpus: Ranks on this machine [all visible accelerators; without one, this process alone].
        batch_size_per_gpu: Samples of one micro-batch per rank [the script's]. The step's samples grow with the ranks.
        enable_ddp: One process per device [True]. False = the older plugin's serial path: this process alone, with a
            copy of the model per device, which compute one after the other. Legacy, slower than one GPU.
        global_batch: "keep" = a step sees the samples of the one-process run, "scale" = N times as many ["keep"].
        strategy: How gradients are synchronized: a strategy such as `DiLoCo(every_steps=8)`, or its name for its
            defaults: "ddp", "allreduce", "parameter_server", "local_sgd" or "diloco" ["ddp"].
        shard: "on" = each rank holds a shard of weights and optimizer states (FSDP2), "auto" = if needed ["off"].
        balance: How a step's samples are divided among ranks: "auto", "tokens" or "off" ["auto"].
        resume: "auto" resumes from the last complete checkpoint of this training, "off" as the script says ["off"].
        replay: In a notebook in which a model was loaded before: ranks above 0 run the earlier cells too [False].
        others: The other options of `MultiGPUConfig`, by name.

    Raises:
        ConfigError: An invalid value, or a second call with other values.
        SetupError: This machine, or this place in the script, does not allow what was asked for.
        VersionError: A library is outside the supported range.
    """
    named: dict[str, Any] = dict(num_gpus=num_gpus, batch_size_per_gpu=batch_size_per_gpu, enable_ddp=enable_ddp)
    named |= dict(global_batch=global_batch, strategy=strategy, shard=shard, balance=balance, resume=resume)
    try:
        if (program := find_worker_program()) is not None:
            program.meet_at_line()
        _enable({**named, **others}, replay=replay)
    except MultiGPUError as error:
        if logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
            raise
        # Leave out the frames below this call: they do not help users.
        raise error.with_traceback(None) from error.__cause__


def tool_of(context: RunContext) -> Tool:
    """Returns the tool of the run, or a `Tool` that does nothing."""
    if context.tool is None:
        return Tool()
    name, values = context.tool.name, context.tool.values
    if name == "verify":
        from unsloth_multigpu.recorders.verify_recorder import Verify

        return Verify(**values)
    if name == "forecast":
        from unsloth_multigpu.recorders.forecast_recorder import Forecast

        return Forecast(**values)
    if name == "chaos":
        from unsloth_multigpu.recorders.inject import Chaos

        return Chaos(**values)
    assert name == "probe", name
    from unsloth_multigpu.shard.script_probe import Probe

    return Probe(**values)


def _enable(given: dict[str, Any], *, replay: bool) -> None:
    global _session  # noqa: PLW0603  # The one mutable global of the package.
    context = RunContext.read(os.environ)
    tool = tool_of(context)
    config = tool.adjusted(MultiGPUConfig.resolve(given))
    if context.shard is not None and config.shard == "auto":
        config = config.with_shard(context.shard)
    if (active := active_session()) is not None:
        _check_same_call(active.config, config)
        return
    if is_helper():
        _refuse_unsteered_training()
        return
    shell = find_shell()
    console = Console(is_notebook=shell is not None)
    try:
        _session = _open_here(config, context, tool, shell, replay=replay)
    except BaseException:
        console.close()
        raise
    _session.console = console


def _refuse_unsteered_training() -> None:
    """In a helper process the call does nothing. If that process trains anyway, its `train()` raises."""
    from unsloth_multigpu.hooks.trainer_patches import unsteered_train_patch

    def is_allowed() -> bool:
        try:
            return is_multi_gpu_enabled() or is_helper()
        except LaunchError:
            return False  # A rank: another library has set the missing variables since.

    PatchRegistry([unsteered_train_patch(is_allowed)]).apply()


def _open_here(config: MultiGPUConfig, context: RunContext, tool: Tool, shell: Any, *, replay: bool) -> Session:
    """Opens the session of a rank, a notebook's kernel or a single process. In a supervisor it does not return."""
    had_workers = _session is not None and _session.had_workers
    identity = read_identity(os.environ, is_kernel=shell is not None)
    if identity is None:  # A rank needs nothing of the supervisor's modules.
        from unsloth_multigpu import start

        if context.tool is None and shell is None:  # Tools and notebooks use one machine.
            start.check_cluster(config)
        num_ranks = start.ranks_to_start(config)
        if start.needs_supervisor(config, num_ranks):
            if shell is not None:
                from unsloth_multigpu.notebook.kernel_start import open_notebook

                return open_notebook(config, num_ranks, shell, replay=replay, had_workers=had_workers)
            # A run that is compared with another is never resumed, so it need not save.
            start.start_this_command(config, num_ranks, saves_when_stopped=not tool.is_comparison)
        identity = SINGLE_PROCESS
    program = find_worker_program() or Program()
    return open_session(Session(config, identity, context, tool, program=program, had_workers=had_workers))


def disable_multi_gpu() -> None:
    """Removes every patch. The process stays a rank. Without an open session nothing happens."""
    if (session := active_session()) is not None:
        session.close()


def active_session() -> Session | None:
    """Returns the open session of this process, None without one."""
    return None if _session is None or _session.is_closed else _session


def is_multi_gpu_enabled() -> bool:
    """True between `enable_multi_gpu` and `disable_multi_gpu`."""
    return active_session() is not None


def get_active_config() -> MultiGPUConfig | None:
    """The options in effect, or None if not enabled."""
    return None if (session := active_session()) is None else session.config


def get_multi_gpu_status() -> MultiGPUStatus:
    """Returns the state of this process; see `MultiGPUStatus`."""
    if (session := active_session()) is None:
        return MultiGPUStatus(is_enabled=False)
    identity = session.identity
    return MultiGPUStatus(
        is_enabled=True,
        rank=identity.rank,
        local_rank=identity.local_rank,
        world_size=identity.world_size,
        launcher=identity.launcher,
        log_dir=session.context.log_dir,
        config=session.config,
        patches=session.registry.states(),
        report=session.report,
    )


def is_main_process() -> bool:
    """True on rank 0 and in a process that is not a rank, like accelerate's `is_main_process`.

    Raises:
        LaunchError: The variables of a launcher contradict each other or are incomplete.
    """
    session = active_session()
    identity = read_identity(os.environ) if session is None else session.identity
    return identity is None or identity.rank == 0


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: the function runs on rank 0 only; on other ranks the call returns None.

    The function must not wait for the other ranks, which do not run it. Do not use it to save by the Trainer, the model
    or the tokenizer: all ranks must call these, and they write on rank 0 only anyway.
    """

    @functools.wraps(function)
    def on_rank_0(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_main_process() else None

    return on_rank_0


def _check_same_call(active: MultiGPUConfig, wanted: MultiGPUConfig) -> None:
    if active != wanted:
        differing = [n for n, value in vars(active).items() if value != getattr(wanted, n)]
        before, now = (", ".join(f"{n}={getattr(c, n)!r}" for n in differing) for c in (active, wanted))
        raise ConfigError(
            f"enable_multi_gpu() is in effect with {before}; this call asks for {now}.",
            hint="Call it once, or disable_multi_gpu() first.",
        )
