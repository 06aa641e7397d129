"""Gradients sent smaller: what `grad_compression` means for DDP, and where it cannot work."""

from __future__ import annotations

from typing import Any

from unsloth_multigpu.errors import SetupError

# A rank of 4 keeps more of LoRA's small matrices than torch's default of 1, whose loss of accuracy is large. torch's
# 1000 steps before the first compressed one are longer than many fine-tunings; error feedback needs at least 2.
_POWER_SGD = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 10}
_HOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "powersgd": ("power_sgd", _POWER_SGD),
}


def compression_settings(compression: str) -> dict[str, Any]:
    """Attributes of accelerate's `DistributedDataParallelKwargs`.

    "fp16" and "bf16" send 16 bits for each element: fp16 has 11 significant bits and loses what is below 6e-8, bf16 has
    8 and the range of fp32. "powersgd" sends two thin matrices of rank 4 for each matrix, from the tenth backward on,
    and carries what it left out into the next step. What it carries is not in a checkpoint and takes the memory of the
    gradients once more. Each rank factorises for itself: ranks need cards of one kind to stay equal.
    """
    from accelerate.utils import DDPCommunicationHookType

    hook, options = _HOOKS[compression]
    # Not the hook's name: accelerate passes over a text without a word, and compresses nothing.
    return {"comm_hook": DDPCommunicationHookType(hook), "comm_state_option": dict(options)}


def check_compression(compression: str, backend: str, hook_of_script: str, *, is_loss_scaled: bool) -> None:
    """Refuses what cannot work before anything is trained.

    Args:
        compression: `MultiGPUConfig.grad_compression`.
        backend: Process group backend that moves the gradients: "nccl", "gloo", "xccl".
        hook_of_script: The `comm_hook` that the script gave accelerate itself, "no" for none.
        is_loss_scaled: A GradScaler scales the loss: mixed precision with fp16.

    Raises:
        SetupError: With what to use instead.
    """
    if hook_of_script != "no":
        raise SetupError(
            f"grad_compression={compression!r}, but the script registers the communication hook {hook_of_script!r}.",
            hint="Use one of the two: a model has one hook.",
        )
    # bf16: torch refuses it. powersgd: each bucket sends twice, the second time when the first has arrived. gloo knows
    # messages by their order only, and buckets arrive in another order on each rank: it hangs, or mixes them up.
    if compression in ("bf16", "powersgd") and backend not in ("nccl", "xccl"):
        raise SetupError(
            f"grad_compression={compression!r} needs NCCL or XCCL; the gradients of this run go over {backend}.",
            hint='Use grad_compression="fp16" or leave it out.',
        )
    # Scaled gradients overflow now and then, and the scaler passes over that step. But what powersgd carries into the
    # next ones is NaN from then on, so all would be passed over.
    if compression == "powersgd" and is_loss_scaled:
        raise SetupError(
            "grad_compression='powersgd' cannot work with fp16=True, whose scaled gradients overflow now and then.",
            hint="Use bf16=True, or another grad_compression.",
        )
