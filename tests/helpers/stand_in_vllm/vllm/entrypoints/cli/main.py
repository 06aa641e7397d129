"""The server."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Client
from pathlib import Path

import torch
import vllm

REPORT, FAULT = os.environ.get("STAND_IN_REPORT"), os.environ.get("STAND_IN", "")
facts = {"argv": sys.argv, "pid": os.getpid(), "devices": os.environ["CUDA_VISIBLE_DEVICES"], "weights": [], "calls": 0}


def report():
    """Another process reads it at any time."""
    if REPORT:
        Path(f"{REPORT}.part").write_text(json.dumps(facts))
        os.replace(f"{REPORT}.part", REPORT)


class Handler(BaseHTTPRequestHandler):
    """The calls of TRL's client."""

    protocol_version = "HTTP/1.1"
    connection_to_trainer = None
    names = ()

    def do_GET(self):
        self.answer(
            {
                "/health": {},
                "/v1/models": {"data": [{"id": options.model}]},
                "/server_info": {
                    "vllm_config": {
                        "weight_transfer_config": options.weight_transfer_config,
                        "model_config": {"logprobs_mode": options.logprobs_mode},
                    }
                },
                "/get_world_size": {"world_size": options.tensor_parallel_size},
            }[self.path.partition("?")[0]]
        )

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        name = self.path.strip("/").replace("/", "_")
        self.answer(getattr(self, name)(json.loads(body or b"{}")) or {})

    def init_weight_transfer_engine(self, given):
        Handler.connection_to_trainer = connect(given["init_info"])

    def start_weight_update(self, given):
        pass

    finish_weight_update = start_weight_update

    def update_weights(self, given):
        total = 0.0
        for _, dtype, shape in zip(*(given["update_info"][n] for n in ("names", "dtype_names", "shapes")), strict=True):
            weight = torch.from_numpy(Handler.connection_to_trainer.recv())
            assert (str(weight.dtype), list(weight.shape)) == (f"torch.{dtype}", shape)
            total += float(weight.to("cuda").double().cpu().abs().sum())
        facts["weights"].append(total)
        report()

    def reset_prefix_cache(self, given):
        return {"success": True}

    def v1_completions(self, given):
        facts["calls"] += 1
        report()
        if f"dies:{facts['calls']}" == FAULT.removesuffix(" once") and not (FAULT.endswith("once") and is_again):
            os.kill(os.getpid(), signal.SIGKILL)
        choices = [
            {"prompt_token_ids": ids, "token_ids": drawn, "logprobs": log_probabilities(drawn)}
            for ids in given["prompt"]
            for drawn in (vllm.completion_of(ids, place) for place in range(given["n"]))
        ]
        return {"choices": choices}

    def answer(self, values):
        data = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def log_probabilities(drawn):
    """Of a completion, as asked for by TRL."""
    tokens = [f"token_id:{number}" for number in drawn]
    return {"tokens": tokens, "token_logprobs": [-1.0] * len(drawn), "top_logprobs": [{t: -1.0} for t in tokens]}


def connect(init_info):
    """The Trainer may begin to listen after this call has come."""
    while True:
        try:
            return Client((init_info["master_address"], init_info["master_port"]))
        except ConnectionRefusedError:
            time.sleep(0.05)


def read_options():
    """Of those that TRL gives, the ones that matter here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--weight-transfer-config")
    parser.add_argument("--logprobs-mode")
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    options = read_options()
    # As workers of an engine: in a session of its own.
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    facts["child"] = child.pid
    is_again = bool(REPORT) and Path(REPORT).exists()
    report()
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
