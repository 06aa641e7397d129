"""The receipt: fingerprints of samples, reasons for differences, the recorder on a real Trainer, and the verdict."""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from unsloth_multigpu.cli import receipt as table
from unsloth_multigpu.config import MultiGPUConfig
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.proof import comparison, receipt, source
from unsloth_multigpu.proof.fingerprint import fingerprints

ROWS = [[5, 6, 7], [8, 9], [5, 6, 7], [1]]


def padded(rows, left=False, pad=0):
    length = max(map(len, rows))
    filled = [[0] * (length - len(r)) for r in rows]
    ids = [[pad] * len(f) + r if left else r + [pad] * len(f) for r, f in zip(rows, filled, strict=True)]
    mask = [f + [1] * len(r) if left else [1] * len(r) + f for r, f in zip(rows, filled, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def test_fingerprint_knows_a_sample_whatever_its_padding_and_place():
    whole = fingerprints(padded(ROWS))
    assert whole.total() == 4
    assert sorted(whole.values()) == [1, 1, 2]
    parts = fingerprints(padded(ROWS[3:] + ROWS[:1], left=True, pad=99)) + fingerprints(padded(ROWS[1:3]))
    assert parts == whole
    assert fingerprints(padded([[5, 6, 7], [8, 9], [5, 6, 7], [2]])) != whole


def test_fingerprint_parts_rows_without_padding():
    flat = {
        "input_ids": torch.tensor([[token for row in ROWS for token in row]]),
        "position_ids": torch.tensor([[place for row in ROWS for place in range(len(row))]]),
    }
    assert fingerprints(flat) == fingerprints(padded(ROWS))


def test_fingerprint_covers_every_text_of_a_row():
    def pair(chosen, rejected):
        texts = {"chosen": padded(chosen), "rejected": padded(rejected, left=True)}
        return {f"{name}_{key}": value for name, text in texts.items() for key, value in text.items()}

    assert fingerprints(pair(ROWS, ROWS[::-1])) != fingerprints(pair(ROWS, ROWS))
    assert fingerprints(pair(ROWS[:2], ROWS[2:])).total() == 2


def test_fingerprint_takes_other_inputs_row_by_row():
    images = torch.rand(3, 2, 2).to(torch.bfloat16)
    assert fingerprints({"pixel_values": images}) == fingerprints({"pixel_values": images[[2, 0, 1]]})
    assert fingerprints([{"prompt": "a"}, {"prompt": "b"}]).total() == 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.2)})
        self.attention_dropout = 0.1
        self.dropout_is_on = True
        self.config = SimpleNamespace(embd_pdrop=0.3, output_router_logits=False, drop_last=False)


def trainer_with(model=None, **arguments):
    defaults = {"neftune_noise_alpha": None, "optim": "adamw_torch", "device": torch.device("cpu")}
    return SimpleNamespace(
        model=model or nn.Linear(2, 2),
        args=SimpleNamespace(**{**defaults, **arguments}),
        accelerator=SimpleNamespace(mixed_precision="no"),
        data_collator=None,
    )


def names(trainer, **options):
    return {s.name for s in source.find_sources(trainer, MultiGPUConfig(**options))}


def test_dropout_of_every_kind_is_found_and_turned_off():
    model = Layer()
    (found,) = source.find_sources(trainer_with(model), MultiGPUConfig())
    assert found.name == "dropout"
    assert "0.1, 0.2, 0.3" in found.found
    assert found.advice == "--no-dropout"
    source.turn_dropout_off(model)
    assert names(trainer_with(model)) == set()
    assert (model.lora_dropout["default"].p, model.attention_dropout, model.config.embd_pdrop) == (0, 0, 0)
    assert (model.dropout_is_on, model.config.drop_last) == (True, False)


def test_other_reasons_for_differences_are_found():
    assert names(trainer_with()) == set()
    assert names(trainer_with(neftune_noise_alpha=5.0)) == {"NEFTune"}
    assert names(trainer_with(steps_per_generation=4)) == {"sampling"}
    assert names(trainer_with(optim="paged_adamw_8bit")) == {"8-bit optimizer"}
    assert names(trainer_with(nn.BatchNorm1d(2))) == {"batch norm"}
    assert names(trainer_with(nn.Linear(2, 2, dtype=torch.bfloat16))) == {"bf16"}
    assert names(trainer_with(), global_batch="scale") == {"larger steps"}
    assert names(trainer_with(), batch_size_per_gpu=3) == {"larger steps"}
    assert names(trainer_with(), grad_compression="fp16") == {"compression"}
    mixed = trainer_with()
    mixed.accelerator.mixed_precision = "fp16"
    assert source.find_precision(mixed) == "fp16"


def test_rounding_of_a_gpu_is_found():
    on_card = trainer_with(device=torch.device("cuda"))
    assert names(on_card) == {"kernels"}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert names(on_card) == {"kernels", "tf32"}
        assert names(trainer_with()) == set()
    finally:
        torch.set_float32_matmul_precision(before)


STEPS = [(2.5, 0.7, {"a": 1, "b": 2}), (2.25, 0.5, {"c": 3})]
BOUNDS = comparison.bounds_for("fp32", "adamw_torch")


def run_of(steps=STEPS, **facts):
    records = [comparison.StepRecord(i, loss, norm, Counter(s)) for i, (loss, norm, s) in enumerate(steps, 1)]
    facts = {"trainer": "T", "precision": "fp32", "optimizer": "adamw_torch", "device": "cpu", **facts}
    return comparison.RunRecord(tuple(records), {}, facts)


def judged(steps, weights=()):
    return comparison.compare(run_of(), run_of(steps), weights, BOUNDS)


def test_equal_runs_agree():
    found = judged([(2.5 + 1e-6, 0.7 - 1e-6, {"b": 2, "a": 1}), STEPS[1]])
    assert found.agree
    assert found.steps[0].num_samples == (3, 3)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([STEPS[0], (2.25, 0.51, {"c": 3})], "step 2: gradient norm 0.5 and 0.51 on one process and on the ranks"),
        ([STEPS[0], (2.26, 0.5, {"c": 3})], "step 2: loss 2.25 and 2.26 on one process"),
        ([(2.5, 0.7, {"a": 2, "b": 1}), STEPS[1]], "step 1: other samples (3 and 3 on"),
        ([(2.5, math.nan, {"a": 1, "b": 2}), STEPS[1]], "step 1: gradient norm 0.7 and nan"),
        ([(2.5, math.inf, {"a": 1, "b": 2}), STEPS[1]], "step 1: gradient norm 0.7 and inf"),
        ([(2.5, None, {"a": 1, "b": 2}), STEPS[1]], "step 1: gradient norm 0.7 and none"),
        (STEPS[:1], "one process took 2 steps, the ranks 1"),
    ],
)
def test_first_disagreement_is_named(steps, reason):
    found = judged(steps)
    assert not found.agree
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith(reason)


def test_loss_near_zero_is_not_compared_with_itself():
    one, many = run_of([(1e-9, 0.5, {})]), run_of([(-3e-9, 0.5, {})])
    assert comparison.compare(one, many, (), BOUNDS).agree


def test_weights_are_compared_tensor_by_tensor(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4), "d": torch.zeros(2)}
    other = {**tensors, "b": torch.ones(4) * 1.5, "c": torch.ones(4) * 3}
    for name, content in (("one", tensors), ("many", other)):
        save_file(content, tmp_path / name)
    found = comparison.compare_weights(tmp_path / "one", tmp_path / "many", {"b": 0.9, "c": 1e-9}, BOUNDS.noise)
    assert [(w.name, w.counts) for w in found] == [("b", True), ("a", True), ("d", True), ("c", False)]
    assert found[0].relative == pytest.approx(1 / 3)
    verdict = comparison.compare(run_of(), run_of(), found, BOUNDS)
    assert verdict.reasons == ("final weights: 1 of 4 tensors differ, b by 3.3e-01 (bound 1e-03)",)
    del other["a"]
    save_file({**other, "e": torch.ones(1), "d": torch.zeros(3)}, tmp_path / "many")
    found = comparison.compare_weights(tmp_path / "one", tmp_path / "many", {}, BOUNDS.noise)
    assert {w.name for w in found if w.relative == math.inf} == {"a", "d", "e"}


def test_weights_that_are_no_number_disagree(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one")
    save_file({"a": torch.tensor([1.0, math.nan])}, tmp_path / "many")
    found = comparison.compare_weights(tmp_path / "one", tmp_path / "many", {}, BOUNDS.noise)
    assert not comparison.compare(run_of(), run_of(), found, BOUNDS).agree


def test_bounds_follow_precision_and_optimizer():
    fine, coarse = comparison.bounds_for("fp32", "adamw_8bit"), comparison.bounds_for("bf16", "adamw_torch")
    assert BOUNDS.grad_norm == fine.grad_norm < coarse.grad_norm
    assert BOUNDS.weights < fine.weights == coarse.weights


def test_samples_of_all_ranks_are_put_together(tmp_path):
    assert comparison.read_run(tmp_path) is None
    for rank, samples in enumerate(({"a": 1}, {"a": 2, "b": 1})):
        steps = [{"step": 1, "loss": 2.0 + rank, "grad_norm": 0.5, "samples": samples}]
        record = {"rank": rank, "steps": steps, "gradient_shares": {"w": 1.0}, "facts": {"rank": rank}}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(record))
    found = comparison.read_run(tmp_path)
    assert found.steps == (comparison.StepRecord(1, 2.0, 0.5, Counter(a=3, b=1)),)
    assert (found.gradient_shares, found.facts) == ({"w": 1.0}, {"rank": 0})


def test_table_shows_figures_marks_and_verdict():
    text = table.render(judged([STEPS[0], (2.25, 0.51, {"c": 2})]), [], run_of().facts, 2)
    first, second = (line for line in text.splitlines() if line[:4].strip().isdigit())
    assert first.split() == ["1", "3", "same", "2.5", "2.5", "0.0e+00", "0.7", "0.7", "0.0e+00"]
    assert second.split() == ["2", "OTHER", "2.25", "2.25", "0.0e+00", "0.5", "0.51", "!2.0e-02"]
    assert "ONE PROCESS AND 2 RANKS DO NOT AGREE: step 2: other samples (3 and 2" in text
    found = {"name": "dropout", "found": "p 0.1", "advice": "--no-dropout"}
    text = table.render(judged(STEPS), [found], run_of().facts, 3)
    assert "  dropout: p 0.1. For agreement: --no-dropout." in text
    assert text.endswith("One process and 3 ranks agree over 2 steps.")


class Tracker(TrainerCallback):
    __module__ = "transformers.integrations.some_tracker"

    def on_train_begin(self, args, state, control, **kwargs):
        raise AssertionError("a tracker was called")


class Saver(TrainerCallback):
    """What a user's own callback may do."""

    def __init__(self):
        self.trainer = None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.save_pretrained(args.output_dir + "/mine")
        self.trainer.save_model(args.output_dir + "/mine_too")


@pytest.fixture
def trainer(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, attention_dropout=0.1, **sizes))
    model.lm_head.weight.requires_grad_(False)
    args = TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=2,
        max_steps=9,
        save_steps=1,
        logging_steps=4,
        max_grad_norm=1e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": torch.arange(4) + i, "labels": torch.arange(4) + i} for i in range(28)]
    saver = Saver()
    saver.trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[Tracker(), saver])
    return saver.trainer


def record(trainer, folder, is_filler=lambda: False, **options):
    folder.mkdir()
    request = receipt.ReceiptRequest(
        **{"folder": str(folder), "num_steps": 2, "num_gpus": 1, "dropout": True} | options
    )
    assert receipt.ReceiptRequest.read(request.variables()) == request
    recorder = receipt.Recorder(trainer, request, 0, MultiGPUConfig(), is_filler)
    with recorder.on_trainer():
        trainer.train()
    recorder.write()
    return json.loads((folder / "rank_0.json").read_text())


def test_recorder_follows_the_first_steps_and_saves_nothing(trainer, tmp_path):
    callbacks = list(trainer.callback_handler.callbacks)
    learning_rates = []
    trainer.add_callback(callback := type("Watch", (TrainerCallback,), {})())
    type(callback).on_log = lambda self, args, state, control, logs=None, **k: learning_rates.append(
        logs.get("learning_rate")
    )
    found = record(trainer, tmp_path / "receipt", dropout=False)
    trainer.remove_callback(callback)
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert all(sum(step["samples"].values()) == 2 for step in found["steps"])
    # Before clipping, and by the schedule of the whole training.
    assert all(step["grad_norm"] > 0.01 and step["loss"] > 1 for step in found["steps"])
    assert learning_rates[:2] == pytest.approx([5e-5, 5e-5 * 8 / 9])
    saved = {p.name for p in (tmp_path / "out").rglob("*")} if (tmp_path / "out").exists() else set()
    assert saved == set()
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    weights = load_file(tmp_path / "receipt" / receipt.WEIGHTS_FILE)
    assert weights.keys() == trained.keys() == found["gradient_shares"].keys()
    assert all(torch.equal(weights[name], p) for name, p in trained.items())
    assert math.hypot(*found["gradient_shares"].values()) == pytest.approx(1, rel=0.5)
    assert [s["name"] for s in found["facts"]["sources"]] == []
    assert found["facts"]["precision"] == "fp32"
    # As it was before.
    assert trainer.callback_handler.callbacks == callbacks
    assert not {"training_step", "save_model", "save_pretrained"} & {*vars(trainer), *vars(trainer.model)}
    assert (trainer.args.logging_nan_inf_filter, trainer.args.logging_steps) == (True, 4)


def test_recorder_names_dropout_and_counts_no_filler(trainer, tmp_path):
    trainer.callback_handler.callbacks = [
        c for c in trainer.callback_handler.callbacks if not isinstance(c, (Tracker, Saver))
    ]
    found = record(trainer, tmp_path / "receipt", is_filler=lambda: trainer.state.global_step == 1)
    assert [s["name"] for s in found["facts"]["sources"]] == ["dropout"]
    assert [sum(step["samples"].values()) for step in found["steps"]] == [2, 0]


def test_other_parallelism_is_refused(trainer, tmp_path):
    trainer.is_fsdp_enabled = True
    with pytest.raises(SetupError, match="FSDP"):
        record(trainer, tmp_path / "receipt")
