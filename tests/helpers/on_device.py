"""A plugin for pytest: scripts that tests start as CPU ranks get CUDA devices in host memory instead.

    python -m pytest -p tests.helpers.on_device tests/dist/test_resume.py

Unsloth is hidden: its kernels are interpreted there, and most of these tests are too large for that.
"""

from __future__ import annotations

from tests.helpers import run
from tests.helpers.fake_cuda import cards

run.ON_CPU = {**cards(8), "FAKE_CUDA_HIDES": "triton,unsloth,unsloth_zoo"}
