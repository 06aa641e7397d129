"""What a client does with a message: seeds, state, FedProx, errors; on plain models and tiny Llamas in this process."""

import math
import random
from contextlib import suppress

import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11 or newer")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

from tests.helpers.tiny import build_tiny, topics
from unsloth_multigpu.errors import ConfigError, FederatedError
from unsloth_multigpu.federated.aggregation import to_tensor
from unsloth_multigpu.federated.client import client_seed, make_client_app
from unsloth_multigpu.federated.flower_strategy import changed_by

NUM_CLIENTS = 4
pytestmark = pytest.mark.usefixtures("may_make_messages")


def ask(app, kind, arrays=None, client_id=0, node_config=None, **config):
    """Sends a message to a client in this process and returns the reply's content."""
    content = RecordDict({"config": ConfigRecord(config)})
    if arrays is not None:
        content["arrays"] = arrays
    node_config = {"partition-id": client_id, "num-partitions": NUM_CLIENTS} if node_config is None else node_config
    context = Context(1, client_id + 1, node_config, RecordDict(), {})
    return app(Message(content, client_id + 1, kind), context).content


def tensors(content):
    return {name: to_tensor(array) for name, array in content["arrays"].items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def builder():
    """A frozen layer, trained ones, BatchNorm and dropout."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def train(model, client):
    """Five steps on data that the client's seed draws; the loss goes back as a tensor."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(12, 6)).square().mean()
        loss.backward()
        optimizer.step()
    return 12, {"train_loss": loss.detach(), "noise": [random.random(), float(np.random.rand())]}


def evaluate(model, client):
    assert not model.training
    return float(model(torch.ones(2, 6)).detach().sum()), np.int64(2), {"right": True}


@pytest.fixture
def app():
    return make_client_app(builder, train, evaluate, server_id="s", seed=3)


@pytest.fixture
def start(app):
    return ask(app, "query.initial")["arrays"]


def test_initial_state_is_the_same_in_every_process_also_after_a_training_and_names_what_travels(app):
    first, again = ask(app, "query.initial"), ask(make_client_app(builder, train, seed=3), "query.initial")
    assert same(tensors(first), tensors(again))
    ask(app, "train", first["arrays"])
    assert same(tensors(first), tensors(ask(app, "query.initial")))
    assert not same(tensors(first), tensors(ask(make_client_app(builder, train, seed=4), "query.initial")))
    parameters = ["1.weight", "1.bias", "3.weight", "3.bias"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert (list(first["arrays"]), first["config"]["buffers"]) == (parameters + buffers, buffers)
    assert first["config"]["adapter_config"] == ""


def test_result_depends_on_seed_round_and_client_and_on_nothing_that_ran_before(app, start):
    alone = ask(make_client_app(builder, train, evaluate, seed=3), "train", start, 2, **{"server-round": 5})
    ask(app, "train", start, 0, **{"server-round": 5})
    ask(app, "evaluate", start, 1)
    torch.rand(3), random.random(), np.random.rand()
    before = random_states()
    after_others = ask(app, "train", start, 2, **{"server-round": 5})
    assert random_states() == before
    assert same(tensors(alone), tensors(after_others))
    assert alone["metrics"] == after_others["metrics"]
    for client_id, server_round in ((1, 5), (2, 6)):
        other = ask(app, "train", start, client_id, **{"server-round": server_round})
        assert not same(tensors(alone), tensors(other))
    assert alone["metrics"]["num-examples"] == 12


def test_client_gets_what_it_has_to_know(start):
    seen = []
    app = make_client_app(builder, lambda model, client: seen.append(client) or (0, None), server_id="s", seed=3)
    reply = ask(app, "train", start, 1, **{"server-round": 2, "lr": 0.5})
    (client,) = seen
    assert (client.client_id, client.num_clients, client.server_round) == (1, NUM_CLIENTS, 2)
    assert client.config == {"server-round": 2, "lr": 0.5}
    assert client.seed == client_seed(3, 2, 1)
    assert str(client.device) == ("cuda:0" if torch.cuda.is_available() else "cpu")
    # A client without data: its state goes back as it came.
    assert reply["metrics"] == {"num-examples": 0}
    assert same(tensors(reply), {name: to_tensor(array) for name, array in start.items()})


class Smoothed(nn.Module):
    """Buffers that a forward pass assigns again, writes to, or needs once."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(6)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("sum", torch.zeros(6), persistent=False)
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.register_buffer("table", None, persistent=False)
        self.length, self.lengths = 0, []

    def forward(self, inputs):
        if self.training:
            self.ema = 0.5 * self.ema + 0.5 * inputs.detach().mean(0)
            self.sum += inputs.detach().mean(0)
            self.seen.fill_(True)
        if self.table is None:
            self.table = inputs.detach()[0] + 1
        self.length += 1
        self.lengths.append(self.length)
        return self.linear(self.norm(inputs + self.ema + self.sum) * self.table * self.scale)


def train_smoothed(model, client):
    """A client's training; 0 and 1 leave all that they can, and what they met goes back."""
    met = [model.length, len(model.lengths), model.norm.momentum, len(model._forward_hooks), float(model.sum.sum())]
    met += [float(model.ema.sum()), model.ema.element_size(), model.linear.weight.element_size(), float(model.seen)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(12, 6)).square().mean().backward()
        optimizer.step()
    if client.client_id < 2:
        model.norm.momentum = 0.9
        model.register_forward_hook(lambda module, args, result: result + 1)
        model.lengths = model.lengths[1:]
        model.scale.data += 1  # Of which torch counts no version.
    if client.client_id == 1:
        model.double()
    return 12, {"met": [float(value) for value in met]}


def test_every_client_ends_as_it_would_in_a_process_of_its_own():
    shared = make_client_app(Smoothed, train_smoothed, seed=3)
    start = ask(shared, "query.initial")["arrays"]
    replies = {client_id: ask(shared, "train", start, client_id) for client_id in (3, 1, 0, 2)}
    for client_id, reply in replies.items():
        alone = ask(make_client_app(Smoothed, train_smoothed, seed=3), "train", start, client_id)
        assert reply["metrics"] == alone["metrics"]
        assert same(tensors(reply), tensors(alone))
        assert bool(changed_by(reply)) == (client_id == 1)  # The model has to be built again.
    assert list(start) == [
        *("linear.weight", "linear.bias", "norm.weight", "norm.bias", "ema", "seen"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    ]


def merge(model, client):
    """As PEFT's merge_adapter() does, of which torch counts no version."""
    model[0].weight.data += 1e-3 * torch.ones(8, 1) @ torch.ones(1, 6)
    return train(model, client)


def replace(model, client):
    """It trains a layer of its own."""
    model[3] = nn.Linear(8, 3)
    return train(model, client)


@pytest.mark.parametrize(("careless", "changed"), [(merge, ["0.weight"]), (replace, [])])
def test_what_a_client_changed_is_gone_and_frozen_weights_are_named(app, start, careless, changed):
    expected = ask(app, "train", start, 1)
    works = careless, train
    careless_app = make_client_app(builder, lambda model, client: works[client.client_id](model, client), seed=3)
    assert changed_by(ask(careless_app, "train", start, 0)) == changed
    reply = ask(careless_app, "train", start, 1)
    assert changed_by(reply) == []
    assert same(tensors(reply), tensors(expected))


@pytest.mark.parametrize(
    ("spoil", "result", "text"),
    [
        (lambda model: model[3].bias.data.fill_(math.nan), (1, {}), r"3\.bias is infinite or NaN"),
        (lambda model: model.pop(3), (1, {}), r"3\.weight is missing after the client's training"),
        (
            lambda model: setattr(model[1], "running_mean", torch.zeros(9)),
            (1, {}),
            r"1\.running_mean has shape \(9,\) after the client's training; its shape was \(8,\)",
        ),
        (len, None, "train_fn returned None, not .number of examples, metrics."),
        (len, (1.5, {}), "train_fn returned .1.5, .*not .number of examples, metrics."),
        (len, (-1, {}), "train_fn returned .-1"),
        (len, (1, {"text": "good"}), "train_fn returned .*'good'.*, which are not metrics"),
        (len, (1, {"num-examples": 3}), "'num-examples' is reserved"),
    ],
)
def test_result_that_cannot_be_averaged_is_an_error(spoil, result, text, start):
    app = make_client_app(builder, lambda model, client: [spoil(model), result][1])
    for _ in range(2):  # The next client's turn is not spoiled by it.
        with pytest.raises((FederatedError, ConfigError), match=text):
            ask(app, "train", start)


@pytest.mark.parametrize(
    ("result", "text"),
    [((float("nan"), 1, {}), "the loss nan"), ((1, {}), "returned .1, .*, not .loss"), ((0.0, "2", {}), "not .loss")],
)
def test_evaluation_that_cannot_be_averaged_is_an_error(result, text, start):
    with pytest.raises(FederatedError, match=text):
        ask(make_client_app(builder, train, lambda model, client: result), "evaluate", start)
    # A client without data weighs nothing.
    app = make_client_app(builder, train, lambda model, client: (float("nan"), np.int64(0), {"right": True}))
    assert ask(app, "evaluate", start)["metrics"] == {"num-examples": 0, "loss": 0.0, "right": 1}


def test_arrays_that_do_not_fit_are_named(app, start):
    wrong_shape = ArrayRecord(dict(start) | {"3.bias": Array(np.zeros(4, np.float32))})
    with pytest.raises(FederatedError, match=r"shape of 3\.bias is \(4,\) on the server and \(3,\)"):
        ask(app, "train", wrong_shape)
    with pytest.raises(FederatedError, match=r"shape of 4\.bias is \(3,\) on the server and None in this model"):
        ask(app, "train", ArrayRecord(dict(start) | {"4.bias": start["3.bias"]}))
    with pytest.raises(FederatedError, match="partition-id"):
        ask(app, "train", start, node_config={})
    with pytest.raises(FederatedError, match="tuple, not a torch"):
        ask(make_client_app(lambda: (builder(), None), train), "query.initial")
    with pytest.raises(FederatedError, match="no trainable parameter"):
        ask(make_client_app(lambda: builder().requires_grad_(False), train), "query.initial")


def tanh_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def six_steps(model, make_optimizer, num_accumulated, mu=0.0):
    """A client's training; with the term in the loss, as FedProx's paper has it, where `mu` is given."""
    fixed = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(num_accumulated):
            (model(torch.randn(12, 6)) - 1).square().mean().div(num_accumulated).backward()
        if mu:
            pull = sum((p - q).square().sum() for p, q in zip(model.parameters(), fixed, strict=True))
            (mu / 2 * pull).backward()
        optimizer.step()


class NestedSGD(torch.optim.SGD):
    """Its step calls the step of its base class, which has hooks of its own once an SGD was made."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make_optimizer", "num_accumulated"),
    [(lambda parameters: torch.optim.AdamW(parameters, 0.02), 3), (lambda parameters: NestedSGD(parameters, 0.2), 1)],
    ids=["adamw", "nested"],
)
def test_proximal_term_is_that_of_the_paper(make_optimizer, num_accumulated):
    def train_fn(model, client):
        torch.optim.SGD(model.parameters(), 0.1)
        six_steps(model, make_optimizer, num_accumulated)
        return 12, {}

    app = make_client_app(tanh_model, train_fn, seed=3)
    start = ask(app, "query.initial")["arrays"]
    pulled, free = (tensors(ask(app, "train", start, **{"proximal-mu": mu})) for mu in (0.7, 0.0))
    model = tanh_model()
    model.load_state_dict({name: to_tensor(array) for name, array in start.items()})
    torch.manual_seed(client_seed(3, 0, 0))
    six_steps(model, make_optimizer, num_accumulated, mu=0.7)
    expected = model.state_dict()
    assert max(float((pulled[n] - expected[n]).abs().max()) for n in expected) <= 1e-6
    assert max(float((free[n] - expected[n]).abs().max()) for n in expected) > 1e-3


class FailingSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError


def with_closure(model):
    torch.optim.SGD(model.parameters(), 0.1).step(lambda: 0.0)


def failing(model):
    with suppress(ZeroDivisionError):
        FailingSGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (with_closure, r"proximal-mu does not work with SGD.step\(closure\)"),
        (len, "no torch optimizer took a step"),
        (failing, "later steps had no"),
    ],
)
def test_step_that_the_proximal_term_cannot_reach_is_an_error(work, text, start):
    app = make_client_app(builder, lambda model, client: [work(model), (1, {})][1])
    with pytest.raises(FederatedError, match=text):
        ask(app, "train", start, **{"proximal-mu": 0.1})


@pytest.mark.thorough
def test_trainer_of_hugging_face_with_the_proximal_term(tmp_path):
    """Through accelerate's optimizer, gradients accumulated, in bfloat16; and no client feels the one before."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

    path = build_tiny(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [tokenizer(text)["input_ids"][:24] for text in topics(16, min_words=40)]
    depths = []

    class PullByHand(TrainerCallback):
        def on_train_begin(self, *args, model, **kwargs):
            self.start = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}

        def on_pre_optimizer_step(self, *args, **kwargs):
            for parameter, start in self.start.items():
                parameter.grad += 3.0 * (parameter.detach() - start)

    def build():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    def train_with_trainer(model, client):
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
        quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
        options = TrainingArguments(str(tmp_path), bf16=True, learning_rate=0.05, seed=client.seed, **sizes, **quiet)
        data = Dataset.from_dict({"input_ids": rows, "labels": rows})
        callbacks = [PullByHand()] * client.config["by-hand"]
        Trainer(model=model, args=options, train_dataset=data, callbacks=callbacks).train()
        depth, function = 0, model.forward
        while (function := getattr(function, "__wrapped__", None)) is not None:
            depth += 1
        depths.append(depth)  # How many wrappers lie around the model's forward.
        return len(rows), {}

    app = make_client_app(build, train_with_trainer, seed=1)
    start = ask(app, "query.initial")["arrays"]
    pulled, by_hand, free = (
        tensors(ask(app, "train", start, **{"proximal-mu": mu, "by-hand": number}))
        for mu, number in ((3.0, 0), (0.0, 1), (0.0, 0))
    )
    assert max(float((pulled[n] - by_hand[n]).abs().max()) for n in free) <= 1e-6
    assert max(float((pulled[n] - free[n]).abs().max()) for n in free) > 1e-3
    assert len(set(depths)) == 1  # bf16 wraps `forward` in each Trainer, around what the last one left.
