"""A user's DPO script over Unsloth's GPU code on two devices.

Without the plugin two ranks fail at the first backward pass, "Expected to mark a variable ready only once": TRL adds a
second adapter, Unsloth's own choice of `find_unused_parameters` is undone, and it checkpoints reentrantly.

    python gpu_path_dpo.py MODEL OUT                                      two ranks, started by the plugin
    python gpu_path_dpo.py MODEL OUT --plain                              one process
    torchrun --nproc-per-node 2 -- gpu_path_dpo.py MODEL OUT --plain      fails

Each rank leaves what it saw in OUT/rank_N.json.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

from gpu_path_user import SETTINGS, adapter_weights, load, options, with_lora, write_facts  # isort: skip  By Unsloth.
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

model, tokenizer = load(options.model)
model = with_lora(model, "q_proj", "v_proj")
rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "no"} for i in range(4)]
trainer = DPOTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(rows),
    args=DPOConfig(per_device_train_batch_size=2, max_length=32, max_steps=2, **SETTINGS),
)
trainer.train()
write_facts(trainer, adapter_weights(model))
