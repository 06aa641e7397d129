"""Checks the replies of a round, and converts aggregated arrays to their dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

Kind = Literal["train", "evaluate"]
# Key in a reply's "client" record: names of tensors that the client has changed although it must not.
CHANGED = "changed-weights"


def check_replies(
    replies: Sequence[Message], kind: Kind, server_round: int, *, min_success: float, weight_key: str
) -> tuple[list[Message], list[str]]:
    """Returns the replies for the strategy, including errors, in the order of the clients; and one line per failure.

    Clients without data are left out: they would count in a median, and may lack metrics.

    Raises FederatedError if no client succeeded or had data, or fewer than `min_success` of them succeeded.
    """
    replies = sorted(replies, key=client_of)
    good = [reply for reply in replies if reply.has_content()]
    empty = [reply for reply in good if weight_of(reply.content, weight_key) == 0]
    # Without the prefix of a slot's error, which the line has already.
    what = f" (round {server_round}, {kind})"
    bad = [(name_of(reply), reply.error.reason) for reply in replies if reply.has_error()]
    lost = [(name, str(reason).removeprefix(name + what).lstrip(" :")) for name, reason in bad]
    # 0.35 * 20 is a little more than 7.
    if lost and (not good or len(good) < min_success * len(replies) - 1e-9):
        bound = f", min_success={min_success}" if good else ""
        raise FederatedError(
            f"round {server_round}: {len(good)} of {len(replies)} clients succeeded in {kind}{bound}. "
            f"The first failure: {': '.join(lost[0])}",
            hint=f"The log above shows the whole error. Correct {kind}_fn or model_builder.",
        )
    if good and len(empty) == len(good) and kind == "train":
        raise FederatedError(
            f"round {server_round}: no client had data in train: all successful clients report 0 examples.",
            hint="train_fn returns (num_examples, metrics).",
        )
    failures = [f"{who}: left out of {kind}: {why}" for who, why in lost]
    failures += [f"{name_of(reply)}: no data in {kind}" for reply in empty]
    for reply in good:
        if changed := changed_by(reply.content):
            failures.append(f"{name_of(reply)}: changed {', '.join(changed)} in {kind}, which must not change")
            logger.warning("round %d: %s; its model is built again", server_round, failures[-1])
    return [reply for reply in replies if not any(reply is other for other in empty)], failures


def changed_by(content: RecordDict) -> list[str]:
    """Returns up to three names of tensors, mostly frozen weights, that the client has changed and does not send."""
    changed = content.config_records.get("client", ConfigRecord()).get(CHANGED)
    return list(map(str, changed[:3])) if isinstance(changed, list) else []


def client_of(message: Message) -> int:
    """Returns the number of the client that replied."""
    return message.metadata.src_node_id - 1


def name_of(message: Message) -> str:
    """Returns "client 3"."""
    return f"client {client_of(message)}"


def weight_of(content: RecordDict, key: str) -> float:
    """Returns the reply's number of examples; 1 without one, which the strategy may refuse."""
    value = next((record[key] for record in content.metric_records.values() if key in record), 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def like(arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Converts arrays to their earlier dtypes: means and optimizers turn float32 and integers into float64.

    Raises FederatedError for a value that is infinite or NaN.
    """
    import numpy as np

    found: dict[str, Array] = {}
    for name, array in arrays.items():
        value = array.numpy()
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise FederatedError(
                f"{name} is infinite or NaN after aggregation.",
                hint="Lower the learning rate of the clients, or of the strategy (eta, server_learning_rate).",
            )
        dtype = np.dtype(before[name].dtype) if name in before else value.dtype
        if dtype != value.dtype:
            array = Array(np.asarray(np.rint(value) if dtype.kind in "iub" else value, dtype=dtype))
        found[name] = array
    return ArrayRecord(found)
