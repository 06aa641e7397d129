"""TRL's generation server, on devices that no rank uses.

`python -m unsloth_multigpu.launch.generation_server PID ARGUMENTS...` becomes the server.
"""

from __future__ import annotations

import http.client
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unsloth_multigpu.errors import GeneratorError
from unsloth_multigpu.launch.nodes import socket_interfaces
from unsloth_multigpu.launch.rank import die_with_supervisor
from unsloth_multigpu.logs import tell
from unsloth_multigpu.options import ENV_SERVER, MultiGPUConfig
from unsloth_multigpu.wire.child import end_command, read_tail, start_process
from unsloth_multigpu.wire.event import SERVER_WANTED, Event
from unsloth_multigpu.wire.run import make_log
from unsloth_multigpu.words import duration, how_ended

# Starts the server of TRL's Trainers in every version: TRL's own at first, later `vllm serve`.
_PROGRAM = "trl.scripts.vllm_serve"
_HOST = "127.0.0.1"
# Below Linux's ephemeral ports, which other connections may take before the server listens.
_PORTS = range(20000, 32000)
_ANSWER_S = 1.0
# Time from SIGTERM to SIGKILL, in which vLLM ends its workers.
_END_LIMIT_S = 10.0


@dataclass(eq=False, repr=False)
class GenerationServer(AbstractContextManager["GenerationServer"]):
    """Starts the server when rank 0 asks for it, watches it, and ends it with the ranks of this attempt.

    It cannot start with the ranks, because it loads the model of the Trainer, which the script creates later. Each
    attempt has its own server: the old one has the weights of the failed ranks and a connection to them.

    Args:
        devices: Variables that show it its devices.

    Attributes:
        port: Its port, which rank 0 has chosen from its context.
        error: Why it can no longer serve; None as long as it can.
    """

    config: MultiGPUConfig
    devices: Mapping[str, str]
    run_dir: Path
    log_dir: Path
    attempt: int
    port: int = field(init=False, default=0)
    error: GeneratorError | None = field(init=False, default=None)
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _since_s: float = field(init=False, default=0.0)
    _is_ready: bool = field(init=False, default=False)

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            end_command(self._process, self._marker, _END_LIMIT_S)

    @property
    def log(self) -> Path:
        """The file of the server's output."""
        return self.log_dir / "generators.log"

    @property
    def _marker(self) -> str:
        return f"{ENV_SERVER}={self.run_dir}/{self.attempt}"

    def poll(self, events: Sequence[Event]) -> str:
        """Called about ten times a second while ranks run. Returns why the server has failed, "" if it has not."""
        if self._process is not None and self.error is None:
            self._look(self._process)
        elif wanted := next((event for event in events if event.kind == SERVER_WANTED and self.error is None), None):
            self._start(**wanted.facts)
        return "" if self.error is None else str(self.error.args[0])

    def _start(self, port: int, arguments: Sequence[str]) -> None:
        make_log(self.log)
        self.port = port
        # Tensor parallelism, as TRL documents for a dense model: vLLM refuses data parallelism there.
        placement = ["--tensor_parallel_size", str(self.config.generators), "--host", _HOST, "--port", str(port)]
        program = [sys.executable, "-m", "unsloth_multigpu.launch.generation_server", str(os.getpid())]
        name, _, value = self._marker.partition("=")
        variables = {**socket_interfaces(self.config), **os.environ, **self.devices, name: value}
        tell(f"unsloth_multigpu: generators={self.config.generators}: the server starts, its log is {self.log}\n")
        try:
            self._process = start_process([*program, *arguments, *placement], variables, self.log)
        except OSError as error:
            self.error = self._failure(f"was not started: {error}")
        self._since_s = time.monotonic()

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        if (code := process.poll()) is not None:
            when = "while it was serving" if self._is_ready else "while it was loading"
            self.error = self._failure(f"{how_ended(code)} {when}")
        elif not self._is_ready:
            self._is_ready, loading_s = answers(self.port), time.monotonic() - self._since_s
            if self._is_ready:
                tell(f"unsloth_multigpu: the server of generators answers after {duration(loading_s)}\n")
            elif loading_s > self.config.timeout_s:
                self.error = self._failure(f"did not answer within timeout_s={self.config.timeout_s:g} s")

    def _failure(self, what: str) -> GeneratorError:
        tell("".join(f"  [server] {line[:200]}\n" for line in read_tail(self.log, 15).splitlines()))
        return GeneratorError(f"generators={self.config.generators}: the server {what}", hint=f"Its log is {self.log}.")


def answers(port: int) -> bool:
    """True if a server on this machine answers at /health."""
    # Not urllib, which would use a proxy.
    connecting = closing(http.client.HTTPConnection(_HOST, port, timeout=_ANSWER_S))
    with suppress(OSError, http.client.HTTPException), connecting as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    return False


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive ports that are free now."""
    while True:
        port = random.SystemRandom().randrange(_PORTS.start, _PORTS.stop - count)
        with suppress(OSError), ExitStack() as stack:
            for number in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port


def _become_server() -> None:
    die_with_supervisor(int(sys.argv.pop(1)), signal.SIGTERM)
    # SLURM sends SIGUSR1 to all processes of a step; only the supervisor acts on it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _become_server()
