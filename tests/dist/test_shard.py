"""Sharded training against one process: FSDP2 of accelerate, of transformers and of Unsloth, on CPU ranks."""

import functools
import json
import re
from pathlib import Path

import pytest

from examples.tiny_model import build_tiny
from tests.helpers import outcome
from tests.helpers.injector import faults_in, records
from tests.helpers.need import UNSLOTH
from tests.helpers.run import ROOT, light, light_with_bits, run_python, run_well
from unsloth_multigpu.errors import DistributedError, SetupError
from unsloth_multigpu.recorders.fault import Fault

SCRIPT = Path(__file__).parent / "scripts" / "shard.py"
pytestmark = pytest.mark.slow

SAVED = ("full:32x8x1", "lora:30x2x4", "qlora:30x8x1")
# Other models than a decoder of texts.
KINDS = [f"momentum_{kind}" for kind in ("llama:11x4x1", "vit:11x4x1", "llava:11x4x1", "picky:8x4x1")]
# Name -> ranks, variables and jobs of the thorough suite.
MORE = {
    # The script itself asks for sharding.
    "asked": (2, {"UNSLOTH_MULTIGPU_SHARD": "off"}, ["asked_full:30x8x1", "asked_scaled:14x4x1"]),
    # Steps whose samples three ranks share evenly, and such as they do not.
    "three": (3, {}, [f"momentum_{kind}" for kind in ("full:36x6x2", "full:31x8x1", "lora:36x6x2", "lora:31x2x4")]),
    "three_by_adam": (3, {}, ["epsilon_full:31x8x1", "qlora:31x8x1"]),
    "kinds": (2, light(), ["sft_full:15x4x2", "dpo_lora:14x2x2", *KINDS]),
    "unsloth": (2, {"ENGINE": "unsloth", **light_with_bits()}, ["unsloth_lora:15x8x1", "unsloth_full:15x8x1"]),
}
# Come behind the jobs of "kinds", and the script goes on without them.
REFUSED = {
    "t5": "share one weight, of which accelerate's FSDP2 would make two",
    "hooked": "The script's hook on the gradient of lm_head.weight is never called in a sharded training",
    "adafactor_llama": "optim='adafactor' cannot train weights that are sharded by FSDP2 of accelerate",
    "inner": "model.norm.weight, lm_head.weight came out of step 1 unsharded: a part of the model was called by itself",
    "own_backward": "OwnBackward.training_step calls backward() by itself, and the model is sharded",
    "by_hand": "ByHand.compute_loss calls a part of the model by itself, but a sharded model gathers its weights only",
}
NORM, WEIGHTS = 1e-5, 1e-5
# Weights that no pass reads; and such whose gradient is only rounding, in one process too.
STILL = ("vision_tower.post_layernorm.weight", "vision_tower.post_layernorm.bias", "k_proj.bias")
# Adam makes the rounding of rare tokens' gradients visible; by as much where DDP trains.
BY_ADAM = {"full:32x8x1": 2e-3, "qlora:30x8x1": 1e-4, "qlora:31x8x1": 1e-4, "unsloth_lora:15x8x1": 1e-4}
TINY = """
import os, sys; sys.path.insert(0, sys.argv[1])
from tests.helpers.cpu_fsdp import allow_cpu_ranks; allow_cpu_ranks()
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
class Kind(TrainerCallback):
    def on_train_begin(self, *_, model, **__):
        print(type(next(model.parameters())).__name__, file=open("kinds", "a"))
set_seed(0)
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11)
rows = [dict(input_ids=list(range(1, n)), labels=list(range(1, n))) for n in range(3, 11)]
args = TrainingArguments("out", report_to=[], per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=2)
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows, callbacks=[Kind()])
trainer.train()
"""
LIGHT = light("rich", "triton", "peft", "datasets")


def train(folder, num_gpus, jobs, save_steps=0, code=0, **env):
    model = build_tiny(folder / "model")
    out = folder / f"{env.pop('name', 'ranks')}_{num_gpus}"
    hidden = (light_with_bits if "qlora" in "".join(jobs) else light)("rich", "triton")
    given = {**hidden, "UNSLOTH_MULTIGPU_SHARD": "on" if num_gpus > 1 else "off", **env}
    given = {name: value for name, value in given.items() if value is not None}
    run = run_python([SCRIPT, num_gpus, model, out, save_steps, *jobs], folder, given)
    assert run.code == code, run.err
    return out, run.err


def facts(out, job):
    return [json.loads(path.read_text()) for path in sorted((out / job).glob("facts_*.json"))]


def largest_difference(one, two, file="weights.safetensors"):
    return outcome.largest_difference(one / file, two / file, relative=True, least=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shard")


@pytest.fixture(scope="module")
def alone(folder):
    return train(folder, 1, SAVED, 3)[0]


@pytest.fixture(scope="module")
def sharded(folder, alone):
    return train(folder, 2, SAVED, 3)


@pytest.fixture(scope="module")
def more(folder):
    """Trains the jobs of a name in `MORE`, once, by one process and by ranks."""

    @functools.cache
    def trained(name):
        num_ranks, options, jobs = MORE[name]
        refused, code = (REFUSED, SetupError.exit_code) if name == "kinds" else ((), 0)
        one, _ = train(folder, 1, jobs, name=name, **options)
        return one, *train(
            folder, num_ranks, [*jobs, *(f"{kind}:11x4x1" for kind in refused)], name=name, code=code, **options
        )

    return trained


def assert_same_training(one, many, job, num_ranks):
    (single,), ranks = facts(one, job), facts(many, job)
    assert len(ranks) == num_ranks
    assert ranks[0]["norms"] == pytest.approx(single["norms"], rel=NORM)
    assert largest_difference(one / job, many / job) <= BY_ADAM.get(job, WEIGHTS)
    assert all(name.endswith(STILL) for name in ranks[0]["unmoved"])
    for rank in ranks:
        for kind in ("parameter_bytes", "optimizer_bytes"):
            assert rank[kind] <= (1 / num_ranks + 0.015) * single[kind]


@pytest.mark.parametrize("job", SAVED)
def test_sharded_ranks_train_as_one_process_does(alone, sharded, job):
    assert_same_training(alone, sharded[0], job, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*list(MORE)[:-1], pytest.param("unsloth", marks=UNSLOTH)])
def test_other_jobs_train_as_in_one_process(more, name):
    (num_ranks, _, jobs), (one, many, text) = MORE[name], more(name)
    sharder = "Unsloth" if name == "unsloth" else "accelerate"
    num_told = text.count(f"sharded by FSDP2 of {sharder}: a rank holds {100 // num_ranks}.")
    # Some kinds are trained again, and some are refused when they are sharded.
    assert num_told > len(jobs) if name == "kinds" else num_told == len(jobs)
    for job in jobs:
        assert_same_training(one, many, job, num_ranks)


@pytest.mark.thorough
@pytest.mark.parametrize("saver", ["save_model", "save_pretrained"])
def test_files_have_the_names_of_one_process(more, saver):
    """LLaVA's weights have other names in files."""
    one, two = (out / "momentum_llava:11x4x1" / saver for out in more("kinds")[:2])
    assert outcome.largest_difference(one / "model.safetensors", two / "model.safetensors") <= 1e-6
    assert json.loads((one / "config.json").read_text()) == json.loads((two / "config.json").read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_sharded_is_refused_before_the_first_step(more, kind):
    ranks = facts(more("kinds")[1], f"{kind}:11x4x1")
    assert len(ranks) == 2
    for rank in ranks:
        assert REFUSED[kind] in rank["refused"]
        assert "Hint:" in rank["refused"]
        # What a callback calls is seen behind the first step.
        assert not rank["norms"] or kind == "inner"


@pytest.mark.parametrize("job", SAVED)
def test_ranks_compute_equally_many_micro_batches_and_every_sample_once(sharded, job):
    num_rows = int(job.partition(":")[2].split("x")[0])
    ranks = [rank["micro_batches"] for rank in facts(sharded[0], job)]
    for steps in zip(*ranks, strict=True):
        assert len({len(step) for step in steps}) == 1
    # A filler comes first: gradients meet in a rank's last micro-batch.
    assert all(not step[-1][0] for steps in ranks for step in steps)
    num_samples = sum(len(piece) - 1 for steps in ranks for step in steps for piece in step if not piece[0])
    assert num_samples == 2 * num_rows


def test_what_cannot_be_measured_is_said_and_not_invented(sharded):
    assert "multigpu/waiting and multigpu/slowest_rank are not logged: waiting is not measured if" in sharded[1]


def test_adapter_that_is_not_trained_is_saved_with_its_own_weights(alone, sharded):
    for job in SAVED[1:]:
        one, two = alone / job / "save_pretrained", sharded[0] / job / "save_pretrained"
        assert largest_difference(one, two, "other/adapter_model.safetensors") == 0


@pytest.mark.parametrize(("job", "file"), [("full:32x8x1", "model"), ("lora:30x2x4", "adapter_model")])
def test_files_are_those_of_one_process(alone, sharded, job, file):
    for place in ("save_model", "save_pretrained", "checkpoints/checkpoint-8"):
        one, two = alone / job / place, sharded[0] / job / place
        assert largest_difference(one, two, f"{file}.safetensors") <= BY_ADAM.get(job, WEIGHTS)
        names = {path.name for path in one.iterdir()}
        ours = {"unsloth_multigpu.json", "rng_state_0.pth", "rng_state_1.pth", "rng_state.pth"}
        of_fsdp = {"pytorch_model_fsdp.bin", "optimizer.bin", "optimizer.pt"}
        assert {path.name for path in two.iterdir()} ^ names <= ours | of_fsdp


def test_model_inside_of_an_adapter_is_saved_with_all_its_weights(alone, sharded):
    one, two = (out / "lora:30x2x4" / "inside" for out in (alone, sharded[0]))
    assert largest_difference(one, two, "model.safetensors") <= WEIGHTS


@pytest.mark.parametrize("job", SAVED[:2])
def test_uploads_are_those_of_one_process_and_made_once(alone, sharded, job):
    def uploads(out, rank):
        return json.loads((out / job / f"uploads_{rank}.json").read_text())

    assert uploads(sharded[0], 0) == uploads(alone, 0)
    assert uploads(sharded[0], 1) == []
    assert [kind for kind, *_ in uploads(alone, 0)] == ["commit", "folder"]
    file = "model.safetensors" if job.startswith("full") else "adapter_model.safetensors"
    for place in ("commit", "folder"):
        assert largest_difference(alone / job / place, sharded[0] / job / place, file) <= BY_ADAM.get(job, WEIGHTS)
        assert largest_difference(sharded[0] / job / "save_model", sharded[0] / job / place, file) == 0


@pytest.mark.parametrize("job", [SAVED[0], pytest.param(SAVED[1], marks=pytest.mark.thorough)])
def test_training_resumes_on_another_number_of_ranks(folder, sharded, job):
    out, _ = train(folder, 3, [job], name="resumed", RESUME=str(sharded[0]))
    before, after = facts(sharded[0], job)[0]["norms"], facts(out, job)[0]["norms"]
    assert after == pytest.approx(before[3:], rel=NORM)
    assert largest_difference(sharded[0] / job, out / job) <= WEIGHTS


@pytest.mark.thorough
def test_training_does_not_resume_in_the_other_mode(folder, sharded):
    options = {"RESUME": str(sharded[0]), "UNSLOTH_MULTIGPU_SHARD": "off"}
    out, text = train(folder, 2, SAVED[:1], name="other_mode", code=SetupError.exit_code, **options)
    assert f"SetupError: {sharded[0] / SAVED[0]}/checkpoints/checkpoint-3 was written by ranks that each held" in text
    assert "(shard='on')" in text
    assert not facts(out, SAVED[0])


@pytest.mark.thorough
def test_run_that_is_killed_has_no_disk_and_is_stopped_goes_on_bit_by_bit(folder):
    job, planted = SAVED[0], folder / "planted"
    planted.mkdir()
    # The planner measures, and no two runs measure the same.
    unplanned = {"UNSLOTH_MULTIGPU_BALANCE": "off"}
    unbroken, _ = train(folder, 2, [job], name="unbroken", **unplanned)
    # Each meets the fault of its start: the ranks start again twice, and then the user does.
    faults = (Fault("kill", 1, 5), Fault("disk_full", 0, 6, attempt=1, phase="save"), Fault("sigterm", 0, 4, attempt=2))
    options = {"name": "faults", "UNSLOTH_MULTIGPU_MAX_RESTARTS": "2", "UNSLOTH_MULTIGPU_RESUME": "auto", **unplanned}
    out, text = train(folder, 2, [job], 3, code=-15, **options, **faults_in(planted, *faults))
    killed = "rank 1 was killed by SIGKILL after step 4"
    full = "checkpoint-6 could not be saved, earlier checkpoints are"
    stopping = r"stopped by SIGTERM after step ([45])\. The same command resumes from .*/checkpoint-\1\."
    stopped = re.search(stopping, text)
    places = [text.index(t) for t in (killed, "all ranks again (1)", full, "all ranks again (2)", stopped[0])]
    assert places == sorted(places)
    assert [record["step"] for record in records(planted, 0, "begin")] == [0, 3, 3]
    assert {p.name for p in (out / job / "checkpoints").iterdir()} == {"checkpoint-3", f"checkpoint-{stopped[1]}"}
    assert not facts(out, job)
    train(folder, 2, [job], 3, **options)
    assert len(facts(out, job)[0]["norms"]) == 8 - int(stopped[1])
    assert largest_difference(unbroken / job, out / job) == 0


@pytest.mark.thorough
def test_save_of_rank_0_alone_ends_with_what_to_do(tmp_path):
    line = "import unsloth_multigpu as ump; ump.enable_multi_gpu(num_gpus=2, shard='on')"
    save = "if os.environ['RANK'] == '0': trainer.model.save_pretrained('saved')"
    run = run_python(["-c", f"{line}\n{TINY}\n{save}", ROOT], tmp_path, LIGHT)
    assert run.code == DistributedError.exit_code, run.err
    assert "rank 0 failed after step 2: DistributedError: PreTrainedModel.save_pretrained(" in run.err
    assert "rank 1 ended the script without this save. Saving a sharded model gathers the weights of" in run.err
    assert "Hint: Call it on all ranks, not under `if rank == 0:`. The files are written once." in run.err
    assert not (tmp_path / "saved").exists()


@pytest.mark.thorough
def test_offloaded_parts_train_as_those_on_the_device(folder, sharded):
    job = SAVED[1]
    out, _ = train(folder, 2, [job], 8, name="offload", UNSLOTH_MULTIGPU_SHARD_OFFLOAD="1")
    for rank in facts(out, job):
        assert rank["offload"] == ["CPUOffloadPolicy"]
    assert {name for rank in facts(sharded[0], job) for name in rank["offload"]} == {"OffloadPolicy"}
    assert facts(out, job)[0]["norms"] == facts(sharded[0], job)[0]["norms"]
    assert largest_difference(sharded[0] / job, out / job) == 0
    saved = "save_pretrained/adapter_model.safetensors"
    assert largest_difference(sharded[0] / job, out / job, saved) == 0


@pytest.mark.thorough
def test_verify_compares_sharded_ranks_with_one_process(tmp_path):
    (tmp_path / "receipt.py").write_text(TINY)
    command = ["-m", "unsloth_multigpu", "verify", "--steps", "2", "--num-gpus", "2", "receipt.py", ROOT]
    run = run_well(command, tmp_path, {**LIGHT, "UNSLOTH_MULTIGPU_SHARD": "on"})
    assert "One process and 2 ranks agree over 2 steps" in run.out
    assert "s as one process, " in run.out
    # Of one process, and of two ranks.
    assert sorted((tmp_path / "kinds").read_text().split()) == ["DTensor", "DTensor", "Parameter"]
