"""A user's script for pictures over Unsloth's GPU code on two devices, as Unsloth's notebooks for vision models.

    python gpu_path_vision.py MODEL OUT              two ranks, started by the plugin
    python gpu_path_vision.py MODEL OUT --plain      one process

Each rank leaves what it saw in OUT/rank_N.json.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

from gpu_path_user import SETTINGS, adapter_weights, options, write_facts  # isort: skip  By Unsloth.
import numpy
import torch
from PIL import Image
from trl import SFTConfig, SFTTrainer
from unsloth import FastVisionModel
from unsloth.trainer import UnslothVisionDataCollator

model, processor = FastVisionModel.from_pretrained(
    str(options.model), max_seq_length=64, dtype=torch.float32, load_in_4bit=False
)
model = FastVisionModel.get_peft_model(model, r=4, lora_alpha=8, lora_dropout=0, bias="none", random_state=3407)
FastVisionModel.for_training(model)
random = numpy.random.default_rng(3)
rows = [
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=numpy.uint8))},
                    {"type": "text", "text": "what"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "ab of the " * (1 + i % 3)}]},
        ]
    }
    for i in range(5)
]
trainer = SFTTrainer(
    model=model,
    processing_class=processor,
    data_collator=UnslothVisionDataCollator(model, processor),
    train_dataset=rows,
    args=SFTConfig(
        per_device_train_batch_size=3,
        num_train_epochs=1,
        remove_unused_columns=False,
        dataset_text_field="",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=64,
        **SETTINGS,
    ),
)
trainer.train()
model.save_pretrained(str(options.out / "adapter"))
processor.save_pretrained(str(options.out / "adapter"))
write_facts(trainer, adapter_weights(model))
