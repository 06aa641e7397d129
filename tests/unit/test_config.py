"""Options: where a value comes from, and what is said of one that cannot be used."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.hooks.trainer import trainer_patches
from unsloth_multigpu.logs import Console
from unsloth_multigpu.options import ENV_PREFIX, INTERNAL_VARIABLES, MultiGPUConfig, from_keywords
from unsloth_multigpu.row import rows
from unsloth_multigpu.strategy import DDP, AllReduce, DiLoCo
from unsloth_multigpu.table import FORMER

DEFAULTS = {
    "num_gpus": None,
    "batch_size_per_gpu": None,
    "enable_ddp": True,
    "global_batch": "keep",
    "strategy": DDP(),
    "shard": "off",
    "balance": "auto",
    "resume": "off",
    "device": "auto",
    "seed_per_rank": True,
    "log_dir": "logs",
    "shard_offload": False,
    "grad_compression": None,
    "max_tokens_per_micro_batch": None,
    "max_restarts": 0,
    "timeout_s": 1800.0,
    "hang_timeout_s": 120.0,
    "grace_s": 30.0,
    "on_nan": "raise",
    "check_first_step": "auto",
    "loss_reduction": "auto",
    "inexact": "warn",
    "verify_every": 100,
    "log_metrics": True,
    "nnodes": "1",
    "rdzv_endpoint": None,
    "rdzv_id": None,
    "node_rank": None,
}
# Option -> (text of its variable, value).
FROM_ENVIRONMENT: dict[str, tuple[str, Any]] = {
    "num_gpus": ("3", 3),
    "batch_size_per_gpu": ("4", 4),
    "enable_ddp": ("no", False),
    "global_batch": ("scale", "scale"),
    "strategy": (" diloco:every_steps=8, outer_momentum=0", DiLoCo(every_steps=8, outer_momentum=0.0)),
    "shard": ("on", "on"),
    "balance": ("off", "off"),
    "resume": ("auto", "auto"),
    "device": ("cpu", "cpu"),
    "seed_per_rank": ("0", False),
    "log_dir": ("/var/tmp/logs", "/var/tmp/logs"),
    "shard_offload": ("1", True),
    "grad_compression": ("fp16", "fp16"),
    "max_tokens_per_micro_batch": ("4096", 4096),
    "max_restarts": ("2", 2),
    "timeout_s": ("2.5", 2.5),
    "hang_timeout_s": ("0", 0.0),
    "grace_s": ("7.5", 7.5),
    "on_nan": ("skip", "skip"),
    "check_first_step": ("every", "every"),
    "loss_reduction": ("whole", "whole"),
    "inexact": ("raise", "raise"),
    "verify_every": ("0", 0),
    "log_metrics": ("off", False),
    "nnodes": ("2", "2"),
    "rdzv_endpoint": ("node0:29400", "node0:29400"),
    "rdzv_id": ("job7", "job7"),
    "node_rank": ("1", 1),
}


# Options that have a meaning only beside another.
BESIDE: dict[str, dict[str, Any]] = {
    "shard_offload": {"shard": "on"},
    "nnodes": {"rdzv_endpoint": "node0:29400", "rdzv_id": "job7"},
    "rdzv_endpoint": {"nnodes": "2", "rdzv_id": "job7"},
    "rdzv_id": {"nnodes": "2", "rdzv_endpoint": "node0:29400"},
    "node_rank": {"nnodes": "2", "rdzv_endpoint": "node0:29400", "rdzv_id": "job7"},
}


def variable(option: str) -> str:
    return ENV_PREFIX + option.upper()


def assert_says(error: pytest.ExceptionInfo[ConfigError], message: str, hint: str) -> None:
    first, _, second = str(error.value).partition("\nHint: ")
    assert message in first
    assert hint in second


def test_defaults_are_the_documented_ones() -> None:
    assert vars(MultiGPUConfig.resolve({}, {})) == DEFAULTS


def test_tables_of_this_file_name_every_option() -> None:
    assert list(DEFAULTS) == list(FROM_ENVIRONMENT) == [f.name for f in dataclasses.fields(MultiGPUConfig)]


@pytest.mark.parametrize("option", FROM_ENVIRONMENT)
def test_option_is_read_from_its_variable(option: str) -> None:
    text, value = FROM_ENVIRONMENT[option]
    beside = BESIDE.get(option, {})
    config = MultiGPUConfig.resolve(beside, {variable(option): f" {text} "})
    assert vars(config) == {**DEFAULTS, **beside, option: value}


def test_arguments_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {variable("num_gpus"): "3", variable("timeout_s"): "60", variable("seed_per_rank"): "1"}
    config = MultiGPUConfig.resolve({"num_gpus": 2, "seed_per_rank": False, "timeout_s": None}, environment)
    assert (config.num_gpus, config.seed_per_rank, config.timeout_s) == (2, False, 60.0)
    assert config.max_restarts == 0


def test_environment_is_that_of_the_process_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("max_restarts"), "7")
    assert MultiGPUConfig.resolve({}).max_restarts == 7
    assert MultiGPUConfig.resolve({}, {}).max_restarts == 0


@pytest.mark.parametrize("text", ["", "  ", "none", "None"])
@pytest.mark.parametrize("option", ["num_gpus", "timeout_s", "global_batch", "log_metrics"])
def test_empty_variable_leaves_the_default(option: str, text: str) -> None:
    assert getattr(MultiGPUConfig.resolve({}, {variable(option): text}), option) == DEFAULTS[option]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("True", True), ("YES", True), ("on", True), ("0", False), ("False", False), ("no", False)],
)
def test_truth_value_has_several_spellings(text: str, value: bool) -> None:
    assert MultiGPUConfig.resolve({}, {variable("seed_per_rank"): text}).seed_per_rank is value


def test_variables_that_are_no_options_are_passed_over() -> None:
    environment = {**dict.fromkeys(INTERNAL_VARIABLES, "x"), "UNSLOTH_RETURN_LOGITS": "1", "NUM_GPUS": "x"}
    assert MultiGPUConfig.resolve({}, environment) == MultiGPUConfig()


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MultiGPUConfig().num_gpus = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "keeps"),
    [({}, True), ({"global_batch": "scale"}, False), ({"batch_size_per_gpu": 4}, False)],
)
def test_batch_per_gpu_and_scale_give_up_the_global_batch(arguments: dict[str, Any], keeps: bool) -> None:
    assert MultiGPUConfig(**arguments).keeps_global_batch is keeps


WHOLE = "expected a whole number of at least"


@pytest.mark.parametrize(
    ("option", "value", "message", "hint"),
    [
        ("num_gpus", 0, f"num_gpus=0; {WHOLE} 1, or None for all visible accelerators", "Leave it out"),
        ("num_gpus", -2, f"num_gpus=-2; {WHOLE} 1", "Leave it out for all GPUs"),
        ("num_gpus", True, f"num_gpus=True; {WHOLE} 1", "Leave it out for all GPUs"),
        ("num_gpus", 2.0, f"num_gpus=2.0; {WHOLE} 1", "Leave it out for all GPUs"),
        ("num_gpus", "2", f"num_gpus='2'; {WHOLE} 1", "or give their number"),
        ("num_gpus", [0, 1], f"num_gpus=[0, 1]; {WHOLE} 1", "CUDA_VISIBLE_DEVICES chooses which"),
        ("batch_size_per_gpu", 0, f"batch_size_per_gpu=0; {WHOLE} 1, or None for the script's", "out for the script's"),
        ("batch_size_per_gpu", "auto", f"batch_size_per_gpu='auto'; {WHOLE} 1", "batch_size_per_gpu out"),
        ("max_restarts", -1, f"max_restarts=-1; {WHOLE} 0", "max_restarts out."),
        ("max_restarts", False, f"max_restarts=False; {WHOLE} 0", "max_restarts out."),
        ("enable_ddp", 1, "enable_ddp=1; expected True or False", "enable_ddp=True"),
        ("seed_per_rank", "yes", "seed_per_rank='yes'; expected True or False", "seed_per_rank=True"),
        ("global_batch", "all", "global_batch='all'; expected 'keep' or 'scale'", "Set global_batch to one of them"),
        ("global_batch", 16, "global_batch=16; expected 'keep' or 'scale'", "Set global_batch to one of them"),
        (
            "strategy",
            "horovod",
            "strategy='horovod'; expected 'ddp' or 'allreduce' or 'parameter_server' or",
            "Set strategy to one of them",
        ),
        ("strategy", 3, "strategy=3; expected 'ddp' or 'allreduce' or", "Set strategy to one of them"),
        ("strategy", AllReduce, "strategy=<class", "Set strategy to one of them"),
        ("strategy", "dilco", "strategy='dilco'; expected 'ddp'", "Did you mean diloco? Set strategy to"),
        (
            "balance",
            True,
            "balance=True; expected 'auto' or 'off' or 'tokens'",
            "Did you mean 'auto'? Set balance to one of them",
        ),
        (
            "max_tokens_per_micro_batch",
            0,
            f"max_tokens_per_micro_batch=0; {WHOLE} 1, or None",
            "micro_batch out for what",
        ),
        (
            "grad_compression",
            "int8",
            "grad_compression='int8'; expected 'bf16' or 'fp16' or 'powersgd'",
            "Set grad_compression to",
        ),
        ("verify_every", -1, f"verify_every=-1; {WHOLE} 0", "Leave verify_every out."),
        ("verify_every", 2.5, f"verify_every=2.5; {WHOLE} 0", "Leave verify_every out."),
        ("hang_timeout_s", -1, "hang_timeout_s=-1; expected seconds of at least 0", "Leave hang_timeout_s out"),
        ("hang_timeout_s", float("inf"), "hang_timeout_s=inf; expected seconds of at least 0", "hang_timeout_s out"),
        (
            "resume",
            True,
            "resume=True; expected 'off' or 'auto'",
            "Did you mean 'auto'? Set resume='auto' to resume, resume='off' not to",
        ),
        ("grace_s", 0, "grace_s=0; expected seconds above 0", "Leave grace_s out."),
        ("inexact", "allow", "inexact='allow'; expected 'warn' or 'raise'", "Set inexact to one of them"),
        ("on_nan", "ignore", "on_nan='ignore'; expected 'raise' or 'skip' or 'off'", "Set on_nan to one of them"),
        ("nnodes", "0", "nnodes='0'; expected a number", 'nnodes="2"'),
        ("nnodes", "2 nodes", "nnodes='2 nodes'; expected a number", 'nnodes="2"'),
        ("nnodes", 2.0, "nnodes=2.0; expected a number", 'nnodes="2"'),
        ("nnodes", "1:4", "nnodes='1:4'; expected a number", "start this script with torchrun --nnodes 1:4 --nproc"),
        ("nnodes", "2", "rdzv_endpoint=None, but nnodes='2': nodes would not find", 'rdzv_endpoint="HOST:29400"'),
        ("rdzv_endpoint", "host:1", "rdzv_endpoint='host:1' is for several nodes", "or set nnodes"),
        ("rdzv_id", "job", "rdzv_id='job' is for several nodes", "or set nnodes"),
        (
            "device",
            "cuda:1",
            "device='cuda:1'; expected 'auto' or 'cpu' or 'cuda' or 'xpu'",
            "Set device to one of them",
        ),
        ("device", ["cpu"], "device=['cpu']; expected", "Set device to one of them"),
        ("timeout_s", 0, "timeout_s=0; expected seconds above 0", "Leave timeout_s out."),
        ("timeout_s", -1.5, "timeout_s=-1.5; expected seconds above 0", "Leave timeout_s out."),
        ("timeout_s", float("nan"), "timeout_s=nan; expected seconds above 0", "Leave timeout_s out."),
        ("timeout_s", float("inf"), "timeout_s=inf; expected seconds above 0", "Leave timeout_s out."),
        ("timeout_s", True, "timeout_s=True; expected seconds above 0", "Leave timeout_s out."),
        ("timeout_s", "60", "timeout_s='60'; expected seconds above 0", "Leave timeout_s out."),
        (
            "shard",
            "yes",
            "shard='yes'; expected 'off' or 'auto' or 'on'",
            "Did you mean 'on'? Set shard to one of them",
        ),
        ("shard", False, "shard=False; expected 'off' or 'auto' or 'on'", "Did you mean 'off'?"),
        ("num_gpus", 2**63 - 1, "num_gpus=9223372036854775807; expected at most 1e+09", "Leave it out"),
        ("batch_size_per_gpu", 10**23, f"batch_size_per_gpu={10**23}; expected at most 1e+09", "out for the script's"),
        (
            "strategy",
            f"diloco:every_steps={10**30}",
            f"strategy='diloco:every_steps={10**30}'; every_steps=1",
            "every_steps out",
        ),
        ("num_gpus", list(range(1000)), "num_gpus=[0, 1, 2, 3, 4, 5, ...]; expected a whole number", "Leave it out"),
        ("log_dir", "", "log_dir=''; expected a folder name", 'log_dir="logs"'),
        ("log_dir", 3, "log_dir=3; expected a folder name", 'log_dir="logs"'),
    ],
)
def test_wrong_argument_is_named_with_a_hint(option: str, value: object, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        MultiGPUConfig.resolve({option: value}, {})
    assert_says(error, message, hint)


def test_limit_that_nothing_would_hold_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        MultiGPUConfig(balance="off", max_tokens_per_micro_batch=512)
    assert_says(error, "max_tokens_per_micro_batch=512 is for the planner, and balance='off'", "balance='auto'")
    with pytest.raises(ConfigError) as error:
        MultiGPUConfig(global_batch="scale", balance="tokens")
    assert_says(error, "balance='tokens' deals the samples of a step, and global_batch='scale'", "batch='keep'")


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"shard": "on", "grad_compression": "bf16"},
            "grad_compression='bf16' is for DDP, and with shard",
            "one of them",
        ),
        ({"shard_offload": True}, "shard_offload=True moves what a rank holds of a sharded model", "shard='on' or"),
        ({"shard": "on", "strategy": "diloco"}, "shard='on' has no meaning for strategy='diloco", "strategy='ddp'"),
        ({"shard": "on", "enable_ddp": False}, "shard='on' is for several ranks", "one of them"),
        (
            {"strategy": "allreduce", "grad_compression": "bf16"},
            "grad_compression='bf16' has no meaning for",
            "strategy='ddp'",
        ),
        (
            {"strategy": DiLoCo(every_steps=4), "grad_compression": "bf16"},
            "no meaning for strategy='diloco:every_steps=4'",
            "strategy='ddp'",
        ),
        ({"strategy": "diloco", "balance": "tokens"}, "balance='tokens' lets ranks end a step together", "one of them"),
        ({"enable_ddp": False, "strategy": "allreduce"}, "strategy='allreduce' is for several ranks", "one of them"),
        ({"enable_ddp": False, "global_batch": "scale"}, "global_batch='scale' is for several ranks", "one of them"),
        ({"enable_ddp": False, "batch_size_per_gpu": 4}, "batch_size_per_gpu=4 is for several ranks", "one of them"),
        ({"enable_ddp": False, "grad_compression": "bf16"}, "grad_compression='bf16' is for several", "one of them"),
        ({"enable_ddp": False, "max_restarts": 1}, "max_restarts=1 is for several ranks", "one of them"),
        ({"on_nan": "skip", "grad_compression": "powersgd"}, "on_nan='skip' cannot work with grad_comp", "'bf16'"),
        ({"enable_ddp": False, "on_nan": "skip"}, "on_nan='skip' is for several ranks", "one of them"),
        ({"enable_ddp": False, "resume": "auto"}, "resume='auto' is for several ranks", "one of them"),
        (
            {"strategy": "diloco", "on_nan": "skip"},
            "on_nan='skip' needs one gradient that all ranks see",
            "on_nan='raise'",
        ),
        ({"nnodes": "2", "rdzv_endpoint": "host", "rdzv_id": "job"}, "rdzv_endpoint='host'; expected HOST:PORT", "10."),
        ({"nnodes": "2", "rdzv_endpoint": "host:1"}, "rdzv_id=None, but nnodes='2'", 'rdzv_id="any-name"'),
        (
            {"nnodes": "2", "rdzv_endpoint": "host:1", "rdzv_id": "job", "node_rank": 2},
            "node_rank=2, but nnodes='2'; expected 0 .. 1",
            "from 0",
        ),
        ({"enable_ddp": False, "balance": "tokens"}, "balance='tokens' is for several ranks", "one of them"),
    ],
)
def test_option_that_another_makes_meaningless_is_an_error(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        MultiGPUConfig(**options)
    assert_says(error, message, hint)


@pytest.mark.parametrize(
    ("options", "meets"),
    [
        ({}, True),
        ({"strategy": "allreduce"}, True),
        ({"strategy": "parameter_server"}, True),
        ({"strategy": "local_sgd"}, False),
        ({"strategy": "diloco"}, False),
    ],
)
def test_ranks_meet_in_every_step_of_synchronous_strategies(options: dict[str, Any], meets: bool) -> None:
    assert MultiGPUConfig(**options).is_synchronous is meets


@pytest.mark.parametrize(
    ("name", "text", "message", "hint"),
    [
        ("NUM_GPUS", "two", "UNSLOTH_MULTIGPU_NUM_GPUS='two'; expected a whole number", "UNSLOTH_MULTIGPU_NUM_GPUS=2"),
        ("NUM_GPUS", "2.0", "UNSLOTH_MULTIGPU_NUM_GPUS='2.0'; expected a whole number", "UNSLOTH_MULTIGPU_NUM_GPUS=2"),
        ("NUM_GPUS", "true", "UNSLOTH_MULTIGPU_NUM_GPUS='true'; expected a whole number", "UNSLOTH_MULTIGPU_NUM_GPUS"),
        (
            "NUM_GPUS",
            "0",
            "UNSLOTH_MULTIGPU_NUM_GPUS=0; expected a whole number of at least 1",
            "Leave it out for all GPUs",
        ),
        ("MAX_RESTARTS", "-1", "UNSLOTH_MULTIGPU_MAX_RESTARTS=-1; expected a whole number", "_MAX_RESTARTS out."),
        ("TIMEOUT_S", "soon", "UNSLOTH_MULTIGPU_TIMEOUT_S='soon'; expected a number", "UNSLOTH_MULTIGPU_TIMEOUT_S=2"),
        ("TIMEOUT_S", "nan", "UNSLOTH_MULTIGPU_TIMEOUT_S=nan; expected seconds above 0", "_TIMEOUT_S out."),
        ("TIMEOUT_S", "-inf", "UNSLOTH_MULTIGPU_TIMEOUT_S=-inf; expected seconds above 0", "_TIMEOUT_S out."),
        ("TIMEOUT_S", "0", "UNSLOTH_MULTIGPU_TIMEOUT_S=0.0; expected seconds above 0", "_TIMEOUT_S out."),
        ("SEED_PER_RANK", "maybe", "UNSLOTH_MULTIGPU_SEED_PER_RANK='maybe'; expected a truth", "SEED_PER_RANK=1 or"),
        ("GLOBAL_BATCH", "16", "UNSLOTH_MULTIGPU_GLOBAL_BATCH='16'; expected 'keep' or", "_GLOBAL_BATCH to one"),
        ("DEVICE", "gpu", "UNSLOTH_MULTIGPU_DEVICE='gpu'; expected 'auto' or 'cpu'", "_DEVICE to one"),
        ("GPUS", "2", "UNSLOTH_MULTIGPU_GPUS='2' names no option", "UNSLOTH_MULTIGPU_NUM_GPUS"),
        ("GPUS", "", "UNSLOTH_MULTIGPU_GPUS='' names no option", "Else unset it"),
        ("NUM_GPU", "2", "_NUM_GPU='2' names no option", "Did you mean UNSLOTH_MULTIGPU_NUM_GPUS? Else unset it."),
        (
            "SYNC_EVERY_STEPS",
            "8",
            "_SYNC_EVERY_STEPS='8' names no option",
            "Did you mean UNSLOTH_MULTIGPU_STRATEGY=local_sgd:every_steps=...? Else unset it.",
        ),
        ("RESUME", "1", "UNSLOTH_MULTIGPU_RESUME='1'; expected", "Set UNSLOTH_MULTIGPU_RESUME='auto' to resume"),
    ],
)
def test_wrong_variable_is_named_with_a_hint(name: str, text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        MultiGPUConfig.resolve({}, {ENV_PREFIX + name: text})
    assert_says(error, message, hint)


def test_wrong_variable_is_an_error_even_where_an_argument_stands_over_it() -> None:
    with pytest.raises(ConfigError, match="UNSLOTH_MULTIGPU_NUM_GPUS='two'"):
        MultiGPUConfig.resolve({"num_gpus": 2}, {variable("num_gpus"): "two"})


# Arguments of the older plugin.


@pytest.mark.parametrize("name", FORMER)
def test_argument_of_the_older_plugin_is_unknown_and_its_replacement_is_named(name: str) -> None:
    assert name not in rows(MultiGPUConfig)
    with pytest.raises(ConfigError) as error:
        from_keywords({"num_gpus": 2, name: True})
    assert_says(error, f"enable_multi_gpu() got {name}=True, which it does not know", f"Use {FORMER[name]}.")


def test_unknown_argument_is_named_with_the_one_that_is_like_it_or_with_all() -> None:
    with pytest.raises(ConfigError) as error:
        from_keywords({"num_gpu": 2})
    assert_says(error, "enable_multi_gpu() got num_gpu=2, which it does not know", "Did you mean num_gpus? ")
    with pytest.raises(ConfigError) as error:
        from_keywords({"xyzzy": 2})
    assert error.value.hint.startswith("Options: ")
    named = error.value.hint.removeprefix("Options: ").rstrip(".").split(", ")
    assert named == list(rows(MultiGPUConfig))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sync_every_steps", "Did you mean strategy=ump.LocalSGD(every_steps=...)? `unsloth-multigpu"),
        ("every_steps", "Did you mean strategy=ump.LocalSGD(every_steps=...)? `unsloth-multigpu"),
        ("sync_bucket_mb", "Did you mean strategy=ump.AllReduce(bucket_mb=...)? `unsloth-multigpu"),
        ("outer_momentum", "Did you mean strategy=ump.DiLoCo(outer_momentum=...)? `unsloth-multigpu"),
    ],
)
def test_keyword_that_stands_elsewhere_is_named_there(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_keywords({name: 8})
    assert error.value.hint.startswith(hint)


@pytest.mark.parametrize("enable_ddp", [True, False])
def test_one_process_that_sees_several_cards_leaves_them_out_of_data_parallel(enable_ddp: bool) -> None:
    config = MultiGPUConfig(num_gpus=1, enable_ddp=enable_ddp)
    (patch,) = (p for p in trainer_patches(config, 1, "any", print, print) if p.target.endswith("__post_init__"))
    args = SimpleNamespace(ddp_timeout=1, n_gpu=4, _n_gpu=4)
    patch.wrap(lambda self: None)(args)
    assert args._n_gpu == 1


def training_arguments(config: MultiGPUConfig) -> SimpleNamespace:
    """TrainingArguments as the patch leaves them in a rank of two."""
    manager: Any = SimpleNamespace(meet_ranks=lambda: None)
    patches = trainer_patches(config, 2, "cuda", print, lambda: manager)
    (patch,) = (p for p in patches if p.target.endswith("__post_init__"))
    args = SimpleNamespace(per_device_train_batch_size=8, ddp_timeout=1800, use_cpu=False)
    patch.wrap(lambda self: None)(args)
    return args


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("batch_size_per_gpu", 3, "per_device_train_batch_size"),
        ("timeout_s", 90.0, "ddp_timeout"),
    ],
)
def test_option_reaches_the_training_arguments(option: str, value: object, name: str) -> None:
    plain = vars(training_arguments(MultiGPUConfig()))
    assert plain[name] != value
    assert vars(training_arguments(MultiGPUConfig(**{option: value}))) == {**plain, name: value}  # type: ignore[arg-type]


@contextmanager
def unconfigured_logging() -> Iterator[logging.Logger]:
    """The package's logger as in a process where nobody has configured logging. No fixture: pytest adds its handlers
    to the root logger after those have run."""
    package = logging.getLogger("unsloth_multigpu")
    before = (package.handlers, package.level, package.propagate, logging.root.handlers)
    package.handlers, package.propagate, logging.root.handlers = [], True, []
    package.setLevel(logging.NOTSET)
    try:
        yield package
    finally:
        package.handlers, level, package.propagate, logging.root.handlers = before
        package.setLevel(level)


@pytest.mark.parametrize(("asked", "level"), [(logging.DEBUG, logging.DEBUG), (logging.NOTSET, logging.INFO)])
def test_level_that_a_script_has_set_stays(asked: int, level: int) -> None:
    with unconfigured_logging() as package:
        package.setLevel(asked)
        console = Console()
        assert (package.level, len(package.handlers), package.propagate) == (level, 1, False)
        console.close()
        assert (package.level, package.handlers, package.propagate) == (asked, [], True)


def test_console_of_a_notebook_keeps_stderr_for_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with unconfigured_logging() as package:
        console = Console(is_notebook=True)
        package.info("a fact")
        package.warning("a warning")
        console.close()
    out, err = capsys.readouterr()
    assert (out, err) == ("unsloth_multigpu: a fact\n", "unsloth_multigpu: warning: a warning\n")


def test_console_is_not_left_to_what_unsloth_has_configured(capsys: pytest.CaptureFixture[str]) -> None:
    with unconfigured_logging() as package:
        logging.basicConfig(level=logging.WARNING, format="[%(name)s|%(levelname)s]%(message)s")  # As its import does.
        console = Console()
        package.info("a fact")
        package.warning("a warning")
        console.close()
    assert capsys.readouterr().err == "unsloth_multigpu: a fact\nunsloth_multigpu: warning: a warning\n"


def test_console_is_left_to_an_application_that_has_its_own() -> None:
    with unconfigured_logging() as package:
        logging.root.addHandler(logging.NullHandler())
        console = Console()
        assert (package.handlers, package.propagate) == ([], True)
        console.close()
        assert package.level == logging.NOTSET
