"""LoRA on a model in 4 bit: gradient norms, text, where weights lie, the memory of card and host, and files.

Usage: four_bits.py NUM_RANKS MODEL OUT [ARGUMENTS]
MODEL is quantised already, or is when it is loaded; one process then leaves it in OUT/packed. ARGUMENTS are those of
the Trainer in JSON, and "tokens", the most of a row, and "resume", a checkpoint. Other options by variables. Facts of a
rank are in OUT/facts_RANK.json, the adapter in OUT/adapter.
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
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments, logged
from tiny_llama import RaggedRows, collate

out, given = Path(sys.argv[3]), {"max_steps": 3, **json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}")}
batch, num_tokens, resume = given.pop("batch", 2), given.pop("tokens", None), given.pop("resume", None)
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
        facts.setdefault("prepared", torch.cuda.memory_allocated())
        facts.setdefault("peak_prepared", torch.cuda.max_memory_allocated())


# It leaves 1.2 GiB of a card free, which this one does not have.
transformers.modeling_utils.caching_allocator_warmup = lambda *_: None
torch.zeros(1, device="cuda")
before = host_bytes()
is_packed = hasattr(AutoConfig.from_pretrained(sys.argv[2]), "quantization_config")
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
told = {} if is_packed else {"quantization_config": bits}
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32, **told)
out.mkdir(exist_ok=True)
if int(sys.argv[1]) == 1 and not is_packed:
    model.save_pretrained(out / "packed")
facts["weights"] = torch.cuda.memory_allocated()
facts["peak_loaded"], facts["host_loaded"] = torch.cuda.max_memory_allocated(), host_bytes() - before
model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
torch.manual_seed(0)
lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
model = get_peft_model(model, lora)
rows = RaggedRows(26)
rows.rows = [row[:num_tokens] for row in rows.rows]
args = arguments(out / "checkpoints", batch, **given)
trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate, callbacks=[Peaks()])
trainer.train(resume_from_checkpoint=resume)
model.save_pretrained(out / "adapter")
prompt = torch.tensor([[5, 6, 7]], device="cuda")
facts["said"] = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[0].tolist()
facts |= {
    "norms": logged(trainer, "grad_norm")["grad_norm"],
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    "devices": sorted({str(p.device) for p in model.parameters()}),
}
try:
    model.merge_and_unload()
except ump.SetupError as error:
    facts["refused"] = str(error)
(out / f"facts_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))
