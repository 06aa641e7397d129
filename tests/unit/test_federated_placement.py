"""Which device trains which client: properties of every plan."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from unsloth_multigpu.federated.placement import Client, Device, can_start, deal, round_robin, slots_that_fit

GIB = 2**30
COSTS = st.lists(st.integers(0, 50), max_size=7)
SPEEDS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=3)
HOW = st.sampled_from(["round_robin", "balanced"])


def clients_of(costs, memories=None) -> list[Client]:
    return [Client(n, float(cost), (memories or {}).get(n, 0)) for n, cost in enumerate(costs)]


def devices_of(speeds, memory_bytes=None) -> list[Device]:
    return [Device(speed, memory_bytes) for speed in speeds]


def last_end_s(queues, costs, speeds) -> float:
    return max(sum(costs[n] for n in queue) / speed for queue, speed in zip(queues, speeds, strict=True))


@given(COSTS, SPEEDS, HOW)
def test_every_client_gets_one_device(costs, speeds, how) -> None:
    queues = deal(clients_of(costs), devices_of(speeds), how)
    assert len(queues) == len(speeds)
    assert sorted(n for queue in queues for n in queue) == list(range(len(costs)))


@given(st.lists(st.integers(0, 99), unique=True, max_size=9), SPEEDS)
def test_round_robin_depends_on_the_client_alone(ids, speeds) -> None:
    queues = deal([Client(n, cost=n) for n in ids], devices_of(speeds), "round_robin")
    for position, queue in enumerate(queues):
        assert queue == [n for n in ids if n % len(speeds) == position]
        assert all(round_robin(n, len(speeds)) == position for n in queue)


@given(COSTS, SPEEDS)
def test_balanced_stays_near_the_best_possible(costs, speeds) -> None:
    ours_s = last_end_s(deal(clients_of(costs), devices_of(speeds), "balanced"), costs, speeds)
    num_devices = len(speeds)
    best_s = min(
        last_end_s([[n for n, p in enumerate(choice) if p == d] for d in range(num_devices)], costs, speeds)
        for choice in product(range(num_devices), repeat=len(costs))
    )
    equal = len(set(speeds)) == 1
    bound = 4 / 3 - 1 / (3 * num_devices) if equal else 2 * num_devices / (num_devices + 1)
    assert ours_s <= bound * best_s + 1e-9


@given(COSTS, SPEEDS)
def test_balanced_starts_the_longest_first(costs, speeds) -> None:
    for queue in deal(clients_of(costs), devices_of(speeds), "balanced"):
        assert [costs[n] for n in queue] == sorted((costs[n] for n in queue), reverse=True)


def test_balanced_counts_speed() -> None:
    devices = [Device(speed=1.0), Device(speed=3.0)]
    assert deal(clients_of([6, 6, 6, 6]), devices, "balanced") == [[3], [0, 1, 2]]
    # Where two would end at once, the faster one takes it: the other is free for less work.
    assert deal(clients_of([2, 2, 1]), [Device(speed=1.0), Device(speed=2.0)], "balanced") == [[2], [0, 1]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=8), st.lists(st.integers(6, 9), min_size=1))
def test_clients_that_run_at_once_fit_together(work, sizes) -> None:
    # The loop of a server that starts whatever it may, in order, and ends one client at a time.
    clients = [Client(n, cost, memory) for n, (cost, memory) in enumerate(work)]
    devices = [Device(memory_bytes=size) for size in sizes]
    for device, queue in zip(devices, deal(clients, devices, "balanced"), strict=True):
        waiting, running = [clients[n] for n in queue], []
        while waiting:
            while waiting and can_start(waiting[0], device, running):
                running.append(waiting.pop(0))
            assert running
            assert sum(client.memory_bytes for client in running) <= device.memory_bytes
            running.pop(0)


def test_large_client_goes_where_it_fits() -> None:
    devices = [Device(speed=9.0, memory_bytes=2 * GIB), Device(memory_bytes=4 * GIB), Device()]
    large = Client(0, 1.0, 3 * GIB)
    assert deal([large], devices[:2], "balanced") == [[], [0]]
    assert deal([large], devices[2:], "round_robin") == [[0]]


def test_client_that_fits_nowhere_goes_to_the_largest_device() -> None:
    devices = [Device(memory_bytes=2 * GIB), Device(speed=0.1, memory_bytes=4 * GIB)]
    assert deal([Client(7, 1.0, 5 * GIB), Client(8)], devices, "balanced") == [[8], [7]]


def test_number_of_slots_follows_memory() -> None:
    assert slots_that_fit(10 * GIB, 3 * GIB, limit=8) == 3
    assert slots_that_fit(10 * GIB, 3 * GIB, limit=2) == 2
    assert slots_that_fit(1 * GIB, 3 * GIB, limit=8) == 1
    assert slots_that_fit(10 * GIB, 0, limit=8) == 1
