"""Chooses the client that a free slot runs next. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def choose_client(
    client_ids: Sequence[int], device: int, num_devices: int, how: str, seconds: Mapping[int, float]
) -> int | None:
    """Returns the index in `client_ids` of the next client; None = no client for this device.

    "balanced" chooses the longest one. On devices of equal speed the last client then ends within 4/3 of the optimal
    time (Graham 1969, "Bounds on Multiprocessing Timing Anomalies").

    Args:
        client_ids: Waiting clients, in their order.
        device: Index of the slot's device among the `num_devices` that work.
        how: "round_robin" = client_id % num_devices is the index of the client's device.
        seconds: Time of each client in its last run. A client without one counts as the mean.
    """
    if how == "round_robin":
        return next((n for n, client_id in enumerate(client_ids) if client_id % num_devices == device), None)
    mean_s = sum(seconds.values()) / len(seconds) if seconds else 0.0
    return max(range(len(client_ids)), key=lambda n: seconds.get(client_ids[n], mean_s), default=None)
