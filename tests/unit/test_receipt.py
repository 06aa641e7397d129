"""The receipt: fingerprints of samples, the verdict, and the recorder on a real Trainer."""

import io
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.hooks.trainer_patches import TrainerHooks, followed_train_patch
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.plugin import tool_of
from unsloth_multigpu.recorders import verify_recorder as recorder
from unsloth_multigpu.recorders.fingerprint import fingerprints
from unsloth_multigpu.session import Session
from unsloth_multigpu.step.comparison import FINE, sketch_of
from unsloth_multigpu.tools.verify import receipt
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.wire.context import RunContext, ToolRequest
from unsloth_multigpu.wire.identity import SINGLE_PROCESS

ROWS = [[5, 6, 7], [8, 9], [5, 6, 7], [1]]


def padded(rows, left=False, pad=0):
    length = max(map(len, rows))
    filled = [[0] * (length - len(r)) for r in rows]
    ids = [[pad] * len(f) + r if left else r + [pad] * len(f) for r, f in zip(rows, filled, strict=True)]
    mask = [f + [1] * len(r) if left else [1] * len(r) + f for r, f in zip(rows, filled, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def packed(row, positions):
    return {"input_ids": torch.tensor([row]), "position_ids": torch.tensor([positions])}


FLAT = packed([t for row in ROWS for t in row], [place for row in ROWS for place in range(len(row))])
SQUARE = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 4]])}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (padded(ROWS), padded(ROWS[3:] + ROWS[:3], left=True, pad=99), True),
        (padded(ROWS), padded([*ROWS[:3], [2]]), False),
        (padded(ROWS), padded([*ROWS, [1]]), False),
        # A mask of who sees whom says nothing of padding.
        (SQUARE, {**SQUARE, "attention_mask": torch.ones(2, 1, 3, 3).tril()}, True),
        # Rows without padding are parted, also in the middle of a sample.
        (padded(ROWS), FLAT, True),
        (padded([[6, 7], [8, 9]]), packed([6, 7, 8, 9], [1, 2, 0, 1]), True),
        (packed([5, 6], [3, 4]), packed([5, 9], [3, 4]), False),
    ],
)
def test_fingerprint_knows_a_sample_whatever_its_padding_and_place(one, other, is_same):
    assert (fingerprints(one) == fingerprints(other)) is is_same


STEPS = [(2.5, 0.7, {"a": 1, "b": 2}), (2.25, 0.5, {"c": 3})]
OVERFLOW = (2.5, math.inf, {"a": 1})
NOTHING = "nothing could be compared"
EQUAL = {"is_exact": True, "not_compared": "", "difference": 8e-8, "bound": 1e-5, "one_process_s": 2.0, "dealt_s": 1.0}
WRONG = {**EQUAL, "is_exact": False, "difference": 3.1e-2}
DEALT = "the gradient from the same weights, as one process and as dealt,"
ONES = {"w": torch.ones(4)}
TENSORS = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.zeros(2)}
OTHERS = {**TENSORS, "b": torch.ones(4) * 1.5}


def run_of(steps=STEPS, tensors=ONES, compared=None, **facts):
    """A run as `merged` leaves it, with these updates."""
    names = ("step", "loss", "grad_norm", "samples", "compared")
    records = [
        dict(zip(names, (i, loss, norm, Counter(s), compared or {}), strict=True))
        for i, (loss, norm, s) in enumerate(steps, 1)
    ]
    usual = {"trainer": "T", "rounding": FINE, "optimizer": "adamw_torch", "device": "cpu", "world_size": 2}
    updates = {name: (sketch_of(tensor), recorder._moved(tensor)) for name, tensor in tensors.items()}
    return {"steps": records, "updates": updates, "facts": {**usual, **facts}, "sources": []}


def both(*values):
    """Two runs that have left the same."""
    return run_of(*values), run_of(*values)


@pytest.mark.parametrize(
    ("runs", "reasons"),
    [
        ((run_of(), run_of([(2.5 + 1e-6, 0.7 - 1e-6, {"b": 2, "a": 1}), STEPS[1]])), []),
        # A loss near zero is not compared with itself, and steps that overflow may come before one that does not.
        ((run_of([(1e-9, 0.5, {"a": 1})]), run_of([(-3e-9, 0.5, {"a": 1})])), []),
        (both([OVERFLOW, *STEPS]), []),
        *(
            ((run_of(), run_of(steps)), [reason])
            for steps, reason in (
                ([STEPS[0], (2.25, 0.51, {"c": 3})], "step 2: gradient norm 0.5 and 0.51 on one process and on"),
                ([STEPS[0], (2.26, 0.5, {"c": 3})], "step 2: loss 2.25 and 2.26 on one process"),
                ([(2.5, 0.7, {"a": 2, "b": 1}), STEPS[1]], "step 1: other samples (3 and 3 on"),
                ([(2.5, math.nan, {"a": 1, "b": 2}), STEPS[1]], "step 1: gradient norm 0.7 and nan"),
                ([(2.5, None, {"a": 1, "b": 2}), STEPS[1]], "step 1: gradient norm 0.7 and none"),
                (STEPS[:1], "one process took 2 steps, the ranks 1"),
            )
        ),
        (both([(2.5, 0.7, {})]), [f"step 1: {NOTHING}, neither run has a sample"]),
        (both([STEPS[0], (None, 0.7, {"a": 1})]), [f"step 2: {NOTHING}, neither run has a loss"]),
        (both([OVERFLOW, (math.nan, math.nan, {"a": 1})]), [f"{NOTHING}: no step has a gradient norm above 0"]),
        (both([(0.0, 0.0, {"a": 1})]), [f"{NOTHING}: no step has a gradient norm above 0"]),
        (both(STEPS, {}), [f"{NOTHING}: no weights were moved"]),
        (both(STEPS, {"w": torch.zeros(4)}), [f"{NOTHING}: no weights were moved; the first steps of fp16 overflow"]),
        # From the same weights the ranks' own comparison judges. What it did not compare is said.
        ((run_of(), run_of(compared=EQUAL)), []),
        ((run_of(), run_of(compared=WRONG)), [f"step {step}: {DEALT} differs by 3.1" for step in (1, 2)]),
        (
            (run_of(), run_of(STEPS[:1], compared={**WRONG, "difference": None})),
            [f"step 1: {DEALT} is not finite", "one"],
        ),
        ((run_of(), run_of(compared={**WRONG, "not_compared": "it draws"})), []),
        *(((run_of(**{n: "1"}), run_of(**{n: "2"})), [f"{n}: "]) for n in ("device", "optimizer", "trainer")),
        ((run_of(rounding=1e-5), run_of(rounding=2e-5)), ["rounding: "]),
        ((run_of(tensors=TENSORS), run_of(tensors=OTHERS)), ["weights: the updates of 1 of 3 tensors differ, b by "]),
    ],
)
def test_verdict_names_each_difference(runs, reasons):
    found = receipt.compare(*runs)
    assert found["agree"] is (not reasons)
    assert len(found["reasons"]) == len(reasons), found["reasons"]
    assert all(a.startswith(b) for a, b in zip(found["reasons"], reasons, strict=True)), found["reasons"]
    verdict = "DO NOT AGREE" if reasons else "agree over"
    if reasons and NOTHING in reasons[0]:
        verdict = "ONE PROCESS AND 2 RANKS WERE NOT SHOWN TO AGREE: "
    stream = io.StringIO()
    receipt.show(Screen(stream), receipt.make_receipt(["train.py"], *runs))
    page = stream.getvalue()
    assert verdict in page
    is_unknown = runs[1]["steps"][0]["compared"].get("not_compared")
    assert ("\ngradients from the same weights were not compared: it draws\n" in page) is bool(is_unknown)


def test_updates_are_compared_tensor_by_tensor():
    def compared(**changed):
        return receipt.compare(run_of(tensors=TENSORS), run_of(tensors={**TENSORS, **changed}))

    found = compared(b=torch.ones(4) * 1.5)["weights"]
    assert [(w["name"], w["counts"]) for w in found] == [("b", True), ("a", True), ("c", False)]
    # Norms are exact; what they leave of a difference is estimated.
    assert found[0]["update_norm"] == [2.0, 3.0]
    assert 0.5 <= found[0]["relative"] < 1.2
    assert {w["name"] for w in compared(e=torch.ones(1))["weights"] if w["relative"] == math.inf} == {"e"}
    found = compared(a=torch.zeros(4), b=torch.full((4,), math.nan))
    assert [w["name"] for w in found["weights"]] == ["b", "a", "c"]
    assert not found["agree"]


class Tracker(TrainerCallback):
    __module__ = "transformers.integrations.some_tracker"

    def on_train_begin(self, args, state, control, **kwargs):
        raise AssertionError("a tracker was called")


class Saver(TrainerCallback):
    """What a user's own callback may do."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.save_pretrained(args.output_dir + "/mine")
        self.trainer.save_model(args.output_dir + "/mine_too")
        self.trainer.save_state()
        for save in (model.save_pretrained_merged, model.save_pretrained_gguf, model.push_to_hub):
            save(args.output_dir + "/more")
        self.trainer.push_to_hub(args.output_dir + "/pushed_too")


@pytest.fixture
def trainer(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, attention_dropout=0.1, **sizes))
    model.lm_head.weight.requires_grad_(False)
    args = TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=2,
        max_steps=3,
        save_steps=1,
        logging_steps=4,
        max_grad_norm=1e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": torch.arange(4) + i, "labels": torch.arange(4) + i} for i in range(28)]
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    model.save_pretrained_merged = model.save_pretrained_gguf = lambda path: Path(path).mkdir(parents=True)
    trainer.push_to_hub = model.push_to_hub = model.save_pretrained_merged
    return trainer


def record(trainer, folder, **options):
    folder.mkdir()
    values = {"folder": str(folder), "num_steps": 2, "num_gpus": 1, **options}
    request = ToolRequest("verify", values)
    tool = tool_of(RunContext.read(request.variables()))
    recorder = tool.part(trainer, SimpleNamespace(identity=SINGLE_PROCESS, config=MultiGPUConfig()), None)
    with Loop(trainer, [recorder]).steering():
        trainer.train()
    recorder.write()
    return json.loads((folder / "rank_0.json").read_text())


def test_recorder_follows_the_first_steps_after_a_resume_and_saves_nothing(trainer, tmp_path, monkeypatch):
    trainer.train()
    args, out, train = trainer.args, tmp_path / "out", trainer.train
    args.max_steps, args.save_total_limit, args.load_best_model_at_end = 9, 1, True
    args.metric_for_best_model = "loss"
    state = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())
    best = {"best_model_checkpoint": str(out / "checkpoint-1"), "best_global_step": 1, "best_metric": 0.1}
    (out / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({**state, **best}))
    before = load_file(out / "checkpoint-3" / "model.safetensors")
    names = sorted(str(p) for p in out.rglob("*"))
    # Resumes from the newest.
    monkeypatch.setattr(trainer, "train", lambda: train(resume_from_checkpoint=True))
    trainer.callback_handler.callbacks += [Tracker(), Saver(trainer)]
    found = record(trainer, tmp_path / "receipt", dropout=False)
    assert sorted(str(p) for p in out.rglob("*")) == names
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert all(sum(step["samples"].values()) == 2 for step in found["steps"])
    # Before clipping, and by the schedule of the whole training.
    assert all(step["grad_norm"] > 0.01 and step["loss"] > 1 for step in found["steps"])
    rates = {log["step"]: log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log}
    assert rates[5] == pytest.approx(5e-5 * 5 / 9)
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert found["updates"].keys() == trained.keys()
    for name, (update, _) in found["updates"].items():
        assert update[0] > 0
        assert update == sketch_of(trained[name].detach() - before[name])
    assert (found["sources"], found["facts"]["rounding"]) == ([], FINE)


def test_other_parallelism_is_refused(trainer, tmp_path):
    trainer.is_fsdp_enabled = True
    with pytest.raises(SetupError, match="FSDP"):
        record(trainer, tmp_path / "receipt")


def test_verified_run_makes_no_repository_and_compares_all_ranks_at_every_step(tmp_path):
    tool, alone = (recorder.Verify(str(tmp_path), 1, num_gpus) for num_gpus in (3, 1))
    config = tool.adjusted(MultiGPUConfig(num_gpus=1, verify_every=0))
    assert (config.num_gpus, config.verify_every, config.check_first_step) == (3, 1, "every")
    assert alone.adjusted(MultiGPUConfig(num_gpus=1)).check_first_step == "auto"
    patches = TrainerHooks(Session(config, SINGLE_PROCESS, console=None, tool=tool)).patches()
    (patch,) = (p for p in patches if "TrainingArguments" in p.target)
    values = {"ddp_timeout": 1, "use_cpu": False, "steps_per_generation": 1, "n_gpu": 1, "output_dir": str(tmp_path)}
    args = SimpleNamespace(push_to_hub=True, **values)
    patch.wrap(lambda self: None, args)
    assert (args.push_to_hub, args.use_cpu) == (False, False)


def test_training_that_nobody_follows_does_not_begin():
    is_followed = [False]
    registry = PatchRegistry([followed_train_patch(lambda: is_followed[0])])
    registry.apply()
    try:
        with pytest.raises(SetupError, match="enable_multi_gpu\\(\\) is not in effect"):
            Trainer.train(None)
        is_followed[0] = True
        with pytest.raises(AttributeError):
            Trainer.train(None)
    finally:
        registry.undo()
