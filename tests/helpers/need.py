"""What a test needs and a machine may lack: the mark skips the test and names it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import pytest
from packaging.version import Version

UNSLOTH = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="Unsloth is not installed")
# Unsloth trains on the CPU since this release; its GPU code runs by tests.helpers.fake_cuda.
UNSLOTH_ASKS_FOR_GPU = importlib.util.find_spec("unsloth") is not None and Version(version("unsloth")) < Version(
    "2026.10.9"
)
