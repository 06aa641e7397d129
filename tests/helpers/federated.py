"""A ClientApp without a model: its clients do what the message says, once or every time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

app = ClientApp()
NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHASHSEED", "RANK", "WORLD_SIZE", "MASTER_ADDR")
KEPT = []


def message_to(client_id: int, what: str = "echo", *, kind: str = "train", **config) -> Message:
    content = {"arrays": arrays(np.arange(4.0)), "config": ConfigRecord({"do": what, "server-round": 1, **config})}
    return Message(RecordDict(content), dst_node_id=client_id + 1, message_type=kind)


def arrays(values: np.ndarray) -> ArrayRecord:
    return ArrayRecord({"w": Array(values.astype(np.float32))})


@app.train()
def train(message, context):
    config = message.content["config"]
    marker = Path(config.get("marker", "/dev/null"))
    is_again = marker.exists() and marker.is_file()
    if marker.is_absolute() and not is_again and str(marker) != "/dev/null":
        marker.write_text(str(os.getpid()))
    size = globals()[config["do"]](is_again)
    client_id = context.node_config["partition-id"]
    print(f"client {client_id} prints \u00e4")
    facts = {name: os.environ.get(name, "-") for name in NAMES}
    content = {
        "arrays": arrays(np.full(size or 4, client_id)),
        "metrics": MetricRecord({"num-examples": client_id + 1, "pid": os.getpid()}),
        "facts": ConfigRecord({**facts, "threads": torch.get_num_threads(), "argv": sys.argv}),
    }
    return Message(RecordDict(content), reply_to=message)


@app.query()
def query(message, context):
    return None


def echo(is_again: bool):
    """Nothing more."""


def large(is_again: bool):
    return 10**7


def kill_once(is_again: bool):
    if not is_again:
        os.kill(os.getpid(), signal.SIGKILL)


def kill(is_again: bool):
    print("about to end")
    os.kill(os.getpid(), signal.SIGKILL)


def lose_device_once(is_again: bool):
    from unsloth_multigpu.federated import client_worker as worker

    def check_device(kind: str) -> None:
        raise RuntimeError("gone")

    if not is_again:
        worker.check_device = check_device
        raise RuntimeError("CUDA error: unspecified launch failure")


def fail(is_again: bool):
    raise ValueError("no data\nfor me")


def leave(is_again: bool):
    sys.exit(3)


def hang(is_again: bool):
    threading.Event().wait()


def start_others(is_again: bool):
    # What a client leaves behind: a DataLoader's workers, forked with all that the slot has open, and a program.
    loader = iter(DataLoader(range(8), num_workers=1, multiprocessing_context="fork", persistent_workers=True))
    next(loader)
    KEPT.append(loader)
    KEPT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", os.environ["MARKER"]]))


def start_others_and_hang(is_again: bool):
    start_others(is_again)
    Path(os.environ["MARKER"]).write_text(str(os.getpid()))
    hang(is_again)
