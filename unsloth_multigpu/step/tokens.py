"""How many tokens a micro-batch has, and how many of its places are padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Ids of a model's own tokens, and the mask that says which of them are padding. Trainers of preferences have several.
_ENDS = (("input_ids", "attention_mask"), ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask"))
_OTHER_IDS = ("decoder_input_ids",)


class TokenCount:
    """Counts tokens and padding of micro-batches. What lies on an accelerator is read when it has been computed.

    A token is a place of `input_ids`, or of `prompt_ids` and `completion_ids`, which its mask leaves in; without a mask
    each place is one. It counts whether or not it has a label. All other places are padding. So the number of tokens
    of a step is the same on any number of ranks, that of padding is not. Rows without a mask are counted with what pads
    them. What a decoder is given beside `input_ids` is not counted.

    Attributes:
        num_tokens: Of the steps that are over, as far as they are known; None before the first micro-batch with tokens,
            as in models that see no tokens.
        num_padding_tokens: Of the same steps.
    """

    def __init__(self) -> None:
        self.num_tokens: int | None = None
        self.num_padding_tokens: int | None = None
        self._num_places = self._num_on_host = 0
        self._on_device: Any = None
        # What was known on the host at the end of a step, and what the device then sends to it.
        self._pending: deque[tuple[Any, torch.Tensor, int, int]] = deque()

    def add(self, inputs: Any, *, is_filler: bool) -> None:
        """Counts a micro-batch. A filler holds no token that counts: it only takes a rank's time.

        Args:
            inputs: What the model is called with.
        """
        for ids, mask in _token_ids(inputs):
            self._num_places += ids.numel()
            if is_filler:
                continue
            if mask is None or mask.shape != ids.shape:
                self._num_on_host += ids.numel()
                continue
            count = torch.count_nonzero(mask)
            if count.device.type == "cpu":
                self._num_on_host += int(count)
            else:
                self._on_device = count if self._on_device is None else self._on_device + count

    def end_step(self) -> None:
        """Lets the device send what it has counted, and takes in what has come. Does not wait."""
        if self._on_device is None:
            if self._num_places:
                self._set(self._num_on_host, self._num_places)
            return
        host = torch.empty((), dtype=torch.int64, pin_memory=True)
        host.copy_(self._on_device, non_blocking=True)
        event = torch.Event(device=self._on_device.device)
        event.record()
        self._pending.append((event, host, self._num_on_host, self._num_places))
        while self._pending and self._pending[0][0].query():
            self._take()

    def settle(self) -> None:
        """Takes in all. Waits for the device."""
        while self._pending:
            self._pending[0][0].synchronize()
            self._take()

    def _take(self) -> None:
        _, host, num_on_host, num_places = self._pending.popleft()
        self._set(num_on_host + int(host), num_places)

    def _set(self, num_tokens: int, num_places: int) -> None:
        self.num_tokens, self.num_padding_tokens = num_tokens, num_places - num_tokens


def _token_ids(inputs: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
        if not isinstance(value, torch.Tensor) or name in _OTHER_IDS:
            continue
        for ids_end, mask_end in _ENDS:
            if name.endswith(ids_end):
                mask = inputs.get(name.removesuffix(ids_end) + mask_end)
                yield value, mask if isinstance(mask, torch.Tensor) else None
