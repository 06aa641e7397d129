"""Loops with Accelerators of their own, without the line: what each step saw and did, as JSON of rank 0.

Usage: accelerated.py OUT_FILE LOOP...
"""

import json
import math
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, IterableDataset

NUM_EPOCHS = 2


class Rows(torch.utils.data.Dataset):
    """Row `i` is its number and three features, of which `i % 5 + 1` count as tokens."""

    def __init__(self, num_rows):
        self.values = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"id": index, "x": self.values[index], "tokens": index % 5 + 1}


class Stream(IterableDataset):
    def __init__(self, num_rows):
        self.rows = Rows(num_rows)

    def __iter__(self):
        return iter([self.rows[i] for i in range(len(self.rows))])


class Loop:
    """A training as `*_no_trainer.py` scripts have it."""

    def __init__(self, data, *, batch_size=4, accumulation=1, loader=None, **options):
        self.accelerator = Accelerator(gradient_accumulation_steps=accumulation, **options)
        # Draws differ from rank to rank, and the order of rows does not.
        set_seed(3, device_specific=True)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader = DataLoader(data, batch_size=batch_size, **({"shuffle": True} if loader is None else loader))
        # Some scripts count the steps of a schedule before accelerate has shared the loader, and multiply here.
        num_steps = math.ceil(math.ceil(21 / batch_size) / accumulation) * NUM_EPOCHS * self.accelerator.num_processes
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / num_steps, 0.0))
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.found = {"steps": [], "ids": [], "num_steps": num_steps}

    def epoch(self, loader=None, loss_of=None):
        for batch in loader or self.loader:
            with self.accelerator.accumulate(self.model):
                rows = self.model(batch["x"]).square().sum(-1)
                self.accelerator.backward(rows.mean() if loss_of is None else loss_of(rows, batch))
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 100.0)
                    self.found["steps"].append([float(norm), self.schedule.get_last_lr()[0]])
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.found["ids"].append(self.accelerator.gather_for_metrics(batch["id"]).tolist())
        return self

    def done(self):
        weights = [p.detach().flatten() for p in self.accelerator.unwrap_model(self.model).parameters()]
        return {**self.found, "weights": torch.cat(weights).tolist()}


def scored(loop):
    """Rows in the order of the loader, by `gather_for_metrics` of tensors and of objects."""
    found = {"rows": [], "objects": []}
    loop.model.eval()
    loader = loop.accelerator.prepare(DataLoader(Rows(11), batch_size=4))
    for batch in loader:
        with torch.no_grad():
            values = loop.model(batch["x"])
        ids, values = loop.accelerator.gather_for_metrics((batch["id"], values))
        found["rows"] += [[int(i), float(v)] for i, v in zip(ids, values.squeeze(-1), strict=True)]
        found["objects"] += loop.accelerator.gather_for_metrics([str(int(i)) for i in batch["id"]])
    return found


def uneven():
    """A last batch of one row, in each of two epochs."""
    loop = Loop(Rows(21)).epoch().epoch()
    return {**loop.done(), "scored": scored(loop)}


def accumulated():
    """Batches of five, two for a step, and a full last batch behind which rows are dropped."""
    return (
        Loop(Rows(17), batch_size=5, accumulation=2, loader={"shuffle": True, "drop_last": True}).epoch().epoch().done()
    )


def resumed():
    """Saves after the first epoch, and goes on in the midst of the second one in another loop."""
    folder = Path(sys.argv[1]).with_suffix("")
    first = Loop(Rows(21), project_config=ProjectConfiguration(str(folder))).epoch()
    first.accelerator.save_state(str(folder / "state"))
    first.epoch()
    second = Loop(Rows(21))
    second.accelerator.load_state(str(folder / "state"))
    second.epoch(second.accelerator.skip_first_batches(second.loader, 2))
    return {"first": first.done(), "second": second.done()}


def by_tokens():
    """A loss that is a sum over tokens, divided by those of all ranks."""
    loop = Loop(Rows(21))

    def loss_of(rows, batch):
        num_tokens = loop.accelerator.gather_for_metrics(batch["tokens"]).sum()
        return (rows * batch["tokens"]).sum() * loop.accelerator.num_processes / num_tokens

    return loop.epoch(loss_of=loss_of).done()


def stream():
    """accelerate reads a stream on rank 0, and sends each rank its part of a batch."""
    return Loop(Stream(20), loader={}).epoch().done()


def diffusion():
    """LoRA of a UNet, as scripts of diffusers train it; noise and time belong to a row."""
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.optimization import get_scheduler
    from peft import LoraConfig

    set_seed(5)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(4, 8),
        layers_per_block=1,
        norm_num_groups=2,
        cross_attention_dim=4,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).requires_grad_(False)
    unet.add_adapter(LoraConfig(r=2, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    trained = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    images = torch.randn(10, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(list(enumerate(images)), shuffle=True, batch_size=3)
    # 2 steps of 2 batches.
    num_sharded = math.ceil(len(loader) / accelerator.num_processes)
    num_steps = math.ceil(num_sharded / 2) * accelerator.num_processes
    schedule = get_scheduler(
        "linear", optimizer, num_warmup_steps=accelerator.num_processes, num_training_steps=num_steps
    )
    unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
    noising, found = DDPMScheduler(num_train_timesteps=100), []
    unet.train()
    for ids, latents in loader:
        with accelerator.accumulate(unet):
            draws = [torch.Generator().manual_seed(int(i)) for i in ids]
            noise = torch.stack([torch.randn(4, 8, 8, generator=draw) for draw in draws]).to(latents.device)
            times = torch.stack([torch.randint(0, 100, (), generator=draw) for draw in draws]).to(latents.device)
            words = torch.stack([torch.randn(2, 4, generator=draw) for draw in draws]).to(latents.device)
            made = unet(noising.add_noise(latents, noise, times), times, words, return_dict=False)[0]
            loss = torch.nn.functional.mse_loss(made.float(), noise.float(), reduction="mean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(trained, 1.0)
                found.append([float(norm), schedule.get_last_lr()[0]])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    weights = [p.detach().flatten() for p in accelerator.unwrap_model(unet).parameters() if p.requires_grad]
    return {"steps": found, "num_steps": num_steps, "weights": torch.cat(weights).tolist()}


def trainer():
    """A Trainer makes an accelerator of its own, and one of the script's beside it, in a method of the Trainer's."""
    from common import Line, arguments, logged, points
    from transformers import Trainer

    class Own(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.seen = Accelerator().num_processes

    first = Accelerator()
    args = arguments(Path(sys.argv[1]).with_suffix(".trainer"), 4, num_train_epochs=1)
    own = Own(Line(), args, train_dataset=points(21))
    own.train()
    kept = first.num_processes == 1 and own.seen == own.accelerator.num_processes
    return {"steps": logged(own, "grad_norm")["grad_norm"], "weights": own.model.layer.weight.tolist()[0], "kept": kept}


if __name__ == "__main__":
    found = {name: globals()[name]() for name in sys.argv[2:]}
    if Accelerator().is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))
