"""Ranks that torch.multiprocessing.spawn starts. Usage: spawned.py OUT WHERE [NUM_RANKS]

WHERE is the place of the line: "inside" the function that is started, or at the "top" of the script. NUM_RANKS=0 is one
process without spawn.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

out, where = Path(sys.argv[1]), sys.argv[2]
num_ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 2
LINE = {"device": "cpu", "num_gpus": num_ranks or 1}

if where == "top" and __name__ == "__mp_main__":
    ump.enable_multi_gpu(**LINE)


def help_out(path):
    ump.enable_multi_gpu(**LINE)
    Path(path).write_text(str(ump.is_multi_gpu_enabled()))


def train(rank):
    if num_ranks:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    if where == "inside":
        ump.enable_multi_gpu(**LINE)
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x, labels=None):
            return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}

    class Stop(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if where != "inside":
                Path(out, f"trained_{rank}").touch()

    torch.manual_seed(1)
    rows = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(15)]
    args = TrainingArguments(
        str(out / "checkpoints"),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        seed=3,
    )
    trainer = Trainer(model=Model(), args=args, train_dataset=rows, callbacks=[Stop()])
    trainer.train()
    status = ump.get_multi_gpu_status()
    if num_ranks:
        helper = multiprocessing.get_context("spawn").Process(target=help_out, args=(out / f"helper_{rank}",))
        helper.start()
        helper.join()
    facts = {
        "status": [status.is_enabled, status.rank, status.world_size],
        "norms": [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log],
        "weights": [w for p in trainer.model.parameters() for w in p.flatten().tolist()],
        "samples": status.report and status.report.ranks[rank].num_samples,
    }
    Path(out, f"rank_{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    if not num_ranks:
        train(0)
    else:
        from torch.multiprocessing import spawn

        spawn(train, nprocs=num_ranks)
