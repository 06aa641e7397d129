"""A model in parts in one real kernel: against one process, behind Stop and errors, and when a worker is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.need import UNSLOTH
from tests.helpers.notebook import CellResult, NotebookRun
from tests.helpers.outcome import largest_difference
from tests.helpers.run import LIGHT, ROOT, hide, run_well
from tests.helpers.tiny import build_tiny

pytestmark = pytest.mark.slow

ENABLE = """
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2, shard="on")
from tests.helpers.cpu_fsdp import allow_cpu_ranks
allow_cpu_ranks()
"""
# Adam with a large epsilon does not make the rounding of small gradients visible.
TRAINING = """
import json, os, signal, time
import torch
from common import SGD, Calls, logged
from texts import Texts
from tests.helpers.tiny import topics

texts = Texts("model")
settings = {**SGD, "output_dir": "out", "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2}
settings |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
settings |= {"optim": "adamw_torch", "adam_epsilon": 1e-3}

def load(kind):
    torch.manual_seed(3)
    return texts.causal_lm() if kind == "full" else texts.lora()

def trained(model, steps=4, on_step_end=lambda *_, **__: None):
    global trainer
    trainer = texts.sft(model, topics(13, max_words=30), {**settings, "max_steps": steps})
    trainer.add_callback(Calls(on_step_end=on_step_end))
    trainer.train()
    print(json.dumps(logged(trainer, "grad_norm")["grad_norm"]), flush=True)

def say(model):
    ids = texts.tokenizer("The statement", return_tensors="pt")
    return texts.tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0])
"""
# What a notebook's cells do as well. The last training goes on where the one before it has ended.
ALONE = """
for kind in ("full", "lora"):
    model = load(kind)
    trained(model)
    model.save_pretrained(f"one/{kind}")
model.merge_and_unload().save_pretrained("one/merged")
model = load("full")
trained(model, 2)
model.save_pretrained("one/stopped")
trained(model, 2)
model.save_pretrained("one/again")
"""
ALONE_WITH_UNSLOTH = """
model = texts.fast_lora()
trained(model, 2)
model.save_pretrained("one/stopped")
trained(model, 2)
model.save_pretrained("one/again")
print(json.dumps(say(model)))
"""
# Of rank 0, in the second step.
WAITS_FOR_STOP = """
def wait_for_stop(_args, state, control, **_):
    if state.global_step == 2 and os.environ["RANK"] == "0":
        print("go", flush=True)
        while not signal.getsignal(signal.SIGINT).__self__._caught[0]:
            time.sleep(0.01)
"""
FAILS = """
def fail(*_, **__):
    if os.environ["RANK"] in ranks:
        raise ArithmeticError("in a callback")
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookRun]:
    """A kernel of two ranks, beside what one process has trained."""
    folder = tmp_path_factory.mktemp("parts")
    with _beside_one_process(folder, TRAINING, ALONE, LIGHT) as run:
        yield run


@contextmanager
def _beside_one_process(folder: Path, training: str, alone: str, env: dict[str, str]) -> Iterator[NotebookRun]:
    build_tiny(folder / "model")
    found_here = f"import sys\nsys.path[:0] = {[str(ROOT), str(Path(__file__).parent / 'scripts')]}\n"
    (folder / "alone.py").write_text(found_here + training + alone)
    done = run_well(["alone.py"], folder, env)
    (folder / "alone").write_text(done.out)
    with NotebookRun(folder, env) as run:
        for source in (found_here + ENABLE, training):
            run.well(source)
        yield run


def _norms(text: str) -> list[list[float]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("[")]


def _check_files(notebook: NotebookRun, name: str, limit: float = 1e-5) -> None:
    one, many = notebook.folder / "one" / name, notebook.folder / name
    assert sorted(p.name for p in many.iterdir()) == sorted(p.name for p in one.iterdir())
    (file,) = (p.name for p in one.glob("*.safetensors"))
    assert largest_difference(one / file, many / file, relative=True) <= limit


def _refused(cell: CellResult, *texts: str) -> None:
    assert cell.error == "SetupError", cell
    assert len(cell.traceback) == 1
    for text in (*texts, "Load the model or a checkpoint again"):
        assert text in cell.value


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_cells_train_generate_and_save_as_one_process_does(notebook: NotebookRun, kind: str) -> None:
    text = notebook.well(f"model = load({kind!r})\ntrained(model)\nmodel.save_pretrained({kind!r})")
    assert "sharded by FSDP2 of accelerate: a rank holds 50." in text
    of_one = _norms((notebook.folder / "alone").read_text())[["full", "lora"].index(kind)]
    assert _norms(text)[-1] == pytest.approx(of_one, rel=1e-5)
    _check_files(notebook, kind)
    whole, adapter = "AutoModelForCausalLM.from_pretrained('full')", "PeftModel.from_pretrained(load('full'), 'lora')"
    imports = "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n"
    said = notebook.well(f"{imports}print(say(model) == say({whole if kind == 'full' else adapter}))")
    assert said.splitlines()[-1] == "True"


def test_save_of_one_rank_is_an_error_at_once_and_breaks_nothing(notebook: NotebookRun) -> None:
    for source, text in (
        ("%%rank0\nmodel.save_pretrained('lost')", "save_pretrained is called on this rank alone"),
        ("if os.environ['RANK'] == '1': model.save_pretrained('lost')", "and rank 0 has left"),
        ("if os.environ['RANK'] == '0': model.save_pretrained('lost')", "and the other ranks have left"),
    ):
        cell = notebook.run(source)
        assert (cell.error, text in cell.value, cell.seconds < 30) == ("DistributedError", True, True), cell
        assert "Call it on all ranks" in cell.value
    assert not (notebook.folder / "lost").exists()
    notebook.well("model.save_pretrained('lora')")
    _check_files(notebook, "lora")


def test_merged_adapter_is_saved_as_one_process_does(notebook: NotebookRun) -> None:
    notebook.well("merged = model.merge_and_unload()\nmerged.save_pretrained('merged')")
    _check_files(notebook, "merged")


def test_stop_ends_all_ranks_behind_one_step_and_a_new_trainer_goes_on(notebook: NotebookRun) -> None:
    notebook.well(f"{WAITS_FOR_STOP}\nmodel = load('full')")
    _check_stop(notebook)


def _check_stop(notebook: NotebookRun) -> None:
    notebook.well("group = torch.distributed.group.WORLD")
    stopped = notebook.stop("trained(model, 10**6, wait_for_stop)")
    assert (stopped.error, len(stopped.traceback)) == ("KeyboardInterrupt", 1)
    assert "Stop: the training ends after this step" in stopped.text
    assert "stopped by SIGINT after step 2" in stopped.text
    notebook.well("model.save_pretrained('stopped')")
    _check_files(notebook, "stopped")
    assert notebook.well("print(torch.distributed.group.WORLD is group)") == "True", "no rank was cut off"
    notebook.well("trained(model, 2)\nmodel.save_pretrained('again')")
    _check_files(notebook, "again")


def test_weights_outlive_stop_in_another_cell_and_an_error_of_all_ranks(notebook: NotebookRun) -> None:
    before = notebook.well("print(say(model))")
    assert notebook.stop("print('go', flush=True)\nwhile True: say(model)").error == "KeyboardInterrupt"
    assert notebook.well("print(say(model))") == before
    notebook.well("model.save_pretrained('again')")
    _check_files(notebook, "again")
    everyone = notebook.run(f"{FAILS}\nranks = '01'\ntrained(model, 2, fail)", timeout_s=120)
    assert everyone.error == "ArithmeticError"
    notebook.well("say(model)\ntrained(model, 2)")


def test_training_that_ranks_did_not_leave_together_costs_the_model(notebook: NotebookRun) -> None:
    one = notebook.run("ranks = '1'\ntrained(model, 2, fail)", timeout_s=120)
    assert (one.error, "rank 1 raised ArithmeticError: in a callback" in one.value) == ("DistributedError", True)
    for use in ("say(model)", "model.save_pretrained('lost')", "trainer.save_model('lost')", "trained(model)"):
        _refused(notebook.run(use), "may be a step apart")
    assert not list(notebook.folder.glob("lost/*.safetensors"))
    notebook.well("model = load('lora')\ntrained(model, 2)")


def test_kernel_alone_has_not_the_weights(notebook: NotebookRun) -> None:
    """The last one: a worker ends."""
    (worker,) = notebook.children()
    worker.kill()
    cell = notebook.run("print(say(model))")
    assert cell.error == "DistributedError"
    assert f"rank 1 (pid {worker.pid}) was ended by SIGKILL" in cell.value
    assert "keeps its model, unless shard='on' has sharded it" in cell.value
    for use in ("say(model)", "model(torch.zeros(1, 2, dtype=int))", "model.save_pretrained('lost')"):
        _refused(notebook.run(use), "the ranks with its other shards have ended")
    assert "The" in notebook.well("print(say(load('full')))")
    # Else accelerate would shard the next Trainer of this process, too.
    assert notebook.well("ump.disable_multi_gpu()\nprint('ACCELERATE_USE_FSDP' in os.environ)").endswith("False")


@pytest.mark.thorough
@UNSLOTH
def test_unsloth_shards_what_cells_train_stop_and_train_again(tmp_path: Path) -> None:
    training, env = f"import unsloth\n{TRAINING}", hide("scipy", "sklearn", "torchao")
    with _beside_one_process(tmp_path, training, ALONE_WITH_UNSLOTH, env) as notebook:
        notebook.well(f"{WAITS_FOR_STOP}\nmodel = texts.fast_lora()")
        _check_stop(notebook)
        said = json.loads((tmp_path / "alone").read_text().splitlines()[-1])
        assert json.loads(notebook.well("print(json.dumps(say(model)))").splitlines()[-1]) == said
