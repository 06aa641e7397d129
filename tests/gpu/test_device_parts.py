"""4-bit models in parts, on CUDA devices in host memory: faults, checkpoints, files, and how far memory goes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from tests.helpers.fake_cuda import cards, needs_device
from tests.helpers.injector import faults_in
from tests.helpers.outcome import largest_difference
from tests.helpers.run import PLAIN, light_with_bits, run_python, run_well
from tests.helpers.tiny import build_tiny
from unsloth_multigpu.recorders.fault import Fault
from unsloth_multigpu.shard.memory import CONTEXT_BYTES, NCCL_BYTES, RESERVE

COUNTED = Path(__file__).with_name("counted.py")
PEAKS = Path(__file__).with_name("peaks.py")
FOUR_BITS = Path(__file__).with_name("four_bits.py")
# Adam with a small epsilon makes the rounding of small gradients visible.
ARGUMENTS = {"batch": 6, "max_steps": 8, "learning_rate": 1e-2, "adam_epsilon": 1e-3}
SAVES = {"save_strategy": "steps", "save_steps": 3}
ADAPTER = "adapter_model.safetensors"
pytestmark = [needs_device, pytest.mark.slow]


def variables(num_ranks: int, **more: str) -> dict[str, str]:
    """Of a script that needs bitsandbytes. The planner measures, and no two runs measure the same."""
    hidden = light_with_bits("datasets", "rich", "triton", "unsloth", "unsloth_zoo")
    options = {"SHARD": "on" if num_ranks > 1 else "off", "BALANCE": "off", **more}
    named = {f"UNSLOTH_MULTIGPU_{name}": value for name, value in options.items()}
    return {**hidden, **cards(num_ranks, guarded=True), **named}


def train(
    folder: Path,
    name: str,
    num_ranks: int,
    *,
    arguments: dict[str, str] | None = None,
    faults: tuple[Fault, ...] = (),
    code: int = 0,
    **more: str,
) -> str:
    """Leaves checkpoints, norms and the adapter in folder/name."""
    (folder / name).mkdir(exist_ok=True)
    planted = faults_in(folder / name, *faults) if faults else {}
    given = {**ARGUMENTS, **(SAVES if num_ranks > 1 else {}), **(arguments or {})}
    command = [FOUR_BITS, str(num_ranks), folder / "model", folder / name, json.dumps(given)]
    run = run_python(command, folder, {**variables(num_ranks, **more), **planted})
    assert run.code == code, run.err
    return run.err


def facts_of(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / f"facts_{rank}.json").read_text())
    return found


def difference(folder: Path, one: str, two: str) -> float:
    return largest_difference(folder / one / "adapter" / ADAPTER, folder / two / "adapter" / ADAPTER)


def test_adapter_on_4_bit_weights_trains_as_on_one_device(tmp_path: Path) -> None:
    """Each device has a copy of all weights, and an optimizer with states in 8 bits."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    build_tiny(tmp_path / "model", vocab_size=300)
    for num_ranks in (1, 2):
        train(tmp_path, str(num_ranks), num_ranks, arguments={"optim": "adamw_bnb_8bit"}, SHARD="off")
    one, *two = (facts_of(tmp_path, *place) for place in (("1", 0), ("2", 0), ("2", 1)))
    assert "torch.uint8" in one["dtypes"]
    assert [rank["devices"] for rank in two] == [["cuda:0"], ["cuda:1"]]
    assert two[0]["norms"] == pytest.approx(one["norms"], rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, and what one process has trained on it."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = tmp_path_factory.mktemp("parts")
    build_tiny(folder / "model", vocab_size=300)
    train(folder, "one", 1)
    return folder


@pytest.fixture(scope="module")
def killed(folder: Path) -> str:
    """What two ranks said of which one was killed."""
    return train(folder, "killed", 2, faults=(Fault("kill", 1, 5),), MAX_RESTARTS="1", RESUME="auto")


@pytest.mark.thorough
def test_killed_rank_costs_no_step_and_the_adapter_is_that_of_one_process(folder: Path, killed: str) -> None:
    assert "rank 1 was killed by SIGKILL after step 4" in killed
    assert "all ranks again (1)" in killed
    assert "/checkpoint-3\n" in killed
    assert facts_of(folder, "killed")["norms"][-5:] == pytest.approx(facts_of(folder, "one")["norms"][3:], rel=1e-5)
    assert difference(folder, "killed", "one") <= 1e-5
    assert {p.name for p in (folder / "killed" / "adapter").iterdir()} == {
        p.name for p in (folder / "one" / "adapter").iterdir()
    }


@pytest.mark.thorough
def test_adapter_of_parts_is_merged_in_one_process(folder: Path, killed: str) -> None:
    """As docs/sharding.md says: into the model in 16 bits or more. Equal to the merge of one process's training."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name in ("one", "killed"):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
        PeftModel.from_pretrained(model, folder / name / "adapter").merge_and_unload().save_pretrained(
            folder / name / "merged"
        )
    one, killed, model = (folder / name / "model.safetensors" for name in ("one/merged", "killed/merged", "model"))
    assert largest_difference(killed, one) <= 1e-5
    assert largest_difference(one, model) > 1e-2


@pytest.mark.thorough
def test_full_disk_and_sigterm_cost_no_step(folder: Path, killed: str) -> None:
    faults = (Fault("disk_full", 0, 6, phase="save"), Fault("sigterm", 0, 4, attempt=1))
    options = {"MAX_RESTARTS": "1", "RESUME": "auto"}
    text = train(folder, "stopped", 2, faults=faults, code=-15, **options)
    assert "checkpoint-6 could not be saved, earlier checkpoints are" in text
    stopped = re.search(
        r"stopped by SIGTERM after step ([45])\. The same command resumes from .*/checkpoint-\1\.", text
    )
    assert stopped, text
    assert not (folder / "stopped" / "facts_0.json").exists()
    shutil.rmtree(folder / "stopped" / "adapter", ignore_errors=True)
    assert f"/checkpoint-{stopped[1]}\n" in train(folder, "stopped", 2, **options)
    # Each of them has been resumed from another checkpoint.
    assert difference(folder, "stopped", "killed") == 0


@pytest.mark.thorough
def test_three_ranks_go_on_from_the_checkpoint_of_two(folder: Path, killed: str) -> None:
    train(folder, "three", 3, arguments={"resume": str(folder / "killed" / "checkpoints" / "checkpoint-3")})
    assert facts_of(folder, "three")["norms"][-5:] == pytest.approx(facts_of(folder, "one")["norms"][3:], rel=1e-5)
    assert difference(folder, "three", "one") <= 1e-5


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["accelerate", pytest.param("unsloth", marks=need.UNSLOTH)])
def test_memory_of_a_part_shrinks_with_the_number_of_ranks(tmp_path: Path, engine: str) -> None:
    """Of the device while it loads, is sharded and trains, beside what each rank has whole; of the host to load.

    Whole are the constants of quantisation, which are on the device when the model is loaded, the layer that is
    gathered, and what a step of one process needs beside its weights: these devices dequantise by operators of torch,
    with copies of the matrix.
    """
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    num_layers = 24
    model = Path(build_tiny(tmp_path / "model", hidden_size=512, num_layers=num_layers, vocab_size=300))
    # What these devices compute with is memory of the host, which malloc would keep.
    options = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    options |= light_with_bits(*(() if engine == "unsloth" else ("rich", "unsloth", "unsloth_zoo")))

    def peaks(name: str, num_ranks: int, model: Path) -> list[dict[str, int]]:
        arguments = [PEAKS, str(num_ranks), model, tmp_path / name, *(["--unsloth"] if engine == "unsloth" else [])]
        run_well(arguments, tmp_path, {**variables(num_ranks, CHECK_FIRST_STEP="off"), **options})
        return [json.loads((tmp_path / f"{name}.{rank}").read_text()) for rank in range(num_ranks)]

    (one,) = peaks("one", 1, model)
    whole, step = one["loaded"], one["peak_trained"] - one["prepared"]
    found = {2: peaks("two", 2, model), 8: peaks("eight", 8, tmp_path / "one_packed")}
    for num_ranks, bound in ((2, 0.6), (8, 0.2)):
        for rank in found[num_ranks]:
            constants = rank["loaded"]
            assert constants < 0.08 * whole
            assert rank["prepared"] - constants <= 1.03 * whole / num_ranks
            assert rank["peak_prepared"] - constants <= bound * whole
            assert rank["peak_trained"] - constants - step - whole / num_layers <= bound * whole
    assert found[8][0]["peak_loaded"] <= 0.2 * whole
    # Quantised while it loads, for which each weight is on the device in 32 bits.
    assert found[2][0]["peak_loaded"] <= 0.6 * whole
    # Of the host at the peak, beside what any process needs to load.
    size = (model / "model.safetensors").stat().st_size
    beside = one["host_peak_loaded"] - size
    found_on_host = {
        num_ranks: sum(rank["host_peak_loaded"] - beside for rank in ranks) / size
        for num_ranks, ranks in ((2, found[2]), (8, peaks("eight_whole", 8, model)))
    }
    for what in ("peak_loaded", "prepared", "peak_trained"):
        print(engine, what, *(f"{ranks[0][what] / 2**20:.1f} MiB" for ranks in ([one], *found.values())))
    print(engine, "host, x the file:", *(f"{times:.2f}" for times in found_on_host.values()))
    assert max(found_on_host.values()) <= 1.3


@pytest.mark.thorough
def test_model_spread_over_cards_is_sharded_where_one_cannot_hold_its_training(tmp_path: Path) -> None:
    """device_map="balanced" with shard="auto" is sharded, in a line with numbers, or one copy a card, which is said."""
    model = Path(build_tiny(tmp_path / "model", hidden_size=256, num_layers=8, vocab_size=300))
    weights = (model / "model.safetensors").stat().st_size
    # What plan adds, and less than weights, gradients and the two states of Adam. 15 % stay free.
    small = int((CONTEXT_BYTES + NCCL_BYTES + 3.6 * weights) / (1 - RESERVE))

    def said(memory: int, *, is_sharded: bool) -> str:
        options = {**PLAIN, **cards(2, memory=str(memory)), "UNSLOTH_MULTIGPU_SHARD": "auto"}
        run = run_well([COUNTED, "full balanced rows=1", model, tmp_path / "out"], tmp_path, options)
        for rank in range(2):
            facts = json.loads((tmp_path / f"out.{rank}").read_text())
            assert facts["devices"] == [f"cuda:{rank}"]
            assert facts["is_sharded"] == is_sharded
            # Both hold for a card without what plan adds for its context and NCCL.
            assert facts["peak"] <= memory - CONTEXT_BYTES - NCCL_BYTES
        return run.err

    sharded = said(small, is_sharded=True)
    numbers = r"shard=auto: DDP needs [\d.]+ GiB of [\d.]+, sharded over 2 ranks [\d.]+: sharded\n"
    assert re.search(numbers, sharded), sharded
    assert "device_map='balanced' is not used: FSDP2 divides each layer between the ranks" in sharded
    whole = said(2**31, is_sharded=False)
    assert re.search(r"shard=auto: DDP needs [\d.]+ GiB of 2\.0: not sharded\n", whole), whole
    assert "device_map='balanced' does not split the model here: each rank loads the whole model" in whole
