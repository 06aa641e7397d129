"""What follows from counted bytes: which mode fits, what is said, and the table of `plan`."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.helpers.refused import refused
from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.shard import count, script_probe
from unsloth_multigpu.shard.memory import (
    CONTEXT_BYTES,
    GIB,
    NCCL_BYTES,
    MemoryForecast,
    StepBytes,
    Training,
    decide,
    forecast_of,
)
from unsloth_multigpu.shard.script_probe import Answer
from unsloth_multigpu.tools.plan.plan_command import Options, parse_memory, run, show
from unsloth_multigpu.tools.script_program import parse_numbers

TRAINING = Training("Llama", 8_000, 80, 0, "adamw_torch_fused", "bfloat16", True, rows=4, tokens=2048, accumulation=16)
STEP = StepBytes(weights=10, sharded=8, gradients=3, optimizer=6, peak=7, update=2)


def of_total(mode, num_ranks, gib):
    return MemoryForecast(mode, num_ranks, int(gib * GIB), 0, 0, 0, {})


def test_forecast_of_counted_bytes():
    whole = forecast_of(STEP, TRAINING, "ddp", 1)
    assert (whole.weights, whole.gradients, whole.optimizer, whole.activations) == (10, 3, 6, 4)
    assert whole.total == 23 + CONTEXT_BYTES
    assert forecast_of(STEP, TRAINING, "ddp", 2).total == 23 + CONTEXT_BYTES + NCCL_BYTES
    # The update needs more than forward and backward.
    assert forecast_of(replace(STEP, update=9), TRAINING, "ddp", 1).activations == 9
    assert whole.host == 0


def test_what_is_offloaded_is_on_the_host():
    moved = forecast_of(STEP, replace(TRAINING, offload=True), "sharded", 8)
    assert (moved.weights, moved.gradients, moved.optimizer, moved.activations) == (2, 0, 0, 4)
    assert moved.host == 8 + 3 + 6 + 2
    whole = replace(TRAINING, offload=True)
    assert forecast_of(STEP, whole, "ddp", 8) == forecast_of(STEP, TRAINING, "ddp", 8)


def test_ranks_share_the_samples_of_a_step():
    training = replace(TRAINING, rows=8, accumulation=2)
    shares = [(n, *training.on_ranks(n)) for n in (1, 2, 3, 4, 16, 32)]

    assert shares == [(1, 8, 2), (2, 8, 1), (3, 6, 1), (4, 4, 1), (16, 1, 1), (32, 1, 1)]
    assert replace(training, keeps_batch=False).on_ranks(16) == (8, 2)
    shared = replace(training, num_sharing=2)
    assert [shared.on_ranks(n) for n in (1, 2, 4)] == [training.on_ranks(n) for n in (1, 1, 2)]
    assert shared.has_samples(32)
    with refused(SetupError, "3 ranks are not a multiple of sequence_parallel=2", "--gpus 2,4"):
        shared.on_ranks(3)
    assert [training.has_samples(n) for n in (16, 17)] == [True, False]
    assert replace(training, keeps_batch=False).has_samples(17)


def test_decision_and_its_line():
    whole, parts = of_total("ddp", 8, 140), of_total("sharded", 8, 28)

    chosen = decide(TRAINING, [whole, parts], 80 * GIB)
    assert chosen == ("sharded", "DDP needs 140 GiB of 80, sharded over 8 ranks 28: sharded")
    assert decide(TRAINING, [of_total("ddp", 8, 18)], 80 * GIB)[1] == "DDP needs 18 GiB of 80: not sharded"
    with pytest.raises(SetupError, match="DDP needs 140 GiB of 24, sharded over 8 ranks 28; 20"):
        decide(TRAINING, [whole, parts], 24 * GIB)


def test_optimizer_that_needs_whole_weights_is_no_way_out():
    why = ("optim='adamw_8bit' cannot train weights that are sharded", "Set optim='adamw_torch_fused'.")
    training = replace(TRAINING, optimizer="adamw_8bit", only_whole=why)
    with pytest.raises(SetupError, match="optim='adamw_8bit' cannot train weights that are sharded"):
        decide(training, [of_total("ddp", 8, 140)], 80 * GIB)


@pytest.mark.parametrize(
    ("text", "expected"), [("24GiB", 24 * GIB), ("24", 24 * GIB), ("80GB", 80 * 10**9), ("1.5 gib", 3 * GIB // 2)]
)
def test_memory_of_the_command_line(text, expected):
    assert parse_memory("memory", text) == expected


@pytest.mark.parametrize(
    ("parse", "name", "texts"),
    [
        (parse_memory, "memory", ["", "24 cats", "GiB", "0", "-1GiB"]),
        (parse_numbers, "gpus", ["", "0", "1,,2", "two", "1.5", "-1"]),
    ],
)
def test_wrong_value_is_refused(parse, name, texts):
    for text in texts:
        with pytest.raises(ConfigError, match=f"{name}='{text}'; expected "):
            parse(name, text)


ROWS = (of_total("ddp", 4, 145), of_total("sharded", 4, 50), of_total("ddp", 8, 140), of_total("sharded", 8, 28))


def lines_of(answer, numbers):
    stream = io.StringIO()
    show(Screen(stream), answer, numbers)
    return stream.getvalue().splitlines()


def test_table_says_which_row_fits_and_what_to_set():
    lines = lines_of(Answer(TRAINING, ROWS, device_bytes=80 * GIB), parse_numbers("gpus", "8,4,8"))

    assert lines[0] == (
        "Llama: 8,000 parameters, 80 trainable, 0 quantized; adamw_torch_fused, gradient checkpointing on, bfloat16"
    )
    shown = [line.split()[:2] for line in lines if line.endswith(("fits", "too large"))]
    assert shown == [[num_gpus, mode] for num_gpus in ("4", "8") for mode in ("ddp", "sharded")]
    assert lines[-2:] == ["68 of 80 GiB can be used: 15% stay free.", 'With 4 GPUs: enable_multi_gpu(shard="on")']
    assert "set --memory" in lines_of(Answer(TRAINING, ROWS), [4, 8])[-1]
    small = lines_of(Answer(TRAINING, ROWS, device_bytes=24 * GIB), [4, 8])
    assert small[-1].endswith("No row fits: --gpus 16,32 shows more GPUs, --memory larger ones.")


def test_more_ranks_than_samples_are_no_way_out():
    training = replace(TRAINING, rows=1, accumulation=4)
    lines = lines_of(Answer(training, ROWS, device_bytes=40 * GIB), [4, 8])

    assert [line.split()[0] for line in lines if line.endswith("too few samples")] == ["8", "8"]
    assert lines[-2] == "A step has 4 samples, too few for 8 ranks: raise the batch size."
    assert "No row fits" in lines[-1]


def test_model_is_a_program_of_its_own_where_no_script_is_given():
    assert Options().program() == []
    given = {"model": "org/model", "bits": "4", "gpus": "2,8"}
    module, name, *asked = Options(**given).program()[1:]
    assert module.endswith(".model_script")
    assert name == "org/model"
    assert " ".join(asked) == "--lora 16 --bits 4 --tokens 2048 --samples 8"
    for option in ({"model": "org/model"}, {"lora": 0}, {"bits": "4"}):
        with pytest.raises(ConfigError, match=r"for a forecast without a script, but train.py --lr 3 was given\."):
            run(Options(**option), {}, ["train.py", "--lr", "3"])


def test_a_forecast_counts_what_was_given_or_refuses_it():
    with refused(SetupError, "tokens=8, but the samples have no input_ids", "Leave --tokens out"):
        count._max_tokens(SimpleNamespace(train_dataset=[{"prompt_ids": [1, 2]}]), 8)
    assert count._max_tokens(SimpleNamespace(train_dataset=[{"input_ids": [1, 2]}]), 8) == (8, "as given")
    with refused(SetupError, "model: the memory of a GGUF file cannot be forecast"):
        script_probe._from_configuration(None, None, pretrained_model_name_or_path="model", gguf_file="a.gguf")


def test_all_processes_of_a_forecast_are_found_in_any_folder(monkeypatch, tmp_path):
    (tmp_path / "bücher").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "bücher"))

    def run_to_end(_command, variables, log, *, marker, limit_s):
        assert any(marker in value for value in variables.values())
        log.touch()
        return 1

    monkeypatch.setattr(script_probe, "run_to_end", run_to_end)
    with pytest.raises(SetupError, match="The script ended with exit code 1 before train"):
        script_probe.ask(["python"], {}, script_probe.Question([("ddp", 1)]))
