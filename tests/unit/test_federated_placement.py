"""Which client a free slot runs next: properties of every plan."""

import heapq
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from unsloth_multigpu.federated.placement import choose_client

COSTS = st.lists(st.integers(1, 50), max_size=7)


@given(st.lists(st.integers(0, 99), unique=True, max_size=9), st.integers(1, 3))
def test_round_robin_depends_on_the_client_alone(ids, num_devices):
    for device in range(num_devices):
        waiting, taken = list(ids), []
        while (chosen := choose_client(waiting, device, num_devices, "round_robin", {})) is not None:
            taken.append(waiting.pop(chosen))
        assert taken == [n for n in ids if n % num_devices == device]


@given(COSTS, st.integers(1, 3))
def test_balanced_ends_within_a_third_of_the_shortest_possible_time(costs, num_devices):
    waiting, free = list(range(len(costs))), [(0, device) for device in range(num_devices)]
    seconds = dict(enumerate(map(float, costs)))
    while waiting:
        end_s, device = heapq.heappop(free)
        chosen = choose_client(waiting, device, num_devices, "balanced", seconds)
        heapq.heappush(free, (end_s + costs[waiting.pop(chosen)], device))
    ours_s = max(end_s for end_s, _ in free)
    best_s = min(
        max((sum(c for c, p in zip(costs, choice, strict=True) if p == d) for d in range(num_devices)), default=0)
        for choice in product(range(num_devices), repeat=len(costs))
    )
    assert ours_s <= (4 / 3 - 1 / (3 * num_devices)) * best_s + 1e-9


def test_client_that_has_not_run_yet_counts_as_long_as_the_mean():
    assert choose_client([0, 1, 2], 0, 2, "balanced", {0: 1.0, 1: 5.0}) == 1
    assert choose_client([0, 2], 0, 2, "balanced", {0: 1.0, 1: 5.0}) == 1
    assert choose_client([3, 0], 0, 2, "balanced", {}) == 0
    assert choose_client([], 0, 2, "balanced", {}) is None
