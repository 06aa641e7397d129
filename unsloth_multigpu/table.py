"""The table of options: each is one row, which says everything about it but what the code does with it.

From it come the checks, the variables, the command line with `--help`, `docs/options.md`, and what is refused where
nothing would follow it; see `options`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.row import (
    Choice,
    Count,
    Endpoint,
    Folder,
    Nodes,
    Scope,
    Seconds,
    Switch,
    Text,
    option,
)
from unsloth_multigpu.strategy import DDP, Strategy, StrategyKind

# Sections of docs/options.md, in their order.
EVERYDAY = "Everyday"
GRADIENTS = "How gradients meet"
DEALING = "Which samples, where"
FAILING = "When something fails"
SHOWN = "What is shown"
PLACE = "Processes and devices"
NODES = "Several nodes"
SECTIONS = (EVERYDAY, GRADIENTS, DEALING, FAILING, SHOWN, PLACE, NODES)

# Arguments of the older plugin that are no options -> what to use.
FORMER = {
    "sync": "strategy=..., its name now",
    "ddp_backend": "TrainingArguments(ddp_backend=...)",
    "find_unused_parameters": "TrainingArguments(ddp_find_unused_parameters=...)",
    "enable_gradient_checkpointing": "TrainingArguments(gradient_checkpointing=...)",
    "enable_memory_optimization": "the variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "gradient_aggregation": "enable_ddp=False alone, whose shards weigh what they weigh on one device",
    "debug": 'logging.getLogger("unsloth_multigpu").setLevel("DEBUG")',
}

_WHICH_GPUS = "Leave it out for all GPUs, or give their number; CUDA_VISIBLE_DEVICES chooses which."
_RUN_AND_VERIFY = ("run", "verify")
_RUN_AND_CHAOS = ("run", "chaos")
_EVERY_COMMAND = ("run", "verify", "chaos")
_OF_A_PLAN = (Scope.RANKS, Scope.PLANNER, Scope.TRAINER)


@dataclass(frozen=True)
class OptionTable:
    """Every option of a run, as a field with its row. The order is that of `--help` and of `docs/options.md`."""

    num_gpus: int | None = option(
        None,
        Count(1, none_means="all visible accelerators", hint=_WHICH_GPUS),
        "Ranks on this machine. More than there are GPUs is an error. Without a GPU, that many CPU ranks over gloo, "
        "after a warning.",
        otherwise="all visible GPUs; where there is none, this process alone",
        section=EVERYDAY,
        commands=_RUN_AND_CHAOS,
        is_of_node=True,
    )
    batch_size_per_gpu: int | None = option(
        None,
        Count(1, none_means="the script's value"),
        "Samples of one micro-batch on each rank, in place of per_device_train_batch_size. An optimizer step then sees "
        'N times as many, as with global_batch="scale".',
        Scope.RANKS,
        otherwise="the script's",
        section=EVERYDAY,
        commands=_RUN_AND_VERIFY,
    )
    enable_ddp: bool = option(
        True,
        Switch(),
        "One process per device. Off: the older plugin's serial path, which is slower than one GPU: this process "
        "alone, with a copy of the model per device, which compute one after the other.",
        Scope.TRAINER,
        section=GRADIENTS,
    )
    global_batch: str = option(
        "keep",
        Choice(("keep", "scale")),
        '"keep": an optimizer step sees the samples of the one-GPU run. "scale": every rank takes the script\'s batch '
        "and Hugging Face deals the samples, as under torchrun; a step sees N times as many.",
        Scope.RANKS,
        section=EVERYDAY,
        commands=_RUN_AND_VERIFY,
    )
    strategy: Strategy = option(
        DDP(),
        StrategyKind(),
        'How gradients meet: "ddp", "allreduce", "parameter_server", "local_sgd" or "diloco". Options of a strategy '
        'stand behind a colon, as in "diloco:every_steps=8,outer_momentum=0"; in Python also as '
        "ump.DiLoCo(every_steps=8).",
        Scope.RANKS,
        Scope.TRAINER,
        section=EVERYDAY,
        commands=_RUN_AND_VERIFY,
    )
    shard: str = option(
        "off",
        Choice(("off", "auto", "on")),
        '"on": each rank holds a part of the weights, gradients and optimizer states (FSDP2, by Unsloth where it is '
        'imported, else by accelerate), for models that do not fit one GPU. "off": every rank holds the whole model, '
        'unless the script itself asks for FSDP2. "auto": that, where a forecast of the memory says that it is needed.',
        Scope.RANKS,
        Scope.DDP,
        Scope.TRAINER,
        asking=("auto", "on"),
        section=EVERYDAY,
        commands=_EVERY_COMMAND,
    )
    balance: str = option(
        "auto",
        Choice(("auto", "off", "tokens")),
        '"auto": the samples of a step are dealt by length, so that all ranks finish together, where that leaves the '
        'gradient as it is. "tokens": that, or an error that says why not; also in one process, where it saves '
        'padding. "off": dealt in order.',
        *_OF_A_PLAN,
        asking=("tokens",),
        section=EVERYDAY,
        commands=_EVERY_COMMAND,
    )
    resume: str = option(
        "off",
        Choice(("off", "auto"), hint="Set {name}='auto' to resume, {name}='off' not to."),
        '"auto": a training that was stopped resumes from the last whole checkpoint in its output folder, if the same '
        'training wrote one. "off": as the script says.',
        Scope.RANKS,
        Scope.TRAINER,
        section=EVERYDAY,
    )
    device: str = option(
        "auto",
        Choice(("auto", "cpu", *KINDS)),
        '"auto", "cpu", "cuda" (ROCm too), "xpu" or "npu". "auto": accelerators if there are any, else the CPU.',
        section=PLACE,
        commands=_EVERY_COMMAND,
    )
    seed_per_rank: bool = option(
        True,
        Switch(),
        "Each rank draws its own dropout masks and augmentations. Rank 0 keeps the script's seed.",
        section=PLACE,
        commands=_RUN_AND_VERIFY,
    )
    log_dir: str = option(
        "logs",
        Folder(),
        "Folder of rank_N.log, made if missing.",
        section=PLACE,
        commands=_RUN_AND_VERIFY,
        is_of_node=True,
    )
    shard_offload: bool = option(
        False,
        Switch(),
        'With shard="on" or "auto": weights, gradients and optimizer states of a sharded model lie in host memory. '
        "A GPU holds the layers that compute, and the optimizer runs on the CPU. Slower; for models that do not fit "
        "sharded either.",
        Scope.RANKS,
        Scope.DDP,
        section=PLACE,
        commands=_EVERY_COMMAND,
    )
    grad_compression: str | None = option(
        None,
        Choice(("bf16", "fp16", "powersgd")),
        '"bf16", "fp16" or "powersgd": smaller gradients on a slow link. They are no longer exact. "bf16" and '
        '"powersgd" need NCCL, and "powersgd" does not go with fp16=True.',
        Scope.RANKS,
        Scope.DDP,
        Scope.TRAINER,
        section=GRADIENTS,
        commands=_RUN_AND_VERIFY,
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        Count(1, none_means="what equal numbers of rows could reach"),
        "Most tokens of a micro-batch, rows x longest row. More lets short texts share a micro-batch; less saves "
        "memory.",
        *_OF_A_PLAN,
        otherwise="what equal numbers of rows reach",
        section=DEALING,
        commands=_RUN_AND_VERIFY,
    )
    max_restarts: int = option(
        0,
        Count(0),
        "How often all ranks are started again after one failed.",
        Scope.RANKS,
        section=FAILING,
        commands=_RUN_AND_CHAOS,
    )
    timeout_s: float = option(
        1800.0,
        Seconds(),
        "Limit, in seconds, of a collective and of a wait for another rank.",
        section=FAILING,
    )
    hang_timeout_s: float = option(
        120.0,
        Seconds(least=2.0, never=True, reason="ranks beat every 0.5 seconds"),
        "Seconds without progress after which a training rank is called hung and the run ends. Longer while it loads, "
        "saves, evaluates, compiles or makes its first step, and where micro-batches of this run take long (ten times "
        "the longest). 0 = never.",
        section=FAILING,
        commands=_RUN_AND_CHAOS,
    )
    grace_s: float = option(
        30.0,
        Seconds(),
        "Seconds from SIGTERM, SIGUSR1 or Ctrl-C until the run ends: the time to finish a step and to save.",
        section=FAILING,
        commands=_RUN_AND_CHAOS,
    )
    on_nan: str = option(
        "raise",
        Choice(("raise", "skip", "off")),
        'What a gradient that is not finite does. "raise": it ends the run. "skip": the step is left out on all '
        'ranks. "off": it is left to the script.',
        Scope.RANKS,
        Scope.TRAINER,
        asking=("skip",),
        section=FAILING,
    )
    check_first_step: str = option(
        "auto",
        Choice(("auto", "off", "every")),
        "Computes a step as one process does and as the ranks share it, before it is trained, and compares the "
        'gradients. "auto": the first step, in a minute at most; of code that is the script\'s own also steps 2, 4, 8 '
        'and so on and the first of each epoch. "every": each step. "off": none.',
        Scope.TRAINER,
        asking=("every",),
        section=FAILING,
    )
    loss_reduction: str = option(
        "auto",
        Choice(("auto", "token_sum", "row_mean", "token_mean", "whole")),
        'How the loss is reduced. "auto": known of the classes of transformers, TRL and Unsloth, else measured. '
        '"token_sum": a sum divided by num_items_in_batch, whose samples may be in any micro-batch. "row_mean", '
        '"token_mean": a mean over rows or labels. "whole": anything; micro-batches stay whole.',
        Scope.TRAINER,
        section=DEALING,
    )
    inexact: str = option(
        "warn",
        Choice(("warn", "raise")),
        'What a training does that is not exactly that of one process, as the comparison of a step finds. "warn": it '
        'is said, with its size. "raise": it is refused.',
        Scope.TRAINER,
        section=FAILING,
    )
    verify_every: int = option(
        100,
        Count(0),
        "Steps between two comparisons of all ranks' weights, and until then after steps 1, 2, 4, 8 and so on; "
        "0 = never.",
        section=FAILING,
    )
    log_metrics: bool = option(
        True,
        Switch(),
        "Two or more ranks: adds the numbers multigpu/tokens_per_s, waiting, padding, slowest_rank and "
        "peak_memory_gib to each line with a training loss that the Trainer logs on rank 0. The console shows them in "
        "every tenth of these lines, trackers have them all.",
        section=SHOWN,
    )
    nnodes: str = option(
        "1",
        Nodes(),
        "Nodes of the run, all of which take part from the first step to the last.",
        Scope.RANKS,
        section=NODES,
    )
    rdzv_endpoint: str | None = option(
        None,
        Endpoint(),
        "Where the nodes meet: HOST:PORT, served by the node of that name.",
        Scope.NODES,
        section=NODES,
        is_of_node=True,
    )
    rdzv_id: str | None = option(
        None, Text(), "The run's name among those that meet there.", Scope.NODES, section=NODES
    )
    node_rank: int | None = option(
        None,
        Count(0, none_means="by address"),
        "Place of this node among the others, from 0. The first ranks run on node 0.",
        Scope.NODES,
        otherwise="by address",
        section=NODES,
        is_of_node=True,
    )


class SeldomOptions(TypedDict, total=False):
    """The keywords of `enable_multi_gpu` that are not in its signature, for type checkers and editors."""

    device: str | None
    seed_per_rank: bool | None
    log_dir: str | os.PathLike[str] | None
    shard_offload: bool | None
    grad_compression: str | None
    max_tokens_per_micro_batch: int | None
    max_restarts: int | None
    timeout_s: float | None
    hang_timeout_s: float | None
    grace_s: float | None
    on_nan: str | None
    check_first_step: str | None
    loss_reduction: str | None
    inexact: str | None
    verify_every: int | None
    log_metrics: bool | None
    nnodes: str | int | None
    rdzv_endpoint: str | None
    rdzv_id: str | None
    node_rank: int | None
