"""Counts the ranks of this machine, and turns this process into their supervisor."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from unsloth_multigpu.accelerator import HIDDEN, KINDS, variables_for
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig, variable
from unsloth_multigpu.program import ipython_shell

logger = get_logger(__name__)

# Option and its default -> torchrun's variable, which Kubeflow sets; its neutral values; the effect if it is ignored.
_CLUSTER_VARIABLES = {
    ("nnodes", 1): ("PET_NNODES", ("", "1"), "each node would train by itself"),
    ("num_gpus", None): ("PET_NPROC_PER_NODE", ("", "auto", "gpu", *KINDS), "all devices of the machine would train"),
}


def check_cluster(config: MultiGPUConfig) -> None:
    """Refuses to train alone in one of several pods: Kubeflow's variables are not read, options have to repeat them.

    For a process that no launcher has started as a rank.

    Raises:
        ConfigError: A variable sets the number of nodes or ranks, and the option for it has its default.
    """
    for (name, default), (cluster_variable, neutral, otherwise) in _CLUSTER_VARIABLES.items():
        value = os.environ.get(cluster_variable, "")
        if getattr(config, name) == default and value not in neutral:
            raise ConfigError(
                f"{cluster_variable}={value!r} is set, and {name}={default}: {otherwise}.",
                hint=f"Set {variable(name)}; with several nodes also the other options that docs/cluster.md lists for "
                f"Kubeflow. Or start the script with torchrun, which reads the variables. For one node unset "
                f"{cluster_variable}.",
            )


def ranks_to_start(config: MultiGPUConfig) -> int:
    """Returns the number of ranks to start on this machine, 1 for the legacy path. Checks that the devices exist.

    Raises:
        SetupError: More ranks than accelerators, or no accelerator of the kind that was asked for.
    """
    num_devices = _devices_to_use(config)
    num_ranks = num_devices if config.enable_ddp else 1
    if needs_supervisor(config, num_ranks) and sys.platform != "linux":
        what = "Several ranks need" if num_ranks > 1 else "generators, max_restarts and nnodes need"
        raise SetupError(f"{what} Linux; this is {sys.platform}.", hint="Use Linux or WSL2, or set num_gpus=1 alone.")
    return num_ranks


def needs_supervisor(config: MultiGPUConfig, num_ranks: int) -> bool:
    """True if the `num_ranks` ranks of this machine are child processes of this one, and not this process itself."""
    has_others = num_ranks > 1 or config.nnodes > 1
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
            f"generators={config.generators} needs as many CUDA devices, and at least one more for the ranks; {found}.",
            hint="Leave generators out: each rank then generates by itself.",
        )
    if config.device == "cpu" or available == 0:
        num_devices = config.num_gpus or 1
        if num_devices > 1 and not config.enable_ddp:  # With DDP the ranks log it.
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
    """Returns type and number of the visible accelerators, such as ("cuda", 2), or ("cpu", 0). Opens none of them."""
    import torch

    from unsloth_multigpu.group.manager import find_accelerator

    accelerator = find_accelerator()
    if accelerator is None:
        return "cpu", 0
    # torch.accelerator.device_count() of torch 2.6 would open it.
    return accelerator.type, torch.get_device_module(accelerator).device_count()


def supervise(
    command: Sequence[str], config: MultiGPUConfig, num_ranks: int, *, saves_when_stopped: bool = True
) -> NoReturn:
    """Runs `num_ranks` ranks of `command` and exits as they exit. Does not return.

    If num_gpus was not given and a step has too few samples for a rank per device, starts once more with fewer ranks.
    """
    from unsloth_multigpu.launch.launcher import DDPLauncher
    from unsloth_multigpu.launch.nodes import await_name, split_endpoint

    if config.nnodes > 1:
        await_name(*split_endpoint(config), config.timeout_s)
    server_devices = _reserve_server_devices(config)
    while True:
        resolved = config
        if config.shard == "auto":
            from unsloth_multigpu.shard.script_probe import choose_shard

            resolved = config.with_shard(choose_shard(command, os.environ, config, num_ranks))
        launcher = DDPLauncher(command, num_ranks, resolved, saves_when_stopped, server_devices)
        code = launcher.run()
        if launcher.most_ranks is None:
            exit_like(code)
        if launcher.stop.is_asked():  # A signal came while the first ranks were cleaned up.
            exit_like(-launcher.stop.signal_number)
        num_ranks = launcher.most_ranks
        config = replace(config, num_gpus=num_ranks)


def _reserve_server_devices(config: MultiGPUConfig) -> dict[str, str]:
    """Returns the variables that show the generation server the last devices. Hides these from all other processes."""
    if not config.generators:
        return {}
    kind, available = visible_accelerators()
    num_others = available - config.generators
    of_server = variables_for(kind, range(num_others, available), os.environ)
    os.environ.update(variables_for(kind, range(num_others), os.environ))
    return of_server


def exit_like(code: int) -> NoReturn:
    """Ends this process with the result of `DDPLauncher.run`: an exit code, or -N for signal N."""
    try:
        for stream in (sys.stdout, sys.stderr):
            # The stream may be closed or None, and its reader may be gone.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        # The script must not continue in the supervisor, not even in an `except SystemExit` around the user's line.
        os._exit(code if code >= 0 else 128 - code)


def relaunch_command(orig_argv: Sequence[str], main: ModuleType, executable: str) -> list[str]:
    """Builds the command line of a rank from `sys.orig_argv`, the module `__main__` and `sys.executable`.

    `python train.py --args`, `python -m pkg.train`, `python -c "..."` and interpreter options (`-X dev`, `-W error`)
    are kept as they were given.

    Raises:
        SetupError: The program cannot be started again: IPython or Python at a terminal, or a script from stdin.
    """
    arguments = list(orig_argv[1:])
    main_file = "<stdin>" if ipython_shell() is not None else getattr(main, "__file__", None)
    # No file: code of -c, or a script that a module of this package runs.
    if main_file is None and any(re.match(r"-[A-Za-z]*[cm]", argument) for argument in arguments):
        return [executable, *arguments]
    # Pipes and streams cannot be read a second time.
    if main_file in (None, "<stdin>") or Path(main_file).resolve().parts[1:2] in (("dev",), ("proc",)):
        raise SetupError(
            "enable_multi_gpu() cannot start this program again: it was typed at a prompt or piped into Python.",
            hint="Save it to a file and run `python train.py`, use a notebook, or set num_gpus=1.",
        )
    place = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    is_script = place < len(arguments) and str(main_file).endswith(f"/{arguments[place]}")
    if is_script and Path(arguments[place]).resolve() != Path(main_file).resolve():
        # The script has changed the working folder, so its relative name is no longer valid.
        arguments[place] = os.path.abspath(main_file)
    return [executable, *arguments]


def is_called_by_pytest() -> bool:
    """True inside a test and while pytest imports a test module, not in a script that a test has started."""
    frames = traceback.walk_stack(None)
    return any(str(frame.f_globals.get("__name__")).startswith("_pytest.") for frame, _ in frames)


def start_this_command(config: MultiGPUConfig, num_ranks: int, *, saves_when_stopped: bool = True) -> NoReturn:
    """Starts ranks of the command that this process runs. Does not return.

    Raises:
        SetupError: The command cannot or must not be started again, or the script has made a Trainer before.
    """
    if is_called_by_pytest():
        # The process of pytest would become the supervisor and exit without its report.
        raise SetupError(
            "enable_multi_gpu() cannot start ranks from a test: each rank would run all tests again.",
            hint="Start the script with subprocess.run([sys.executable, 'train.py']), or set num_gpus=1.",
        )
    command = relaunch_command(sys.orig_argv, sys.modules["__main__"], sys.executable)
    _check_is_first_line()
    supervise(command, config, num_ranks, saves_when_stopped=saves_when_stopped)


def _check_is_first_line() -> None:
    """Refuses to start ranks after a Trainer was made, and warns of other work that comes before it."""
    first_line = "Make enable_multi_gpu() the first line of the script."
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is not None and any(issubclass(type(o), trainer_class) for o in gc.get_objects()):
        raise SetupError("A Trainer was made before enable_multi_gpu(): it is set up for one process.", hint=first_line)
    before = [f"the import of {name}" for name in ("unsloth", "transformers", "trl", "peft") if name in sys.modules]
    torch = sys.modules.get("torch")
    if torch is not None and any(m.is_initialized() for name in KINDS if (m := getattr(torch, name, None))):
        before.append("work on a GPU, whose memory this process keeps while the ranks train")
    if before:
        logger.warning("enable_multi_gpu() comes after %s; each rank repeats that. %s", ", ".join(before), first_line)
