"""One real kernel for each end of the range of IPython: what rank 0 does for all, and what the user sees.

The cells of all tests run in one kernel, in order; none needs what another leaves behind. The kernel has what a kernel
of a front end has before its first cell: finders of modules, and code that the front end runs by itself.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.helpers import run
from tests.helpers.notebook import NotebookRun, oldest_ipython

# Before the line: what the workers have to do again, and what only this process has.
EARLIER = """
!echo never again
answer = 42
handler_before = get_ipython().CustomTB
"""
# A call that fails, and is put right in a later cell: what stands behind it was never run.
MISTAKE = """
import unsloth_multigpu as ump
before_mistake = 1
ump.enable_multi_gpu(num_gpu=2)
answer = 0
"""
# The line itself stands within a cell magic, behind what is done before it.
LINE = """%%time
import os
import unsloth_multigpu as ump
before = 1
while not ump.is_multi_gpu_enabled():
    ump.enable_multi_gpu(num_gpus=2, log_dir="own_logs")
    after = before + 1
"""
TOTAL = """
import torch, torch.distributed as dist
rank = dist.get_rank()
def total(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor)
    return tensor.item()
"""

# As images of Kaggle start Python: with a finder before all others. Behind what each Python of these tests begins with.
SITE = (
    f"exec(open({run.SITE + '/sitecustomize.py'!r}).read())"
    + """
import importlib.abc, importlib.machinery, sys, types
class Loader(importlib.abc.Loader):
    def create_module(self, spec): return types.ModuleType(spec.name)
    def exec_module(self, module): module.is_replaced = 1

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == "google_cloud_storage":
            return importlib.machinery.ModuleSpec(fullname, Loader())

sys.meta_path.insert(0, Finder())
"""
)


@pytest.fixture(scope="module", params=["newest", pytest.param("oldest", marks=pytest.mark.thorough)])
def notebook(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookRun]:
    folder = tmp_path_factory.mktemp("notebook")
    packages = oldest_ipython()["PYTHONPATH"] if request.param == "oldest" else str(run.ROOT)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    with NotebookRun(folder, {"PYTHONPATH": os.pathsep.join([str(folder / "site"), packages])}) as started:
        # As VS Code and its setting jupyter.runStartupCommands do.
        assert started.hidden("hidden_function = lambda: 1").error == ""
        version = started.hidden("__import__('IPython').__version__").text.strip()
        assert (version == "'7.34.0'") == (request.param == "oldest"), version
        failing = {MISTAKE: "ConfigError", "def f(:": "SyntaxError"}
        for source in (EARLIER, *failing, LINE, TOTAL):
            result = started.run(source, 120)
            assert result.error == failing.get(source, ""), result
        yield started


def test_a_worker_has_what_was_there_before_the_line(notebook: NotebookRun) -> None:
    values = "total(answer), total(before), total(after), total(before_mistake)"
    assert notebook.well(values) == "(84.0, 2.0, 4.0, 2.0)"
    log = (notebook.folder / "own_logs" / "rank_1.log").read_text()
    assert "never again" not in log.replace("echo never again", "")


def test_a_worker_has_not_the_names_of_the_kernels_front_end(notebook: NotebookRun) -> None:
    result = notebook.run("hidden_function()")
    assert result.error == "DistributedError"
    assert "code that only rank 0 runs has defined it" in result.value


def test_a_changed_module_is_reloaded_on_all_ranks(notebook: NotebookRun) -> None:
    (notebook.folder / "edited.py").write_text("value = 1\n")
    notebook.well("%load_ext autoreload\n%autoreload 2")
    assert notebook.well("import edited\ntotal(edited.value)") == "2.0"
    (notebook.folder / "edited.py").write_text("value = 10\n")
    # Rank 0 reloads it in a request that only rank 0 runs.
    assert notebook.hidden("edited.value").well() == "10"
    assert notebook.well("total(edited.value)") == "20.0"
    notebook.well("%autoreload 0")


def test_finders_of_a_front_end_and_ours_leave_each_other_alone(notebook: NotebookRun) -> None:
    # One more, before ours. Later tests see that patches land in what is imported from now on.
    notebook.well("import sitecustomize, sys\nsys.meta_path.insert(0, sitecustomize.Finder())")
    assert notebook.well("import google_cloud_storage as gcs\ntotal(gcs.is_replaced)") == "2.0"


def test_requests_of_a_front_end_are_none_of_the_workers(notebook: NotebookRun) -> None:
    viewer = "def shown(value): return type(value).__name__\nprint(shown(total), rank)\ndel shown"
    assert notebook.hidden(viewer).well() == "function 0"
    assert notebook.hidden("!echo [$RANK]").well() == "[]"
    notebook.well("silent_name = 1", silent=True)
    for source, error in (("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("%nothing", "UsageError")):
        assert notebook.hidden(source).error == error
    # Two while a cell runs, with what the user's typing asks for.
    requests = [
        notebook.begin("import time; time.sleep(0.5); total(1)"),
        notebook.begin("print('second')", store_history=False),
    ]
    asked = [notebook.client.complete("tot", 3), notebook.client.inspect("total", 3)]
    requests += [notebook.begin("raise ValueError('third')", store_history=False)]
    results = [notebook.finish(request) for request in requests]
    assert [result.text.strip() for result in results] == ["2.0", "second", ""]
    assert [result.error for result in results] == ["", "", "ValueError"]
    assert [notebook.reply(request)["status"] for request in asked] == ["ok", "ok"]
    assert notebook.well("total('silent_name' in globals()), total('shown' in globals())") == "(1.0, 0.0)"
    assert "shown(total)" not in (notebook.folder / "own_logs" / "rank_1.log").read_text()


def test_a_subshell_is_none_of_the_workers(notebook: NotebookRun) -> None:
    if notebook.well("import ipykernel\nipykernel.version_info[0]") < "7":
        pytest.skip("there are no subshells before ipykernel 7")
    subshell = notebook.control("create_subshell_request", {})["subshell_id"]
    # Both start programs. The first one ends first, and its cell needs the rank's variables.
    until = "until [ -e {0} ]; do sleep 0.05; done"
    cell = notebook.begin(f"!echo begins; {until.format('second')}\nimport os\ntotal(os.environ['WORLD_SIZE'])")
    notebook.wait_for_text("begins")
    hidden = notebook.begin(f"!touch second; {until.format('first')}\n1 / 0", subshell, store_history=False)
    result = notebook.finish(cell)
    assert (result.text.split(), result.error) == (["4.0"], "")
    (notebook.folder / "first").touch()
    result = notebook.finish(hidden)
    assert (result.text.split(), result.error) == ([], "ZeroDivisionError")
    assert notebook.control("delete_subshell_request", {"subshell_id": subshell})["status"] == "ok"
    assert notebook.well("total(os.environ['RANK'])") == "1.0"
    assert notebook.well("def f(x):\n    !echo {x}\nf('local')") == "local"


SLEEPS = "print('begins')\ntime.sleep(60 * (1 - rank))\ngoes_on = total(1)"


@pytest.mark.parametrize(
    ("source", "press"),
    [
        (SLEEPS, lambda notebook: os.kill(notebook.pid, signal.SIGINT)),  # For rank 0 alone.
        (SLEEPS, lambda notebook: notebook.control("interrupt_request", {})),
        ("!echo begins; exec sleep 60\ngoes_on = total(1)", NotebookRun.interrupt),
    ],
)
def test_stop_ends_a_cell(notebook: NotebookRun, source: str, press: Callable[[NotebookRun], None]) -> None:
    result = notebook.stop(source, "begins", press)
    assert (result.error, len(result.traceback)) == ("KeyboardInterrupt", 1), result
    assert result.seconds < 30
    assert notebook.well("total(1), total('goes_on' in globals())") == "(2.0, 0.0)"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("!echo from {rank}; exit 3\ntotal(_exit_code)", "from 0\n6.0"),
        ("x = !echo one; echo two\nx, x.s, total(len(x))", "(['one', 'two'], 'one two', 4.0)"),
        ("x = %sx echo one\nx, total(len(x))", "(['one'], 2.0)"),
        ("def f(rank):\n    x = !echo {rank}\n    return x\nf('local'), total(len(f('b')))", "(['local'], 2.0)"),
        ("%%bash\necho [$RANK$WORLD_SIZE$UNSLOTH_MULTIGPU_RUN_DIR$MASTER_ADDR$PYTHONHASHSEED]", "[]"),
        ("import sys\n!{sys.executable} -c 'import os; print(os.environ.get(\"RANK\"))'", "None"),
        ("%%writefile made.py\nvalue = 7", "Writing made.py"),
        ("import made\ntotal(made.value)", "14.0"),
        ("%%rank0\nprint('only', rank)\nrank", "only 0\n0"),
        ("%%rank 1\nprint('only', rank)\nx = !echo [$RANK]\nx", "[rank1] only 1\n[rank1] Out[N]: ['[]']"),
        ("%%rank 0,1\nprint('each', rank)", "each 0\n[rank1] each 1"),
        ("%ranks on", ""),
        ("print('both', rank)\nfor i in range(3): print(i, end='\\r')", "both 0\n0\r1\r2\r[rank1] both 1\n[rank1] 2"),
        ("%ranks off", ""),
        ("print('quiet', rank)", "quiet 0"),
        ("%ranks help", "%ranks: all ranks. %ranks log [N]: the end of a log. %ranks on, off: output of every rank."),
        ("%%capture caught\nprint('caught', rank)\ny = total(1)", ""),
        ("caught.stdout, y", "('caught 0\\n', 2.0)"),
        ("line = 'named_by_line'", ""),
        ("%%capture $line\nprint('found')", ""),
        ("named_by_line.stdout", "'found\\n'"),
        ("%env FOO=bar\n%cd -q ..\nimport os\ntotal(os.environ['FOO'] == 'bar')", "env: FOO=bar\n2.0"),
        ("%config InlineBackend.figure_format = 'svg'", ""),
        ("class Tee:\n    def __init__(self, to): self.to, self.write, self.flush = to, to.write, to.flush", ""),
        ("import sys\nsys.stdout = Tee(sys.stdout)", ""),
        ("sys.stdout = sys.stdout.to\ntotal(1)", "2.0"),
        ("display({'a': 1})", "{'a': 1}"),
        ("import asyncio\nawait asyncio.sleep(0.01)\ntotal(1)", "2.0"),
        ("len?", ""),
        ("# nothing", ""),
        ("def g(): return 1", ""),
        ("41 + 1", "42"),
        ("total(_), total(list(Out.values())[-1])", "(84.0, 84.0)"),
        ("if rank == 0:\n    !echo only here\ntotal(1)", "only here\n2.0"),
        ("if rank == 0: get_ipython().getoutput('echo first')\nb = !echo second\ntotal(b == ['second'])", "2.0"),
        ("breakpoint() if rank else None\ntotal(1)", "2.0"),
        ("%%rank 1\nexit()", ""),
        ("%%rank 1\nquit", ""),
    ],
)
def test_a_cell_gives_what_it_gives_on_one_gpu(notebook: NotebookRun, source: str, text: str) -> None:
    # The numbers of cells depend on which tests run.
    assert re.sub(r"Out\[\d+\]", "Out[N]", notebook.well(source)) == text


def test_cells_have_the_same_numbers_on_all_ranks(notebook: NotebookRun) -> None:
    assert notebook.well("number = get_ipython().execution_count\n'kept'") == "'kept'"
    assert notebook.well("total(number) / number, total(Out[max(Out)] == 'kept')") == "(2.0, 2.0)"
    place = notebook.run("def where(): return rank and 1 / 0\nwhere()").traceback[0]
    assert len(set(re.findall(r"(?:In\[|-input-)(\d+)", place))) == 1


def test_the_ranks_are_shown(notebook: NotebookRun) -> None:
    head, first, second = notebook.well("%ranks").splitlines()
    assert head.split()[:4] == ["rank", "device", "step", "doing"]
    own, other = (dict(zip(head.split(), row.split(), strict=False)) for row in (first, second))
    assert (own["rank"], own["device"], own["pid"]) == ("0", "cpu", str(notebook.pid))
    assert (other["rank"], other["device"]) == ("1", "cpu")
    assert int(other["pid"]) in {child.pid for child in notebook.children()}
    notebook.run("print('to be found', rank)")
    assert "to be found 1\n" in notebook.run("%ranks log").text
    assert notebook.run("%ranks log 7").text == "rank 7 has no log\n"


@pytest.mark.parametrize("ask", ["input", "getpass"])
def test_the_user_is_asked_once(notebook: NotebookRun, ask: str) -> None:
    # The name that a cell has imported is used in later cells.
    notebook.well("from getpass import getpass")
    message = notebook.begin(f"typed = {ask}('which?')\nprint(typed, total(len(typed)))")
    assert notebook.client.get_stdin_msg(timeout=30)["content"]["prompt"] == "which?"
    notebook.client.input("abc")
    assert notebook.finish(message).well() == "abc 6.0"


def test_stop_while_the_user_is_asked(notebook: NotebookRun) -> None:
    message = notebook.begin("typed = input('which?')")
    notebook.client.get_stdin_msg(timeout=30)
    notebook.interrupt()
    result = notebook.finish(message)
    assert result.error == "KeyboardInterrupt"
    assert len(result.traceback) == 1
    assert notebook.well("total(1)") == "2.0"


@pytest.mark.parametrize(
    ("source", "error", "fact"),
    [
        ("raise ValueError('both')", "ValueError", "both"),
        ("if rank == 1: raise ValueError('one')", "DistributedError", "rank 1 raised ValueError: one"),
        ("if rank == 1: raise ValueError('one')\ndist.barrier()", "DistributedError", "rank 1 raised ValueError: one"),
        ("%%capture\nif rank == 1: raise ValueError('one')", "DistributedError", "rank 1 raised ValueError: one"),
        ("%%rank 1\nraise ValueError('one')", "DistributedError", "rank 1 raised ValueError: one"),
        ("%%rank 0\nraise ValueError('zero')", "ValueError", "zero"),
        ("if rank == 1:\n    !echo never", "DivergenceError", "rank 0 has left the cell without !echo never"),
        ("x = get_ipython().getoutput(f'echo {rank}')", "DivergenceError", "without x = !echo 1"),
        ("def f(:", "SyntaxError", "invalid syntax"),
    ],
)
def test_an_error_is_shown_once(notebook: NotebookRun, source: str, error: str, fact: str) -> None:
    result = notebook.run(source)
    assert (result.error, len(result.traceback)) == (error, 1), result
    assert fact in result.value
    # In its message; a ValueError also in the line that raised it.
    assert (result.traceback[0] + result.text).count(fact) <= 2
    assert notebook.well("total(1)") == "2.0"


@pytest.mark.parametrize("source", ["%nosuchmagic", "%%nosuchmagic\n1", "%%rank 7\n1", "%rerun"])
def test_a_wrong_magic_is_said_once(notebook: NotebookRun, source: str) -> None:
    result = notebook.run(source)
    assert result.error == "UsageError"
    assert result.traceback == ()
    assert result.text.count("UsageError: ") == 1
    assert notebook.well("total(1)") == "2.0"


def test_an_error_that_the_cell_survives_is_none_of_the_cell(notebook: NotebookRun) -> None:
    result = notebook.run("try: 1 / 0\nexcept ZeroDivisionError: get_ipython().showtraceback()\ntotal(1)")
    assert (result.error, len(result.traceback), result.text) == ("", 1, "2.0\n"), result


def test_a_save_of_rank_0_alone_does_not_count(notebook: NotebookRun) -> None:
    # A rank that takes the first save for the second does not wait for it.
    source = """
rank or shutil.rmtree("rows")
dist.barrier()
rows.save_to_disk("rows")
total(os.path.isfile("rows/state.json"))
"""
    notebook.well("import os, shutil\nfrom datasets import Dataset\nrows = Dataset.from_dict({'a': [1]})")
    notebook.well("%%rank0\nrows.save_to_disk('rows')")
    assert notebook.well(source).endswith("2.0")


def test_login_is_done_once(notebook: NotebookRun) -> None:
    # Stands for the Hub: notes who logs in.
    source = """
import huggingface_hub._login as hub
def interpreter_login(*args, **kwargs): print("login of", os.environ["RANK"])
hub.interpreter_login.__wrapped__.__code__ = interpreter_login.__code__
hub.interpreter_login()
total(1)
"""
    assert notebook.well("%ranks on") == ""
    result = notebook.well(source)
    notebook.well("%ranks off")
    assert "login of 0" in result
    assert "[rank1] Out" in result
    assert "login of 1" not in result


def test_a_cell_needs_no_folder_of_logs(notebook: NotebookRun) -> None:
    notebook.well(f"!rm -rf {notebook.folder}/own_logs")
    assert notebook.well("%ranks on\ntotal(1)") == "2.0"


def test_a_breakpoint_stops_rank_0_and_the_others_wait(notebook: NotebookRun) -> None:
    def debug(command: str, arguments: dict) -> dict:
        request = {"type": "request", "seq": next(numbers), "command": command, "arguments": arguments}
        reply = notebook.control("debug_request", request)
        assert reply["success"], reply
        return reply.get("body", {})

    numbers = iter(range(1, 100))
    source = "one = 1\ntwice = total(one)\ntwice"
    debug("initialize", {"clientID": "vscode", "adapterID": "", "pathFormat": "path"})
    debug("attach", {"justMyCode": True})
    path = debug("dumpCell", {"code": source})["sourcePath"]
    for points in ([{"line": 2}], []):
        debug("setBreakpoints", {"source": {"path": path}, "breakpoints": points})
        message = notebook.begin(source)
        if points:
            stopped = notebook.wait_for_event("stopped")
            debug("continue", {"threadId": stopped["threadId"]})
        assert notebook.finish(message).well() == "2.0"
    debug("disconnect", {"restart": False, "terminateDebuggee": False})
    assert notebook.well("total(1)") == "2.0"


def test_a_reset_of_the_names_leaves_the_ranks_together(notebook: NotebookRun) -> None:
    notebook.well("import builtins; builtins.kept = dict(globals())")
    notebook.well("%reset -f")
    assert notebook.well("import builtins\n'total' in globals()") == "False"
    notebook.well("globals().update((n, v) for n, v in builtins.kept.items() if not n.startswith('_'))")
    assert notebook.well("ump.enable_multi_gpu(num_gpus=2, log_dir='own_logs')\ntotal(1)") == "2.0"


def test_disabling_leaves_no_trace(notebook: NotebookRun) -> None:
    source = """
import builtins, getpass
shell = get_ipython()
ump.disable_multi_gpu()
print([name for name, value in vars(shell).items() if "unsloth" in str(getattr(value, "__module__", ""))])
# These bear the names of IPython's own.
print("run_cell_async" in vars(shell), shell.CustomTB == handler_before)
print(shell.custom_exceptions, {"rank", "ranks"} & set(shell.magics_manager.magics["cell"]))
print([f for found in shell.events.callbacks.values() for f in found if "unsloth" in f.__module__])
print(builtins.input.__module__, getpass.getpass.__module__)
"""
    assert notebook.well(source).splitlines() == [
        "[]",
        "False True",
        "() set()",
        "[]",
        "ipykernel.kernelbase ipykernel.kernelbase",
    ]
    assert notebook.run("%ranks").error == "UsageError"
    again = notebook.run("ump.enable_multi_gpu(num_gpus=1)\nump.disable_multi_gpu()\nump.enable_multi_gpu(num_gpus=2)")
    assert again.error == "SetupError"
    assert "enable_multi_gpu() was called before in this kernel" in again.value
    assert notebook.run("1/0").error == "ZeroDivisionError"
    assert notebook.children() == []
