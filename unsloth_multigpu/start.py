"""How many ranks does this machine run, and how does this process become their supervisor?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from unsloth_multigpu.config import MultiGPUConfig
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.option import num_nodes

logger = get_logger(__name__)

# Work before the line that is worth a warning, in seconds; importing this package and torch takes about 3.
_EARLY_WORK_S = 10.0


def ranks_to_start(config: MultiGPUConfig) -> int:
    """How many ranks this machine is asked to run; one for the legacy path, whose devices are checked here as well.

    Raises:
        SetupError: More than it has accelerators, or none of the kind that was asked for.
    """
    num_devices = _devices_to_use(config)
    num_ranks = num_devices if config.enable_ddp else 1
    if needs_supervisor(config, num_ranks) and sys.platform != "linux":
        what = "Several ranks need" if num_ranks > 1 else "max_restarts and nnodes need"
        raise SetupError(f"{what} Linux; this is {sys.platform}.", hint="Use Linux or WSL2, or set num_gpus=1 alone.")
    return num_ranks


def needs_supervisor(config: MultiGPUConfig, num_ranks: int) -> bool:
    """True if this process cannot be the rank itself: there are more of them, or somebody has to start it again.

    Args:
        num_ranks: Ranks of this machine.
    """
    has_others = num_ranks > 1 or num_nodes(config.nnodes)[1] > 1
    return config.enable_ddp and (has_others or config.max_restarts > 0)


def _devices_to_use(config: MultiGPUConfig) -> int:
    kind, available = visible_accelerators()
    if config.device in ("cuda", "xpu") and kind != config.device:
        raise SetupError(
            f"device={config.device!r}, but this machine has {available} {kind} accelerator(s).",
            hint="Set device='auto', or check the driver and the installed torch.",
        )
    if config.device == "cpu" or available == 0:
        num_devices = config.num_gpus or 1
        if num_devices > 1:
            reason = "device='cpu'" if config.device == "cpu" else "no accelerator is visible"
            what = "CPU ranks over gloo" if config.enable_ddp else "replicas on the CPU, one after the other"
            logger.warning("%s: num_gpus=%d runs as %d %s", reason, num_devices, num_devices, what)
        if available:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return num_devices
    num_devices = config.num_gpus or available
    if num_devices > available:
        raise SetupError(
            f"num_gpus={num_devices}, but {available} GPU(s) are visible.",
            hint=f"Set num_gpus={available}, or CUDA_VISIBLE_DEVICES.",
        )
    return num_devices


def visible_accelerators() -> tuple[str, int]:
    """Kind and number of the accelerators that this process sees: ("cuda", 2), or ("cpu", 0). Opens none."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Apple's is one device that has no process group.
    if accelerator is None or accelerator.type == "mps":
        return "cpu", 0
    return accelerator.type, torch.accelerator.device_count()


def supervise(command: Sequence[str], config: MultiGPUConfig, num_ranks: int) -> None:
    """Runs `num_ranks` ranks of `command` and ends this process as they end. Does not return."""
    from unsloth_multigpu.launch.launcher import DDPLauncher, exit_like

    exit_like(DDPLauncher(command, num_ranks, config).run())


def start_this_command(config: MultiGPUConfig, num_ranks: int) -> None:
    """Starts ranks of the command that this process runs. Does not return."""
    from unsloth_multigpu.launch.script import relaunch_command

    command = relaunch_command(sys.orig_argv, sys.modules["__main__"], sys.executable)
    _warn_of_early_work(num_ranks)
    supervise(command, config, num_ranks)


def _warn_of_early_work(num_ranks: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held_bytes = sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))
        logger.warning(
            "enable_multi_gpu() comes after work on a GPU: this process keeps %.1f GiB there while the ranks train. "
            "Make it the first line of the script.",
            held_bytes / 2**30,
        )
    heavy = [name for name in ("unsloth", "transformers", "trl", "peft") if name in sys.modules]
    # Of this process alone: waiting for a child, or for somebody to type, is no work that ranks do again.
    seconds = time.process_time()
    if heavy or seconds > _EARLY_WORK_S:
        logger.warning(
            "enable_multi_gpu() comes after %.0f s of work%s, which each of the %d ranks does again. "
            "Make it the first line of the script.",
            seconds,
            f" (imported: {', '.join(heavy)})" if heavy else "",
            num_ranks,
        )
