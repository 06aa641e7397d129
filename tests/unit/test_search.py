"""A search for hyperparameters: on one GPU it is Hugging Face's, on several ranks it is refused at once."""

import pytest

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.hooks.trainer_patches import TrainerHooks
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.session import Session
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, RankIdentity


@pytest.mark.parametrize("world_size", [1, 2])
def test_search_is_refused_on_several_ranks(world_size):
    identity = RankIdentity(0, 0, world_size, world_size, "unsloth_multigpu")
    patches = TrainerHooks(Session(MultiGPUConfig(), identity, console=None)).patches()
    found = [patch for patch in patches if patch.target.endswith(".hyperparameter_search")]
    assert len(found) == (world_size > 1)
    for patch in found:
        with pytest.raises(SetupError, match="on several ranks: its trials are chosen by one process"):
            patch.wrap(lambda *_: None, None)


def test_trial_is_not_steered_and_refuses_what_would_steer_it():
    def run(**options):
        session = Session(MultiGPUConfig(**options), SINGLE_PROCESS)
        return session.run_training(None, lambda: "trained", {"trial": object()})

    assert run() == "trained"
    with pytest.raises(SetupError, match="resume='auto' has no effect on the trials of hyperparameter_search"):
        run(resume="auto")
