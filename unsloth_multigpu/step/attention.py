"""What attention costs compared with the rest of a model, by its shape."""

from __future__ import annotations

from typing import Any

from torch import nn

from unsloth_multigpu.step.cost import attention_factor


def attention_of(model: nn.Module) -> float:
    """The `q` of `step.cost.CostModel`, per token; 0 for a model whose config does not tell its shape."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden_size, num_layers = (getattr(config, n, None) for n in ("hidden_size", "num_hidden_layers"))
    modules: list[Any] = list(model.modules())
    # By the names of their sizes: weights of quantised layers are packed. PEFT's layers have the sizes of those that
    # they hold.
    matrices = [m for m in modules if hasattr(m, "in_features") and hasattr(m, "out_features")]
    num_weights = sum(int(m.in_features) * int(m.out_features) for m in matrices if not hasattr(m, "base_layer"))
    if not isinstance(hidden_size, int) or not isinstance(num_layers, int):
        return 0.0
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # transformers' attention layers say it. "eager" computes what it then masks; so does "sdpa" where rows are padded,
    # but the long rows, with which it counts, mostly stand alone. The lengths of an encoder's rows are planned with.
    is_causal = any(getattr(m, "is_causal", False) is True for m in modules)
    is_causal &= not getattr(config, "is_encoder_decoder", False)
    skips = getattr(config, "_attn_implementation", None) != "eager"
    return attention_factor(
        hidden_size, num_layers, num_weights, is_frozen=num_trained < num_weights / 2, is_causal=is_causal and skips
    )
