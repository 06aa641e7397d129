"""What a benchmark of federated clients runs: the options of `bench --federated`, checked, as plain data."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.tools.bench.option import BenchOptions

DEFAULT_FEDERATED = "slots:2,slots:1,threads:2"
# With which the others are compared.
BASELINE = "slots:1"
NUM_CLIENTS = 4
NUM_ROUNDS = 3
NUM_STEPS_OF_CLIENT = 8
# In the first round each process builds its model.
NUM_WARMUP_ROUNDS = 1
_KINDS = ("slots", "threads")
# Options of bench that mean nothing to clients, with their defaults.
_NOT_FOR_CLIENTS: Mapping[str, Any] = {
    "ranks": 2,
    "slow_rank": None,
    "accumulation": 1,
    "epochs": None,
    "save_steps": None,
    "interleave": "runs",
    "report": None,
}


@dataclass(frozen=True)
class FederatedArm:
    """One way to train the clients.

    Args:
        kind: "slots" = `create_multigpu_flower_server`, "threads" = threads of one process.
        num_at_once: Clients that train at the same time.
    """

    kind: str
    num_at_once: int

    @property
    def name(self) -> str:
        """What `--federated` calls it."""
        return f"{self.kind}:{self.num_at_once}"


@dataclass(frozen=True)
class FederatedOptions:
    """One benchmark.

    Args:
        num_clients: Clients, each with rows of its own.
        num_rounds, num_warmup: Rounds that are measured, and those before them.
        num_repeats: How often every arm runs.
        llama: The model, and the rows of all clients in one round: a client is a rank there.
    """

    num_clients: int
    num_rounds: int
    num_warmup: int
    num_repeats: int
    llama: BenchOptions

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> FederatedOptions:
        """Checks a command line; `llama.device` is left as it was given.

        Raises:
            ConfigError: A value cannot be used, or is for another kind of benchmark.
        """
        for name, default in _NOT_FOR_CLIENTS.items():
            if (value := getattr(arguments, name)) != default:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} does not go with --federated.", hint="Leave it out."
                )
        num_clients = NUM_CLIENTS if arguments.clients is None else arguments.clients
        num_rounds = NUM_ROUNDS if arguments.rounds is None else arguments.rounds
        num_warmup = NUM_WARMUP_ROUNDS if arguments.warmup is None else arguments.warmup
        for flag, number, minimum in (
            ("clients", num_clients, 1),
            ("rounds", num_rounds, 1),
            ("warmup", num_warmup, 0),
        ):
            if number < minimum:
                raise ConfigError(f"--{flag} {number}: expected at least {minimum}.", hint=f"Give --{flag} {minimum}.")
        steps = NUM_STEPS_OF_CLIENT if arguments.steps is None else arguments.steps
        as_ranks = {"ranks": num_clients, "steps": steps, "warmup": 0, "train": arguments.train or "lora"}
        llama = BenchOptions.from_arguments(argparse.Namespace(**{**vars(arguments), **as_ranks}), ())
        return cls(num_clients, num_rounds, num_warmup, arguments.repeats, llama)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FederatedOptions:
        """Of what `dataclasses.asdict` gave, after it travelled as JSON."""
        return cls(**{**values, "llama": BenchOptions.from_json(values["llama"])})

    def on_device(self, device: str) -> FederatedOptions:
        """These options on "cpu" or "cuda"."""
        return dataclasses.replace(self, llama=dataclasses.replace(self.llama, device=device))


def parse_arms(text: str) -> list[FederatedArm]:
    """The arms that `text` names, with commas between them.

    Raises:
        ConfigError: A name that is no arm, or one given twice.
    """
    arms = []
    for name in (part.strip() for part in text.split(",")):
        kind, _, number = name.partition(":")
        if kind not in _KINDS or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--federated: there is no {name!r}.", hint="Give slots:N or threads:N, as in slots:2.")
        arm = FederatedArm(kind, int(number))
        if arm in arms:
            raise ConfigError(f"--federated: {arm.name!r} is given twice.", hint="Name each once; see --repeats.")
        arms.append(arm)
    return arms


def check_not_federated(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for an option that only --federated has."""
    for name in ("clients", "rounds"):
        if (value := getattr(arguments, name)) is not None:
            raise ConfigError(f"--{name} {value} is for --federated.", hint="Give --federated, or leave it out.")
