"""`unsloth-multigpu plan` on whole scripts, whose models have no weights on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.helpers.run import PLAIN, Finished, hide, run_command

SCRIPT = Path(__file__).parent / "scripts" / "verify_me.py"
COMMAND = ["--", "train.py", "--model", "model", "--fault"]
LAYERS, HIDDEN, INNER = 2, 64, 176
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": 1000}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
# Of a layer: inputs and outputs of its matrices; of all layers, the elements of these.
FEATURES = [HIDDEN + HIDDEN] * 2 + [HIDDEN + HIDDEN // 2] * 2 + [HIDDEN + INNER] * 3
LINEAR = LAYERS * (3 * HIDDEN**2 + 3 * HIDDEN * INNER)
# bitsandbytes is needed.
QUANTISED = hide("datasets", "rich", "scipy", "sklearn", "torchao", "triton")


def plan(folder: Path, program: list[str], *options: str, **variables: str) -> Finished:
    config = LlamaConfig(**SIZES, **HEADS, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder / "model")
    line = "import unsloth_multigpu as ump; ump.enable_multi_gpu(num_gpus=2)\n"
    (folder / "train.py").write_text(line + SCRIPT.read_text())
    shutil.copy(SCRIPT.with_name("tiny_llama.py"), folder)
    run = run_command("plan", *options, *program, folder=folder, env={**PLAIN, **variables})
    assert not [*folder.glob("went_on*")]
    return run


def test_model_is_forecast_from_its_configuration_alone(tmp_path: Path) -> None:
    options = ["--model", "model", "--lora", "8", "--bits", "4", "--tokens", "30", "--gpus", "2", "--memory", "24GiB"]
    run = plan(tmp_path, [], *options, "--json", **QUANTISED)
    assert run.code == 0, run.err
    training = json.loads(run.out)["training"]
    # All linear layers but the head.
    assert training["num_quantised"] == LINEAR
    assert training["num_trainable"] == 8 * LAYERS * sum(FEATURES)
    assert (training["tokens"], training["checkpointing"], training["autocast"]) == (30, True, "bfloat16")


def test_script_is_forecast_without_weights_and_with_samples_that_ranks_share(tmp_path: Path) -> None:
    run = plan(tmp_path, [*COMMAND, "lora"], "--json", "--gpus", "1,2,4", UNSLOTH_MULTIGPU_SEQUENCE_PARALLEL="2")
    assert run.code == 0, run.err
    found = json.loads(run.out)
    one, two, four = found["forecasts"]
    assert [(row["num_ranks"], row["mode"]) for row in (one, two, four)] == [(1, "ddp"), (2, "ddp"), (4, "ddp")]
    # Trained are the features of a linear layer times 8, in float32.
    assert one["gradients"] == 4 * 8 * LAYERS * sum(FEATURES)
    assert one["weights"] == two["weights"] == four["weights"] > one["gradients"] + 2 * LINEAR
    # Four ranks are two groups, with the rows of one process in a micro-batch.
    assert four["activations"] == two["activations"] < 0.6 * one["activations"]
    assert any("sequence_parallel=2 keeps weights whole" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("reads", ['train.py", line 66', "print(float(model.lm_head.weight.sum()))", "shard='on'"]),
        pytest.param("no_training", ["ended with exit code 0 before train()"], marks=pytest.mark.thorough),
        pytest.param("killed", ["was ended by SIGKILL", "in this machine's memory"], marks=pytest.mark.thorough),
    ],
)
def test_script_that_cannot_be_asked_is_refused(what: str, facts: list[str], tmp_path: Path) -> None:
    run = plan(tmp_path, [*COMMAND, what])

    assert run.code == 69
    assert all(fact in run.err for fact in facts), run.err
