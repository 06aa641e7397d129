"""How the engines are asked to keep a rank's part in the host's memory (`shard_offload`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Unsloth reads it when it shards. accelerate has `fsdp_config["cpu_offload"]`, transformers `fsdp_cpu_offload` of its
# DistributedConfig.
UNSLOTH_VARIABLE = "UNSLOTH_FSDP2_CPU_OFFLOAD"


def asked_of_unsloth(environment: Mapping[str, str]) -> bool:
    """True if Unsloth would offload; it reads its variables like this."""
    return environment.get(UNSLOTH_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def asked_of_accelerate(plugin_arguments: Mapping[str, Any] | None) -> bool:
    """True if `TrainingArguments.fsdp_plugin_args` say so."""
    return bool((plugin_arguments or {}).get("cpu_offload"))
