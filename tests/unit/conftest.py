"""Fixtures of several unit tests, and how hypothesis runs them."""

import os

import pytest
from hypothesis import settings

# The same examples in each run, as long as they take.
settings.register_profile("unit", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("unit")


@pytest.fixture
def lone_group():
    """torch.distributed, with a process group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist
    dist.destroy_process_group()


@pytest.fixture
def open_umask():
    """A mask that takes nothing away shows what the code itself asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def may_make_messages():
    """Flower's messages are those of a task."""
    from unsloth_multigpu.federated.grid import task_identity

    with task_identity():
        yield
