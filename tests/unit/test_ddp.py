"""What DDP is told about a model: whether every parameter surely gets a gradient in every step."""

import copy
import logging
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.board import manager_of, session_of
from tests.helpers.trainer import FakeAccelerator, FakeTrainer
from unsloth_multigpu.part import Part
from unsloth_multigpu.train.ddp import DDPWrapping, uses_every_parameter
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.trainer import DDPTrainer

TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
TINY |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(scope="module", autouse=True)
def quiet_libraries():
    """PEFT is imported once, here: it takes seconds and talks about libraries that are missing."""
    logging.disable(logging.WARNING)
    import peft  # noqa: F401

    yield
    logging.disable(logging.NOTSET)


def config_of(name, **changes):
    import transformers

    return getattr(transformers, f"{name}Config")(**changes)


def llama():
    return config_of("Llama", **TINY)


def of(name, **changes):
    return tiny(config_of(name, **changes))


def tiny(config=None, name="TinyForCausalLM", module="transformers.models.tiny"):
    """A model of three layers; its class says what it is for."""
    model = type(name, (nn.ModuleDict,), {"__module__": module})(
        {"q_proj": nn.Linear(2, 2), "v_proj": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2)}
    )
    if config is not None:
        model.config = config
    return model


def adapted(model, names=("default",), **options):
    """The model with one LoRA per name, all of them trained."""
    import peft

    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **options})
    result = peft.PeftModel(model, config, adapter_name=names[0])
    for name in names[1:]:
        result.add_adapter(name, config)
    for name, parameter in result.named_parameters():
        parameter.requires_grad = ".lora_" in name or ".modules_to_save." in name
    return result


def partly_frozen(model, *names):
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad = not parameter.requires_grad
    return model


def with_layer(name):
    model = tiny(llama())
    model[name] = torch.nn.Linear(2, 2)
    return model


def ia3():
    import peft

    return peft.PeftModel(tiny(llama()), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))


USES_EVERY_PARAMETER = [
    lambda: tiny(llama()),
    lambda: partly_frozen(tiny(llama()), "q_proj"),
    lambda: adapted(tiny(llama())),
    lambda: adapted(tiny(llama()), use_dora=True),
    lambda: adapted(tiny(llama()), target_modules=["q_proj"], modules_to_save=["lm_head"]),
    lambda: adapted(with_layer("shared_expert"), target_modules=["q_proj"]),
    lambda: adapted(tiny(llama(), "TinyForSequenceClassification")),
    lambda: partly_frozen(adapted(tiny(llama()), ("default", "other")), ".other."),
    lambda: partly_frozen(with_layer("pooler"), "pooler"),
    lambda: of("Qwen3", **TINY),
    lambda: of("Gemma2", **TINY),
    lambda: of("Phi3", **TINY, pad_token_id=0),
    lambda: of("GPT2"),
    lambda: of("OPT", layerdrop=0.0),
]
MAY_LEAVE_ONE_OUT = [
    lambda: adapted(tiny(llama()), target_modules=["q_proj", "lm_head"]),
    lambda: adapted(with_layer("embed_tokens"), target_modules=["q_proj", "embed_tokens"]),
    lambda: adapted(with_layer("shared_expert"), target_modules=["q_proj", "shared_expert"]),
    lambda: with_layer("pooler"),  # BigBirdForCausalLM has one.
    lambda: adapted(tiny(llama()), ("default", "other")),
    lambda: partly_frozen(adapted(tiny(llama())), "lm_head"),
    ia3,
    lambda: partly_frozen(tiny(llama()), ""),  # It trains nothing.
    lambda: tiny(None),
    lambda: tiny({"hidden_size": 8}),
    lambda: tiny(llama(), module="__main__"),
    # Other heads may leave a pooler or a mask embedding without a gradient.
    lambda: tiny(llama(), "TinyForSequenceClassification"),
    lambda: of("Mixtral", **TINY),
    lambda: of("Dbrx"),
    lambda: of("Gemma3"),
    lambda: of("Qwen2_5Omni"),
    lambda: of("Whisper", encoder_layerdrop=0.1),
    lambda: of("GPT2", add_cross_attention=True),
]


@pytest.mark.parametrize(
    ("make", "is_sure"), [*product(USES_EVERY_PARAMETER, [True]), *product(MAY_LEAVE_ONE_OUT, [False])]
)
def test_model_surely_uses_every_trained_parameter_or_may_leave_one_out(make, is_sure):
    assert uses_every_parameter(make()) is is_sure


class Accelerator(FakeAccelerator):
    """Notes what it would give DDP; makes its settings only when it wraps the model, as of transformers 4."""

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        self.told = copy.copy(self.ddp_handler)
        # Without a process group no real one can be made.
        return DistributedDataParallel.__new__(DistributedDataParallel)


def wrap(model, accelerator, find_unused_parameters=None):
    """What a `train()` does that wraps the model."""
    trainer = FakeTrainer(model, ddp_find_unused_parameters=find_unused_parameters, device="cpu")
    trainer.accelerator = accelerator
    with Loop(trainer, [DDPWrapping(trainer, manager_of(None, 0, 2))]).steering():
        accelerator.ddp_handler = SimpleNamespace(find_unused_parameters="untouched", comm_hook="no")
        return accelerator.prepare_model(model)


# What the script says in TrainingArguments stands.
@pytest.mark.parametrize(
    ("argument", "sure", "told"), [(None, True, False), (None, False, "untouched"), (True, True, "untouched")]
)
def test_ddp_is_told_once_the_model_is_known(argument, sure, told):
    accelerator = Accelerator()
    wrap(tiny(llama() if sure else None), accelerator, argument)
    assert accelerator.told.find_unused_parameters == told
    assert accelerator.told.gradient_as_bucket_view is True


@pytest.mark.parametrize("is_moved", [False, True])
def test_frozen_weights_elsewhere_are_left_alone_by_ddp(lone_group, is_moved):
    """As Unsloth's embeddings that were copied to be trained; accelerate moves a model that is not quantised."""
    model = tiny(llama())
    model["embed"] = torch.nn.Linear(2, 2, device="meta").requires_grad_(False)
    model["head"] = torch.nn.Linear(2, 2).requires_grad_(False)
    model._ddp_params_and_buffers_to_ignore = ["head.bias"]

    class Wrapping(FakeAccelerator):
        def prepare_model(self, model, device_placement=None, evaluation_mode=False):
            if is_moved:
                model["embed"].to_empty(device="cpu")
            return DistributedDataParallel(model)

    if not is_moved:
        with pytest.raises(ValueError, match="must be on the same type of devices"):
            Wrapping().prepare_model(model)
    assert wrap(model, Wrapping()).parameters_to_ignore == {"head.bias", "embed.weight", "embed.bias"}
    assert model._ddp_params_and_buffers_to_ignore == ["head.bias"]


def test_tool_follows_a_training_that_another_parallelism_steers():
    """Otherwise `verify` would let it run to its end, over what the user has saved."""
    seen = []

    class Following(Part):
        place = "recorder"

        def overrides(self):
            return {"training_step": lambda original, *_: seen.append("step")}

        def on_step_end(self, *_, **__):
            seen.append("end of step")

    trainer = FakeTrainer()
    trainer.accelerator.parallelism_config = SimpleNamespace(non_data_parallel_size=2)
    manager = manager_of(None, 0, 2)
    steered = DDPTrainer(trainer, session_of(manager))
    steered.of_tool = [Following(trainer, manager)]
    steered.run(lambda: (trainer.training_step(None, None), trainer.steps(1)))
    assert seen == ["step", "end of step"]
    assert "training_step" not in vars(trainer)
