"""Which device trains which client, and when. Pure: plain values in, plain values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Placement = Literal["round_robin", "balanced"]


@dataclass(frozen=True)
class Client:
    """What is known of a client's work.

    Args:
        client_id: Its number, from 0.
        cost: Work of one round, in any unit that is the same for all: examples, or seconds on a device of speed 1.
        memory_bytes: What it needs of a device while it runs; 0 = not known.
    """

    client_id: int
    cost: float = 1.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Device:
    """What is known of a device.

    Args:
        speed: Units of `Client.cost` that it does in a second; where it runs several clients at once, all together.
        memory_bytes: What all clients that run on it at once may need together; None = not known, so no limit.
    """

    speed: float = 1.0
    memory_bytes: int | None = None


def round_robin(client_id: int, num_devices: int) -> int:
    """Position of the device that a client always gets, whoever else takes part in the round."""
    return client_id % num_devices


def deal(clients: Sequence[Client], devices: Sequence[Device], how: Placement) -> list[list[int]]:
    """Gives every client of a round a device.

    "balanced" takes the longest client first and puts it where it would end first: on devices of equal speed the last
    one then ends within 4/3 of the shortest possible time (Graham 1969, "Bounds on Multiprocessing Timing Anomalies"),
    on unequal ones within twice that (Gonzalez, Ibarra, Sahni 1977, "Bounds for LPT Schedules on Uniform Processors").

    Args:
        clients: Those of the round. Equal costs keep their order.
        devices: Where they may run.
        how: "round_robin", which looks at nothing else, or "balanced".

    Returns:
        `queues[position of the device]` = client ids in the order in which they start. Every client occurs once.
    """
    queues: list[list[int]] = [[] for _ in devices]
    if how == "round_robin":
        for client in clients:
            queues[round_robin(client.client_id, len(devices))].append(client.client_id)
        return queues
    ends_s = [0.0] * len(devices)
    for client in sorted(clients, key=lambda client: -client.cost):
        fitting = [position for position, device in enumerate(devices) if can_start(client, device, ())]
        # It fits on none (a larger device is gone): try the largest one, whose own error tells if it is too small.
        fitting = fitting or [max(range(len(devices)), key=lambda position: devices[position].memory_bytes or 0)]
        # Of two that would finish at the same time take the faster one; then the first.
        end_s, _, position = min(
            (ends_s[position] + client.cost / devices[position].speed, -devices[position].speed, position)
            for position in fitting
        )
        ends_s[position] = end_s
        queues[position].append(client.client_id)
    return queues


def can_start(client: Client, device: Device, running: Iterable[Client]) -> bool:
    """True if the client fits with those that run on the device. On a free one, all that `deal` put there do."""
    if device.memory_bytes is None:
        return True
    return client.memory_bytes + sum(other.memory_bytes for other in running) <= device.memory_bytes


def slots_that_fit(free_bytes: int, slot_bytes: int, limit: int) -> int:
    """Slots that a device holds, at least one and at most `limit`.

    Args:
        free_bytes: What the device has left, nothing of ours on it.
        slot_bytes: What one slot needs at its peak; 0 = not known, then one.
    """
    return max(1, min(limit, free_bytes // slot_bytes)) if slot_bytes > 0 else 1
