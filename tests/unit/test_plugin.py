"""The one line: what it opens in a single process, what a second call means, and what is given back."""

import logging
import os
import sys

import pytest

import unsloth_multigpu as ump
from unsloth_multigpu import plugin, start, versions
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.wire.identity import RankIdentity

LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture(autouse=True)
def single_process(monkeypatch):
    """No launcher, no variables, no level set, one GPU to be seen without torch; in the end nothing is enabled."""
    logging.getLogger("unsloth_multigpu").setLevel(logging.NOTSET)
    for name in os.environ:
        if name in LAUNCHERS or name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setattr(start, "visible_accelerators", lambda: ("cuda", 1))
    monkeypatch.setattr(start, "is_called_by_pytest", lambda: False)
    # Whatever is broken, no test here starts ranks, which would run it again.
    monkeypatch.setattr(start, "supervise", lambda *_, **__: pytest.fail("ranks were to be started"))
    yield
    ump.disable_multi_gpu()


def test_status_shows_one_process_and_its_patches():
    ump.enable_multi_gpu(num_gpus=1, timeout_s=60)
    status = ump.get_multi_gpu_status()
    assert ump.is_multi_gpu_enabled()
    assert (status.is_enabled, status.rank, status.local_rank, status.world_size) == (True, 0, 0, 1)
    assert (status.launcher, status.log_dir, status.report) == ("none", None, None)
    assert status.config == ump.get_active_config() == ump.MultiGPUConfig(num_gpus=1, timeout_s=60)
    assert list(status.patches) == [
        "transformers.trainer:Trainer.train",
        "transformers.training_args:TrainingArguments.__post_init__",
    ]
    ump.disable_multi_gpu()
    assert ump.get_multi_gpu_status() == ump.MultiGPUStatus(is_enabled=False)


def test_second_call_with_the_same_arguments_changes_nothing():
    ump.enable_multi_gpu(num_gpus=1)
    patches, handlers = ump.get_multi_gpu_status().patches, list(logging.getLogger("unsloth_multigpu").handlers)
    ump.enable_multi_gpu(1)
    assert ump.get_multi_gpu_status().patches == patches
    assert logging.getLogger("unsloth_multigpu").handlers == handlers


@pytest.mark.parametrize(
    ("other", "before", "now"),
    [
        ({}, "num_gpus=1", "num_gpus=None"),
        ({"num_gpus": 2}, "num_gpus=1", "num_gpus=2"),
        ({"num_gpus": 1, "global_batch": "scale"}, "global_batch='keep'", "global_batch='scale'"),
    ],
)
def test_second_call_with_other_arguments_is_an_error(other, before, now):
    ump.enable_multi_gpu(num_gpus=1)
    with pytest.raises(ConfigError) as error:
        ump.enable_multi_gpu(**other)
    assert str(error.value) == (
        f"enable_multi_gpu() is in effect with {before}; this call asks for {now}.\n"
        "Hint: Call it once, or disable_multi_gpu() first."
    )
    config = ump.get_active_config()
    assert (config.num_gpus, config.global_batch) == (1, "keep")


def package_logger():
    package = logging.getLogger("unsloth_multigpu")
    return package.level, package.propagate, list(package.handlers)


def test_disable_gives_everything_back():
    before = (package_logger(), dict(os.environ), sys.excepthook)
    ump.enable_multi_gpu(num_gpus=1)
    opened = plugin._session
    assert opened is not None
    ump.disable_multi_gpu()
    # test_patching.py has what that means.
    assert set(opened.registry.states().values()) == {"undone"}
    assert (package_logger(), dict(os.environ), sys.excepthook) == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"num_gpus": 4}, SetupError), ({"device": "xpu"}, SetupError), ({"num_gpus": 0}, ConfigError)],
)
def test_call_that_fails_leaves_nothing(arguments, error):
    before = (package_logger(), dict(os.environ))
    with pytest.raises(error):
        ump.enable_multi_gpu(**arguments)
    assert (package_logger(), dict(os.environ)) == before
    assert not ump.is_multi_gpu_enabled()


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (
            {"num_gpus": 4},
            {},
            r"num_gpus=4, but torchrun started 2 rank\(s\) here.\nHint: Leave num_gpus out, or start 4",
        ),
        ({}, {"UNSLOTH_TP_SIZE": "2"}, "UNSLOTH_TP_SIZE=2: Unsloth's tensor parallelism trains and saves by itself"),
    ],
)
def test_rank_of_another_launcher_that_does_not_fit_the_options_is_refused(monkeypatch, options, variables, message):
    for name, value in {**RankIdentity(0, 0, 2, 2, "torchrun").variables(), **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=message):
        ump.enable_multi_gpu(**options)


def test_library_newer_than_tested_is_told_once(monkeypatch, caplog):
    installed = {**dict.fromkeys(versions.SUPPORTED, None), "datasets": "5.9.0", "torch": "2.13.0", "trl": "1.15.0"}
    monkeypatch.setattr(versions, "installed_version", installed.get)
    ump.enable_multi_gpu(num_gpus=1)
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert told.startswith("newer than tested: datasets 5.9.0 (tested <5.3,>=3.4.1). ")
    ump.disable_multi_gpu()
    installed["datasets"] = "4.8.0"
    ump.enable_multi_gpu(num_gpus=1)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize(("variables", "is_main"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False)])
def test_main_process_is_rank_0_with_and_without_the_line(monkeypatch, variables, is_main):
    if variables:
        identity = RankIdentity(int(variables["RANK"]), int(variables["RANK"]), 2, 2, "torchrun")
        for name, value in identity.variables().items():
            monkeypatch.setenv(name, value)
    calls = []

    @ump.on_main_process
    def note(value, *, factor=1):
        """Its text."""
        calls.append(value)
        return value * factor

    assert ump.is_main_process() is is_main
    assert note(2, factor=3) == (6 if is_main else None)
    assert calls == ([2] if is_main else [])
    assert (note.__name__, note.__doc__) == ("note", "Its text.")
