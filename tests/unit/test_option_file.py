"""Options in a YAML file and in pyproject.toml: what wins over what, and what is refused with a hint."""

import os

import pytest

from tests.helpers.refused import refused
from unsloth_multigpu import __main__ as main
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.options import ENV_CONFIG, ENV_PREFIX, MultiGPUConfig, variable
from unsloth_multigpu.strategy import DiLoCo

TABLE = ", [tool.unsloth_multigpu]"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a user, without variables of ours."""
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    place = tmp_path / "project" / "scripts"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    return place


def yaml_config(folder, text):
    file = folder / "multigpu.yaml"
    file.write_text(text, encoding="utf-8")
    return MultiGPUConfig.resolve({}, {ENV_CONFIG: str(file)})


def toml_config(folder, text):
    (folder.parent / "pyproject.toml").write_text(text, encoding="utf-8")
    return MultiGPUConfig.resolve({})


def test_arguments_win_over_variables_over_the_file_over_pyproject(folder, monkeypatch):
    names = ("grace_s", "timeout_s", "max_restarts", "verify_every", "log_dir")

    def found(**arguments):
        config = MultiGPUConfig.resolve(arguments)
        return [getattr(config, name) for name in names]

    assert found() == [30.0, 1800.0, 0, 100, "logs"]
    table = "grace_s = 1\ntimeout_s = 1.5\nmax_restarts = 1\nverify_every = 1\n"
    (folder.parent / "pyproject.toml").write_text(f"[tool.unsloth_multigpu]\n{table}")
    assert found() == [1.0, 1.5, 1, 1, "logs"]
    (folder / "m.yaml").write_text("grace_s: 2\ntimeout_s: 2\nmax_restarts: 2  # restarts\n")
    monkeypatch.setenv(ENV_CONFIG, "m.yaml")
    assert found() == [2.0, 2.0, 2, 1, "logs"]
    monkeypatch.setenv(variable("timeout_s"), "3")
    monkeypatch.setenv(variable("grace_s"), "3")
    assert found() == [3.0, 3.0, 2, 1, "logs"]
    assert found(grace_s=4) == [4.0, 3.0, 2, 1, "logs"]


def test_every_option_is_read_from_yaml_as_from_a_variable(folder):
    texts = {
        "num_gpus": "2",
        "balance": "off",
        "resume": "off",
        "strategy": "diloco:every_steps=8",
        "enable_ddp": "yes",
        "nnodes": "4",
        "rdzv_endpoint": "10.0.0.1:29400",
        "rdzv_id": "007",
        "hang_timeout_s": "0",
        "log_dir": "",
    }
    by_variable = MultiGPUConfig.resolve({}, {variable(name): text for name, text in texts.items()})
    assert yaml_config(folder, "\n".join(f"{name}: {text}" for name, text in texts.items())) == by_variable
    # YAML 1.1 would make False, 64 and 7 of these.
    assert (by_variable.balance, by_variable.nnodes, by_variable.rdzv_id) == ("off", 4, "007")
    assert by_variable.strategy == DiLoCo(every_steps=8)
    assert yaml_config(folder, "# nothing\n") == yaml_config(folder, "num_gpus: null\n") == MultiGPUConfig()


def test_every_option_is_read_from_pyproject(folder):
    text = '[tool.unsloth_multigpu]\nnum_gpus = 2\nshard_offload = false\ntimeout_s = 60\nbalance = "tokens"\n'
    config = toml_config(folder, text)
    assert (config.num_gpus, config.shard_offload, config.timeout_s) == (2, False, 60.0)
    assert toml_config(folder, "[tool.other]\nnum_gpus = 9\n") == MultiGPUConfig()
    # What this package has no part in is not read: not even its form.
    assert toml_config(folder, "this is no TOML") == MultiGPUConfig()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("num_gpus: 2\nnum_gpu: 3", ", line 2: num_gpu='3' is not an option.", "Did you mean num_gpus?"),
        ("num_gpus: two", ", line 1: num_gpus='two'; expected a whole number", "Leave num_gpus out"),
        ("\nbalance: none_of\n", ", line 2: balance='none_of'; expected 'auto' or", "Leave balance out"),
        ("num_gpus: 2\nnum_gpus: 3", ", line 2: num_gpus is given twice.", "Leave one"),
        ("strategy: {diloco: 8}", ", line 1: strategy has several values; expected one.", "diloco:every_steps=8"),
        ("- num_gpus", " has no options.", "`name: value`"),
        ("num_gpus: [", " is not YAML: ", "`name: value`"),
    ],
)
def test_wrong_yaml_names_file_line_and_the_way_out(folder, text, message, hint):
    with refused(ConfigError, f"{folder / 'multigpu.yaml'}{message}", hint):
        yaml_config(folder, text)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[tool.unsloth_multigpu]\nnum_gpu = 3", f"{TABLE}: num_gpu=3 is not an option.", "Did you mean num_gpus?"),
        ("[tool.unsloth_multigpu]\nnum_gpus = 2.5", f"{TABLE}: num_gpus=2.5; expected a whole", "Leave num_gpus out"),
        ("[tool]\nunsloth_multigpu = 2", f"{TABLE} is 2; expected a table.", "one option per line"),
        ("[tool.unsloth_multigpu\n", " cannot be read: ", "Correct the file"),
    ],
)
def test_wrong_pyproject_is_named(folder, text, message, hint):
    with refused(ConfigError, f"{folder.parent / 'pyproject.toml'}{message}", hint):
        toml_config(folder, text)


def test_file_that_is_not_there_is_named(folder):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: "):
        MultiGPUConfig.resolve({}, {ENV_CONFIG: "none.yaml"})


def test_run_reads_the_file_that_it_is_given(folder, monkeypatch, capsys):
    (folder / "train.py").write_text("pass")
    (folder / "m.yaml").write_text("num_gpu: 1\n")
    monkeypatch.setenv(ENV_CONFIG, "")  # So that it is put back.
    assert main.main(["run", "--config", "m.yaml", "train.py"]) == ConfigError.exit_code
    assert "m.yaml, line 1: num_gpu='1' is not an option.\nHint: Did you mean num_gpus?" in capsys.readouterr().err
    assert os.environ[ENV_CONFIG] == str(folder / "m.yaml")
