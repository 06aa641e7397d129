"""`unsloth-multigpu run`: a script without the line sees what it sees under plain Python, on every rank."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.helpers.outcome import each, facts_of
from tests.helpers.run import BARE, run_python, run_well

RUN = ["-m", "unsloth_multigpu", "run"]
ARGUMENTS = ["--num-gpus", "7", "-h", "--", "a b", "$HOME", ""]

# What a program can see of the way in which it was started. It draws on a spawned worker, which imports it again.
FACTS = """
import json, multiprocessing, os, pickle, sys, threading

class Thing:
    def __eq__(self, other):
        return isinstance(other, Thing)

def add_rank(number):
    return number + 100

def facts():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": __spec__ and __spec__.name,
        "loader": type(__loader__).__name__,
        "path": sys.path,
        "globals": sorted(globals()),
        "builtins": type(__builtins__).__name__,
        "is_main": vars(main) is globals(),
        "pickled": pickle.loads(pickle.dumps(Thing())) == Thing(),
    }

def write(found):
    name = f"facts_{os.environ.get('RANK', '0')}.json"
    with open(os.path.join(sys.argv[1], name), "w") as file:
        json.dump(found, file)

if __name__ == "__main__":
    found = facts()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["spawned"] = pool.map(add_rank, [1])

    def late():
        threading.main_thread().join()
        # The program's last line is behind us.
        found["late_pickle"] = pickle.loads(pickle.dumps(Thing())) == Thing()
        write(found)

    threading.Thread(target=late).start()
"""


@pytest.fixture
def program(tmp_path):
    """A folder with the program as script, in a sub-folder, as a module and behind a link."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "neighbour.py").write_text("")
    (tmp_path / "pkg" / "train.py").write_text("from . import neighbour\n" + FACTS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(FACTS)
    (tmp_path / "link.py").symlink_to(Path("sub") / "train.py")
    return tmp_path


# name -> ranks, and the command
FORMS = {
    "one_rank": (1, ["sub/train.py"]),
    "script": (2, ["sub/train.py"]),
    "link": (2, ["link.py"]),
    "module": (2, ["-m", "pkg.train"]),
}


@pytest.mark.parametrize("name", each(FORMS, ["one_rank", "link", "module"]))
def test_program_sees_what_plain_python_shows(program, name):
    num_ranks, form = FORMS[name]
    plain, ours = program / "plain", program / "ours"
    plain.mkdir()
    ours.mkdir()
    assert run_python([*form, plain, *ARGUMENTS], program).code == 0
    run_well([*RUN, "--num-gpus", str(num_ranks), "--device", "cpu", *form, ours, *ARGUMENTS], program)
    (expected,) = facts_of(plain / "facts", 1)
    assert expected["argv"][2:] == ARGUMENTS
    assert expected["spawned"] == [101]
    assert expected["late_pickle"] is True
    expected["argv"][1] = str(ours)
    assert facts_of(ours / "facts", num_ranks) == [expected] * num_ranks


def test_script_is_steered_by_files_variables_and_flags_and_may_have_the_line(tmp_path):
    folder, table = tmp_path / "scripts", "num_gpus = 3\ntimeout_s = 50\ngrace_s = 7\nmax_restarts = 4\n"
    folder.mkdir()
    (tmp_path / "pyproject.toml").write_text(f"[tool.unsloth_multigpu]\n{table}")
    (folder / "multigpu.yaml").write_text("num_gpus: 2\ntimeout_s: 60\ngrace_s: 8\nlog_dir: records\n")
    (folder / "train.py").write_text(
        textwrap.dedent("""
        import unsloth_multigpu as ump
        before = ump.get_multi_gpu_status()
        ump.enable_multi_gpu()
        status, config = ump.get_multi_gpu_status(), ump.get_active_config()
        assert status == before
        assert (status.is_enabled, status.launcher) == (True, "unsloth_multigpu")
        facts = [status.world_size, config.num_gpus, config.timeout_s, config.grace_s, config.max_restarts]
        with open(f"facts_{status.rank}.json", "w") as file:
            print(facts, file=file)
        """)
    )
    command = [*RUN, "--config", "multigpu.yaml", "--grace-s", "9", "train.py"]
    run_well(command, folder, {**BARE, "UNSLOTH_MULTIGPU_TIMEOUT_S": "70"})
    # The file over the table, the variable over the file, the flag over both, and the table where nothing else is.
    assert facts_of(folder / "facts") == [[2, 2, 70.0, 9.0, 4]] * 2
    assert not (folder / "facts_2.json").exists()
    assert (folder / "records" / "rank_1.log").exists()


@pytest.mark.parametrize(
    "form", [["train.py"], pytest.param(["-m", "train"], marks=pytest.mark.thorough)], ids=["script", "module"]
)
def test_error_is_told_as_plain_python_tells_it(tmp_path, form):
    code = "import os\nif os.environ.get('RANK', '1') == '1':\n    raise ValueError('rank 1 fell')\n"
    (tmp_path / "train.py").write_text(code)
    plain = run_python(form, tmp_path)
    run = run_python([*RUN, "--num-gpus", "2", "--device", "cpu", *form], tmp_path)
    assert (run.code, plain.code) == (1, 1)
    assert plain.err.endswith("ValueError: rank 1 fell\n")
    assert run.err.count(plain.err) == 1, run.err
    assert run.err.count("Traceback") == 1, run.err
    assert "unsloth_multigpu: rank 1 failed: ValueError: rank 1 fell." in run.err


@pytest.mark.parametrize("how", ["subprocess", pytest.param("accelerate", marks=pytest.mark.thorough)])
def test_program_that_starts_a_launcher_ends_with_what_to_type(tmp_path, how):
    """Each rank would train the whole run, into one folder, with exit code 0."""
    (tmp_path / "train.py").write_text("import os\nopen(f'trained_{os.getpid()}', 'w').close()\n")
    ways = {
        "subprocess": "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', 'train.py'], check=True)\n",
        "accelerate": "from accelerate.commands.launch import launch_command, launch_command_parser\n"
        "launch_command(launch_command_parser().parse_args(['--cpu', '--num_processes', '1', 'train.py']))\n",
    }
    (tmp_path / "start.py").write_text(ways[how])
    run = run_python([*RUN, "--num-gpus", "2", "start.py"], tmp_path, BARE)
    assert list(tmp_path.glob("trained_*")) == []
    assert run.code == 69
    assert "train.py': a launcher in each rank would start the whole training again." in run.err
    assert "Hint: Let the ranks run the launched script itself: unsloth-multigpu run train.py ..." in run.err
