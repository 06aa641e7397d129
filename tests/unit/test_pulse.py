"""The pulse's thread, and the stacks that a signal makes a rank write."""

import json
import sys
from types import SimpleNamespace

import pytest

from unsloth_multigpu.launch import pulse
from unsloth_multigpu.wire.stack import main_frames, place_of

TEXT = """Thread 0x00007f0000000001 [pulse] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/train.py", line 1 in other

Current thread 0x00007f0000000000 [python] (most recent call first):
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "{threading}", line 327 in wait
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/linear.py", line 134 in forward
  File "{pulse}", line 5 in run
  File "/home/me/my "model".py", line 41 in forward
  File "/home/me/train.py", line 90 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3"
"""


def test_innermost_line_of_the_users_own_is_named():
    import threading

    frames = main_frames(TEXT.format(threading=threading.__file__, pulse=pulse.__file__))
    assert len(frames) == 6
    assert place_of(frames) == 'my "model".py:41 in forward'
    assert place_of(frames[:4]) == ""
    assert place_of(['  File "<ipython-input-4-829d36eb45d5>", line 7 in collate']) == "In [4]:7 in collate"
    assert (main_frames(""), main_frames("Segmentation fault\n")) == ([], [])


class Page:
    def __init__(self):
        self.step, self.phase, self.micro_batch = 1, 3, 0
        self.beats = []

    def pulse(self, collective, operation):
        self.beats.append((collective, operation))


def test_collective_is_named_only_after_standing_still(monkeypatch):
    now_s, asked = [100.0], []
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(pulse, "last_collective", lambda: 7)
    monkeypatch.setattr(pulse, "pending_operation", lambda: asked.append(now_s[0]) or "barrier")
    page = Page()
    heart = pulse.Pulse(page, 10.0)
    for second in range(12):
        now_s[0] = 100.0 + second
        heart.beat()
    assert asked == [106.0, 109.0]
    assert page.beats == [(7, "")] * 6 + [(7, "barrier")] * 6
    page.step = 2
    heart.beat()
    assert page.beats[-1] == (7, "")


def test_no_group_and_strange_records_are_no_error(monkeypatch):
    assert pulse.last_collective() == -1
    broken = SimpleNamespace(is_initialized=lambda: True, _get_default_group=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", broken)
    assert pulse.last_collective() == -1
    for text in ("", "{}", '{"entries": [{}]}', '{"entries": 3}'):
        records = SimpleNamespace(_dump_nccl_trace_json=lambda text=text, **_: text)
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", records)
        assert pulse.pending_operation() == ""
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace())
    assert pulse.pending_operation() == ""


def recorder(names):
    facts = {"input_sizes": [[8, 4], [2]], "process_group": ["0", ""], "retired": False, "state": "scheduled"}

    def dump(*, includeCollectives=True, onlyActive=False):
        assert includeCollectives
        return json.dumps({"entries": [{"profiling_name": name, **facts} for name in names]}).encode()

    return dump


@pytest.mark.parametrize(
    ("backend", "in_nccls", "in_the_others", "named"),
    [
        ("nccl", ["nccl:all_reduce"], [], "all_reduce [8, 4] [2]"),
        ("gloo", [], ["gloo:barrier"], "barrier [8, 4] [2]"),
        ("gloo", ["nccl:all_reduce"], [], ""),
        ("undefined", ["nccl:all_reduce"], [], "all_reduce [8, 4] [2]"),
        ("xccl", [], ["xccl:barrier"], "barrier [8, 4] [2]"),
    ],
)
def test_recorder_is_that_of_the_groups_backend(monkeypatch, backend, in_nccls, in_the_others, named):
    """A build for CUDA has two; NCCL writes into the one that has its name, all others into the other."""
    c10d = SimpleNamespace(is_initialized=lambda: True, get_backend=lambda: backend)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
    dumps = {"_dump_nccl_trace_json": recorder(in_nccls), "_dump_fr_trace_json": recorder(in_the_others)}
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**dumps))
    assert pulse.pending_operation() == named
