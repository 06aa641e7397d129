"""Ranks that torch.multiprocessing.spawn starts. Usage: spawned.py OUT WHERE [NUM_RANKS]

WHERE is the place of the line: "inside" the function that is started, or at the "top" of the script. NUM_RANKS=0 is one
process without spawn.
"""

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
    from common import Calls, Line, arguments, logged, points, write_facts
    from transformers import Trainer

    def note(*_, **__):
        if where != "inside":
            Path(out, f"trained_{rank}").touch()

    args = arguments(out / "checkpoints", 4, max_steps=6, learning_rate=0.1, seed=3)
    trainer = Trainer(model=Line(), args=args, train_dataset=points(15), callbacks=[Calls(on_train_begin=note)])
    trainer.train()
    status = ump.get_multi_gpu_status()
    if num_ranks:
        helper = multiprocessing.get_context("spawn").Process(target=help_out, args=(out / f"helper_{rank}",))
        helper.start()
        helper.join()
    facts = {
        "status": [status.is_enabled, status.rank, status.world_size],
        "norms": logged(trainer, "grad_norm")["grad_norm"],
        "weights": [w for p in trainer.model.parameters() for w in p.flatten().tolist()],
        "samples": status.report and status.report.ranks[rank].num_samples,
    }
    write_facts(out / "rank", facts)


if __name__ == "__main__":
    if not num_ranks:
        train(0)
    else:
        from torch.multiprocessing import spawn

        spawn(train, nprocs=num_ranks)
