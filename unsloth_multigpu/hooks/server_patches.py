"""Connects Trainers of TRL to the vLLM server that the option `generators` starts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from unsloth_multigpu.errors import ConfigError, RankTimeoutError, SetupError, VersionError
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.trainer_protocol import ArgumentsLike
from unsloth_multigpu.versions import check_version
from unsloth_multigpu.wire.event import SERVER_WANTED, EventWriter, is_ready
from unsloth_multigpu.wire.wait import wait_until

_NEEDED = "trl>=0.28"
_HOST = "127.0.0.1"
_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port")


def server_patch(ask: Callable[[Mapping[str, Any]], None]) -> Patch:
    """Returns the patch of the class with which TRL's Trainers generate.

    `ask` is called with its arguments when a Trainer is created, and returns when the server answers.
    """
    target = "trl.generation.vllm_generation:VLLMGeneration.__init__"
    needs = ("model", "mode", "max_model_length", "model_impl")
    return Patch(target, "trl>=0.24", functools.partial(_served, ask), needs=needs, optional=True)


def _served(
    ask: Callable[[Mapping[str, Any]], None], original: Callable[..., None], /, self: Any, *args: Any, **kwargs: Any
) -> None:
    """Starts the server of generators=N, since the model of the Trainer is known here."""
    ask(inspect.signature(original).bind(self, *args, **kwargs).arguments)
    original(self, *args, **kwargs)


def name_server(args: ArgumentsLike, generators: int, port: int) -> None:
    """Sets the address of the server in the arguments of a Trainer that generates, before they are validated.

    Raises:
        ConfigError: The arguments request no server, or another one.
        SetupError: The script uses Unsloth, which has an engine in each process.
        VersionError: TRL is too old.
    """
    if not hasattr(args, "vllm_server_base_url"):
        return
    asked = f"generators={generators}"
    if not check_version(_NEEDED).ok:
        raise VersionError(f"{asked} needs {_NEEDED}.", hint=f'pip install "{_NEEDED}", or leave generators out.')
    if "unsloth" in sys.modules:
        raise SetupError(
            f"{asked} is for TRL's own models; Unsloth's generate in each process.",
            hint="Leave generators out, and set fast_inference=True for an engine on each GPU.",
        )
    if not args.use_vllm or args.vllm_mode != "server":
        raise ConfigError(
            f"{asked}, but use_vllm={args.use_vllm} and vllm_mode={args.vllm_mode!r}: nothing is asked of a server.",
            hint='Set use_vllm=True and vllm_mode="server", or leave generators out.',
        )
    ours = {"vllm_server_base_url": f"http://{_HOST}:{port}", "vllm_group_port": port + 1}
    usual = {field.name: field.default for field in dataclasses.fields(args) if field.name in _ADDRESS}
    for name, default in usual.items():
        # Arguments that are built from others have our address.
        if (value := getattr(args, name)) not in (default, ours.get(name)):
            raise ConfigError(
                f"{asked} starts a server, but {name}={value!r} names another one.",
                hint=f"Leave {name} out, or generators.",
            )
    for name in ours.keys() & usual.keys():
        setattr(args, name, ours[name])


def ask_for_server(
    events: EventWriter, *, is_first: bool, port: int, timeout_s: float, given: Mapping[str, Any]
) -> None:
    """Requests the server from the supervisor, and waits until it answers.

    Args:
        is_first: This is rank 0, which requests it.
        timeout_s: Limit of the supervisor for the server, and of the ranks for rank 0.
        given: Arguments of TRL's `VLLMGeneration`.

    Raises:
        ConfigError: The model was not loaded from a folder or from the Hub.
        RankTimeoutError: Rank 0 has not requested the server, or the supervisor does not answer.
    """
    if is_first:
        events.write(SERVER_WANTED, port=port, arguments=_command_of(given))
    # TRL sends requests to this machine, which must not go through a proxy.
    os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy", os.environ.get("NO_PROXY")), _HOST]))
    # The supervisor ends the ranks of a server that fails.
    deadline_s = time.monotonic() + 2 * timeout_s
    if not wait_until(lambda: is_ready(events.run_dir, events.attempt), deadline_s):
        raise RankTimeoutError(
            f"generators: no server answered within twice timeout_s={timeout_s:g} s.",
            hint="Let all ranks make the Trainer.",
        )


def _command_of(given: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of TRL's command."""
    model = given["model"].name_or_path
    if not model:
        raise ConfigError(
            "generators: the server loads the Trainer's model by its name, and it has none.",
            hint="Load the model from a folder or from the Hub.",
        )
    values = {
        "model": model,
        "max_model_len": given.get("max_model_length"),
        "vllm_model_impl": given.get("model_impl"),
        "trust_remote_code": given.get("trust_remote_code") or None,
    }
    return [text for name, value in values.items() if value is not None for text in (f"--{name}", str(value))]
