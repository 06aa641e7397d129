"""The weights that a federated training starts from, and those that it ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import nn

from unsloth_multigpu.errors import FederatedError, ResumeError
from unsloth_multigpu.federated.adapters import to_array, to_tensor
from unsloth_multigpu.federated.checkpoint import SavedRound
from unsloth_multigpu.federated.client import build_model
from unsloth_multigpu.federated.lora import save_adapter
from unsloth_multigpu.logs import get_logger

_log = get_logger(__name__)

# Loading a base model may take longer than a round of small clients.
_LEAST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Start:
    """What a client says of a freshly built model.

    Args:
        layout: Names and shapes of what does not travel.
        adapter_config: For `save_adapter`; "" where the model has no adapter.
        frozen: Parts of the adapter that are not trained.
        buffers: Names of arrays that are no parameters.
        obstacles: "project" and "exact" -> why they cannot work with this model.
    """

    arrays: ArrayRecord
    layout: Sequence[str] = ()
    adapter_config: str = ""
    frozen: ArrayRecord = field(default_factory=ArrayRecord)
    buffers: Sequence[str] = ()
    obstacles: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The global state after a training.

    Args:
        residual: What exact aggregation of LoRA left in addition to the arrays, for the original base weights.
    """

    arrays: ArrayRecord
    residual: ArrayRecord | None
    start: Start

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The travelling tensors, copies on the CPU."""
        return _tensors(self.arrays)

    def save(self, folder: Path) -> None:
        """Writes a PEFT adapter, or model.safetensors; raises OSError where the disk is full or fails."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.start.adapter_config:
            # Buffers are the base model's unless training has changed them; other tools refuse names they do not know.
            same = [name for name in self.start.buffers if self.arrays[name] == self.start.arrays.get(name)]
            state = {name: value for name, value in self.state_dict().items() if name not in same}
            save_adapter(folder, state | _tensors(self.start.frozen), self.residual, self.start.adapter_config)
            return
        from safetensors.torch import save_file

        save_file(self.state_dict(), folder / "model.safetensors")


def ask_for_start(grid: Grid, num_asked: int, timeout_s: float) -> Start:
    """Lets clients build their model, seeded, and takes the first one that says what it is.

    Args:
        num_asked: How many at once: one per slot, which all load what they need meanwhile.

    Raises:
        FederatedError: No client could, or they built different ones.
    """
    node_ids, reason = sorted(grid.get_node_ids()), "there are no clients"
    limit_s = max(timeout_s, _LEAST_TIMEOUT_S)
    # A second try with other clients, since a device may be gone.
    for asked in (node_ids[:num_asked], node_ids[num_asked : 2 * num_asked]):
        messages = [Message(RecordDict({"config": ConfigRecord()}), node_id, "query.initial") for node_id in asked]
        replies = list(grid.send_and_receive(messages, timeout=limit_s)) if asked else []
        starts = [_start_of(reply.content) for reply in replies if reply.has_content()]
        if starts:
            warn_of_unlike(starts)
            return starts[0]
        if asked:
            reason = str(replies[0].error.reason) if replies else f"no answer within {limit_s:g} s"
    raise FederatedError(
        f"no client could build its model: {reason}",
        hint="The log above shows the whole error. Does model_builder() work in a script of its own?",
    )


def start_of_model(model_builder: Callable[[], nn.Module], seed: int) -> Start:
    """The whole state_dict() of a model that is built here, as apps that follow Flower's documentation expect."""
    model = build_model(model_builder, torch.device("cpu"), seed)
    return Start(ArrayRecord({name: to_array(value) for name, value in model.state_dict().items()}))


def check_same_model(saved: SavedRound, start: Start) -> None:
    """Raises ResumeError, naming a tensor, where a saved round is not one of the clients' model."""
    before = _shapes(saved.arrays) | dict(line.split(": ", 1) for line in saved.layout)
    now = _shapes(start.arrays) | dict(line.split(": ", 1) for line in start.layout)
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise ResumeError(
                f"round {saved.server_round} has {name} of shape {before.get(name)}, the model of model_builder has "
                f"{now.get(name)}.",
                hint="Use the model_builder of the training that stopped.",
            )


def _tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Copies; safetensors wants them contiguous, and a transposed parameter is not."""
    contiguous = torch.contiguous_format
    return {name: to_tensor(array).clone(memory_format=contiguous) for name, array in arrays.items()}


def _shapes(arrays: ArrayRecord) -> dict[str, str]:
    return {name: str(tuple(array.shape)) for name, array in arrays.items()}


def warn_of_unlike(starts: Sequence[Start]) -> None:
    """Warns where processes draw other random numbers, as unlike GPUs do.

    No error: what travels is made equal, and frozen weights mostly come from files.
    """
    for other in starts[1:]:
        unlike = [name for name in starts[0].arrays if other.arrays.get(name) != starts[0].arrays[name]]
        if unlike:
            _log.warning(
                "model_builder makes %s another one in each process. The clients get the same one now; frozen weights "
                "that are drawn at random would stay different: draw them on the CPU.",
                unlike[0],
            )
            return


def _start_of(content: RecordDict) -> Start:
    config: Mapping[str, Any] = content.config_records["config"]
    return Start(
        content.array_records["arrays"],
        config["frozen-layout"],
        config["adapter-config"],
        content.array_records.get("adapter-frozen", ArrayRecord()),
        config["buffers"],
        {
            "project": config["not-projectable"],
            "exact": [*config["not-projectable"], *config["not-foldable"]],
        },
    )
