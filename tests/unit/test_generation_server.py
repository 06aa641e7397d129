"""The process of the server that generates: started when it is asked for, watched, and ended with what it has left."""

import json
import os
import signal
import time

import pytest

from tests.helpers.run import orphans, wait_until
from unsloth_multigpu.errors import GeneratorError
from unsloth_multigpu.launch.generation_server import GenerationServer, free_ports
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.event import SERVER_WANTED, Event
from unsloth_multigpu.wire.process import is_alive

PORT = free_ports(2)
ASKED = [Event(SERVER_WANTED, 0, 0, 0.0, -1, {"port": PORT, "arguments": ["--model", "tiny"]})]
# The module that stands for TRL's. Its child leads a session of its own, as those of vLLM may.
MODULE = """
import http.server, json, os, signal, subprocess, sys, time
from pathlib import Path

sleeps = [sys.executable, "-c", "import time; time.sleep(600)", os.environ["HERE"]]
child = subprocess.Popen(sleeps, start_new_session=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
ignores = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
facts = {"argv": sys.argv[1:], "cards": os.environ.get("CUDA_VISIBLE_DEVICES"), "ignores": ignores, "child": child.pid}
facts["pid"] = os.getpid()
Path(os.environ["HERE"], "facts.json").write_text(json.dumps(facts))
fault = os.environ.get("STAND_IN")
if fault == "dies":
    sys.exit("the model does not fit")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(600 if fault == "mute" else 0)
        self.send_response(503 if fault == "loads" else 200)
        self.end_headers()


http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a server whose program is MODULE, with an option of it."""
    scripts = tmp_path / "trl" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "vllm_serve.py").write_text(MODULE)
    for folder in (scripts, scripts.parent):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HERE", str(tmp_path))

    def server(fault="", timeout_s=60.0):
        monkeypatch.setenv("STAND_IN", fault)
        config = MultiGPUConfig(generators=2, timeout_s=timeout_s)
        return GenerationServer(config, {"CUDA_VISIBLE_DEVICES": "5,7"}, tmp_path, tmp_path, 0)

    yield server
    assert orphans(str(tmp_path)) == []


def turned(server, until):
    said = []
    wait_until(lambda: said.append(server.poll(ASKED)) or until(), 60, "the server")
    return said


def test_server_is_started_when_it_is_asked_for_and_leaves_nothing(make, tmp_path, capfd):
    with make() as server:
        assert server.poll([]) == ""
        assert not server.log.exists()
        assert set(turned(server, lambda: server._is_ready)) == {""}
        facts = json.loads((tmp_path / "facts.json").read_text())
        options = ["--tensor_parallel_size", "2", "--host", "127.0.0.1", "--port", str(PORT)]
        assert facts["argv"] == ["--model", "tiny", *options]
        assert (facts["cards"], facts["ignores"]) == ("5,7", True)
        assert is_alive(facts["child"])
    assert not is_alive(facts["child"])
    assert "the server of generators answers after" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("dies", "ended with exit code 1 while it was loading"),
        ("mute", "did not answer within timeout_s=3 s"),
        ("loads", "did not answer within timeout_s=3 s"),
    ],
)
def test_server_that_does_not_come_is_an_error(make, fault, what, capfd):
    with make(fault, 60.0 if fault == "dies" else 3.0) as server:
        said = turned(server, lambda: server.error is not None)
    assert said[-1] == f"generators=2: the server {what}"
    assert isinstance(server.error, GeneratorError)
    assert str(server.error).endswith(f"Hint: Its log is {server.log}.")
    assert ("  [server] the model does not fit\n" in capfd.readouterr().err) == (fault == "dies")


def test_server_ends_with_its_supervisor(make, tmp_path):
    supervisor = os.fork()
    if supervisor == 0:
        server = make()
        while not (tmp_path / "facts.json").exists():
            server.poll(ASKED)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(supervisor, 0)
    facts = json.loads((tmp_path / "facts.json").read_text())
    wait_until(lambda: not is_alive(facts["pid"]), 30, "the end of the server")
    os.kill(facts["child"], signal.SIGKILL)  # vLLM's end when their parent does.
    time.sleep(0.1)
