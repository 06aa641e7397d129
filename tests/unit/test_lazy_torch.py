"""The stand-ins that let processes of tests start sooner give way to torch's own modules."""

from tests.helpers.run import run_well

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
