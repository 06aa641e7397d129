"""The session of a rank or a single process: its options, identity, patches and trainings."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.accelerator import allocator_variables
from unsloth_multigpu.errors import MultiGPUError, SetupError, is_refusal
from unsloth_multigpu.logs import Console, get_logger
from unsloth_multigpu.option_type import Scope
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part, TrainerLike
from unsloth_multigpu.patching import Patch, PatchRegistry
from unsloth_multigpu.program import Program
from unsloth_multigpu.report import RunReport
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.versions import SUPPORTED, version_rows
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.event import EventWriter
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import only_here

if TYPE_CHECKING:
    import torch

    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.hooks.saving import SaveGate
    from unsloth_multigpu.hooks.server_patches import GenerationServer
    from unsloth_multigpu.train.trainer import DDPTrainer

logger = get_logger(__name__)

# How long a failed rank that serves the store goes on serving it. The other ranks would wait for a failed rank in vain.
_SERVE_AFTER_FAILURE_S = 3.0


@dataclass
class Session:
    """State of this process between `enable_multi_gpu` and `disable_multi_gpu`. `plugin` holds the only one."""

    config: MultiGPUConfig
    identity: RankIdentity
    context: RunContext = field(default_factory=RunContext)
    tool: Tool = field(default_factory=Tool)
    events: EventWriter | None = None
    beat: HeartbeatPage = field(default_factory=lambda: HeartbeatPage(None, 0))
    registry: PatchRegistry = field(default_factory=lambda: PatchRegistry([]))
    report: RunReport | None = None
    on_close: ExitStack = field(default_factory=ExitStack)
    # Runs in this process: a script, or the cells of a notebook.
    program: Program = field(default_factory=Program)
    # True once this notebook kernel has started ranks, which it cannot do a second time.
    had_workers: bool = False
    is_closed: bool = False
    console: Console | None = None
    # Calls of `run_training` that have not returned.
    num_running: int = 0
    # The last training raised an error: the other ranks may still be in it.
    has_failed: bool = False
    server: GenerationServer | None = None
    # Number of earlier sessions of this process.
    index: int = field(default_factory=itertools.count().__next__)
    _manager: DDPManager | None = None
    # Steers the training that runs now.
    _steered: DDPTrainer | None = None

    def manager(self) -> DDPManager:
        """Returns this rank's manager, created on the first call."""
        if self._manager is None:
            from unsloth_multigpu.group.manager import DDPManager

            self._manager = DDPManager(self.identity, self.config, self.index)
            if self.events is not None:
                self._manager.tell = self.events.write
            self.program.prepare(self._manager)
        return self._manager

    def open_manager(self) -> DDPManager | None:
        """Like `manager`; None if the session is closed, or while this rank runs code without the others."""
        return None if self.is_closed or not self.program.can_exchange() else self.manager()

    def renew_manager(self) -> None:
        """Drops the manager after a new process group was opened: the next call of `manager` makes a new one."""
        self._manager = None

    def close(self) -> None:
        """Removes every patch and closes what the session opened."""
        self.is_closed = True
        self.registry.undo()
        self.on_close.close()
        if self.console is not None:
            self.console.close()

    def leave(self) -> None:
        """Called at exit. Serves the store as long as other ranks need it, after a failure only for a moment."""
        # Python keeps the error that ended the main thread.
        has_failed = self.has_failed or hasattr(sys, "last_value")
        if self._manager is not None:
            self._manager.leave_store(_SERVE_AFTER_FAILURE_S if has_failed else self.config.timeout_s)

    def run_training(self, trainer: TrainerLike, original_train: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Called in place of `Trainer.train`. `original_train` reads `arguments` when it is called."""
        self.num_running += 1
        try:
            result = self._run_training(trainer, original_train, arguments)
            self.has_failed = False
            return result
        except BaseException as error:
            self.has_failed = True
            self._report_refusal(error)
            raise
        finally:
            self.num_running -= 1
            self._steered = None  # It refers to the trainer.

    def _report_refusal(self, error: BaseException) -> None:
        """Tells the supervisor that a training was refused: the script may catch the error and exit with 0."""
        num_steps = 0 if self._steered is None else self._steered.progress.num_steps
        if self.events is None or self.identity.world_size == 1 or not isinstance(error, MultiGPUError):
            return
        if is_refusal(error, num_steps):
            text = f"{type(error).__name__}: {error}".split("\n")[0].rstrip(".: ")
            self.events.write("refused", error=text, exit_code=error.exit_code, num_steps=num_steps)

    def notice_training(self) -> None:
        """Called when a Trainer's loop begins, also without a call of `Trainer.train`.

        Raises:
            PatchError: `Trainer.train` was replaced by a function that does not call ours.
        """
        if self.num_running or self.is_closed:
            return
        self.registry.verify()
        logger.warning(
            "a training begins without a call of Trainer.train and is not distributed: each rank computes all samples, "
            "and it takes as long as on one GPU. Let the trainer's train() call super().train()"
        )

    def _run_training(self, trainer: TrainerLike, original_train: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        self.registry.verify()
        if self.identity.world_size == 1 and arguments.get("trial") is not None:
            # A search creates arguments and accelerator inside `train()`, so a trial cannot be steered.
            if asked := self.config.asked(Scope.TRAINER):
                raise SetupError(
                    f"{asked[0]} has no effect on the trials of hyperparameter_search.",
                    hint="Leave it out in a search.",
                )
            return original_train()
        if self.server is not None:
            self.server.check_use(trainer)
        train_index = self.program.begin_training()
        if not self.config.enable_ddp:
            from unsloth_multigpu.legacy.serial import SerialTrainer

            serial = SerialTrainer(trainer, self.config)
            result = serial.run(original_train)
            self.report = serial.report
            return result
        if self.identity.world_size == 1 and self.config.strategy != DDP():
            logger.warning("strategy=%s has no effect in one process", self.config.strategy)
        if self._is_steered():
            from unsloth_multigpu.train.trainer import DDPTrainer

            self._steered = steered = DDPTrainer(trainer, self, arguments, train_index)
            if self.identity.world_size > 1 and self.identity.launcher != "notebook":
                self._wait_for_ranks_after_failure(train_index)
            result = steered.run(original_train, self.program.note_training)
            self.report = steered.report
        elif (of_tool := self.tool.part(trainer, self, None)) is not None:
            result = self._run_alone(trainer, original_train, of_tool)
        else:
            result = original_train()
        self.program.end_training()
        self.tool.end_training()
        return result

    def _wait_for_ranks_after_failure(self, train_index: int) -> None:
        """If the last training has failed on this rank, waits until all ranks have begun this one.

        A rank that is still in the failed training would take this rank's next collective for the one it waits for.
        In a notebook the ranks open a new process group instead.

        Raises:
            RankTimeoutError: Another rank did not begin this training in time.
        """
        manager = self.manager()
        manager.publish(f"begun/{self.identity.rank}/{train_index}")
        for rank in range(self.identity.world_size) if self.has_failed else ():
            what = f"rank {rank} to leave the training that has failed on this rank"
            manager.wait_for(f"begun/{rank}/{train_index}", what, timeout_s=self.config.timeout_s)

    def _run_alone(self, trainer: TrainerLike, original_train: Callable[[], Any], of_tool: Part) -> Any:
        from unsloth_multigpu.train.figures import Meter
        from unsloth_multigpu.train.loop import Loop

        meter = Meter(trainer, self.manager(), self.beat)
        with Loop(trainer, [meter, of_tool]).steering():
            result = original_train()
        self.report = meter.report_alone()
        return result

    def _is_steered(self) -> bool:
        config = self.config
        if self.identity.world_size > 1 or self.tool.plans_one_process:
            return True
        asks_for_plan = config.balance == "tokens" or config.max_tokens_per_micro_batch is not None
        asks_for_guard = config.resume == "auto" or config.on_nan == "skip" or self.events is not None
        return (asks_for_plan or asks_for_guard) and not self.tool.is_comparison


def open_session(session: Session) -> Session:
    """Sets up this process as the rank of the session and applies the patches.

    Raises:
        SetupError: The options do not fit the ranks that the launcher started.
        VersionError: A library is outside the supported range.
    """
    _check_ranks(session)
    session.program.enter(session)
    if session.tool.draws_alike:
        from unsloth_multigpu.group.random_state import seed_all

        seed_all(0)
    is_first = session.identity.rank == 0
    if session.events is not None and (port := session.context.server_port) is not None:
        from unsloth_multigpu.hooks.server_patches import GenerationServer

        session.server = GenerationServer(session.config, port, session.events, is_first=is_first)
    session.registry = PatchRegistry(_patches(session))
    session.registry.apply()
    if is_first:
        _log_start(session)
    return session


def _check_ranks(session: Session) -> None:
    """Checks that the options fit the ranks that a launcher has started."""
    config, identity = session.config, session.identity
    if not config.enable_ddp and identity.world_size > 1:
        raise SetupError(
            f"enable_ddp=False runs in one process, but {identity.launcher} started {identity.world_size} ranks.",
            hint="Start the script with python alone, or leave enable_ddp out.",
        )
    if config.enable_ddp and config.num_gpus not in (None, identity.local_world_size):
        raise SetupError(
            f"num_gpus={config.num_gpus}, but {identity.launcher} started {identity.local_world_size} rank(s) here.",
            hint=f"Leave num_gpus out, or start {config.num_gpus} ranks.",
        )
    if config.shard == "auto" and identity.world_size > 1:
        raise SetupError(
            f"shard='auto' is decided by the process that starts the ranks, and {identity.launcher} has started them.",
            hint="Set shard='on' or shard='off'; `unsloth-multigpu plan` says which fits.",
        )
    if config.generators and session.context.server_port is None:
        raise SetupError(
            f"generators={config.generators}: the server is started by the process that starts the ranks, and "
            f"{identity.launcher} has started them.",
            hint="Start the script with python alone, or leave generators out and start TRL's server yourself.",
        )
    if identity.world_size > 1 and (size := os.environ.get("UNSLOTH_TP_SIZE", "").strip()) not in ("", "1"):
        raise SetupError(
            f"UNSLOTH_TP_SIZE={size}: Unsloth's tensor parallelism trains and saves by itself.",
            hint="Unset it, or start the script with torchrun and without enable_multi_gpu().",
        )
    if identity.world_size % config.sequence_parallel:
        raise SetupError(
            f"sequence_parallel={config.sequence_parallel} does not divide the {identity.world_size} rank(s).",
            hint="Set num_gpus to a multiple of it, or leave it out.",
        )
    if config.shard == "on" and identity.world_size == 1:
        logger.warning("shard='on' has no effect in one process, which holds the whole model")


def _log_start(session: Session) -> None:
    """Logs how many ranks train on which devices, and libraries that are newer than any tested version."""
    from unsloth_multigpu.group.place import NO_ACCELERATOR, start_sentence

    sentence = start_sentence(session.identity, session.config, session.context.log_dir)
    tell = logger.warning if sentence.startswith(NO_ACCELERATOR) else logger.info
    tell("%s", sentence)
    if newer := [row for row in version_rows() if row.is_newer and row.name in SUPPORTED]:
        logger.warning(
            "newer than tested: %s. Every patched function is checked; `unsloth-multigpu verify` compares the first "
            "steps with one process",
            ", ".join(f"{row.name} {row.installed} (tested {row.supported})" for row in newer),
        )


def _patches(session: Session) -> list[Patch]:
    from unsloth_multigpu.hooks.trainer_patches import TrainerHooks
    from unsloth_multigpu.hooks.unsloth_patches import Placement

    config, identity = session.config, session.identity
    patches = TrainerHooks(session).patches()
    _claim_device(session)
    if not config.enable_ddp and config.device != "cpu":
        from unsloth_multigpu.start import visible_accelerators

        # A device map over all visible GPUs would split the model, but each GPU is to hold a whole copy.
        return [*patches, *Placement(visible_accelerators()[0], 0).patches()]
    if identity.world_size == 1:
        return patches
    from unsloth_multigpu.group.manager import local_device
    from unsloth_multigpu.hooks.saving import SaveGate

    gate = SaveGate(identity.rank, session.open_manager)
    # Runs before the process group is destroyed, where a rank may wait for ranks that wait for its save.
    atexit.register(only_here(gate.leave))
    if config.shard == "on":
        from unsloth_multigpu.hooks.shard import ask_unsloth_to_shard

        ask_unsloth_to_shard(session.on_close, offload=config.shard_offload)
    return [*patches, *patches_of_rank(session, local_device(identity, config), gate)]


def patches_of_rank(session: Session, device: torch.device, gate: SaveGate) -> list[Patch]:
    """Returns the further patches of a rank among several."""
    from unsloth_multigpu.hooks.accelerate import device_patches, loop_patches
    from unsloth_multigpu.hooks.datasets import dataset_patches
    from unsloth_multigpu.hooks.saving import saving_patches
    from unsloth_multigpu.hooks.unsloth_patches import Placement

    identity, shards, index = session.identity, session.config.shard == "on", device.index or 0
    placement = Placement(device.type, index, identity.rank, identity.world_size, shards)
    loading = []
    if shards:
        from unsloth_multigpu.hooks.shard import ShardedLoading

        loading = ShardedLoading(device, identity.rank, identity.world_size).patches()
    return [
        *loading,
        *device_patches(device.type, index, identity.local_rank),
        *loop_patches(session.config, session.manager, session.on_close),
        *placement.patches(),
        *saving_patches(gate),
        *dataset_patches(session.context.run_dir, session.open_manager),
    ]


def _claim_device(session: Session) -> None:
    """Makes the rank's GPU the current device, so that "cuda" means it."""
    if session.identity.world_size == 1:
        return
    if session.config.device != "cpu":
        # torch reads these variables once, when the device is opened below. Our launcher has set them already.
        os.environ.update(allocator_variables(os.environ))
    import torch

    from unsloth_multigpu.group.manager import local_device

    device = local_device(session.identity, session.config)
    wanted = session.config.device
    if wanted not in ("auto", device.type):
        raise SetupError(
            f"device={wanted!r}, but rank {session.identity.rank} finds {device.type}.",
            hint="Set device='auto', or check the driver and the installed torch.",
        )
    if device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        # accelerate would call the device "cpu:0", to which torch.load cannot map a checkpoint.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        return
    available, num_ranks = torch.accelerator.device_count(), session.identity.local_world_size
    if available == 1 < num_ranks:
        # Each rank sees one GPU, as SLURM may arrange. accelerate would give DDP the local rank as its device.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    elif available < num_ranks:
        raise SetupError(
            f"{num_ranks} ranks run here, but {available} GPU(s) are visible.",
            hint=f"Start {available} ranks, or set CUDA_VISIBLE_DEVICES.",
        )
    torch.accelerator.set_device_index(device.index)
