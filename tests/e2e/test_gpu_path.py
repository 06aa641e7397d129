"""Unsloth's GPU code, with its own trainers, savers and compile cache, on two CUDA devices in host memory."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import need
from tests.helpers.fake_cuda import cards, needs_device
from tests.helpers.notebook_shape import notebook_shapes
from tests.helpers.outcome import largest_difference
from tests.helpers.run import ROOT, finish, hide, run_well, start
from tests.helpers.tiny import build_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), need.UNSLOTH, needs_device]

SCRIPT = Path(__file__).parent / "scripts" / "gpu_path.py"
TIMEOUT_S = 400.0
LORA_SCALE = 8 / 4  # lora_alpha / r of the script.
TOLERANCE = 1e-4  # Measured: 2e-7 in gradient norms, 1e-7 in weights.
SHARDED = 1e-5
ADAPTER = "adapter/adapter_model.safetensors"
SHARD = {"UNSLOTH_MULTIGPU_SHARD": "on"}
# Importing Unsloth writes a module for each trainer of TRL, which takes half of the time. These train nothing here.
OTHERS = (
    *(f"trl.experimental.{name}" for name in ("cpo", "gkd", "gold", "online_dpo", "orpo", "server_distillation")),
    *(f"trl.trainer.{name}_trainer" for name in ("distillation", "kto", "reward")),
)


@dataclass(frozen=True)
class Run:
    out: Path
    ranks: list[dict[str, Any]]
    err: str


def start_script(kinds: str, model: Path, folder: Path, *options: str, **variables: str) -> subprocess.Popen:
    folder.mkdir()
    # Unsloth's compile cache and our logs go to the working directory.
    env = {
        **hide("scipy", "sklearn", "torchao", *OTHERS),
        **cards(1 if "--plain" in options else 2, guarded=True),
        **variables,
    }
    return start([SCRIPT, model, folder, *kinds.split(), *options], cwd=folder, env=env)


def finish_script(process: subprocess.Popen, kinds: str, folder: Path) -> dict[str, Run]:
    """What each kind has left."""
    finished = finish(process, TIMEOUT_S)
    assert finished.code == 0, f"exit code {finished.code}\n{finished.out[-2000:]}\n{finished.err[-4000:]}"

    def run_of(out: Path) -> Run:
        ranks = [json.loads(file.read_text()) for file in sorted(out.glob("rank_*.json"))]
        return Run(out, ranks, finished.err)

    return {kind: run_of(folder / kind) for kind in kinds.split()}


def train(kind: str, model: Path, folder: Path, *options: str, **variables: str) -> Run:
    with start_script(kind, model, folder, *options, **variables) as process:
        return finish_script(process, kind, folder)[kind]


def train_both(kinds: str, model: Path, folder: Path, *options: str) -> dict[str, tuple[Run, Run]]:
    """Of each kind: the same script in one process and, with the plugin, on two ranks."""
    one, two = folder / "one", folder / "two"
    with (
        start_script(kinds, model, one, *options, "--plain") as one_process,
        start_script(kinds, model, two, *options) as two_ranks,
    ):
        alone, ranks = finish_script(one_process, kinds, one), finish_script(two_ranks, kinds, two)
    return {kind: (alone[kind], ranks[kind]) for kind in kinds.split()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu_path") / "model"
    # The kernels run in an interpreter: each row of each layer costs milliseconds.
    return Path(build_tiny(folder, hidden_size=32, num_layers=1, vocab_size=300))


def assert_equal(alone: Run, run: Run) -> None:
    """Two ranks have trained as one process."""
    assert run.ranks[0]["adapter_hash"] == run.ranks[1]["adapter_hash"]
    for rank in run.ranks:
        for what in ("grad_norms", "losses", "learning_rates"):
            assert rank[what] == pytest.approx(alone.ranks[0][what], rel=TOLERANCE), what
    assert largest_difference(alone.out / ADAPTER, run.out / ADAPTER, relative=True) <= TOLERANCE


# Batch, accumulation and completions of a prompt in Unsloth's GRPO notebooks; it raises the batch to the completions of
# one. The first shape trains.
GRPO_SHAPES = {",".join(map(str, shape[1:])) for shape in notebook_shapes() if shape[0] == "GRPOTrainer"}
SHAPES = ("1,1,6", *sorted(GRPO_SHAPES - {"1,1,6"}))


@pytest.fixture(scope="module")
def both(model: Path) -> dict[str, tuple[Run, Run]]:
    return train_both("sft grpo", model, model.parent, "--shapes", *SHAPES)


@pytest.fixture
def runs(both: dict[str, tuple[Run, Run]]) -> tuple[Run, Run]:
    return both["sft"]


def test_sft_runs_unsloths_own_trainer(runs: tuple[Run, Run]) -> None:
    for run in runs:
        assert {rank["trainer"] for rank in run.ranks} == {"UnslothSFTTrainer"}
        assert [rank["devices"] for rank in run.ranks] == [[f"cuda:{rank}"] for rank in range(len(run.ranks))]
    assert {rank["backend"] for rank in runs[1].ranks} == {"nccl"}
    # An adapter uses all its parameters: looking for unused ones costs a walk over the graph in each step.
    assert not any(rank["find_unused_parameters"] for rank in runs[1].ranks)


def test_sft_ranks_share_the_samples_of_each_step(runs: tuple[Run, Run]) -> None:
    one, two = runs
    assert "dealt by length (" in two.err
    of_ranks = [first + second for first, second in zip(*(rank["samples"] for rank in two.ranks), strict=True)]
    assert [len(step) for step in one.ranks[0]["samples"]] == [3, 2, 3, 2]  # Odd steps do not divide by two.
    assert [sorted(step) for step in of_ranks] == [sorted(step) for step in one.ranks[0]["samples"]]


def test_sft_equals_one_process(runs: tuple[Run, Run]) -> None:
    assert_equal(*runs)


def test_sft_writes_files_from_rank_0_alone_and_each_rank_offloads_to_its_own(runs: tuple[Run, Run]) -> None:
    first, second = runs[1].ranks
    assert second["written"] == []
    assert {"adapter/adapter_config.json", "merged/config.json", "merged/model.safetensors"} <= {*first["written"]}
    assert first["reload_is_equal"]
    assert second["reload_is_equal"]
    assert [rank["offloaded_is_mine"] for run in runs for rank in run.ranks] == [True] * 3


def test_sft_merges_the_adapter_once(runs: tuple[Run, Run], model: Path) -> None:
    out = runs[1].out
    base, merged, adapter = map(
        load_file, (model / "model.safetensors", out / "merged/model.safetensors", out / ADAPTER)
    )
    assert merged.keys() == base.keys()
    num_merged = 0
    for name, weight in base.items():
        lora = f"base_model.model.{name.removesuffix('.weight')}"
        update = torch.zeros_like(weight)
        if f"{lora}.lora_A.weight" in adapter:
            update = LORA_SCALE * adapter[f"{lora}.lora_B.weight"] @ adapter[f"{lora}.lora_A.weight"]
            # Large enough that a second merge, or none, is seen through the rounding to 16 bits.
            assert update.abs().max() > 0.05 * weight.abs().max()
            num_merged += 1
        rounding = torch.finfo(merged[name].dtype).eps * weight.abs().max().item() + 1e-7
        torch.testing.assert_close(merged[name].float(), weight + update, rtol=0, atol=rounding, msg=name)
    assert num_merged == 3  # q_proj, v_proj and down_proj of the one layer.


@pytest.mark.thorough
def test_4_bit_model_is_loaded_in_parts_and_saved_as_of_one_process(model: Path, tmp_path: Path) -> None:
    """Merged and as GGUF, also after an export that failed on rank 0. Every rank is given the names of the files.

    Quantized when it is loaded, or before, which Unsloth does not merge.
    """
    alone, two = train("packed", model, tmp_path / "one", "--plain"), train("packed", model, tmp_path / "two", **SHARD)
    before = train("packed", alone.out / "quantized", tmp_path / "before", "--no-export", **SHARD).ranks
    (one,), parts = alone.ranks, two.ranks
    for rank in parts + before:
        assert rank["num_packed"] == one["num_packed"] == 7  # Of the one layer.
        assert rank["grad_norms"] == pytest.approx(one["grad_norms"], rel=SHARDED)
        # Constants of quantisation, which stay whole, are not among the parameters.
        assert 0 < rank["weights"] <= 0.51 * one["weights"]
    for rank in parts:
        assert len(rank["errors"]) == 1
        assert "No space left on device" in rank["errors"][0]
        assert rank["exported"] == parts[0]["written"]
    assert [len(rank["written"]) for rank in parts] == [2, 0]
    base = load_file(model / "model.safetensors")
    for place in ("merged/model.safetensors", "first_gguf/model.gguf", "second_gguf/model.gguf"):
        files = [run.out / place for run in (alone, two)]
        assert largest_difference(*files, relative=True) <= SHARDED
        whole = load_file(files[0])
        assert max(float((w - base[n]).abs().max() / w.abs().max()) for n, w in whole.items()) > 0.01


@pytest.mark.thorough
def test_sharded_sft_equals_one_process_and_merges_into_its_files(runs: tuple[Run, Run], model: Path) -> None:
    one, run = runs[0], train("sft", model, model.parent / "sharded", **SHARD)
    assert "sharded by FSDP2 of Unsloth: a rank holds 50." in run.err
    for rank in run.ranks:
        assert rank["grad_norms"] == pytest.approx(one.ranks[0]["grad_norms"], rel=SHARDED)
        assert rank["reload_is_equal"]
    assert run.ranks[1]["written"] == []
    for place in (ADAPTER, "merged/model.safetensors"):
        whole, parts = load_file(one.out / place), load_file(run.out / place)
        assert all(whole[n].dtype == parts[n].dtype for n in whole)
        assert largest_difference(one.out / place, run.out / place, relative=True) <= SHARDED
    for place in ("adapter", "merged"):
        assert {p.name for p in (run.out / place).iterdir()} == {p.name for p in (one.out / place).iterdir()}


def test_grpo_equals_one_process_and_is_made_in_each_shape_of_the_notebooks(both: dict[str, tuple[Run, Run]]) -> None:
    (alone,), run = both["grpo"][0].ranks, both["grpo"][1]
    first, second = run.ranks
    assert "completions dealt by length: gradient differs by " in run.err
    assert first["base"] == "UnslothGRPOTrainer"
    assert [rank.pop("devices") for rank in (first, second)] == [["cuda:0"], ["cuda:1"]]
    assert first == second
    assert first["completions"] == alone["completions"]
    assert set(map(len, first["completions"].values())) == {len(SHAPES)}
    assert len(alone["grad_norms"]) == 2
    for what in ("grad_norms", "losses", "rewards"):
        assert first[what] == pytest.approx(alone[what], rel=TOLERANCE), what


@pytest.mark.thorough
def test_vision_model_equals_one_process(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llava"
    run_well(["-m", "tests.helpers.tiny_vision", model, folder], ROOT)
    alone, run = train_both("vision", folder, tmp_path)["vision"]
    assert "samples per step: 3 = 1 + 2 samples on 2 ranks" in run.err
    assert "equal gradient" in run.err
    assert [rank["devices"] for rank in run.ranks] == [["cuda:0"], ["cuda:1"]]
    assert {rank["trainer"] for rank in run.ranks} == {"UnslothSFTTrainer"}
    assert_equal(alone, run)
    for file in ("processor_config.json", "tokenizer.json", "adapter_config.json"):
        assert (run.out / "adapter" / file).read_text() == (alone.out / "adapter" / file).read_text()


@pytest.mark.thorough
def test_dpo_trains_on_two_ranks(model: Path, tmp_path: Path) -> None:
    run = train("dpo", model, tmp_path / "dpo")
    assert "samples per step: 2 = 2 ranks x 1 samples x 1 accumulation, grouped by length" in run.err
    assert "equal gradient" in run.err
    first, second = run.ranks
    assert first["trainer"] == "UnslothDPOTrainer"
    assert first["adapter_hash"] == second["adapter_hash"]
    assert first["grad_norms"] == second["grad_norms"]
    assert len(first["grad_norms"]) == 2
    assert all(norm > 0 for norm in first["grad_norms"])
    assert first["losses"][1] < first["losses"][0]
