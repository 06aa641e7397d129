"""DDPManager: this rank's device, the process group, and communication between ranks other than gradients."""

from __future__ import annotations

import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore

from unsloth_multigpu.accelerator import CPU_BACKEND, WITHOUT_GROUP, backend_of, kind_of
from unsloth_multigpu.errors import DivergenceError
from unsloth_multigpu.group.board import Board
from unsloth_multigpu.group.outcome import failure, value_of
from unsloth_multigpu.group.random_state import read_seeded_state, write_seeded_state
from unsloth_multigpu.group.saves import Saves
from unsloth_multigpu.group.waits import Waits
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.identity import RankIdentity

logger = get_logger(__name__)

_Value = TypeVar("_Value")

_PREFIX = "unsloth_multigpu"
# From this version on, NCCL lets ranks share a GPU.
_SHARING_NCCL = (2, 30)
# Size of a short message of `gather_json`, padding included. A longer message is sent after its length, in a second
# collective. The last messages stay in device memory, see `_finish`.
_SHORT_BYTES = 1024
_LONG = b"bytes "


class DDPManager(Board):
    """Connects a rank with the others: process group, store and collectives.

    Args:
        session_index: Number of this session in the process. A later session must not read keys of an earlier one.

    Attributes:
        connect_store: Connects to the store of this run on first use.
        tell: Sends an event of the given kind to the supervisor.
        saves: Lets rank 0 save while the others wait.
        waits: Adds up the seconds that this rank waits for others.
    """

    def __init__(self, identity: RankIdentity, config: MultiGPUConfig, session_index: int = 0) -> None:
        super().__init__(identity.rank)
        self.identity = identity
        self.config = config
        self._session_index = session_index
        self.connect_store: Callable[[], Store] = lambda: _connect_store(identity, config.timeout_s)
        self.tell: Callable[[str], object] = lambda _kind: None
        self._last_works: deque[Any] = deque(maxlen=8)
        self._is_store_on_rank_0 = False  # Rank 0's process serves the store that this rank has used.
        self.saves = Saves(self)
        self.waits = Waits()

    @functools.cached_property
    def sequence_group(self) -> dist.ProcessGroup:
        """The group of ranks that share samples with this one. Collective on first access."""
        timeout = timedelta(seconds=self.config.timeout_s)
        return dist.new_subgroups(self.config.sequence_parallel, timeout=timeout)[0]  # type: ignore[no-any-return]

    @property
    def store(self) -> Store:
        """Key-value store shared by all ranks. It works without a process group."""
        if self._store is None:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = PrefixStore(f"{attempt}/{self._session_index}", self._store_of_run)
            # Rank 0's process serves it under srun and Ray, unlike torch elastic's and a notebook's.
            if self.identity.world_size > 1 and self.identity.launcher != "notebook" and not _is_elastic():
                self._is_store_on_rank_0 = True
                self.come()
        return self._store

    def leave_store(self, limit_s: float) -> None:
        """Called when this rank ends. If rank 0 serves the store, it waits for the others, at most `limit_s`."""
        if self._is_store_on_rank_0:
            self._is_store_on_rank_0 = False
            self.leave(self.identity.world_size, limit_s)

    @functools.cached_property
    def _store_of_run(self) -> Store:
        """The store of the run, including keys of earlier attempts if the launcher keeps them."""
        return PrefixStore(_PREFIX, self.connect_store())

    def meet_ranks(self) -> None:
        """Waits until all ranks are ready to open the process group; returns at once if it exists. Raises as `meet`."""
        if self.identity.world_size > 1 and not dist.is_initialized():
            self.tell("meeting")  # The supervisor knows which ranks have ended and will not come.
            self.meet(
                self.identity.world_size,
                timeout_s=self.config.timeout_s,
                hint="Let all ranks run the same code up to the training. Raise timeout_s if it only takes long.",
            )
            self.tell("met")

    def open_group(self) -> None:
        """Opens the default process group if it does not exist. accelerate opens it when TrainingArguments are made."""
        if self.identity.world_size == 1:
            return  # With one process, the collectives below return its own values.
        if not dist.is_initialized():
            self.meet_ranks()
            timeout = timedelta(seconds=self.config.timeout_s)
            device_type = local_device(self.identity, self.config).type
            backend = CPU_BACKEND if sends_over_host() else backend_of(device_type)
            if self.config.shard_offload and device_type != "cpu":
                # Shards in host memory are gathered over gloo when they are saved.
                backend = f"cpu:{CPU_BACKEND},{device_type}:{backend}"
            dist.init_process_group(backend, timeout=timeout)
        if dist.get_world_size() != self.identity.world_size or dist.get_rank() != self.identity.rank:
            raise DivergenceError(
                f"The process group has rank={dist.get_rank()} world_size={dist.get_world_size()}, the launcher said "
                f"rank={self.identity.rank} world_size={self.identity.world_size}.",
                hint="Do not call init_process_group with other values.",
            )

    def agree_on_random_state(self) -> None:
        """Takes over the random state of the rank that calls this first. No rank waits for another.

        If the script has seeded the generators, they are equal on all ranks and nothing changes. Ranks that torchrun
        restarts get the state of the first attempt.
        """
        write_seeded_state(self._store_of_run.compare_set("draws", "", read_seeded_state()).decode())
        # A running process cannot change its string hash, on which the order of `list(set(labels))` depends.
        mine = str(hash(_PREFIX))
        theirs = self._store_of_run.compare_set("string hash", "", mine).decode()
        if theirs != mine and self._store_of_run.add("string hash told", 1) == 1:
            logger.warning(
                "the ranks hash strings differently: the order of a set of strings differs between ranks, and so do "
                "labels that are numbered in this order. Start all ranks with PYTHONHASHSEED=0 in their environment"
            )

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Compares facts that must be equal on all ranks: JSON values, under the same names on every rank. Collective.

        Raises:
            DivergenceError: On every rank; it names the facts that differ, with the values of two ranks.
        """
        if self.identity.world_size == 1:
            return
        texts = {name: json.dumps(facts[name], sort_keys=True, default=str) for name in sorted(facts)}
        if differences := first_difference(self.gather_json(texts)):
            raise DivergenceError(
                "The ranks are about to train different runs. " + "; ".join(differences.values()) + ".",
                hint="Give shuffles, splits and generators of your own (default_rng(), random.Random()) a seed, sort "
                "sets of strings (or start with PYTHONHASHSEED=0), and do not let the script depend on the rank.",
            )

    def broadcast_batches(self, batches: Iterable[Sequence[int]]) -> list[list[int]]:
        """Gives every rank rank 0's batches of sample indices. Only rank 0 reads `batches`. Collective."""
        found: list[list[int]] = self.broadcast_json(
            [[int(i) for i in batch] for batch in batches] if self.identity.rank == 0 else None
        )
        return found

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies rank 0's tensors, bit for bit, into those of every other rank. Collective.

        All ranks pass the same number of tensors, with the same shapes and dtypes, on any devices.
        """
        device = _wire_device()
        for tensor in tensors:
            if not tensor.numel():
                continue
            plain = tensor.detach()
            wire = plain.to(device).contiguous()
            # As bytes, because not every backend sends every dtype.
            self._finish(dist.broadcast(wire.reshape(-1).view(torch.uint8), src=0, async_op=True))
            if wire.data_ptr() != plain.data_ptr():
                plain.copy_(wire)
        self._last_works.clear()  # They hold the tensors, which may be weights that are sharded next.

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replaces gradients by their mean over the ranks, as DDP does. Collective.

        The parameters are the same on all ranks. A parameter that has no gradient on any rank keeps none.
        """
        device = _wire_device()
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            has_gradient = gradient.new_full((1,), parameter.grad is not None)
            wire = torch.cat([gradient.reshape(-1), has_gradient]).to(device)
            self._finish(dist.all_reduce(wire, async_op=True))
            if wire[-1]:
                parameter.grad = (wire[:-1] / self.identity.world_size).view_as(parameter).to(parameter.device)
        self._last_works.clear()

    def lead(self, key: str, what: str, work: Callable[[], _Value], *, timeout_s: float) -> _Value:
        """Returns the JSON value that `work` returns on rank 0, which alone calls it. `key` is used once.

        Not a collective, so the other ranks may wait for longer than its timeout.

        Raises:
            DistributedError: On ranks above 0, if `work` raised an error. It is also an instance of that error's class.
        """
        if self.identity.world_size == 1:
            return work()
        if self.rank > 0:
            outcome = json.loads(self.wait_for(key, f"rank 0 in {what}", timeout_s=timeout_s))
            return value_of(outcome, what)  # type: ignore[no-any-return]
        try:
            value = work()
            outcome = json.dumps({"value": value})
        except BaseException as error:
            self.publish(key, json.dumps(failure(error)))
            raise
        self.publish(key, outcome)
        return value

    def broadcast_json(self, value: Any) -> Any:
        """Returns rank 0's JSON value. Collective."""
        return self.gather_json(value if self.identity.rank == 0 else None)[0]

    def broadcast_numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `values` with rank 0's numbers, so that all ranks decide alike. Other values stay. Collective."""
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        return {**values, **self.broadcast_json(numbers)}

    def gather_json(self, value: Any) -> list[Any]:
        """Returns the JSON values of all ranks, in rank order. One collective if all are short, otherwise two."""
        data = json.dumps(value).encode()
        if self.identity.world_size == 1:
            return [json.loads(data)]
        # JSON may end with spaces, so a message may be padded. Of a long one, only the length is sent first.
        head = data if len(data) <= _SHORT_BYTES else _LONG + str(len(data)).encode()
        rows = self._gather_bytes(head.ljust(_SHORT_BYTES))
        if any(row.startswith(_LONG) for row in rows):
            longest = max(int(row[len(_LONG) :]) for row in rows if row.startswith(_LONG))
            rows = self._gather_bytes(data.ljust(longest))
        return [json.loads(row) for row in rows]

    def _finish(self, work: Any) -> None:
        """Waits for a collective and keeps its handle.

        A thread of the backend drops its reference a moment after the collective is done. If that is the last one, the
        thread needs the GIL to free the tensors, and an exiting process aborts (SIGABRT, seen with gloo).
        """
        with self.waits.counted():
            work.wait()
        self._last_works.append(work)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Returns the messages of all ranks, which have the same length. The host waits for one copy."""
        wire = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_wire_device())
        gathered = wire.new_empty(self.identity.world_size, len(wire))
        self._finish(dist.all_gather(list(gathered), wire, async_op=True))
        return [row.numpy().tobytes() for row in gathered.cpu()]


def first_difference(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Compares the first rank that differs with rank 0. Returns a sentence by name; empty if all ranks are equal."""
    other = next((rank for rank, theirs in enumerate(ranks) if theirs != ranks[0]), 0)
    mine, theirs = ranks[0], ranks[other]
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return {n: f"{n}: rank 0 has {mine.get(n)}, rank {other} has {theirs.get(n)}" for n in names}


def local_device(identity: RankIdentity, config: MultiGPUConfig) -> torch.device:
    """Returns the device of this rank."""
    if config.device == "cpu":
        return torch.device("cpu")
    accelerator = find_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, identity.local_rank % torch.accelerator.device_count())


def find_accelerator() -> torch.device | None:
    """Returns the kind of accelerator of this machine, such as "cuda"; None if there is none. Opens no device."""
    try:
        # Without `check_available`, which torch 2.6 does not have. Its is_available() would open the device.
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without an accelerator.
        return None
    if accelerator is None or accelerator.type == WITHOUT_GROUP:
        return None
    return accelerator if torch.get_device_module(accelerator).is_available() else None


def ranks_share_device(num_visible: int, environment: Mapping[str, str]) -> bool:
    """True if several ranks may use the only visible device: the user has set NCCL's variable for that."""
    return num_visible == 1 and environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def sends_over_host() -> bool:
    """True in a rank that shares its GPU if NCCL is too old for that. Then gloo sends the tensors of the GPU."""
    if not torch.cuda.is_available() or not ranks_share_device(torch.cuda.device_count(), os.environ):
        return False
    return not dist.is_nccl_available() or torch.cuda.nccl.version()[:2] < _SHARING_NCCL


def _wire_device() -> torch.device:
    """Returns the device from which the default process group sends tensors."""
    # A group without a named backend has gloo for the CPU in addition to that of the accelerator.
    if kind_of(str(dist.get_backend())) is None:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _is_elastic() -> bool:
    """True if torch elastic serves a store for the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect_store(identity: RankIdentity, timeout_s: float) -> Store:
    # Without torch elastic rank 0 serves the store, and init_process_group connects to the same server.
    is_server = identity.rank == 0 and not _is_elastic()
    place, timeout = (identity.master_addr, identity.master_port), timedelta(seconds=timeout_s)
    return TCPStore(*place, is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=True)
