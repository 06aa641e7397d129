"""The options of `unsloth-multigpu bench`."""

from __future__ import annotations

import argparse

from unsloth_multigpu.tools.bench.arm import ARMS, DEFAULT_ARMS, UNGUARDED
from unsloth_multigpu.tools.bench.federated_option import (
    DEFAULT_FEDERATED,
    NUM_CLIENTS,
    NUM_ROUNDS,
    NUM_STEPS_OF_CLIENT,
)
from unsloth_multigpu.tools.bench.option import (
    DEFAULT_LENGTHS,
    LIBRARIES,
    MODEL_SIZES,
    NUM_EPOCHS,
    NUM_STEPS,
    NUM_STEPS_OF_EPOCH,
    NUM_WARMUP,
    NUM_WARMUP_ON_DEVICE,
    NUM_WARMUP_SLOW,
    TEXT_LENGTHS,
    BenchOptions,
)
from unsloth_multigpu.tools.bench.strategy_arm import STRATEGIES

_DEFAULTS = BenchOptions(arms=())


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench` to its parser."""
    _add_compared(parser.add_argument_group("what is compared"))
    _add_model(parser.add_argument_group("model"))
    _add_data(parser.add_argument_group("samples"))
    _add_measurement(parser.add_argument_group("measurement"))


def _add_compared(what: argparse._ArgumentGroup) -> None:
    arms = "; ".join(f"{arm.name}: {arm.text}" for arm in ARMS.values())
    others = ", ".join(name for name in ARMS if name not in DEFAULT_ARMS)
    choice = what.add_mutually_exclusive_group()
    choice.add_argument("--arms", metavar="A,B", help=f"[all but {others}] {arms}")
    strategies = "; ".join(f"{arm.name}: {arm.text}" for arm in STRATEGIES.values())
    choice.add_argument(
        "--strategies",
        metavar="A,B",
        help=f'in place of arms ways in which gradients meet, "all" for all; the model learns a text. {strategies}',
    )
    choice.add_argument(
        "--federated",
        nargs="?",
        const=DEFAULT_FEDERATED,
        metavar="A,B",
        help="in place of arms ways to train the same federated clients: slots:N, a process for each of N clients at a "
        f"time, and threads:N, one process; threads need a model for each client [{DEFAULT_FEDERATED}]",
    )
    what.add_argument("--clients", type=int, metavar="N", help=f"with --federated: clients [{NUM_CLIENTS}]")
    what.add_argument("--rounds", type=int, metavar="N", help=f"with --federated: rounds [{NUM_ROUNDS}]")
    what.add_argument("--ranks", type=int, metavar="N", default=_DEFAULTS.num_ranks, help="[2]")
    what.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[auto]")
    what.add_argument("--slow-rank", metavar="R:SPEED", help="rank R computes at SPEED, 0.5 say; simulated")


def _add_model(model: argparse._ArgumentGroup) -> None:
    sizes = ", ".join(f"{name} = {h} x {n}, {v}" for name, (h, n, v) in MODEL_SIZES.items())
    model.add_argument(
        "--model-size",
        choices=tuple(MODEL_SIZES),
        default="small",
        help=f"hidden x layers, vocabulary: {sizes} [small]",
    )
    for name in ("hidden-size", "num-layers", "vocab-size"):
        model.add_argument(f"--{name}", type=int, metavar="N", help="in place of that of --model-size")
    model.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default=_DEFAULTS.dtype,
        help="bf16 = autocast, and frozen weights are bf16 [fp32]",
    )
    model.add_argument(
        "--gradient-checkpointing", action="store_true", help="activations are computed again in the backward pass"
    )
    model.add_argument("--train", choices=("full", "lora"), help="[full; with --federated lora]")
    model.add_argument(
        "--library",
        choices=LIBRARIES,
        default=_DEFAULTS.library,
        help="unsloth = FastLanguageModel and its SFTTrainer in every arm, on the same rows [transformers]",
    )
    model.add_argument("--four-bit", action="store_true", help="with --library unsloth: frozen weights in 4 bits")
    model.add_argument(
        "--optim", metavar="NAME", default=_DEFAULTS.optimizer, help=f"of TrainingArguments [{_DEFAULTS.optimizer}]"
    )


def _add_data(data: argparse._ArgumentGroup) -> None:
    data.add_argument(
        "--lengths",
        metavar="SPEC",
        help="lognormal:MEDIAN:MAX or fixed:N in tokens; text:MAX = Python's help texts, a byte is a token; "
        'file:PATH = one text per line, or .jsonl with {"text": "..."} or a length in each line, repeated as often as '
        f"needed [{DEFAULT_LENGTHS}; with --strategies {TEXT_LENGTHS}]",
    )
    data.add_argument(
        "--padding-free",
        action="store_true",
        help="rows lie end to end in every arm, as with TRL's padding_free, and as Unsloth lays them on several ranks",
    )
    data.add_argument("--batch-size", type=int, metavar="N", default=8, help="samples of a micro-batch per device [8]")
    data.add_argument("--accumulation", type=int, metavar="N", default=1, help="micro-batches of a step per rank [1]")
    data.add_argument("--seed", type=int, metavar="N", default=0, help="of weights, lengths and tokens [0]")


def _add_measurement(run: argparse._ArgumentGroup) -> None:
    for name, value, text in (
        ("epochs", None, f"with --strategies: epochs, each with a test at its end [{NUM_EPOCHS}]"),
        (
            "steps",
            None,
            "timed optimizer steps; with --strategies of an epoch, with --federated of a client in a round "
            f"[{NUM_STEPS}; {NUM_STEPS_OF_EPOCH}; {NUM_STEPS_OF_CLIENT}]",
        ),
        (
            "warmup",
            None,
            f"first steps, which are not timed [{NUM_WARMUP}; with --slow-rank {NUM_WARMUP_SLOW}; on GPUs "
            f"{NUM_WARMUP_ON_DEVICE}, with --strategies {NUM_WARMUP}]; with --federated first rounds [1]",
        ),
        ("repeats", _DEFAULTS.num_repeats, f"rounds; each runs every arm once [{_DEFAULTS.num_repeats}]"),
        ("save-steps", None, f"steps between two checkpoints, of all arms but {UNGUARDED} [none are saved]"),
    ):
        run.add_argument(f"--{name}", type=int, metavar="N", default=value, help=text)
    run.add_argument(
        "--interleave",
        choices=("runs", "steps"),
        default=_DEFAULTS.interleave,
        help="steps = all arms are in memory at once and take turns step by step, which ratios need on a machine that "
        f"others disturb [{_DEFAULTS.interleave}: one after the other]",
    )
    limit_s = _DEFAULTS.timeout_s
    run.add_argument(
        "--timeout-s", type=float, metavar="S", default=limit_s, help=f"limit of one run, or turn [{limit_s:g}]"
    )
    run.add_argument("--json", metavar="FILE", help="write all figures there")
    run.add_argument("--report", metavar="DIR", help="write report.html, its plots and bench.json there")
