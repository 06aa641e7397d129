"""Training in one real kernel: as in one process, cut off between two ranks' steps, and alone after disabling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.notebook import NotebookRun
from tests.helpers.run import ROOT, hide, run_well
from tests.helpers.tiny import build_tiny

SCRIPTS = Path(__file__).parent / "scripts"
LIBRARIES = hide("scipy", "sklearn", "torchao")
ENABLE = """
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2, balance="off", verify_every=1)
"""
# Rows that divide neither by the step nor by the ranks.
TRAINING = """
import hashlib, json, os, sys, time
import torch
import unsloth
from transformers import TrainerCallback
sys.path[:0] = {paths!r}
from common import QUIET
from examples.tiny_model import topics
from texts import Texts

texts = Texts({model!r})
torch.manual_seed(3)
model, tokenizer = texts.fast_lora(), texts.tokenizer

def make_trainer(steps):
    return texts.sft(model, topics(13, max_words=30), dict(
        QUIET, output_dir="out", per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=steps,
        learning_rate=2e-3, bf16=False, fp16=False, optim="adamw_torch", seed=7))

def weights():
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in trained)).hexdigest()[:16]

trainer = make_trainer(5)
trainer.train()
if os.environ.get("RANK", "0") == "0":
    history = [[h["loss"], h["grad_norm"]] for h in trainer.state.log_history if "loss" in h]
    with open("trained.json", "w") as file:
        json.dump([history, weights()], file)
"""
RANKS = """
import torch.distributed as dist

def moments(trainer):
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    values = [v for group in optimizer.param_groups for p in group["params"] for v in optimizer.state[p].values()]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()[:16]

def of_all_ranks(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values

class BetweenTwoSteps(TrainerCallback):
    seen = ""
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if dist.get_rank() == 1 and state.global_step == 1:
            BetweenTwoSteps.seen = weights()
            time.sleep(60)
    def on_optimizer_step(self, args, state, control, **kwargs):
        if dist.get_rank() == 0 and state.global_step == 1:
            BetweenTwoSteps.seen = weights()
            print("rank 0 is a step ahead", flush=True)
            time.sleep(60)

print(json.dumps([of_all_ranks(weights()), of_all_ranks(moments(trainer))]))
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookRun]:
    """A kernel in which two ranks have trained."""
    folder = tmp_path_factory.mktemp("notebook")
    training = TRAINING.format(paths=[str(ROOT), str(SCRIPTS)], model=build_tiny(folder / "tiny"))
    (folder / "script.py").write_text(training)
    with NotebookRun(folder, LIBRARIES) as run:
        for source in (ENABLE, training):
            run.well(source, timeout_s=150)
        yield run


def _last_json(text: str) -> list[list[str]]:
    found: list[list[str]] = json.loads(text.strip().splitlines()[-1])
    return found


def test_training_is_that_of_one_process(notebook: NotebookRun, tmp_path: Path) -> None:
    run_well([notebook.folder / "script.py"], tmp_path, LIBRARIES)
    expected, _ = json.loads((tmp_path / "trained.json").read_text())
    history, _ = json.loads((notebook.folder / "trained.json").read_text())
    assert len(history) == 5
    assert history == [pytest.approx(row, rel=1e-5) for row in expected]


def test_a_new_trainer_goes_on_with_rank_0s_weights_where_stop_cut_between_two_ranks_steps(
    notebook: NotebookRun,
) -> None:
    (zero, one), (zeros_moments, ones_moments) = _last_json(notebook.well(RANKS))
    assert zero == one
    assert zeros_moments == ones_moments

    notebook.well("second = make_trainer(3); second.add_callback(BetweenTwoSteps())")
    assert notebook.stop("second.train()", "rank 0 is a step ahead").error == "KeyboardInterrupt"
    seen, now = _last_json(
        notebook.well("print(json.dumps([of_all_ranks(x) for x in (BetweenTwoSteps.seen, weights())]))")
    )
    assert seen[0] != seen[1], "the ranks were a step apart"
    assert now == [seen[0], seen[0]], "all have the weights that are in the kernel"

    refused = notebook.run("second.remove_callback(BetweenTwoSteps); second.train()")
    assert (refused.error, "Make a new Trainer" in refused.value) == ("SetupError", True)
    # Replicas are compared after every step.
    notebook.well("third = make_trainer(2); third.train()")
    now, moments = _last_json(
        notebook.well("print(json.dumps([of_all_ranks(x) for x in (weights(), moments(third))]))")
    )
    assert now[0] == now[1] != seen[0]
    assert moments[0] == moments[1]
    report = notebook.well("print(ump.get_multi_gpu_status().report.summary(), ump.get_multi_gpu_status().launcher)")
    assert report.startswith("trained 2 steps")
    assert "notebook" in report


def test_a_mistake_of_all_ranks_breaks_nothing_unless_it_cuts_a_training_off(notebook: NotebookRun) -> None:
    notebook.well("group = dist.group.WORLD")
    assert notebook.run("no_such_name").error == "NameError"
    assert notebook.well("print(dist.group.WORLD is group)") == "True"
    source = """
class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise ArithmeticError("in a callback")

fourth = make_trainer(2)
fourth.add_callback(Fails())
fourth.train()
"""
    assert notebook.run(source).error == "ArithmeticError"
    assert notebook.well("print(dist.group.WORLD is group)") == "False"
    notebook.well("third = make_trainer(2); third.train()")


def test_save_and_evaluation_in_a_cell(notebook: NotebookRun) -> None:
    source = """
model.save_pretrained("adapter")
listed = of_all_ranks(sorted(os.listdir("adapter")))
losses = of_all_ranks(third.evaluate(third.train_dataset)["eval_loss"])
print(json.dumps([listed, losses]))
"""
    listed, losses = _last_json(notebook.well(source))
    assert "adapter_model.safetensors" in listed[0]
    assert listed[0] == listed[1]
    assert losses[0] == losses[1]
    # A rank that saves what rank 0 does not is told so, and counts no save too much afterwards.
    cell = notebook.run("if dist.get_rank() == 1: model.save_pretrained('alone')")
    assert cell.error == "DistributedError"
    assert "rank 0 has left the script or the cell" in cell.value
    assert "adapter_model" in notebook.well("model.save_pretrained('again'); print(os.listdir('again'))")


def test_kernel_is_alone_after_disabling(notebook: NotebookRun) -> None:
    """The last one: it ends the workers."""
    source = """
ump.disable_multi_gpu()
left = [n for n in os.environ if n.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "ACCELERATE_", "UNSLOTH_MULTI"))]
from accelerate.state import PartialState
print(json.dumps([left, dist.is_initialized(), PartialState().num_processes]))
"""
    left, is_initialized, num_processes = _last_json(notebook.well(source))
    assert left == []
    assert not is_initialized
    assert num_processes == 1
    assert notebook.children() == []
    source = """
before = weights()
loss = third.evaluate(third.train_dataset)["eval_loss"]
try:
    third.train()
except ump.SetupError as error:
    print(error)
new = make_trainer(2)
new.train()
model.save_pretrained("at_the_end")
ids = tokenizer("The statement", return_tensors="pt")
tokens = model.generate(**ids, max_new_tokens=3, min_new_tokens=3)
print(json.dumps([before, loss, weights(), new.args.world_size, len(tokens[0]) - len(ids["input_ids"][0]),
    sorted(os.listdir("at_the_end")), third.state.global_step, type(third.model_wrapped).__name__]))
"""
    text = notebook.well(source)
    before, loss, after, world_size, num_tokens, files, step, wrapped = _last_json(text)
    assert "Make a new Trainer" in text
    assert before != after
    assert float(str(loss)) > 0
    assert (world_size, num_tokens, step) == (1, 3, 2)
    assert "adapter_model.safetensors" in files
    assert "Distributed" not in str(wrapped)
