"""Flower's real processes on the loopback interface: a SuperLink and SuperNodes over TLS, `flwr run` beside them.

Everything lies in one folder: certificates, keys, logs, and FLWR_HOME. That variable also marks the processes: Flower
starts some of its own, in sessions of their own, and each inherits it.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.helpers.run import ROOT, Finished, environment_with, finish, free_port, light, wait_until

BIN = Path(sys.executable).parent
START_S = 60.0
RUN_S = 240.0
# A SuperNode's SuperExec tries a few times to reach the SuperNode that has ended, and then ends, too.
END_S = 20.0


class Deployment:
    """One SuperLink, and the SuperNodes that `join` starts. Ends them all when its context ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "flwr_home"
        self.tls = folder / "tls"
        self.port = free_port()
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Deployment:
        self.home.mkdir(parents=True)
        make_certificates(self.tls)
        connection = {"address": self.address, "root-certificates": str(self.tls / "ca.pem")}
        lines = [f"{name} = {json.dumps(value)}" for name, value in connection.items()]
        (self.home / "config.toml").write_text("\n".join(['[superlink]\ndefault = "here"\n[superlink.here]', *lines]))
        try:
            process = self._start("superlink", self._superlink())
            wait_until(lambda: has_ended(process) or accepts(self.port), START_S, "SuperLink's port")
            assert not has_ended(process), self.log("superlink")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Asks all of them to end. What then still lives is an error, and killed."""
        try:
            for process in reversed(self._processes):
                process.send_signal(signal.SIGTERM)
            for process in self._processes:
                process.wait(END_S)
            wait_until(lambda: not marked(self.home), END_S, "end of all of Flower's processes")
        finally:
            for pid in marked(self.home):
                os.kill(pid, signal.SIGKILL)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def register(self, name: str) -> None:
        """A key pair `name`, of which the SuperLink learns the public half."""
        make_key(self.tls / name)
        done = self.flwr("supernode", "register", self.tls / f"{name}.pub", "here")
        assert done.code == 0, done.out + done.err

    def join(self, *names: str) -> None:
        """Starts a SuperNode for each client 0, 1, ... with the key of that name; returns when all have joined."""
        nodes = {}
        for i, name in enumerate(names):
            node_config = f"partition-id={i} num-partitions={len(names)}"
            nodes[name] = self._start(name, self._supernode(node_config, "ca.pem", name))
        for name, process in nodes.items():
            condition = partial(self._has_joined, name, process)
            wait_until(condition, START_S, f"SuperNode {name}")

    def _has_joined(self, name: str, process: subprocess.Popen) -> bool:
        assert not has_ended(process), self.log(name)
        return "SuperNode ID" in self.log(name)

    def knock(self, *, ca: str = "ca.pem", key: str | None = None) -> Finished:
        """A SuperNode that the SuperLink, or that itself, is expected to refuse: waits for its end.

        Without a SuperExec, which would hold the pipes open: it lives as long as its SuperNode is not reaped.
        """
        return self.run([*self._supernode("partition-id=0 num-partitions=1", ca, key), "--isolation", "process"])

    def _supernode(self, node_config: str, ca: str, key: str | None) -> list[str]:
        private = ["--auth-supernode-private-key", str(self.tls / key)] if key else []
        return [
            str(BIN / "flower-supernode"),
            *("--superlink", self.address, "--root-certificates", str(self.tls / ca), *private),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", node_config, "--max-retries", "1"),
        ]

    def _superlink(self) -> list[str]:
        files = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        tls = [part for name, file in files.items() for part in (f"--ssl-{name}", str(self.tls / file))]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        # Else each run asks the network for the app's packages.
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        return [str(BIN / "flower-superlink"), *address, *tls, *options]

    def flwr(self, *arguments: str | os.PathLike[str]) -> Finished:
        """`flwr arguments...`, waited for."""
        return self.run([str(BIN / "flwr"), *map(str, arguments)])

    def run(self, command: Sequence[str]) -> Finished:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return finish(subprocess.Popen(command, cwd=self.folder, env=self._environment(), **pipes), RUN_S)

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        # Not to a pipe: what Flower starts has it, too, and would keep it open.
        with (self.folder / f"{name}.log").open("wb") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=self.folder, env=self._environment(), **files)
        self._processes.append(process)
        return process

    def _environment(self) -> dict[str, str]:
        return environment_with(
            {
                **light("datasets", "peft", "triton"),
                "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # Flower looks for its own commands there.
                "PYTHONPATH": str(ROOT),
                "FLWR_HOME": str(self.home),
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # 1 s otherwise.
            }
        )


def has_ended(process: subprocess.Popen) -> bool:
    return process.poll() is not None


def marked(home: Path) -> dict[int, str]:
    """Living processes that have `home` as FLWR_HOME, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()  # Empty for a zombie.
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"FLWR_HOME={home}".encode() in environment.split(b"\0"):
                found[int(entry.name)] = command
    return found


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_key(path: Path) -> None:
    """A key pair of a SuperNode in ssh's format: `path` and `path.pub`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    encoding, openssh = serialization.Encoding, serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(encoding.PEM, openssh, serialization.NoEncryption()))
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def make_certificates(folder: Path) -> None:
    """`ca.pem`; `server.pem` and `server.key`, signed by it for 127.0.0.1; `other.pem`, a CA that signed nothing."""
    folder.mkdir(parents=True)
    issuer, issuer_key = _certificate("test CA")
    (folder / "ca.pem").write_bytes(_pem(issuer))
    (folder / "other.pem").write_bytes(_pem(_certificate("another CA")[0]))
    server, server_key = _certificate("localhost", issuer=issuer, issuer_key=issuer_key)
    (folder / "server.pem").write_bytes(_pem(server))
    (folder / "server.key").write_bytes(_pem(server_key))


def _certificate(name: str, *, issuer=None, issuer_key=None):
    """A certificate for one day, and its key; that of a CA where there is no issuer."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key or key, hashes.SHA256()), key


def _pem(thing) -> bytes:
    from cryptography.hazmat.primitives import serialization

    if hasattr(thing, "public_bytes"):
        return thing.public_bytes(serialization.Encoding.PEM)
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return thing.private_bytes(serialization.Encoding.PEM, pkcs8, plain)
