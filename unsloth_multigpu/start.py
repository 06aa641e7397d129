"""How many ranks does this machine run, and how does this process become their supervisor?"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from unsloth_multigpu.accelerator import HIDDEN, KINDS, among
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.logs import get_logger, tell
from unsloth_multigpu.options import ENV_SHARD_CHOICE, MultiGPUConfig, given_options, num_nodes, variable

logger = get_logger(__name__)

# Option -> torchrun's variable for it, as Kubeflow sets it; values that ask for nothing; what would happen unasked.
_OF_CLUSTER = {
    "nnodes": ("PET_NNODES", ("", "1"), "each node would train by itself"),
    "num_gpus": ("PET_NPROC_PER_NODE", ("", "auto", "gpu", *KINDS), "all devices of the machine would train"),
}


def check_cluster(arguments: Mapping[str, Any]) -> None:
    """Refuses what would train alone in one of several pods: Kubeflow's variables are not read, but have to be given.

    For a process that no launcher has started as a rank.

    Args:
        arguments: What the caller gave.

    Raises:
        ConfigError: A variable asks for several nodes or for a number of ranks, and no option does.
    """
    given = given_options(arguments)
    for name, (cluster_variable, neutral, otherwise) in _OF_CLUSTER.items():
        value = os.environ.get(cluster_variable, "")
        if name not in given and value not in neutral:
            raise ConfigError(
                f"{cluster_variable}={value!r} is set, and {name} was not given: {otherwise}.",
                hint=f"Give {variable(name)}; of several nodes also the other options that docs/cluster.md lists for "
                f"Kubeflow. Or start the script with torchrun, which reads the variables. For one node unset "
                f"{cluster_variable}.",
            )


def ranks_to_start(config: MultiGPUConfig) -> int:
    """How many ranks this machine is asked to run; one for the legacy path, whose devices are checked here as well.

    Raises:
        SetupError: More than it has accelerators, or none of the kind that was asked for.
    """
    num_devices = _devices_to_use(config)
    num_ranks = num_devices if config.enable_ddp else 1
    if needs_supervisor(config, num_ranks) and sys.platform != "linux":
        what = "Several ranks need" if num_ranks > 1 else "generators, max_restarts and nnodes need"
        raise SetupError(f"{what} Linux; this is {sys.platform}.", hint="Use Linux or WSL2, or set num_gpus=1 alone.")
    return num_ranks


def needs_supervisor(config: MultiGPUConfig, num_ranks: int) -> bool:
    """True if this process cannot be the rank itself: there are more ranks, or a supervisor has to restart it.

    Args:
        num_ranks: Ranks of this machine.
    """
    has_others = num_ranks > 1 or num_nodes(config.nnodes) > 1
    return config.enable_ddp and (has_others or config.max_restarts > 0 or config.generators > 0)


def _devices_to_use(config: MultiGPUConfig) -> int:
    from unsloth_multigpu.group.manager import ranks_share_device
    from unsloth_multigpu.group.place import NO_ACCELERATOR

    kind, available = visible_accelerators()
    if config.device in KINDS and kind != config.device:
        found = f"this machine has {available} {kind} accelerator(s)" if available else "no such device is visible"
        raise SetupError(
            f"device={config.device!r}, but {found}.",
            hint="Set device='auto', or check the driver and the installed torch.",
        )
    if config.generators and (config.device == "cpu" or kind != "cuda" or config.generators >= available):
        found = f"{available} {kind} accelerator(s) are visible, and device={config.device!r}"
        raise SetupError(
            f"generators={config.generators} needs as many CUDA devices, and one or more for the ranks; {found}.",
            hint="Leave generators out: each rank then generates by itself.",
        )
    if config.device == "cpu" or available == 0:
        num_devices = config.num_gpus or 1
        if num_devices > 1 and not config.enable_ddp:  # Ranks say it themselves.
            reason = "device='cpu'" if config.device == "cpu" else NO_ACCELERATOR
            what = "replicas on the CPU, one after the other"
            logger.warning("%s: num_gpus=%d runs as %d %s", reason, num_devices, num_devices, what)
        if available:
            os.environ.update(HIDDEN)
        return num_devices
    available -= config.generators
    num_devices = config.num_gpus or available
    if num_devices > available and not (config.enable_ddp and ranks_share_device(available, os.environ)):
        raise SetupError(
            f"num_gpus={num_devices}, but {available} GPU(s) are visible"
            f"{f' beside those of generators={config.generators}' if config.generators else ''}.",
            hint=f"Set num_gpus={available}, or CUDA_VISIBLE_DEVICES.",
        )
    return num_devices


def visible_accelerators() -> tuple[str, int]:
    """Kind and number of the accelerators that this process sees: ("cuda", 2), or ("cpu", 0). Opens none."""
    import torch

    from unsloth_multigpu.group.manager import find_accelerator

    accelerator = find_accelerator()
    if accelerator is None:
        return "cpu", 0
    # torch 2.6's torch.accelerator would open it to count.
    return accelerator.type, torch.get_device_module(accelerator).device_count()


def supervise(
    command: Sequence[str], config: MultiGPUConfig, num_ranks: int, *, saves_when_stopped: bool = True
) -> None:
    """Runs `num_ranks` ranks of `command` and ends this process as they end. Does not return.

    Where they are as many as there are devices, and too many to share a step, fewer are started once more.
    """
    from unsloth_multigpu.launch.launcher import DDPLauncher
    from unsloth_multigpu.launch.nodes import await_name, split_endpoint

    if num_nodes(config.nnodes) > 1:
        await_name(*split_endpoint(config), config.timeout_s)
    told, devices = _with_shard_chosen(command, config, num_ranks), _devices_of_server(config)
    launcher = DDPLauncher(command, num_ranks, told, saves_when_stopped, devices)
    code = launcher.run()
    if (most_ranks := launcher.most_ranks) is not None:
        if launcher.stop.is_asked():  # While what the ranks have left was removed.
            exit_like(-launcher.stop.signal_number)
        config = replace(config, num_gpus=most_ranks)
        told = _with_shard_chosen(command, config, most_ranks)
        code = DDPLauncher(command, most_ranks, told, saves_when_stopped, devices).run()
    exit_like(code)


def _devices_of_server(config: MultiGPUConfig) -> dict[str, str]:
    """The variables by which the server that generates sees the last devices. Hides them from what is started else."""
    if not config.generators:
        return {}
    kind, available = visible_accelerators()
    num_others = available - config.generators
    of_server = among(kind, range(num_others, available), os.environ)
    os.environ.update(among(kind, range(num_others), os.environ))
    return of_server


def _with_shard_chosen(command: Sequence[str], config: MultiGPUConfig, num_ranks: int) -> MultiGPUConfig:
    if config.shard != "auto":
        return config
    from unsloth_multigpu.shard.shard_choice import choose

    # By the environment the ranks are told.
    os.environ[ENV_SHARD_CHOICE] = shard = choose(command, os.environ, config, num_ranks)
    return config.with_shard(shard)


def exit_like(code: int) -> None:
    """Ends this process as `DDPLauncher.run` says: with an exit code, or by the signal -code."""
    try:
        for stream in (sys.stdout, sys.stderr):
            # The reader of the stream may be gone. The stream is None or closed if the process was started so.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        # The script must not continue in the supervisor, not even in an `except SystemExit` around the user's line.
        os._exit(code if code >= 0 else 128 - code)


def this_command() -> list[str]:
    """The command that starts the program of this process again.

    Raises:
        SetupError: It cannot be started again, or should not be.
    """
    from unsloth_multigpu.launch.script import relaunch_command

    if is_called_by_pytest():
        # Its own process would become the supervisor, and end with what it has captured.
        raise SetupError(
            "enable_multi_gpu() cannot start ranks from a test: each rank would run all tests again.",
            hint="Start the script with subprocess.run([sys.executable, 'train.py']), or set num_gpus=1.",
        )
    return relaunch_command(sys.orig_argv, sys.modules["__main__"], sys.executable)


def is_called_by_pytest() -> bool:
    """True inside a test, and while pytest imports one. Not in a script that a test has started."""
    frames = traceback.walk_stack(None)
    return any(str(frame.f_globals.get("__name__")).startswith("_pytest.") for frame, _ in frames)


def end_interrupted() -> None:
    """Ctrl-C came before ranks were started: ends this process by it, as the supervisor ends later. Does not return."""
    tell("\nunsloth_multigpu: stopped by SIGINT, no rank was started.\n")
    exit_like(-signal.SIGINT)


def start_this_command(config: MultiGPUConfig, num_ranks: int, *, saves_when_stopped: bool = True) -> None:
    """Starts ranks of the command that this process runs. Does not return.

    Raises:
        SetupError: It cannot be started again, or each rank would do again what it holds already.
    """
    command = this_command()
    _refuse_earlier_trainer(num_ranks)
    _warn_of_early_work(num_ranks)
    supervise(command, config, num_ranks, saves_when_stopped=saves_when_stopped)


def _refuse_earlier_trainer(num_ranks: int) -> None:
    module = sys.modules.get("transformers.trainer")
    trainer_class = getattr(module, "Trainer", None)
    if trainer_class is not None and any(issubclass(type(o), trainer_class) for o in gc.get_objects()):
        raise SetupError(
            f"A Trainer was made before enable_multi_gpu(): it is built for 1 process, and there are to be {num_ranks} "
            "ranks.",
            hint="Make enable_multi_gpu() the first line of the script.",
        )


def _warn_of_early_work(num_ranks: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and any(m.is_initialized() for name in KINDS if (m := getattr(torch, name, None))):
        logger.warning(
            "enable_multi_gpu() comes after work on a GPU, whose memory this process keeps while the ranks train. Make "
            "it the first line of the script."
        )
    heavy = [name for name in ("unsloth", "transformers", "trl", "peft") if name in sys.modules]
    if heavy:
        logger.warning(
            "enable_multi_gpu() comes after the import of %s, which each of the %d ranks does again. Make it the first "
            "line of the script.",
            ", ".join(heavy),
            num_ranks,
        )
