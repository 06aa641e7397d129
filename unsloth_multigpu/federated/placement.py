"""Which client does a free slot run next? Pure: plain values in, plain values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def choose_client(
    client_ids: Sequence[int], device: int, num_devices: int, how: str, seconds: Mapping[int, float]
) -> int | None:
    """Position in `client_ids` of the client that a free slot runs next; None = none for this device.

    "balanced" takes the longest one. On devices of equal speed the last client then ends within 4/3 of the shortest
    possible time (Graham 1969, "Bounds on Multiprocessing Timing Anomalies").

    Args:
        client_ids: Those that wait, in the order in which they came.
        device: Position of the slot's device among the `num_devices` that work.
        how: "round_robin" = client_id % num_devices is the position of its device, whoever else takes part.
        seconds: How long clients took the last time. One that has not run yet counts as long as the mean.
    """
    if how == "round_robin":
        return next((n for n, client_id in enumerate(client_ids) if client_id % num_devices == device), None)
    usual_s = sum(seconds.values()) / len(seconds) if seconds else 0.0
    return max(range(len(client_ids)), key=lambda n: seconds.get(client_ids[n], usual_s), default=None)
