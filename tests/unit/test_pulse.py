"""The last collective of a rank, and the stacks that a signal makes a rank write."""

import sys
from types import SimpleNamespace

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


def test_group_that_is_being_closed_is_no_error(monkeypatch):
    assert pulse.last_collective() == -1
    broken = SimpleNamespace(is_initialized=lambda: True, _get_default_group=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", broken)
    assert pulse.last_collective() == -1
