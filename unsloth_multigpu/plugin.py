"""The one line, and the one Session that it opens."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from unsloth_multigpu.errors import ConfigError, LaunchError, MultiGPUError
from unsloth_multigpu.launch.spawned import is_helper
from unsloth_multigpu.logs import Console
from unsloth_multigpu.options import MultiGPUConfig, from_keywords
from unsloth_multigpu.patching import PatchRegistry, PatchRow
from unsloth_multigpu.program import find_shell, find_worker_program
from unsloth_multigpu.report import RunReport
from unsloth_multigpu.session import Session, open_session
from unsloth_multigpu.start import (
    check_cluster,
    end_interrupted,
    needs_supervisor,
    ranks_to_start,
    start_this_command,
    this_command,
)
from unsloth_multigpu.strategy import Strategy
from unsloth_multigpu.tool import Tool, tool_of
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, read_identity

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, repr=False)
class MultiGPUStatus:
    """Where this process stands.

    Args:
        is_enabled: `enable_multi_gpu` is in effect.
        launcher: Who started the ranks: "unsloth_multigpu", "notebook", "torchrun", "slurm" or "none".
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

    def __repr__(self) -> str:
        if not self.is_enabled:
            return "MultiGPUStatus(not enabled)"
        usual = vars(MultiGPUConfig())
        given = {} if self.config is None else {n: v for n, v in vars(self.config).items() if v != usual[n]}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        logs = "" if self.log_dir is None else f"logs {self.log_dir}/rank_N.log"
        report = "" if self.report is None else self.report.summary()
        facts = [f"rank {self.rank} of {self.world_size}", f"launcher {self.launcher}", options, logs, report]
        return f"MultiGPUStatus({'; '.join(fact for fact in facts if fact)})"


# The session that is open, or the last one that was.
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

    In a script that you started as `python train.py`, this process becomes the supervisor of `num_gpus` ranks of the
    same command; the call does not return there, and the process ends with the ranks' exit code. In a rank, and with
    one device, it returns. Under torchrun, accelerate launch or srun it joins the ranks that these started.

    What is left out comes from the variable UNSLOTH_MULTIGPU_<NAME>, then from the YAML file UNSLOTH_MULTIGPU_CONFIG,
    then from the default in brackets. These are the options of everyday use; `unsloth-multigpu run --help` and
    docs/options.md have all of them.

    Args:
        num_gpus: Ranks on this machine [all visible accelerators; where there is none, this process alone].
        batch_size_per_gpu: Samples of one micro-batch per rank [the script's]. The step's samples grow with the ranks.
        enable_ddp: One process per device [True]. False = the older plugin's serial path: this process alone, with a
            copy of the model per device, which compute one after the other. Legacy, slower than one GPU.
        global_batch: "keep" = a step sees the samples of the one-process run, "scale" = N times as many ["keep"].
        strategy: How gradients are synchronized: a strategy such as `DiLoCo(every_steps=8)`, or its name for its
            defaults: "ddp", "allreduce", "parameter_server", "local_sgd" or "diloco" ["ddp"].
        shard: "on" = each rank holds a part of weights and states (FSDP2), "auto" = if need be ["off"].
        balance: How a step's samples are dealt: "auto", "tokens" or "off" ["auto"].
        resume: "auto" resumes from the last complete checkpoint of this training, "off" as the script says ["off"].
        replay: In a notebook: where a model was loaded before, ranks above 0 run those cells too [False].
        others: The other options of `MultiGPUConfig`, by name.

    Raises:
        ConfigError: A value that cannot be used, or a second call with other values.
        SetupError: This machine or this place cannot do what was asked.
        VersionError: A library outside the supported range.
    """
    everyday: dict[str, Any] = dict(num_gpus=num_gpus, batch_size_per_gpu=batch_size_per_gpu, enable_ddp=enable_ddp)
    everyday |= dict(global_batch=global_batch, strategy=strategy, shard=shard, balance=balance, resume=resume)
    try:
        if (program := find_worker_program()) is not None:
            program.refuse_replay()
        _enable({**everyday, **from_keywords(others)}, replay=replay)
    except MultiGPUError as error:
        if logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
            raise
        # The user's line is what matters: without the frames below this call.
        raise error.with_traceback(None) from error.__cause__


def _enable(given: dict[str, Any], *, replay: bool) -> None:
    """What `enable_multi_gpu` does with the options that were given."""
    global _session  # noqa: PLW0603  # The one mutable global of the package.
    context = RunContext.read(os.environ)
    tool = tool_of(context)
    config = tool.adjusted(MultiGPUConfig.resolve(given))
    if context.shard_choice is not None and config.shard == "auto":
        config = config.with_shard(context.shard_choice)
    if (active := active_session()) is not None:
        _check_same_call(active.config, config)
        return
    if is_helper():
        _refuse_unsteered_training()
        return
    shell = find_shell()
    console = Console(is_notebook=shell is not None)
    try:
        _session = _open_here(config, context, tool, console, shell, replay=replay, given=given)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and shell is None and read_identity(os.environ) is None:
            end_interrupted()
        console.close()
        raise


def _refuse_unsteered_training() -> None:
    """In a helper, where this call does nothing: should it turn out to be a rank, it does not train by itself."""
    from unsloth_multigpu.hooks.trainer_patches import unsteered_train_patch

    def is_lone() -> bool:
        try:
            return is_multi_gpu_enabled() or is_helper()
        except LaunchError:
            return False  # A rank whose variables other libraries have completed since.

    PatchRegistry([unsteered_train_patch(is_lone)]).apply()


def _open_here(
    config: MultiGPUConfig,
    context: RunContext,
    tool: Tool,
    console: Console,
    shell: Any,
    *,
    replay: bool,
    given: dict[str, Any],
) -> Session:
    """Opens the session of this process: a rank, a notebook's kernel, or alone. A supervisor does not return."""
    had_workers = _session is not None and _session.had_workers
    identity = read_identity(os.environ, is_kernel=shell is not None)
    if identity is None:
        if context.tool is None and shell is None:  # A tool and a notebook train on this machine alone.
            check_cluster(given)
        if shell is None and needs_supervisor(config, config.num_gpus or 1):
            this_command()  # A refusal comes before devices are counted and warned of.
        num_ranks = ranks_to_start(config)
        if needs_supervisor(config, num_ranks):
            if shell is not None:
                from unsloth_multigpu.notebook.kernel_start import open_notebook

                return open_notebook(config, num_ranks, console, shell, replay=replay, had_workers=had_workers)
            # What is compared with another run is not resumed.
            start_this_command(config, num_ranks, saves_when_stopped=not tool.is_comparison)
        identity = SINGLE_PROCESS
    if (program := find_worker_program()) is not None:
        return program.open_session(config, identity, console, context)
    session = open_session(config, identity, console, context, tool)
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
        log_dir=session.context.log_dir,
        config=session.config,
        patches=tuple(session.registry.rows()),
        report=session.report,
    )


def is_main_process() -> bool:
    """True on rank 0 and in a process that is no rank, as accelerate's `is_main_process`.

    Raises:
        LaunchError: The variables of a launcher contradict each other or are incomplete.
    """
    session = active_session()
    identity = read_identity(os.environ) if session is None else session.identity
    return identity is None or identity.rank == 0


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Makes a function run on rank 0 alone; on the others it does nothing and returns None. A decorator.

    Nothing in it may need the other ranks: they are elsewhere. Saving by the Trainer, the model or the tokenizer does,
    and runs on rank 0 alone as it is.
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
