"""The stand-ins of tests: devices in host memory do what a card does, and modules that start late are torch's own."""

import textwrap

from tests.helpers.fake_cuda import cards, needs_device
from tests.helpers.run import PLAIN, finish, free_port, run_python, run_well, start

HEAD = """
import unittest
import torch
refused = unittest.TestCase().assertRaisesRegex
"""


def run(folder, source, **options):
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(source))
    return run_python([script], folder, {**PLAIN, **cards(2, guarded=True, **options)})


@needs_device
def test_device_is_torchs_own_cuda_with_generators_and_memory(tmp_path):
    done = run(
        tmp_path,
        """
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        assert torch.accelerator.current_accelerator().type == "cuda"
        assert torch.cuda.get_device_capability() == (8, 0)
        x = torch.randn(8, 8, device="cuda:1", requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad.device == torch.device("cuda:1")
        for other in (torch.ones(8), torch.ones(8, device="cuda:0")):
            with refused(RuntimeError, "Expected all tensors to be on the same device"):
                x + other
        with torch.autocast("cuda", torch.float16):
            assert (x @ x).dtype == torch.float16
        scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.AdamW([x], fused=True)
        scaler.scale((x * 1e38).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15  # It overflowed.
        pinned = torch.ones(4).pin_memory()
        assert pinned.is_pinned() and pinned.to("cuda", non_blocking=True).sum().item() == 4
        torch.save(x, "x.pt")
        assert torch.load("x.pt", map_location="cpu").device.type == "cpu"
        assert torch.load("x.pt").device == torch.device("cuda:1")
        # Generators are the devices' own.
        torch.manual_seed(1)
        before, of_cpu = torch.cuda.get_rng_state(0), torch.get_rng_state()
        assert before.numel() == 16 and of_cpu.numel() != 16
        first = torch.nn.functional.dropout(torch.ones(64, device="cuda:0"))
        second = torch.nn.functional.dropout(torch.ones(64, device="cuda:0"))
        assert not first.equal(second) and torch.get_rng_state().equal(of_cpu)
        assert not torch.cuda.get_rng_state(0).equal(before)
        torch.cuda.set_rng_state(before, 0)
        assert torch.nn.functional.dropout(torch.ones(64, device="cuda:0")).equal(first)
        generator = torch.Generator("cuda").manual_seed(3)
        assert torch.randn(4, device="cuda", generator=generator).equal(
            torch.randn(4, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
        )
        # Memory is counted, and has an end.
        before = torch.cuda.memory_allocated(1)
        x = torch.empty(1000, 1000, device="cuda:1")
        assert torch.cuda.memory_allocated(1) - before == 4_000_256
        with refused(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 7.63 MiB. GPU 1"):
            torch.empty(2_000_000, device="cuda:1")
        torch.empty(2_000_000, device="cuda:0")
        del x
        assert torch.cuda.memory_allocated(1) == before and torch.cuda.max_memory_allocated(1) >= 4_000_256
        """,
        capability="8.0",
        memory="1=10000000",
    )
    assert done.code == 0, done.err


RANK = """
import os, threading, time
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl")
x = torch.full((4,), rank + 1.0, device="cuda")
dist.all_reduce(x)
assert x.tolist() == [3.0] * 4
"""


def ranks(folder, source):
    script = folder / "rank.py"
    script.write_text(HEAD + RANK + textwrap.dedent(source))
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **cards("0,1", of=2)}
    started = [start([script], folder, {**PLAIN, **shared, "RANK": str(rank)}) for rank in range(2)]
    return [finish(process, 60.0) for process in started]


@needs_device
def test_collective_runs_behind_the_hosts_back_and_refuses_what_nccl_refuses(tmp_path):
    done = ranks(
        tmp_path,
        """
        other, one_of_cpu = dist.new_group(), dist.new_group(backend="gloo")
        begin, later = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        if rank == 1:
            while not os.path.exists("asked"):
                time.sleep(0.05)
            time.sleep(0.6)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        later.record()
        if rank == 0:
            # Rank 1 has not called it yet.
            assert not work.is_completed() and not later.query()
            open("asked", "w").close()
        assert x[0].item() == 6.0
        assert work.is_completed() and later.query()
        if rank == 0:
            assert begin.elapsed_time(later) > 500
        parts = [torch.empty(4, dtype=torch.int64, device="cuda") for _ in range(2)]
        dist.all_gather(parts, torch.full((4,), rank, device="cuda"))
        assert [part[0].item() for part in parts] == [0, 1]
        half = torch.empty(2, device="cuda")
        dist.reduce_scatter_tensor(half, torch.arange(4.0, device="cuda"), op=dist.ReduceOp.AVG)
        assert half.tolist() == [2.0 * rank, 2.0 * rank + 1]
        for tensor, message in (
            (torch.ones(1), "No backend type associated with device type cpu"),
            (torch.ones(1, device=1 - rank), "NCCL would open a second communicator"),
        ):
            with refused(RuntimeError, message):
                dist.all_reduce(tensor)
        # Aborted, a collective leaves its data unreduced, without an error.
        if rank == 0:
            x.fill_(3.0)
            dist.all_reduce(x)
            threading.Timer(0.5, dist.group.WORLD._get_backend(torch.device("cuda")).abort).start()
            assert x[0].item() == 3.0
            open("aborted", "w").close()
        while not os.path.exists("aborted"):
            time.sleep(0.05)
        os._exit(0)
        """,
    )
    assert [rank.code for rank in done] == [0, 0], [rank.err for rank in done]


PROGRAM = """
import sys
import torch
import torch.distributed.tensor._collective_utils as uses_shapes

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0.5, 0.5]
rules = "torch.distributed.tensor._ops._math_ops"
assert not {"sympy", "torch._dynamo.eval_frame", "torch._decomp.decompositions", rules} & sys.modules.keys()
traced, before = [], torch._dynamo

@torch._dynamo.allow_in_graph
def opaque(x):
    return x * 2

def backend(graph, inputs):
    traced.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward

assert torch.compile(lambda x: opaque(x), backend=backend, fullgraph=True)(torch.ones(2)).tolist() == [2, 2]
assert traced == [[opaque]], traced
optimizer.step()  # What it calls was decorated before.
from torch._dynamo import eval_frame
from torch.fx.experimental import symbolic_shapes
assert sys.modules["torch._dynamo"] is torch._dynamo is not before
assert before.eval_frame.OptimizedModule is eval_frame.OptimizedModule
assert isinstance(torch.compile(torch.nn.Linear(1, 1)), before.eval_frame.OptimizedModule)
assert uses_shapes.guard_or_false is symbolic_shapes.guard_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.nn.functional.pad(torch.ones(1, 2, 3), (1, 1), "reflect").shape == (1, 2, 5)
assert sys.modules["torch._decomp.decompositions"] is torch._decomp.decompositions
from torch.distributed.tensor import _decompositions
assert torch.ops.aten.mse_loss.default in _decompositions.decomposition_table
dist = torch.distributed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.tensor.parallel import loss_parallel
with loss_parallel():
    parts = dist.tensor.distribute_tensor(torch.ones(2, 2), dist.device_mesh.init_device_mesh("cpu", (1,)))
    assert (parts @ parts).sum().full_tensor() == 8
assert rules in sys.modules
dist.destroy_process_group()
"""


def test_stand_ins_give_way_to_torchs_own_modules(tmp_path):
    run_well(["-c", PROGRAM], tmp_path)
