"""The options of a run: every field says all that is needed, and all that is made from it agrees."""

import ast
import inspect
import re

import pytest

import unsloth_multigpu as ump
from tests.helpers.options import another_value
from tests.helpers.refused import refused
from tests.helpers.run import ROOT
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import Scope, options_of
from unsloth_multigpu.options import EVERYDAY, GROUPS, MultiGPUConfig, command_options, variable
from unsloth_multigpu.strategy import DDP, STRATEGIES, AllReduce, DiLoCo, LocalSGD, ParameterServer, read_strategy

TABLE = options_of(MultiGPUConfig)
CARRIED = [(name, row) for cls in STRATEGIES.values() for name, row in options_of(cls).items()]
# Where nothing follows what was asked of a scope.
OUT_OF_SCOPE = {
    Scope.RANKS: [{"enable_ddp": False}],
    Scope.PLANNER: [{"global_batch": "scale"}, {"batch_size_per_gpu": 2}, {"strategy": "diloco"}],
    Scope.NODES: [{}],
}


@pytest.mark.parametrize(("name", "option"), [*TABLE.items(), *CARRIED])
def test_option_says_all_that_is_needed(name, option):
    assert re.fullmatch(r"\S.*\.\"?", option.help)  # Whole sentences.
    assert option.default is None or option.take(name, option.default) == option.default
    assert option.group in (GROUPS if name in TABLE else ("",))
    assert set(option.commands) <= {"run", "verify", "chaos"}
    assert "run" in option.commands  # What a tool hands on, a run has.


def test_line_has_the_options_of_everyday_use_in_their_order():
    *everyday, replay, others = inspect.signature(ump.enable_multi_gpu).parameters.values()
    # The third argument stands where the older plugin had it.
    of_older_plugin = ("batch_size_per_gpu", "enable_ddp")
    assert [p.name for p in everyday] == [n for n, o in TABLE.items() if o.group == EVERYDAY or n in of_older_plugin]
    assert [p.name for p in everyday[:3]] == list(TABLE)[:3] == ["num_gpus", "batch_size_per_gpu", "enable_ddp"]
    assert {p.default for p in everyday} == {None}
    assert (replay.name, replay.default, others.kind) == ("replay", False, inspect.Parameter.VAR_KEYWORD)
    annotations = {p.name: p.annotation for p in everyday}
    assert annotations.pop("strategy") == "str | Strategy | None"
    assert annotations == {name: f"{TABLE[name].type.__name__} | None" for name in annotations}


def test_docstring_of_the_line_has_its_keywords():
    documented = re.findall(r"^    (\w+): ", str(inspect.getdoc(ump.enable_multi_gpu)), flags=re.MULTILINE)
    keywords = list(inspect.signature(ump.enable_multi_gpu).parameters)
    assert documented[: len(keywords)] == keywords


SCOPED = [(scope, name) for name, row in TABLE.items() for scope in Scope if scope in row.scopes]


@pytest.mark.parametrize(("scope", "name"), SCOPED, ids=[f"{name} {scope.name}" for scope, name in SCOPED])
def test_option_is_refused_where_nothing_follows_it(scope, name):
    options = {name: another_value(name)}
    if scope is Scope.TRAINER:
        # Whether a plain loop trains is known later: plain.plain_loop asks for what stands here.
        (asked,) = MultiGPUConfig(**options).asked(scope)
        assert asked.startswith(f"{name}=")
    for place in OUT_OF_SCOPE.get(scope, ()):
        with pytest.raises(ConfigError, match=f"^{name}="):
            MultiGPUConfig(**{**place, **options})


def test_every_option_is_read():
    read = set()
    for path in (ROOT / "unsloth_multigpu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                is_config = owner.endswith("config") or (owner == "self" and path.name == "options.py")
                read |= {node.attr} if is_config else set()
    assert set(TABLE) - read == set()


def test_commands_have_flags_of_the_table():
    for command in ("run", "verify", "chaos"):
        table = command_options(command)
        # In the order of docs/options.md.
        known = [name for group in GROUPS for name, row in TABLE.items() if row.group == group]
        assert list(table) == [name for name in known if command in TABLE[name].commands]
        assert all(option.help == TABLE[name].help for name, option in table.items())
    assert command_options("chaos", {"balance": "off"})["balance"].usual() == "off"
    usual = {name: command_options("run")[name].usual() for name in ("max_restarts", "enable_ddp", "strategy")}
    assert usual == {"max_restarts": "0", "enable_ddp": "on", "strategy": "ddp"}


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_readme_has_the_everyday_options_and_the_link(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = [name for name in re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) if name in TABLE]
    # The script's own arguments say it as well.
    assert named == [n for n, row in TABLE.items() if row.group == EVERYDAY and n != "batch_size_per_gpu"]
    assert "(docs/options.md)" in text


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (DDP(), "ddp"),
        (AllReduce(), "allreduce"),
        (ParameterServer(), "parameter_server"),
        (DiLoCo(outer_learning_rate=2.5), "diloco:outer_learning_rate=2.5"),
        (LocalSGD(every_steps=8), "local_sgd:every_steps=8"),
        (DiLoCo(16, 0.1, 0), "diloco:outer_learning_rate=0.1,outer_momentum=0.0"),
    ],
)
def test_text_of_a_strategy_is_read_back(strategy, text):
    assert str(strategy) == text
    assert read_strategy("strategy", text) == strategy
    config = MultiGPUConfig.resolve({}, {variable("strategy"): text})
    assert (config.strategy, config.of_the_run()["strategy"]) == (strategy, text)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "strategy=''; expected 'ddp' or 'allreduce' or", "docs/strategies.md"),
        ("dilco:every_steps=8", "strategy='dilco:every_steps=8'; expected 'ddp' or", "Did you mean diloco? "),
        ("ddp:bucket_mb=4", "'bucket_mb' is not an option of ddp", "Options of ddp: none."),
        ("diloco:every=8", "'every' is not an option of diloco", "Did you mean every_steps? Options of diloco: "),
        ("diloco:every_steps=4,every_steps=8", "'every_steps' is given twice", "Options of diloco"),
        ("diloco:every_steps=4,", "'' is not an option of diloco", "Options of diloco"),
        ("local_sgd:every_steps=0", "every_steps=0; expected a whole number of at least 1", "Leave every_steps out"),
        ("local_sgd:every_steps=1.5", "every_steps='1.5'; expected a whole number", "Leave every_steps out"),
        ("diloco:outer_momentum=nan", "outer_momentum=nan; expected a number of at least 0", "out"),
        ("diloco:outer_momentum=1", "outer_momentum=1.0; expected a number of at least 0 and below 1", "Leave"),
    ],
)
def test_wrong_text_of_a_strategy_is_named_with_a_hint(text, message, hint):
    with refused(ConfigError, message, hint) as error:
        MultiGPUConfig.resolve({"strategy": text}, {})
    assert str(error.value).startswith(f"strategy={text!r}; ")
    if text:
        with pytest.raises(ConfigError, match=re.escape(f"UNSLOTH_MULTIGPU_STRATEGY={text!r}; ")):
            MultiGPUConfig.resolve({}, {variable("strategy"): text})


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_says_what_ranks_do_and_is_named_wherever_users_look(name):
    every = {"allreduce": (True, True), "ddp": (True, True), "parameter_server": (True, False)}
    strategy = STRATEGIES[name]()
    assert (strategy.is_synchronous, strategy.has_one_gradient) == every.get(name, (False, False))
    assert STRATEGIES[name].__name__ in ump.__all__
    assert name in (ump.enable_multi_gpu.__doc__ or "")
    assert name in TABLE["strategy"].help
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    assert f'`strategy="{name}"`' in page or f"`strategy=ump.{STRATEGIES[name].__name__}(" in page
