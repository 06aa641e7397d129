"""What others on the machine or the network can make of a run: nothing is unpickled, evaluated, followed or shown."""

from __future__ import annotations

import ast
import json
import os
import pickle
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from unsloth_multigpu.accelerator import allocator_variables
from unsloth_multigpu.launch.launcher import rank_environment
from unsloth_multigpu.launch.nodes import Record, decode_record
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.child import Child
from unsloth_multigpu.wire.run import exclusive_log_dir

PACKAGE = Path(__file__).parents[2] / "unsloth_multigpu"

# Modules that turn bytes into objects, or speak to a network. What may be used of them nevertheless, and where.
NEVER_IMPORTED = {
    "cloudpickle",
    "dill",
    "ftplib",
    "http",
    "huggingface_hub",
    "joblib",
    "jsonpickle",
    "marshal",
    "multiprocess",
    "multiprocessing",
    "pickle",
    "requests",
    "shelve",
    "socket",
    "socketserver",
    "telnetlib",
    "torch.distributed.rpc",
    "torch.multiprocessing",
    "urllib",
    "xmlrpc",
    "yaml",
    "zmq",
}
ALLOWED = {
    # Nodes of a file of options: nothing is constructed from them.
    "option_file.py": {"yaml.compose", "yaml.BaseLoader", "yaml.YAMLError", "yaml.MappingNode", "yaml.ScalarNode"},
    "hooks/datasets.py": {"pickle.PicklingError"},
    # Several nodes: where to meet.
    "launch/nodes.py": {"socket.*"},
    # The health page of the server that it has started, on loopback.
    "launch/generation_server.py": {"http.client", "http.HTTPStatus", "socket.create_server", "socket"},
    # A pair of connected sockets without a name, and the connections that a group has made.
    "wire/child.py": {"multiprocessing.Pipe", "multiprocessing.connection*"},
    "federated/client_worker.py": {
        "multiprocessing.connection*",
        "cloudpickle.loads",
        "pickle.dumps",
        "pickle.loads",
        "pickle.HIGHEST_PROTOCOL",
    },
    "notebook/kernel.py": {"multiprocessing.connection*", "socket.socket", "socket.SOL_SOCKET", "socket.SO_SNDTIMEO"},
    "notebook/recovery.py": {"socket.fromfd", "socket.SOCK_STREAM", "socket.SHUT_RDWR"},
    # Over such a pair, between a server and the slots that it has started: both run the same user's program.
    "federated/grid.py": {"cloudpickle.dumps", "pickle.dumps", "pickle.loads", "pickle.HIGHEST_PROTOCOL"},
    # Is this process one of a pool?
    "wire/identity.py": {"multiprocessing.current_process", "multiprocessing.parent_process"},
}
MAY_LISTEN = {"launch/nodes.py"}
# Collectives that pickle, by whatever object they are called: `all_gather_object`, `broadcast_object_list`.
OBJECT_COLLECTIVES = ("_object", "_object_list")
EVALUATE = {
    "eval",
    "exec",
    "os.popen",
    "os.system",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "tempfile.mktemp",
}
MAY_EVALUATE = {"cli/script_runner.py": {"exec"}}  # The program that the user has named on the command line.
# Torch's way to let nodes meet, which unpickles what it finds in the store.
PICKLED_RENDEZVOUS = {"c10d_rendezvous_backend", "DynamicRendezvousHandler", "get_rendezvous_handler"}


def violations(source: str, file: str) -> list[str]:
    found = []
    names = set()
    for node in ast.walk(ast.parse(source)):
        what = [f"uses {name}" for name in used(node) if is_risky(name, ALLOWED.get(file, set()))]
        names |= {part for name in used(node) for part in name.split(".")}
        if isinstance(node, ast.Call):
            what += risky_call(node, file)
            names.add(ast.unparse(node.func))
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("/tmp", "/var/tmp")):
            what.append(f"has a name in a folder of all users: {node.value}")
        found += [f"{file}:{node.lineno} {w}" for w in what]  # type: ignore[attr-defined]
    if names & PICKLED_RENDEZVOUS:
        found.append(f"{file} lets nodes meet by pickle")
    return found


def used(node: ast.AST) -> list[str]:
    """Dotted names that are imported, and attributes of names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else []


def is_risky(name: str, allowed: set[str]) -> bool:
    parts = name.split(".")
    is_named = any(".".join(parts[:n]) in NEVER_IMPORTED for n in range(1, len(parts) + 1))
    is_allowed = any(f"{a}.".startswith(f"{name}.") or name.startswith(a.rstrip("*")) for a in allowed)
    return is_named and not is_allowed


def risky_call(node: ast.Call, file: str) -> Iterator[str]:
    function, text = ast.unparse(node.func), ast.unparse(node)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if function.endswith(OBJECT_COLLECTIVES) or function in EVALUATE - MAY_EVALUATE.get(file, set()):
        yield f"calls {function}"
    if function.endswith(".recv") and not node.args:  # A socket's takes a length; a pair's is `recv_bytes`.
        yield "receives an object by pickle"
    if function == "torch.load" and keywords.get("weights_only") != "True":
        yield "calls torch.load without weights_only=True"
    for keyword in ("allow_pickle", "shell", "trust_remote_code"):
        if keywords.get(keyword, "False") != "False":
            yield f"sets {keyword}"
    if function == "socket.create_server" and "'127.0.0.1'" not in text and file not in MAY_LISTEN:
        yield "listens beyond loopback"
    if function == "os.open" and "O_CREAT" in text and not text.endswith(f" {0o600})"):
        yield "makes a file that others can read"


def test_package_unpickles_and_evaluates_nothing() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [v for file, source in sources.items() for v in violations(source, file)] == []
    # What is allowed to a file that does not need it would hide the next violation.
    for file, names in (*ALLOWED.items(), *MAY_EVALUATE.items()):
        assert [name for name in names if name.rstrip("*") not in sources[file]] == [], file


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill as d",
        "from torch import multiprocessing",
        "from multiprocessing.connection import Listener",
        "def f():\n    from urllib.request import urlopen",
        "dist.broadcast_object_list(x)",
        "from accelerate import utils\nutils.gather_object(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "eval(store.get('key'))",
        "connection.recv()",
        "subprocess.run(command, shell=True)",
        "socket.create_server(('', 0))",
        "os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)",
        "open('/tmp/state.json')",
        "tempfile.mktemp()",
        "from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler",
    ],
)
def test_violation_is_found(source: str) -> None:
    assert violations(source, "launch/other.py")


GOOD = {"attempt": 1, "state": "ready", "num_ranks": 2, "port": 2**16 - 1, "message": "rank 0 failed: x", "count": 7}


def test_record_of_another_node_comes_back_as_it_was() -> None:
    assert decode_record(json.dumps(GOOD).encode()) == Record(**GOOD)  # type: ignore[arg-type]


STRANGE = {"attempt": -1, "state": "none", "num_ranks": 2.0, "port": "7", "message": "\x1b[2J", "other": 1}


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps({**GOOD, name: value}).encode() for name, value in STRANGE.items()),
        json.dumps({**GOOD, "message": "x" * 10_000}).encode(),
        pickle.dumps(GOOD),
        b"",
        b"null",
        b"\xff\xfe",
        b"9" * 5000,
        b"[" * 200_000,
    ],
    ids=range(len(STRANGE) + 7),
)
def test_record_that_no_node_writes_is_not_heard(text: bytes) -> None:
    assert decode_record(text) is None


@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling"])
def test_link_in_a_logs_place_is_not_followed(tmp_path: Path, kind: str) -> None:
    other, logs = tmp_path / "other", tmp_path / "logs"
    logs.mkdir()
    if kind != "dangling":
        other.write_text("of somebody")
        other.chmod(0o640)
    if kind == "hard":
        (logs / "rank_1.log").hardlink_to(other)
    else:
        (logs / "rank_1.log").symlink_to(other)
    with exclusive_log_dir(logs, 2):
        log = logs / "rank_1.log"
        assert not log.is_symlink()
        assert (log.read_text(), stat.S_IMODE(log.stat().st_mode)) == ("", 0o600)
    assert other.exists() == (kind != "dangling")
    if kind != "dangling":
        assert (other.read_text(), stat.S_IMODE(other.stat().st_mode)) == ("of somebody", 0o640)


def test_ranks_are_told_no_secret(tmp_path: Path) -> None:
    told = rank_environment(MultiGPUConfig(), 2, tmp_path, tmp_path, "run", {})
    of_run = json.loads(told["UNSLOTH_MULTIGPU_RUN"])
    assert of_run.keys() == {"log_dir", "supervisor_pid", "run_id", "server_port", "shard"}
    torchs = {"PYTHONHASHSEED", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *allocator_variables({})}
    assert set(told) == {"UNSLOTH_MULTIGPU_RUN", "UNSLOTH_MULTIGPU_RUN_DIR"} | torchs
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")


def test_child_speaks_over_a_pair_that_nobody_else_can_reach(tmp_path: Path) -> None:
    # No name in the file system, no port: there is nothing to connect to, and only the child inherits the other end.
    program = "import os, sys, time; os.write(int(sys.argv[1]), b'x'); time.sleep(60)"
    child = Child("slot 0", program, tmp_path / "log", dict(os.environ))
    try:
        with socket.socket(fileno=os.dup(child.connection.fileno())) as end:
            assert (end.family, end.recv(1), end.getsockname(), end.getpeername()) == (socket.AF_UNIX, b"x", "", "")
        assert psutil.Process(child.pid).net_connections("inet") == []
        theirs = sorted(int(fd.name) for fd in Path(f"/proc/{child.pid}/fd").iterdir())
        assert len(theirs) == 4  # Standard input, output, error, and its end.
        assert not os.get_inheritable(child.connection.fileno())
    finally:
        child.close()
