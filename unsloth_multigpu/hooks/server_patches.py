"""Connects Trainers of TRL to the vLLM server that the option `generators` starts."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from unsloth_multigpu.errors import ConfigError, RankTimeoutError, SetupError, VersionError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, TrainerLike
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.versions import check_version
from unsloth_multigpu.wire.event import SERVER_WANTED, EventWriter
from unsloth_multigpu.wire.wait import wait_until

_NEEDED = "trl>=0.28"
_HOST = "127.0.0.1"
_LOOK_S = 0.5
_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port")


class GenerationServer:
    """A rank's access to the server of `generators`: it sets the address in arguments, and requests the start.

    Args:
        port: Port of the server. It receives weights at the next port.
        events: Writes rank 0's request to the supervisor.
    """

    def __init__(self, config: MultiGPUConfig, port: int, events: EventWriter, *, is_first: bool) -> None:
        self._asked = f"generators={config.generators}"
        self._timeout_s = config.timeout_s
        self._port = port
        self._events = events
        self._is_first = is_first
        self._is_requested = False

    def patch(self) -> Patch:
        """Returns the patch of the class with which TRL's Trainers generate."""
        target = "trl.generation.vllm_generation:VLLMGeneration.__init__"
        needs = ("model", "mode", "max_model_length", "model_impl")
        return Patch(target, "trl>=0.24", self._connect, needs=needs, optional=True)

    def check_use(self, trainer: TrainerLike) -> None:
        """Checks, when a training begins, that a Trainer uses the server.

        Raises:
            SetupError: None does.
        """
        if not self._is_requested:
            raise SetupError(
                f"{self._asked} reserves GPUs for generation, and {type(trainer).__name__} does not generate on a "
                "server.",
                hint='Train a GRPOTrainer or RLOOTrainer with use_vllm=True and vllm_mode="server", or leave it out.',
            )

    def set_address(self, args: ArgumentsLike) -> None:
        """Sets the address of the server in the arguments of a Trainer that generates, before they are validated.

        Raises:
            ConfigError: The arguments request no server, or another one.
            SetupError: The script uses Unsloth, which generates in each process.
            VersionError: TRL is too old.
        """
        if not hasattr(args, "vllm_server_base_url"):
            return
        if not check_version(_NEEDED).ok:
            raise VersionError(
                f"{self._asked} needs {_NEEDED}.", hint=f'pip install "{_NEEDED}", or leave generators out.'
            )
        if "unsloth" in sys.modules:
            raise SetupError(
                f"{self._asked} is for TRL's Trainers only: with Unsloth, each process generates by itself.",
                hint="Leave generators out, and set fast_inference=True for an engine on each GPU.",
            )
        if not args.use_vllm or args.vllm_mode != "server":
            raise ConfigError(
                f"{self._asked}, but use_vllm={args.use_vllm} and vllm_mode={args.vllm_mode!r}: the Trainer would "
                "use no server.",
                hint='Set use_vllm=True and vllm_mode="server", or leave generators out.',
            )
        ours = {"vllm_server_base_url": f"http://{_HOST}:{self._port}", "vllm_group_port": self._port + 1}
        usual = {field.name: field.default for field in dataclasses.fields(args) if field.name in _ADDRESS}
        for name, default in usual.items():
            # Arguments that are copied from others have our address already.
            if (value := getattr(args, name)) not in (default, ours.get(name)):
                raise ConfigError(
                    f"{self._asked} starts a server, but {name}={value!r} names another one.",
                    hint=f"Leave {name} out, or generators.",
                )
        for name in ours.keys() & usual.keys():
            setattr(args, name, ours[name])

    def _connect(self, original: Callable[..., None], /, generation: Any, *args: Any, **kwargs: Any) -> None:
        """Requests the server of generators=N and waits for it: here the Trainer's model is known."""
        if self._is_requested:
            raise SetupError(
                "generators: the server holds the weights of one Trainer, but a second Trainer requests it.",
                hint="Train the second one in another run.",
            )
        self._await_server(inspect.signature(original).bind(generation, *args, **kwargs).arguments)
        self._is_requested = True
        original(generation, *args, **kwargs)

    def _await_server(self, given: Mapping[str, Any]) -> None:
        from unsloth_multigpu.launch.generation_server import answers

        if self._is_first:
            self._events.write(SERVER_WANTED, port=self._port, arguments=_command_of(given))
        # TRL's requests to this machine must not go through a proxy.
        os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy", os.environ.get("NO_PROXY")), _HOST]))
        # Rank 0 may come timeout_s later, and the server may take as long. If it fails, the supervisor ends the ranks.
        deadline_s = time.monotonic() + 2 * self._timeout_s
        if not wait_until(lambda: answers(self._port), deadline_s, poll_s=_LOOK_S):
            raise RankTimeoutError(
                f"generators: no server answered within twice timeout_s={self._timeout_s:g} s.",
                hint="Create the Trainer on all ranks.",
            )


def _command_of(given: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of the command `trl vllm-serve`."""
    model = given["model"].name_or_path
    if not model:
        raise ConfigError(
            "generators: the server loads the Trainer's model by its name, but the model has none.",
            hint="Load the model from a folder or from the Hub.",
        )
    values = {
        "model": model,
        "max_model_len": given.get("max_model_length"),
        "vllm_model_impl": given.get("model_impl"),
        "trust_remote_code": given.get("trust_remote_code") or None,
    }
    return [text for name, value in values.items() if value is not None for text in (f"--{name}", str(value))]
