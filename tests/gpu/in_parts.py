"""LoRA on a model in 4 bit that is large beside all else: gradient norms, text, and the memory of card and host.

Usage: in_parts.py NUM_RANKS MODEL OUT.json
MODEL is quantised already, or is when it is loaded; one process then leaves it in OUT.json_packed. shard by a variable.
"""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=int(sys.argv[1]))

import bitsandbytes  # noqa: F401
import torch
import transformers.models.llama.modeling_llama
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments
from tiny_llama import RaggedRows, collate

facts = {}


def host_bytes():
    """Of this process, without the devices, whose memory is the host's here, and without pages of files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    anonymous = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return anonymous - torch.cuda.memory_allocated()


class Peaks(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            facts["prepared"] = torch.cuda.memory_allocated()
            facts["peak_prepared"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()


# It leaves 1.2 GiB of a card free, which this one does not have.
transformers.modeling_utils.caching_allocator_warmup = lambda *_: None
torch.zeros(1, device="cuda")
before = host_bytes()
is_packed = hasattr(AutoConfig.from_pretrained(sys.argv[2]), "quantization_config")
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
told = {} if is_packed else {"quantization_config": bits}
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32, **told)
if int(sys.argv[1]) == 1 and not is_packed:
    model.save_pretrained(f"{sys.argv[3]}_packed")
facts["weights"] = torch.cuda.memory_allocated()
facts["peak_loaded"], facts["host_loaded"] = torch.cuda.max_memory_allocated(), host_bytes() - before
model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
torch.manual_seed(0)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
rows = RaggedRows(26)
rows.rows = [row[:8] for row in rows.rows]  # Activations are to be small beside the weights.
trainer = Trainer(
    model=model,
    args=arguments("checkpoints", 2, max_steps=3),
    train_dataset=rows,
    data_collator=collate,
    callbacks=[Peaks()],
)
trainer.train()
facts["peak_trained"] = torch.cuda.max_memory_allocated()
model.save_pretrained(f"{sys.argv[3]}_adapter")
prompt = torch.tensor([[5, 6, 7]], device="cuda")
facts["said"] = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[0].tolist()
facts["norms"] = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
try:
    model.merge_and_unload()
except ump.SetupError as error:
    facts["refused"] = str(error)
Path(f"{sys.argv[3]}.{os.environ.get('RANK', '0')}").write_text(json.dumps(facts))
