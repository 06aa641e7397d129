"""Two hosts with a wire between them: network namespaces of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.run import environment_with


@dataclass(frozen=True)
class Host:
    """A network namespace with a loopback interface, one end of the wire, and a bridge that leads nowhere.

    Args:
        namespace: Its name for `ip netns`.
        address: Of its end of the wire.
        interface: Name of that end.
    """

    namespace: str
    address: str
    interface: str

    def start(
        self, arguments: Sequence[str | os.PathLike[str]], cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """Starts `python arguments...` on this host; see `tests.helpers.run.start`."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, *map(str, arguments)],
            cwd=cwd,
            env=environment_with(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def set_wire(self, state: str) -> None:
        """`state` = "down" or "up". Packets are lost without a word, as with a pulled plug."""
        _ip("-n", self.namespace, "link", "set", self.interface, state)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes them and takes them away again, with what still runs there."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two hosts are network namespaces, which need root and iproute2")
    mark = f"um{os.getpid()}"  # An interface's name has 15 characters at most.
    first, second = hosts = tuple(Host(f"{mark}h{i}", f"10.213.0.{i + 1}", f"{mark}w{i}") for i in range(2))
    try:
        for host in hosts:
            made = subprocess.run(["ip", "netns", "add", host.namespace], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")
        _ip("-n", first.namespace, "link", "add", first.interface, "type", "veth", "peer", second.interface)
        _ip("-n", first.namespace, "link", "set", second.interface, "netns", second.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "add", "br-a", "type", "bridge")
            _ip("-n", host.namespace, "address", "add", "172.18.0.1/16", "dev", "br-a")
            _ip("-n", host.namespace, "link", "set", "br-a", "up")
        yield first, second
    finally:
        for host in hosts:
            inside = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True)
            for pid in inside.stdout.split():
                os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
