"""What a test needs and a machine may lack: the mark skips the test and names it."""

from __future__ import annotations

import importlib.util

import pytest

UNSLOTH = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="Unsloth is not installed")
