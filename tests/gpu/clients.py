"""The clients of federated_clients.py on one device and on two; each device's clients write what their slot sees.

Usage: clients.py OUT
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
import federated_clients as clients

import unsloth_multigpu as ump

OUT = Path(sys.argv[1])


def train(model, client):
    seen = {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "device": str(client.device),
        "weights_on": sorted({str(value.device) for value in model.state_dict().values()}),
    }
    if client.device.type == "cuda":
        seen["count"] = torch.cuda.device_count()
        seen["card"] = str(torch.cuda.get_device_properties(client.device).uuid)
    (OUT / f"slot_{os.getpid()}.json").write_text(json.dumps(seen))
    return clients.train(model, client)


def main():
    facts = {}
    for num_gpus in (1, 2):
        with ump.create_multigpu_flower_server("clients", clients.build, train_fn=train, num_gpus=num_gpus) as server:
            result = server.fit(clients.NUM_CLIENTS, 2, config=clients.CONFIG)
            save_file(server.state_dict(), OUT / f"{num_gpus}.safetensors")
            facts[num_gpus] = [{d.device: sorted(d.client_ids) for d in one.devices} for one in result.rounds]
        facts[f"slots of {num_gpus}"] = [json.loads(path.read_text()) for path in OUT.glob("slot_*.json")]
        for path in OUT.glob("slot_*.json"):
            path.unlink()
    facts["server has opened a card"] = torch.cuda.is_initialized()
    (OUT / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
