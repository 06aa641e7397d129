"""What stands for a kernel of TRL that runs on GPUs only."""

from importlib.metadata import version

import torch
from packaging.version import Version


class LogProbs:
    """Stands in for TRL's fused kernel, which runs on a GPU only: the same five numbers of each token."""

    @staticmethod
    def use() -> None:
        """In TRL 1.15, which has the kernel on any device; later ones use it where there is a card."""
        if Version(version("trl")).release[:2] == (1, 15):
            import trl.trainer.utils

            trl.trainer.utils._ChunkedLogProbFunction = LogProbs

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, *_):
        logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
        logps = logits.log_softmax(-1)
        probs = logps.exp()
        chosen = logps.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy, top = -(probs * logps).sum(-1), logits.argmax(-1) == targets
            return chosen, entropy, probs.square().sum(-1).log(), logits.mean(-1), top
