"""Which task does a slot that is free take? What was measured says how long a client takes, and what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unsloth_multigpu.federated.device import SlotDevice
from unsloth_multigpu.federated.placement import Client, Device, Placement, can_start, deal, slots_that_fit
from unsloth_multigpu.federated.task import Task

# Device memory that the driver takes for each process, besides what torch reserves: measured with CUDA 12 and 13.
_CONTEXT_BYTES = 512 * 2**20
# Allows for a next client that needs a little more than the first.
_MARGIN = 1.1


@dataclass
class _Sum:
    num_examples: int = 0
    seconds: float = 0.0


class MeasuredCosts:
    """What the clients of earlier messages took.

    A client's cost is the seconds that it took times the speed of its device, in examples per second: an unequal device
    shows by its speed, a client whose examples are long by its own seconds.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], tuple[float, SlotDevice]] = {}
        self._memory_bytes: dict[int, int] = {}
        self._devices: dict[tuple[str, SlotDevice], _Sum] = {}
        self._held_bytes: dict[SlotDevice, int] = {}
        # A cache until the next measurement: dealing asks for the cost of every client that waits.
        self._usual_costs: dict[str, float] = {}

    def note(self, task: Task) -> None:
        """Records a finished task. The first task of a process is left out: its time includes loading the model."""
        assert task.device is not None
        peak_bytes = task.peak_memory_bytes
        self._memory_bytes[task.client_id] = max(peak_bytes, self._memory_bytes.get(task.client_id, 0))
        self._held_bytes[task.device] = max(peak_bytes, self._held_bytes.get(task.device, 0))
        if task.is_first or task.error is not None:
            return
        self._usual_costs.clear()
        self._seconds[task.kind, task.client_id] = task.seconds, task.device
        total = self._devices.setdefault((task.kind, task.device), _Sum())
        total.num_examples += task.num_examples
        total.seconds += task.seconds

    def speed(self, kind: str, device: SlotDevice) -> float:
        """Examples per second of one slot; 1 where they are not known."""
        known = {d: s.num_examples / s.seconds for (k, d), s in self._devices.items() if k == kind and s.num_examples}
        mean = sum(known.values()) / len(known) if known else 1.0
        return known.get(device, mean)

    def client(self, kind: str, client_id: int) -> Client:
        """The expected cost and memory of a client; the mean cost of the others if it has not run yet."""
        seconds, device = self._seconds.get((kind, client_id), (0.0, None))
        cost = self._usual_cost(kind) if device is None else seconds * self.speed(kind, device)
        return Client(client_id, cost, self._memory_bytes.get(client_id, 0))

    def held_bytes(self, device: SlotDevice) -> int:
        """The most memory that a client took there: the device has it, even if less was free when that was read."""
        return self._held_bytes.get(device, 0)

    def forget_clients(self) -> None:
        """Forgets what was measured of clients, and keeps the speeds of devices."""
        self._seconds.clear()
        self._memory_bytes.clear()
        self._usual_costs.clear()

    def _usual_cost(self, kind: str) -> float:
        if kind not in self._usual_costs:
            costs = [s * self.speed(kind, device) for (k, _), (s, device) in self._seconds.items() if k == kind]
            self._usual_costs[kind] = sum(costs) / len(costs) if costs else 1.0
        return self._usual_costs[kind]


class Queues:
    """The tasks that wait, by device.

    Args:
        how: As in `placement.deal`.
        costs: What "balanced" goes by.
    """

    def __init__(self, how: Placement, costs: MeasuredCosts) -> None:
        self._how = how
        self._costs = costs
        self._waiting: dict[SlotDevice, list[Task]] = {}
        self._num_slots: Mapping[SlotDevice, int] = {}

    def deal(
        self, tasks: Iterable[Task], num_slots: Mapping[SlotDevice, int], memory: Mapping[SlotDevice, int]
    ) -> None:
        """Deals these tasks and all that wait.

        Args:
            num_slots: Of each device that lives.
            memory: What each device had free, in bytes; only where it is known.
        """
        waiting = [*self.take_all(), *tasks]
        live, self._num_slots = list(num_slots), num_slots
        self._waiting = {device: [] for device in live}
        for kind in dict.fromkeys(task.kind for task in waiting):
            chosen = [task for task in waiting if task.kind == kind]
            clients = {task.client_id: self._client(task) for task in chosen}
            places = [Device(self._costs.speed(kind, d) * num_slots[d], self._limit(d, memory)) for d in live]
            for device, ids in zip(live, deal(list(clients.values()), places, self._how), strict=True):
                order = {client_id: place for place, client_id in enumerate(ids)}
                own = [task for task in chosen if task.client_id in order]
                self._waiting[device] += sorted(own, key=lambda task: order[task.client_id])

    def take(self, device: SlotDevice, running: Sequence[Task], memory: Mapping[SlotDevice, int]) -> Task | None:
        """The next task for a slot of `device`; None if none waits, or none fits into memory with those that run."""
        place = Device(memory_bytes=self._limit(device, memory))
        beside = [self._client(task) for task in running]
        if own := self._waiting.get(device, []):
            # On a free device the task starts whatever it needs: if it fits nowhere, its own error says so.
            fits = (n for n, t in enumerate(own) if not running or can_start(self._client(t), place, beside))
            return _pop(own, next(fits, None))
        if self._how == "round_robin" or not self._waiting:
            return None
        # This device is idle early: steal from the device with most remaining work if that finishes sooner.
        other = max(self._waiting, key=self._rest_s)
        rest_s, tasks = self._rest_s(other), self._waiting[other]
        helps = (
            n
            for n, t in enumerate(tasks)
            if self._seconds(t, device) <= rest_s and can_start(self._client(t), place, beside)
        )
        return _pop(tasks, next(helps, None))

    def put_first(self, task: Task, devices: Sequence[SlotDevice]) -> None:
        """Queues a task again whose slot has died, on another device if there is one."""
        others = [device for device in devices if device != task.device] or list(devices)
        chosen = min(others, key=self.num_waiting)
        self._waiting.setdefault(chosen, []).insert(0, task)

    def take_all(self) -> list[Task]:
        """Removes and returns all waiting tasks."""
        tasks = [task for queue in self._waiting.values() for task in queue]
        self._waiting = {}
        return tasks

    def num_waiting(self, device: SlotDevice) -> int:
        """How many wait for this device."""
        return len(self._waiting.get(device, ()))

    def _limit(self, device: SlotDevice, memory: Mapping[SlotDevice, int]) -> int | None:
        if self._how == "round_robin" or device not in memory:
            return None
        return max(memory[device], self._costs.held_bytes(device))

    def _rest_s(self, device: SlotDevice) -> float:
        seconds = [self._seconds(task, device) for task in self._waiting[device]]
        return max(sum(seconds) / self._num_slots.get(device, 1), *seconds, 0.0)

    def _seconds(self, task: Task, device: SlotDevice) -> float:
        return self._client(task).cost / self._costs.speed(task.kind, device)

    def _client(self, task: Task) -> Client:
        return self._costs.client(task.kind, task.client_id)


def _pop(tasks: list[Task], place: int | None) -> Task | None:
    return None if place is None else tasks.pop(place)


def slots_to_have(free_bytes: int, peak_bytes: int, device: SlotDevice, limit: int) -> int:
    """How many slots fit on a device that had `free_bytes` left next to one slot, whose client took `peak_bytes`."""
    context_bytes = 0 if device.kind == "cpu" else _CONTEXT_BYTES
    return slots_that_fit(free_bytes + context_bytes, round(_MARGIN * (peak_bytes + context_bytes)), limit)
