"""Who is to blame for the end of a run, judged from events and exit codes made by hand."""

import itertools
import signal

import pytest

from unsloth_multigpu.launch.cause import find_cause, find_early_exit, find_refusal
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Heartbeat

CONNECTION_ERRORS = [
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234",
    "RuntimeError: Gloo connectFullMesh failed with SO_ERROR: Connection refused",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RankTimeoutError: rank 0 waited timeout_s=5 seconds for rank 0 in save",
]
CLOSED = CONNECTION_ERRORS[0]


def of_nccl(kind, last):
    """As torch words it."""
    place = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with)"
    what = f"{kind}: System call failed or device error. \nLast error:\n{last}"
    return f"DistBackendError: {place}, NCCL version 2.27.5\n{what}"


def at_steps(steps):
    return {rank: Heartbeat(step=step) for rank, step in steps.items()}


class Run:
    """Events in the order in which they are added, one second apart."""

    def __init__(self, num_ranks=2):
        self._clock = itertools.count(100)
        self.events = []
        for rank in range(num_ranks):
            self.add("started", rank, pid=1000 + rank)

    def add(self, kind, rank, step=-1, **facts):
        self.events.append(Event(kind, rank, 0, float(next(self._clock)), step, facts))
        return self

    def training(self, *ranks):
        for rank in ranks:
            self.add("training", rank)
        return self

    def fails(self, rank, error, step=-1, exit_code=1):
        """As a rank reports an exception inside `train()`."""
        self.add("left_training", rank, step, error=error)
        self.add("exception", rank, step, error=error, traceback=f"Traceback of rank {rank}\n", exit_code=exit_code)
        return self.add("exiting", rank, step)


def test_exception_of_a_rank_is_the_cause():
    run = Run().training(0, 1).fails(1, "ValueError: bad row\nwith more lines", step=3)
    cause = find_cause(run.events, {1: 1})
    assert (cause.rank, cause.exit_code, cause.traceback) == (1, 1, "Traceback of rank 1\n")
    assert cause.message == "rank 1 failed after step 3: ValueError: bad row"


@pytest.mark.parametrize("broken", CONNECTION_ERRORS)
def test_broken_connection_is_the_cause_unless_a_rank_has_an_error_of_its_own(broken):
    run = Run().training(0, 1).fails(0, broken)
    cause = find_cause(run.events, {0: 1})
    assert (cause.rank, cause.exit_code) == (0, 1)
    assert (broken.partition("RankTimeoutError: ")[2] or broken.rpartition(".cc:534] ")[2]) in cause.message
    assert find_cause(run.fails(1, "ValueError: bad row").events, {0: 1, 1: 1}).rank == 1


def test_rank_that_does_not_come_is_named_by_the_one_that_has_waited():
    late = "RankTimeoutError: rank 1 did not come to open the process group within 5 seconds.\nHint: Let all ranks"
    cause = find_cause(Run().fails(0, late, exit_code=124).events, {0: 124, 1: -signal.SIGTERM}, is_one_node=False)
    assert (cause.message, cause.exit_code) == ("rank 1 did not come to open the process group within 5 seconds", 124)


SHM = "Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), error: No space left on device (28)"
DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
MEMORY = "Cuda failure 2 'out of memory'"
UNHANDLED = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO)"


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (of_nccl("ncclSystemError", SHM), SHM[:60], "--shm-size=8g"),
        (of_nccl("ncclInvalidUsage", DUPLICATE), DUPLICATE, "MIG instances of one GPU"),
        (of_nccl("ncclUnhandledCudaError", MEMORY), MEMORY, "nvidia-smi"),
        (f"DistBackendError: {UNHANDLED}", UNHANDLED, "`unsloth-multigpu doctor`"),
    ],
    ids=["shm", "duplicate", "memory", "cuda"],
)
def test_failure_of_nccl_has_a_reason_and_a_remedy_and_is_not_hidden_by_what_follows(error, message, hint):
    run = Run().training(0, 1).fails(1, error, step=0)
    cause = find_cause(run.events, {0: -signal.SIGABRT, 1: 1}, gone={0, 1})
    assert cause.rank == 1
    assert cause.message.startswith(f"rank 1 failed before the first step: DistBackendError: {message}")
    assert cause.traceback.startswith("Traceback of rank 1\nHint: ")
    assert hint in cause.traceback


def test_failure_of_nccl_that_a_lost_rank_causes_too_is_a_consequence_with_a_hint():
    error = of_nccl("ncclSystemError", "socketPollConnect: connect to 10.0.0.2<41234> returned Connection timed out")
    run = Run().training(0, 1).fails(1, error, step=0)
    assert find_cause(run.events, {0: -signal.SIGKILL, 1: 1}, gone={0, 1}).rank == 0
    assert "NCCL_SOCKET_IFNAME" in find_cause(run.events, {1: 1}).traceback
    # What this package says of it already.
    told = f"OutOfMemoryError: rank 1 ran out of memory\nHint: Lower it.\n{of_nccl('', 'out of memory')}"
    cause = find_cause(Run().fails(1, told).events, {1: 1})
    assert cause.message == "rank 1 failed: OutOfMemoryError: rank 1 ran out of memory"
    assert "Hint: " not in cause.traceback


@pytest.mark.parametrize(("exit_code", "shown"), [(0, 1), (7, 7)])
def test_exit_inside_training_is_an_early_exit(exit_code, shown):
    run = Run().training(0, 1).add("left_training", 1, 4, error=f"SystemExit: {exit_code}", exit_code=exit_code)
    run.add("exiting", 1, 4).fails(0, CLOSED, step=4)
    exit_codes = {0: 1, 1: exit_code} if exit_code else {0: 1}
    cause = find_cause(run.events, exit_codes, gone={1}, beats=at_steps({0: 4, 1: 4}))
    # A run that did not finish never ends with 0.
    assert (cause.rank, cause.exit_code, cause.traceback) == (1, shown, "")
    assert cause.message == f"rank 1 left with exit code {exit_code} after step 4, while other ranks were training"


@pytest.mark.parametrize("kinds", [[], ["exiting"]])
def test_rank_that_ends_while_another_waits_to_train_with_it_is_an_early_exit(kinds):
    run = Run().add("meeting", 0)
    for kind in kinds:
        run.add(kind, 1)
    assert find_early_exit(run.events, set()) is None
    cause = find_cause(run.events, {0: -signal.SIGTERM}, gone={1})
    assert (cause.rank, cause.exit_code) == (1, 1)
    assert cause.message == "rank 1 left with exit code 0, while other ranks were waiting for it to begin a training"
    # They have met: one may be done before the other.
    run = Run().add("meeting", 0).add("meeting", 1).add("met", 1).add("met", 0).add("exiting", 1)
    assert find_early_exit(run.events, {1}) is None


@pytest.mark.parametrize("is_gone", [False, True])
def test_error_that_a_script_has_caught_is_no_exit(is_gone):
    run = Run().training(0, 1).add("left_training", 1, 4, error="RuntimeError: no luck.\nmore").fails(0, CLOSED, step=4)
    cause = find_cause(run.events, {0: 1}, gone={1} if is_gone else (), beats=at_steps({0: 4, 1: 4}))
    ended = " and ended with exit code 0" if is_gone else ""
    assert (cause.rank, cause.exit_code) == (1, 1)
    assert cause.message == (
        f"rank 1 left train() by an error after step 4, which its script caught{ended}, while other ranks were "
        "training: RuntimeError: no luck"
    )
    assert cause.traceback.startswith("Hint: Catch errors of train() on all ranks or on none")


def test_exit_is_the_cause_although_the_process_outlives_the_broken_connection():
    run = Run().training(0, 1).add("exiting", 0).fails(1, CLOSED, step=2)
    # It is not gone yet, or was stopped with the survivors while it was going.
    for exit_codes in ({1: 1}, {1: 1, 0: -15}):
        cause = find_cause(run.events, exit_codes, gone={1}, beats=at_steps({0: 1, 1: 2}))
        assert cause.message == "rank 0 left with exit code 0 after step 1, while other ranks were training"
    # A crash in its teardown is named as one.
    assert find_cause(run.events, {1: 1, 0: -6}, gone={1}).message.startswith("rank 0 was killed by SIGABRT")


@pytest.mark.parametrize(
    "run",
    [
        Run().training(0, 1),
        # Both are done; one ends a little before the other.
        Run().training(0, 1).add("trained", 0).add("trained", 1).add("exiting", 1),
        # No rank trains yet, and one imports faster than the other.
        Run().add("exiting", 1),
        # An error is its own explanation.
        Run().training(0, 1).add("exception", 1, error="ValueError: x"),
        Run().training(0, 1).add("exception", 1, error=CLOSED),
        # The connection broke: the rank is a victim of whoever closed it.
        Run().training(0, 1).add("left_training", 1, error=CLOSED),
        # It stops as it was asked to.
        Run().training(0, 1).add("stopping", 1, 4, signal="SIGTERM").add("exiting", 1, 4),
        Run().training(0, 1).add("stopped", 1, 4, signal="SIGTERM").add("exiting", 1, 4),
    ],
    ids=["training", "trained", "starting", "error", "connection", "left by connection", "stopping", "stopped"],
)
def test_rank_that_ended_in_order_is_no_early_exit(run):
    gone = {1} if run.events[-1].kind != "training" else set()
    assert find_early_exit(run.events, gone) is None


@pytest.mark.parametrize(
    ("number", "exit_code", "likely"),
    [
        (signal.SIGKILL, 137, "; the usual cause is that the machine ran out of memory (see dmesg)"),
        (signal.SIGSEGV, 139, "; a native library crashed, see the stack in the rank's log"),
        (signal.SIGABRT, 134, "; NCCL's watchdog or an assertion on the device aborted it, see the rank's log"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_death_by_signal_is_named(rank, number, exit_code, likely):
    run = Run().training(0, 1).fails(1 - rank, CLOSED)
    cause = find_cause(run.events, {rank: -number, 1 - rank: 1}, gone={rank}, beats=at_steps({0: 5, 1: 5}))
    assert (cause.rank, cause.exit_code) == (rank, exit_code)
    assert cause.message == f"rank {rank} was killed by {number.name} after step 5{likely}"
    if number == signal.SIGKILL:
        cause = find_cause(Run().training(0, 1).events, {rank: -number}, {rank}, num_memory_kills=1)
        assert cause.message == f"rank {rank} was killed by SIGKILL; the kernel killed it for lack of memory"


def test_rank_that_was_killed_in_its_teardown_did_not_die_of_it():
    run = Run().training(0, 1).fails(1, CLOSED, step=1)
    assert "Connection closed" in find_cause(run.events, {1: -signal.SIGKILL}, {1}).message
    assert find_cause(run.events, {0: -signal.SIGKILL, 1: 1}, {0}).message.startswith("rank 0 was killed by SIGKILL")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_rank_that_the_supervisor_ended_is_not_blamed(number):
    run = Run().training(0, 1)
    assert find_cause(run.events, {0: -number, 1: -signal.SIGKILL}, gone={1}).rank == 1
    assert find_cause(Run().events, {0: -number, 1: 3}, gone={1}).message.startswith("rank 1 exited with code 3")
    assert find_cause(run.fails(1, "ValueError: x").events, {0: -number, 1: 1}).rank == 1


def test_broken_connection_to_another_node_is_not_this_nodes_fault():
    run = Run(0).add("started", 2).add("started", 3).training(2, 3).fails(3, CLOSED, step=7).fails(2, CLOSED, step=7)
    cause = find_cause(run.events, {2: 1, 3: 1}, is_one_node=False)
    lost = "rank 3 lost its connection to another node after step 7; that node's own message names the cause"
    assert (cause.rank, cause.exit_code, cause.message, cause.traceback) == (3, 76, lost, "")
    # What a rank of this node did comes first all the same.
    assert find_cause(run.fails(2, "ValueError: x").events, {2: 1}, is_one_node=False).exit_code == 1


def test_exit_code_is_never_zero_nor_above_255():
    events = [Run().events, Run().training(0, 1).events, Run().training(0, 1).fails(1, CLOSED).events]
    codes = [{1: 1}, {1: 255}, {1: -9}, {0: -15}, {0: -2, 1: -15}, {0: -64, 1: 3}]
    for found, exit_codes, gone in itertools.product(events, codes, [set(), {0}, {1}]):
        assert 1 <= find_cause(found, exit_codes, gone).exit_code <= 255


def test_refusal_counts_unless_a_later_training_ends_well_and_the_rank_has_left():
    refused = {"error": "SetupError: no", "exit_code": 69, "num_steps": 0}
    assert find_refusal(Run().events) is None
    run = Run().add("refused", 0, **refused).add("refused", 1, **refused)
    assert find_refusal(run.events) == (69, "train() was refused: SetupError: no; the script continued without it")
    assert find_refusal(run.add("trained", 0).events) is not None
    assert find_refusal(run.add("trained", 1).events) is None
    assert find_refusal(run.add("refused", 0, **refused).events) is not None
    run = Run().training(0, 1).add("left_training", 1, error="SetupError: no").add("refused", 1, **refused)
    assert find_early_exit(run.events, {}).kind == "left_training"
