"""A valid value of each option that is not its default."""

from typing import Any

from unsloth_multigpu.option_type import options_of
from unsloth_multigpu.options import MultiGPUConfig

_TEXTS = {"strategy": "diloco:every_steps=8,outer_momentum=0.5", "rdzv_endpoint": "node0:29400"}


def another_value(name: str) -> Any:
    """Returns a value that asks for something, if the option's default does not."""
    option = options_of(MultiGPUConfig)[name]
    if option.asking or option.choices:
        return option.asking[0] if option.asking else next(word for word in option.choices if word != option.default)
    if option.type is bool:
        return not option.default
    return option.type(3) if option.type in (int, float) else _TEXTS.get(name, "text")
