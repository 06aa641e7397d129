"""Opens and aborts the process group of a notebook's ranks, and keeps their models usable after it has ended.

After a failed cell the ranks get a new group, and rank 0's weights. Earlier Trainers cannot train again. Sharded models
move to the new group; the use of one whose shards are lost is an error.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore

from unsloth_multigpu.accelerator import KINDS, kind_of
from unsloth_multigpu.errors import DistributedError, DivergenceError, SetupError
from unsloth_multigpu.group.board import Board
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.model import unwrapped
from unsloth_multigpu.group.replicas import persistent_buffers, replicated_tensors
from unsloth_multigpu.group.shards import class_of, forget_pass, fsdp_modules, has_shards
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.notebook.kernel_share import variables_set
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.wire.digest import digest_of
from unsloth_multigpu.wire.identity import SINGLE_PROCESS

logger = get_logger(__name__)

# Short, because all ranks open the group at the same time.
_OPEN_LIMIT_S = 60.0
_Address = tuple[str, int]
# Why a sharded model is lost.
_INTERRUPTED = "an error or a second Stop has interrupted its training, so the ranks' shards may be a step apart."
_ALONE = "the ranks with its other shards have ended."
_OLD_TORCH = "a cell has failed or was stopped, and torch before 2.13 cannot move its shards to a new process group."
_OTHER_GROUP = "its shards belong to a process group that the script has made, and that is gone."


def open_group(run_dir: Path, generation: int, backend: str, timeout_s: float) -> None:
    """Opens the default process group. `generation` is a number that grows by one with each group. Collective.

    The store is a file in the run's private folder: no port is open, and no other user can join. `timeout_s` limits one
    collective.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind_of(backend) is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    path = run_dir / f"store_{generation}"
    # Created here, because other users could read a file that the store creates.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    store = FileStore(str(path), world_size)
    Board(rank, store).meet(world_size, timeout_s=min(timeout_s, _OPEN_LIMIT_S), hint="Restart the kernel.")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    dist.barrier()


def close_group() -> None:
    """Destroys the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_group(pids: Sequence[int]) -> None:
    """Aborts the group, so that a collective in which another thread waits raises an error. Local, not collective.

    gloo's `abort()` does not end a wait (torch 2.13), but a shutdown of the TCP connections between the ranks, `pids`,
    does. Listening sockets are left alone: shutting one down ends the process.
    """
    if not dist.is_initialized():
        return
    _abort_backends()
    theirs = {(there, here) for pid in pids if pid != os.getpid() for _, _, here, there in _connections(pid)}
    for descriptor, family, *ends in _connections(os.getpid()):
        # The connection may be closed by now, and the descriptor may belong to another file.
        with suppress(OSError), socket.fromfd(descriptor, family, socket.SOCK_STREAM) as end:
            if tuple(ends) in theirs and [_address(end.getsockname()), _address(end.getpeername())] == ends:
                end.shutdown(socket.SHUT_RDWR)


def _abort_backends() -> None:
    """Aborts the accelerators' backends as one NCCL group: one by one they can deadlock (pytorch#119797)."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    backends = []
    for group, (name, _) in list(c10d._world.pg_map.items()):
        kinds = [kind for kind, of in KINDS.items() if of.backend in name]
        backends += [group._get_backend(torch.device(kind)) for kind in kinds[:1]]
    grouped = [backend for backend in backends[:1] if hasattr(backend, "_group_start")]
    for backend in grouped:
        backend._group_start()
    for backend in backends:
        backend.abort()
    for backend in grouped:
        backend._group_end()


def _connections(pid: int) -> list[tuple[int, int, _Address, _Address]]:
    """Returns descriptor, family, own and peer's address of each TCP connection of a process; [] if it has ended."""
    try:
        process = psutil.Process(pid)
        # It is named `connections` in psutil 5, which the kernel of an older image may have imported.
        found = getattr(process, "net_connections", None) or process.connections
        connections = found(kind="tcp")
    except psutil.NoSuchProcess:
        return []
    established = [c for c in connections if c.status == psutil.CONN_ESTABLISHED]
    return [(c.fd, c.family, _address(c.laddr), _address(c.raddr)) for c in established]


def _address(address: Sequence[Any]) -> _Address:
    """Returns host and port, without the interface that `getsockname` adds to the host: "fe80::1%eth0"."""
    return str(address[0]).partition("%")[0], int(address[1])


class Trainings:
    """The Trainers that were trained in this process group, by the number of their last training.

    A Trainer is recorded after all ranks have agreed on the training, so a number means the same Trainer on each, even
    if some ranks have released theirs.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[TrainerLike], Loop]] = {}
        # Numbers of the trainings that an exception has interrupted.
        self._interrupted: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._noted)

    @property
    def is_interrupted(self) -> bool:
        """True if an exception has interrupted a training."""
        return any(trainer.is_in_train for trainer in self._living().values())

    def note(self, number: int, loop: Loop) -> None:
        """Records a Trainer before the training of this number in the session.

        `loop` steers it, and does not refer to the Trainer after `let_go`.
        """
        trainer = loop.trainer
        self._noted = {n: noted for n, noted in self._noted.items() if noted[0]() not in (None, trainer)}
        self._noted[number] = weakref.ref(trainer), loop

    def retire(self) -> None:
        """Makes training with the Trainers and DDP wrappers of this group an error.

        The ranks' optimizers may be a step apart. A Trainer still evaluates and saves.
        """
        self._interrupted = {number for number, trainer in self._living().items() if trainer.is_in_train}
        if self._interrupted:
            logger.info("the training was interrupted. To train again, make a new Trainer")
        for number, trainer in self._living().items():
            self._noted[number][1].let_go()  # An exception may have interrupted an earlier `let_go`.
            trainer.is_in_train = False
            trainer.train = _refuse_old_trainer
            _remove_ddp(trainer)
        for ddp in _living_modules(nn.parallel.DistributedDataParallel):
            ddp._remove_autograd_hooks()  # They would run in the model's next wrapper, too.
            ddp.forward = _refuse_old_wrapper

    def send_weights(self, manager: DDPManager, *, is_broken: bool) -> None:
        """Broadcasts rank 0's trainable weights and buffers, and forgets the Trainers. Collective in the new group.

        Sharded weights are not sent. A sharded model is lost if its training was interrupted and the ranks may be a
        step apart: `is_broken`, see `Kernel`.

        Raises DivergenceError on all ranks if names, shapes or types of a model's tensors differ between ranks.
        """
        models = {number: trainer.model for number, trainer in self._living().items()}
        self._noted.clear()
        mine = {number: [*_facts(model), number in self._interrupted] for number, model in models.items()}
        ranks = manager.gather_json(mine)
        # Only Trainers that exist on all ranks.
        for number in sorted(n for n in map(int, ranks[0]) if all(str(n) in rank for rank in ranks)):
            facts = [rank[str(number)][:2] for rank in ranks]
            if is_broken and has_shards(models[number]) and any(rank[str(number)][2] for rank in ranks):
                lose(models[number], _INTERRUPTED)
            if any(of_rank != facts[0] for of_rank in facts):
                raise DivergenceError(
                    f"The model of training number {number + 1} of this notebook has different tensors on the ranks "
                    f"(their number, and a digest of names, shapes and types): {facts}.",
                    hint="Load the model again and make a new Trainer.",
                )
            manager.broadcast_tensors(tensor for _, tensor in _shared(models[number]))

    def _living(self) -> dict[int, TrainerLike]:
        return {n: trainer for n, (found, _) in self._noted.items() if (trainer := found()) is not None}


def become_one_process() -> None:
    """Resets accelerate to one process, also in existing objects, such as the Accelerator of a Trainer."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.PartialState._shared_state:
        return
    kept = dict(state.AcceleratorState._shared_state)
    # As transformers does for every TrainingArguments. All objects of one of these classes share its state, so those of
    # Trainers change, too. Settings such as the precision are kept.
    is_cpu = state.PartialState._shared_state["_cpu"]
    state.AcceleratorState._reset_state(reset_partial_state=True)
    # Without a launcher's variables, which the kernel may have had before: accelerate would open a process group.
    with variables_set(dict.fromkeys(SINGLE_PROCESS.variables())):
        alone = vars(state.PartialState(cpu=is_cpu))
    if kept:
        state.AcceleratorState._shared_state.update({**kept, **alone})


def _refuse_old_trainer(*_args: Any, **_kwargs: Any) -> Any:
    raise SetupError(
        "This Trainer cannot train again: a cell failed or was stopped, or the other ranks have ended.",
        hint="Make a new Trainer. The model has rank 0's weights.",
    )


def _refuse_old_wrapper(*_args: Any, **_kwargs: Any) -> Any:
    raise DistributedError(
        "This model was wrapped for a process group that is gone, because a cell failed or was stopped.",
        hint="Wrap unwrap_model(model), and make a new optimizer. Without other ranks, train unwrap_model(model).",
    )


def _remove_ddp(trainer: TrainerLike) -> None:
    """Removes the DDP wrapper, whose group has ended."""
    ddp, accelerator = nn.parallel.DistributedDataParallel, trainer.accelerator
    models = [[*unwrapped(model)] for model in accelerator._models]
    accelerator._models = [chain[0] for chain in models if not any(isinstance(m, ddp) for m in chain)]
    trainer.model_wrapped = trainer.model
    trainer.model.zero_grad(set_to_none=True)  # The gradients may be views of DDP's buckets.


def _facts(model: nn.Module) -> list[Any]:
    """Returns what must be equal on all ranks: the number of tensors, and a digest of their names, shapes and types."""
    shared = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _shared(model)]
    return [len(shared), digest_of(shared)]


def _shared(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*replicated_tensors(model), *persistent_buffers(model)]


def rejoin() -> None:
    """Moves every sharded model of this process to the new process group. Models that cannot be moved are lost."""
    for root in _roots():
        if not forget_pass(root):
            lose(root, _OLD_TORCH)
            continue
        try:
            for info in {id(info): info for info in _mesh_infos(root)}.values():
                # The new group has the old one's name. DTensors look it up at each use, FSDP2 only here.
                info.__post_init__()
        except RuntimeError:  # The script has made the groups of the mesh.
            lose(root, _OTHER_GROUP)


def lose_all() -> None:
    """Makes the use of any sharded model of this process an error, because the other ranks' shards are gone."""
    for root in _roots():
        lose(root, _ALONE)


def lose(model: nn.Module, why: str) -> None:
    """Makes computing or saving with a model an error. Either would raise an unclear error, or use wrong weights."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise SetupError(f"{class_of(model).__name__}: {why}", hint="Load the model or a checkpoint again.")

    module: Any
    for module in model.modules():
        module.register_forward_pre_hook(refuse, prepend=True)
        module.register_state_dict_pre_hook(refuse)
        if hasattr(module, "generate"):  # It may gather weights before it calls the module.
            module.generate = refuse


def _roots() -> list[Any]:
    """Returns the outermost modules of this process on which `fully_shard` was called, also without a Trainer."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    found = _living_modules(fsdp.FSDPModule)
    below = {id(inner) for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if id(module) not in below]


def _living_modules(kind: type) -> list[Any]:
    # Faster than isinstance(), which is slow for an abstract base class such as DistributedDataParallel.
    return [module for module in gc.get_objects() if kind in type(module).__mro__]


def _mesh_infos(root: nn.Module) -> list[Any]:
    """Returns FSDP2's mesh infos of all modules below `root`."""
    states = [module._get_fsdp_state() for module in fsdp_modules(root)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    found = [getattr(o, name) for o in (*groups, *parameters) for name in ("mesh_info", "post_forward_mesh_info")]
    return [info for info in found if info is not None]
