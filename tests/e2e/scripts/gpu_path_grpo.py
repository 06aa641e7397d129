"""A user's GRPO script over Unsloth's GPU code on two devices, in shapes of Unsloth's notebooks.

    python gpu_path_grpo.py MODEL OUT --shapes 1,1,2 ...            two ranks, started by the plugin
    python gpu_path_grpo.py MODEL OUT --shapes 1,1,2 ... --plain    one process

A shape is batch, accumulation and completions of a prompt. Arguments are made in all of them; the first one trains.
Each rank leaves what it saw in OUT/rank_N.json.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

from gpu_path_user import SETTINGS, adapter_weights, load, options, rank, with_lora, write_facts  # isort: skip  By Unsloth.
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig
from trl.experimental.sdft import SDFTConfig


def arguments(config_class, shape):
    batch, accumulation, num_generations = map(int, shape.split(","))
    own = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "num_generations": num_generations,
        "max_completion_length": 8,
        "max_steps": 2,
    }
    return config_class(**{name: value for name, value in SETTINGS.items() if name != "dataset_num_proc"} | own)


def completions(args):
    """Of a step and of a generation, on all ranks."""
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return [step, args.generation_batch_size]


class FixedCompletions(GRPOTrainer):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        """What stands in for a draw: it depends on the prompt and on the place in its group of two."""
        places = [(rank * len(prompt_ids) + i) % 2 for i in range(len(prompt_ids))]
        rows = zip(prompt_ids, places, strict=True)
        return [[20 + (sum(ids) + 7 * k + 11 * place) % 200 for k in range(3 + place)] for ids, place in rows], None


made = {
    config_class.__name__: {shape: completions(arguments(config_class, shape)) for shape in options.shapes}
    for config_class in (GRPOConfig, RLOOConfig, SDFTConfig)
}
model, tokenizer = load(options.model)
model = with_lora(model, "q_proj", "v_proj")
trainer = FixedCompletions(
    model=model,
    processing_class=tokenizer,
    reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 17) for ids in completion_ids],
    train_dataset=Dataset.from_list([{"prompt": f"{i}+1="} for i in range(4)]),
    args=arguments(GRPOConfig, options.shapes[0]),
)
trainer.train()
write_facts(
    trainer,
    adapter_weights(model),
    base=GRPOTrainer.__module__,
    completions=made,
    rewards=[entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
)
