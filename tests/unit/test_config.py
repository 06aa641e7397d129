"""Options: where a value comes from, and what is said of one that cannot be used."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.helpers.refused import refused
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.hooks.trainer_patches import TrainerHooks
from unsloth_multigpu.logs import Console
from unsloth_multigpu.option_type import options_of
from unsloth_multigpu.options import ENV_CONFIG, ENV_PREFIX, FORMER, INTERNAL_VARIABLES, MultiGPUConfig, variable
from unsloth_multigpu.session import Session
from unsloth_multigpu.strategy import AllReduce
from unsloth_multigpu.wire.identity import SINGLE_PROCESS


def test_words_for_yes_and_no():
    for words, value in ((("1", "True", "YES", "on"), True), (("0", "False", "no", "OFF"), False)):
        configs = [MultiGPUConfig.resolve({}, {variable("enable_ddp"): word}) for word in words]
        assert [config.enable_ddp for config in configs] == [value] * 4


def test_empty_variables_and_those_that_are_no_options_leave_the_defaults():
    names = ("num_gpus", "timeout_s", "global_batch", "shard_offload")
    environments = [{variable(name): text for name in names} for text in ("", "  ", "none", "None")]
    others = dict.fromkeys(INTERNAL_VARIABLES - {ENV_CONFIG}, "x")
    for environment in (*environments, {**others, "UNSLOTH_RETURN_LOGITS": "1", "NUM_GPUS": "x"}):
        assert MultiGPUConfig.resolve({}, environment) == MultiGPUConfig()


WHOLE = "expected a whole number of at least"
OUT = "Leave {} out: its default is "
OPTIONS = f"Options: {', '.join(options_of(MultiGPUConfig))}."


@pytest.mark.parametrize(
    ("option", "value", "message", "hint"),
    [
        ("num_gpu", 2, "enable_multi_gpu: num_gpu=2 is not an option", "Did you mean num_gpus?"),
        ("xyzzy", 2, "enable_multi_gpu: xyzzy=2 is not an option", OPTIONS),
        ("num_gpus", 0, f"num_gpus=0; {WHOLE} 1 and at most 1e+09", "Leave num_gpus out"),
        ("num_gpus", True, f"num_gpus=True; {WHOLE} 1", "all visible GPUs"),
        ("num_gpus", 2.0, f"num_gpus=2.0; {WHOLE} 1", "num_gpus out"),
        ("num_gpus", list(range(1000)), "num_gpus=[0, 1, 2, 3, 4, 5, ...]; expected a whole number", "num_gpus out"),
        ("batch_size_per_gpu", 10**23, f"batch_size_per_gpu={10**23}; {WHOLE} 1 and at most 1e+09", "the script's"),
        ("max_restarts", -1, f"max_restarts=-1; {WHOLE} 0", OUT + "0."),
        ("enable_ddp", 1, "enable_ddp=1; expected True or False", OUT + "on."),
        ("global_batch", 16, "global_batch=16; expected 'keep' or 'scale'", OUT + "keep."),
        ("strategy", "dilco", "strategy='dilco'; expected 'ddp'", "Did you mean diloco? "),
        ("strategy", AllReduce, "strategy=<class", "docs/strategies.md"),
        ("balance", True, "balance=True; expected 'auto' or 'off' or 'tokens'", "Did you mean 'auto'? Leave"),
        ("shard", "yes", "shard='yes'; expected 'off' or 'auto' or 'on'", "Did you mean 'on'? Leave"),
        ("shard", False, "shard=False; expected 'off' or 'auto' or 'on'", "Did you mean 'off'?"),
        ("device", ["cpu"], "device=['cpu']; expected 'auto' or 'cpu' or 'cuda'", OUT + "auto."),
        ("verify_every", 2.5, f"verify_every=2.5; {WHOLE} 0", OUT + "100."),
        ("hang_timeout_s", 1, "hang_timeout_s=1; expected a number of at least 2 and at most 1e+09, or 0 for n", OUT),
        ("hang_timeout_s", float("inf"), "hang_timeout_s=inf; expected a number of at least 2", OUT + "120."),
        ("timeout_s", 0, "timeout_s=0; expected a number of at least 0.001", OUT + "1800."),
        ("timeout_s", float("nan"), "timeout_s=nan; expected a number", OUT),
        ("nnodes", "1:4", f"nnodes='1:4'; {WHOLE} 1", "For nodes that come and go see docs/cluster.md."),
        ("nnodes", 2, "rdzv_endpoint=None, but nnodes=2: the nodes could not find", 'rdzv_endpoint="HOST:29400"'),
        ("rdzv_endpoint", "host:1", "rdzv_endpoint='host:1' is for several nodes, but nnodes=1", "one of them"),
        ("log_dir", "", "log_dir=''; expected FOLDER", OUT + "logs."),
        ("log_dir", 3.5, "log_dir=3.5; expected FOLDER", OUT),
    ],
)
def test_wrong_argument_is_named_with_a_hint(option, value, message, hint):
    with refused(ConfigError, message, hint.format(option)):
        MultiGPUConfig.resolve({option: value}, {})


TWO_NODES = {"nnodes": 2, "rdzv_endpoint": "host:1", "rdzv_id": "job"}


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"balance": "off", "max_tokens_per_micro_batch": 5}, "max_tokens_per_micro_batch=5 is for the planner", "one"),
        ({"strategy": "diloco", "balance": "tokens"}, "is for the planner, but strategy='diloco' does not", "one"),
        ({"shard": "on", "strategy": "diloco"}, "by FSDP2, but strategy='diloco'", "one of them"),
        ({"shard_offload": True}, "shard_offload=True moves the shards of a model", "shard='on' or"),
        ({"enable_ddp": False, "batch_size_per_gpu": 4}, "batch_size_per_gpu=4 is for several ranks", "one of them"),
        ({"on_nan": "skip", "strategy": "diloco"}, "on_nan='skip' needs the same gradient", "on_nan='raise'"),
        ({**TWO_NODES, "rdzv_endpoint": "host"}, "rdzv_endpoint='host'; expected HOST:PORT", "Leave"),
        ({**TWO_NODES, "rdzv_id": None}, "rdzv_id=None, but nnodes=2", 'rdzv_id="any-name"'),
        ({**TWO_NODES, "node_rank": 2}, "node_rank=2, but nnodes=2; expected 0 .. 1", "from 0"),
        *(
            ({"sequence_parallel": 2, **other}, "sequence_parallel=2 needs strategy='ddp'", "")
            for other in ({"shard": "on"}, {"strategy": "allreduce"}, {"global_batch": "scale"})
        ),
        *(
            ({"generators": 1, **other}, "generators=1 needs one node and ranks with equal, unsharded weights", "")
            for other in (TWO_NODES, {"shard": "on"}, {"strategy": "diloco"})
        ),
    ],
)
def test_option_that_another_makes_meaningless_is_an_error(options, message, hint):
    with refused(ConfigError, message, hint):
        MultiGPUConfig(**options)


@pytest.mark.parametrize(
    ("name", "text", "message", "hint"),
    [
        ("NUM_GPUS", "two", f"UNSLOTH_MULTIGPU_NUM_GPUS='two'; {WHOLE} 1", "NUM_GPUS out"),
        ("NUM_GPUS", "0", f"UNSLOTH_MULTIGPU_NUM_GPUS=0; {WHOLE} 1", "NUM_GPUS out"),
        ("ENABLE_DDP", "maybe", "UNSLOTH_MULTIGPU_ENABLE_DDP='maybe'; expected True or", "_ENABLE_DDP out"),
        ("RESUME", "1", "UNSLOTH_MULTIGPU_RESUME='1'; expected", "Did you mean 'auto'? Leave"),
        ("GPUS", "2", "UNSLOTH_MULTIGPU_GPUS='2' is not an option", "UNSLOTH_MULTIGPU_NUM_GPUS"),
        ("NUM_GPU", "", "_NUM_GPU='' is not an option", "Did you mean UNSLOTH_MULTIGPU_NUM_GPUS?"),
    ],
)
def test_wrong_variable_is_named_with_a_hint(name, text, message, hint):
    with refused(ConfigError, message, hint):
        MultiGPUConfig.resolve({}, {ENV_PREFIX + name: text})


@pytest.mark.parametrize("name", FORMER)
def test_former_argument_is_unknown_and_its_replacement_is_named(name):
    assert name not in options_of(MultiGPUConfig)
    with refused(ConfigError, f"enable_multi_gpu: {name}=True is not an option", f"Use {FORMER[name]}."):
        MultiGPUConfig.resolve({"num_gpus": 2, name: True})


@pytest.mark.parametrize("enable_ddp", [True, False])
def test_one_process_that_sees_several_cards_leaves_them_out_of_data_parallel(enable_ddp):
    config = MultiGPUConfig(num_gpus=1, enable_ddp=enable_ddp)
    patches = TrainerHooks(Session(config, SINGLE_PROCESS, console=None)).patches()
    (patch,) = (p for p in patches if p.target.endswith("__post_init__"))
    args = SimpleNamespace(ddp_timeout=1, n_gpu=4, _n_gpu=4)
    patch.wrap(lambda self: None, args)
    assert args._n_gpu == 1


@contextmanager
def unconfigured_logging():
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


@pytest.mark.parametrize("is_notebook", [True, False])
def test_console_is_not_left_to_what_unsloth_has_configured(capsys, is_notebook):
    with unconfigured_logging() as package:
        logging.basicConfig(level=logging.WARNING, format="[%(name)s|%(levelname)s]%(message)s")  # As its import does.
        console = Console(is_notebook=is_notebook)
        package.info("a fact")
        package.warning("a warning")
        console.close()
    fact, warning = "unsloth_multigpu: a fact\n", "unsloth_multigpu: warning: a warning\n"
    # Notebooks show stderr like an error.
    assert tuple(capsys.readouterr()) == ((fact, warning) if is_notebook else ("", fact + warning))


def test_console_is_left_to_an_application_that_has_its_own():
    with unconfigured_logging() as package:
        logging.root.addHandler(logging.NullHandler())
        console = Console()
        assert (package.handlers, package.propagate) == ([], True)
        console.close()
        assert package.level == logging.NOTSET
