"""The receipt: fingerprints of samples, reasons for differences, the recorder on a real Trainer, and the verdict."""

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
from unsloth_multigpu.step.comparison import FINE, sketch_of
from unsloth_multigpu.tool import tool_of
from unsloth_multigpu.tools.fingerprint import fingerprints
from unsloth_multigpu.tools.script_program import StepsRequest
from unsloth_multigpu.tools.verify import receipt
from unsloth_multigpu.tools.verify import verify_recorder as recorder
from unsloth_multigpu.tools.verify.verify_recorder import Verify
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import SINGLE_PROCESS

ROWS = [[5, 6, 7], [8, 9], [5, 6, 7], [1]]


def padded(rows, left=False, pad=0):
    length = max(map(len, rows))
    filled = [[0] * (length - len(r)) for r in rows]
    ids = [[pad] * len(f) + r if left else r + [pad] * len(f) for r, f in zip(rows, filled, strict=True)]
    mask = [f + [1] * len(r) if left else [1] * len(r) + f for r, f in zip(rows, filled, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def test_fingerprint_knows_a_sample_whatever_its_padding_and_place():
    whole = fingerprints(padded(ROWS))
    assert sorted(whole.values()) == [1, 1, 2]
    parts = fingerprints(padded(ROWS[3:] + ROWS[:1], left=True, pad=99)) + fingerprints(padded(ROWS[1:3]))
    assert parts == whole
    assert fingerprints(padded([[5, 6, 7], [8, 9], [5, 6, 7], [2]])) != whole
    # A mask of who sees whom says nothing of padding.
    rows = torch.tensor([[5, 6, 7], [8, 9, 4]])
    mask = torch.ones(2, 1, 3, 3).tril()
    assert fingerprints({"input_ids": rows, "attention_mask": mask}) == fingerprints({"input_ids": rows})


def test_fingerprint_parts_rows_without_padding_also_in_the_middle_of_a_sample():
    def packed(row, positions):
        return fingerprints({"input_ids": torch.tensor([row]), "position_ids": torch.tensor([positions])})

    tokens, places = ([t for row in ROWS for t in row], [place for row in ROWS for place in range(len(row))])
    assert packed(tokens, places) == fingerprints(padded(ROWS))
    assert packed([6, 7, 8, 9], [1, 2, 0, 1]) == fingerprints(padded([[6, 7], [8, 9]]))
    assert packed([5, 6], [3, 4]) != packed([5, 9], [3, 4])


STEPS = [(2.5, 0.7, {"a": 1, "b": 2}), (2.25, 0.5, {"c": 3})]
EQUAL = {"is_exact": True, "not_compared": "", "difference": 8e-8, "bound": 1e-5, "one_process_s": 2.0, "dealt_s": 1.0}


def updates_of(**tensors):
    """As a recorder leaves them."""
    return {name: (sketch_of(tensor), recorder._moved(tensor)) for name, tensor in tensors.items()}


UPDATES = updates_of(w=torch.ones(4))


def run_of(steps=STEPS, updates=UPDATES, compared=None, sources=(), **facts):
    names = ("step", "loss", "grad_norm", "samples", "compared")
    records = [
        dict(zip(names, (i, loss, norm, Counter(s), compared or {}), strict=True))
        for i, (loss, norm, s) in enumerate(steps, 1)
    ]
    facts = {"trainer": "T", "rounding": FINE, "optimizer": "adamw_torch", "device": "cpu", **facts}
    facts |= {"world_size": 2}
    return {"steps": records, "updates": updates, "facts": facts, "sources": list(sources)}


def judged(steps, compared=None):
    return receipt.compare(run_of(), run_of(steps, compared=compared))


def judged_alike(steps, updates=UPDATES):
    """The verdict over two runs that have left the same."""
    return receipt.compare(run_of(steps, updates), run_of(steps, updates))


def page_of(one, many):
    stream = io.StringIO()
    receipt.show(Screen(stream), receipt.make_receipt(["train.py"], one, many))
    return stream.getvalue().removesuffix("\n")


def test_equal_runs_agree():
    found = judged([(2.5 + 1e-6, 0.7 - 1e-6, {"b": 2, "a": 1}), STEPS[1]])
    assert found["agree"]
    assert found["steps"][0]["num_samples"] == [3, 3]
    # A loss near zero is not compared with itself, and steps that overflow may come before one that does not.
    assert receipt.compare(run_of([(1e-9, 0.5, {"a": 1})]), run_of([(-3e-9, 0.5, {"a": 1})]))["agree"]
    assert judged_alike([OVERFLOW, *STEPS])["agree"]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([STEPS[0], (2.25, 0.51, {"c": 3})], "step 2: gradient norm 0.5 and 0.51 on one process and on the ranks"),
        ([STEPS[0], (2.26, 0.5, {"c": 3})], "step 2: loss 2.25 and 2.26 on one process"),
        ([(2.5, 0.7, {"a": 2, "b": 1}), STEPS[1]], "step 1: other samples (3 and 3 on"),
        ([(2.5, math.nan, {"a": 1, "b": 2}), STEPS[1]], "step 1: gradient norm 0.7 and nan"),
        ([(2.5, None, {"a": 1, "b": 2}), STEPS[1]], "step 1: gradient norm 0.7 and none"),
        (STEPS[:1], "one process took 2 steps, the ranks 1"),
    ],
)
def test_first_disagreement_is_named(steps, reason):
    found = judged(steps)
    assert not found["agree"]
    assert len(found["reasons"]) == 1
    assert found["reasons"][0].startswith(reason)


OVERFLOW = (2.5, math.inf, {"a": 1})
NOTHING = "nothing could be compared"


@pytest.mark.parametrize(
    ("steps", "updates", "reason"),
    [
        ([(2.5, 0.7, {})], UPDATES, f"step 1: {NOTHING}, neither run has a sample"),
        ([STEPS[0], (None, 0.7, {"a": 1})], UPDATES, f"step 2: {NOTHING}, neither run has a loss"),
        ([OVERFLOW, (math.nan, math.nan, {"a": 1})], UPDATES, f"{NOTHING}: no step has a gradient norm above 0"),
        ([(0.0, 0.0, {"a": 1})], UPDATES, f"{NOTHING}: no step has a gradient norm above 0"),
        (STEPS, {}, f"{NOTHING}: no weights were moved"),
        (STEPS, updates_of(w=torch.zeros(4)), f"{NOTHING}: no weights were moved; the first steps of fp16 overflow"),
    ],
)
def test_runs_that_have_nothing_are_not_said_to_agree(steps, updates, reason):
    found = judged_alike(steps, updates)
    assert len(found["reasons"]) == 1
    assert found["reasons"][0].startswith(reason)
    run = run_of(steps, updates)
    assert "ONE PROCESS AND 2 RANKS WERE NOT SHOWN TO AGREE: " in page_of(run, run)


def test_gradients_from_the_same_weights_are_judged_by_the_ranks_own_comparison():
    assert judged(STEPS, EQUAL)["agree"]
    wrong = {**EQUAL, "is_exact": False, "difference": 3.1e-2}
    found = judged(STEPS, wrong)["reasons"]
    assert len(found) == 2
    assert found[1].startswith(
        "step 2: the gradient from the same weights, as one process and as dealt, differs by 3.1"
    )
    assert judged(STEPS, {**wrong, "difference": None})["reasons"][0].endswith("is not finite in one of them")
    # What was not compared is said, and the runs are judged by what else they have left.
    unknown = {**wrong, "not_compared": "it draws"}
    assert judged(STEPS, unknown)["agree"]
    text = page_of(run_of(), run_of(compared=unknown))
    assert "\ngradients from the same weights were not compared: it draws\n" in text


@pytest.mark.parametrize("name", ["device", "rounding", "optimizer", "trainer"])
def test_runs_of_two_kinds_disagree(name):
    one, other = (1e-5, 2e-5) if name == "rounding" else ("1", "2")
    (reason,) = receipt.compare(run_of(**{name: one}), run_of(**{name: other}))["reasons"]
    assert reason.startswith(f"{name}: ")


def compared_updates(one, many):
    return receipt.compare(run_of(updates=updates_of(**one)), run_of(updates=updates_of(**many)))


def test_updates_are_compared_tensor_by_tensor():
    tensors = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.zeros(2)}
    other = {**tensors, "b": torch.ones(4) * 1.5}
    verdict = compared_updates(tensors, other)
    found = verdict["weights"]
    assert [(w["name"], w["counts"]) for w in found] == [("b", True), ("a", True), ("c", False)]
    # Norms are exact; what they leave of a difference is estimated.
    assert found[0]["update_norm"] == [2.0, 3.0]
    assert 0.5 <= found[0]["relative"] < 1.2
    (reason,) = verdict["reasons"]
    assert reason.startswith("weights: the updates of 1 of 3 tensors differ, b by ")
    del other["a"]
    found = compared_updates(tensors, {**other, "e": torch.ones(1)})["weights"]
    assert {w["name"] for w in found if w["relative"] == math.inf} == {"a", "e"}
    found = compared_updates(tensors, {**tensors, "a": torch.zeros(4), "b": torch.full((4,), math.nan)})
    assert [w["name"] for w in found["weights"]] == ["b", "a", "c"]
    assert not found["agree"]


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
        self.trainer.save_state()
        model.save_pretrained_merged(args.output_dir + "/merged")
        model.save_pretrained_gguf(args.output_dir + "/gguf")
        model.push_to_hub(args.output_dir + "/pushed")
        self.trainer.push_to_hub(args.output_dir + "/pushed_too")


@pytest.fixture
def trainer(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, attention_dropout=0.1, **sizes))
    model.lm_head.weight.requires_grad_(False)
    model.save_pretrained_merged = model.save_pretrained_gguf = lambda path: Path(path).mkdir(parents=True)
    model.push_to_hub = model.save_pretrained_merged
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
    saver.trainer.push_to_hub = model.push_to_hub
    return saver.trainer


def record(trainer, folder, **options):
    folder.mkdir()
    request = StepsRequest(**{"folder": str(folder), "num_steps": 2, "num_gpus": 1, "dropout": True} | options)
    tool = tool_of(RunContext.read(request.variables("unsloth_multigpu.tools.verify.verify_recorder:Verify")))
    assert tool.request == request
    recorder = tool.part(trainer, SimpleNamespace(identity=SINGLE_PROCESS, config=MultiGPUConfig()), None)
    with Loop(trainer, [recorder]).steering():
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
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
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
    updates = found["updates"]
    assert updates.keys() == trained.keys()
    assert all(updates[name][0] == sketch_of(p - before[name]) and updates[name][0][0] for name, p in trained.items())
    assert found["sources"] == []
    assert found["facts"]["rounding"] == FINE
    # As it was before.
    assert trainer.callback_handler.callbacks == callbacks
    assert not {"training_step", "save_model", "save_pretrained"} & {*vars(trainer), *vars(trainer.model)}
    assert (trainer.args.logging_nan_inf_filter, trainer.args.logging_steps) == (True, 4)


def test_resumed_training_keeps_its_checkpoints_and_what_it_trained(trainer, tmp_path):
    handler, args = trainer.callback_handler, trainer.args
    handler.callbacks = [c for c in handler.callbacks if not isinstance(c, (Tracker, Saver))]
    args.max_steps = 3
    trainer.train()
    args.max_steps, args.save_total_limit, args.load_best_model_at_end = 9, 1, True
    args.metric_for_best_model = "loss"
    out = tmp_path / "out"
    state = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())
    best = {"best_model_checkpoint": str(out / "checkpoint-1"), "best_global_step": 1, "best_metric": 0.1}
    (out / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({**state, **best}))
    # Resumes from the newest.
    before = load_file(out / "checkpoint-3" / "model.safetensors")
    names = sorted(p.name for p in out.iterdir())
    assert {"checkpoint-1", "checkpoint-2", "checkpoint-3"} <= set(names)

    class Follow(type(trainer)):
        def train(self, *positional, **named):
            return super().train(resume_from_checkpoint=True)

    trainer.__class__ = Follow
    found = record(trainer, tmp_path / "receipt")
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert sorted(p.name for p in out.iterdir()) == names
    now = dict(trainer.model.named_parameters())
    for name, (update, _) in found["updates"].items():
        assert update[0] > 0
        assert update == sketch_of(now[name].detach() - before[name])
    assert (args.save_total_limit, args.load_best_model_at_end) == (1, True)


def test_other_parallelism_is_refused(trainer, tmp_path):
    trainer.is_fsdp_enabled = True
    with pytest.raises(SetupError, match="FSDP"):
        record(trainer, tmp_path / "receipt")


def test_verified_run_makes_no_repository_and_compares_all_ranks_at_every_step(tmp_path):
    tool = Verify(folder=str(tmp_path), num_steps=1, num_gpus=3, dropout=True)
    config = tool.adjusted(MultiGPUConfig(num_gpus=1, verify_every=0))
    assert (config.num_gpus, config.verify_every, config.check_first_step) == (3, 1, "every")
    alone = Verify(folder=str(tmp_path), num_steps=1, num_gpus=1, dropout=True)
    assert alone.adjusted(MultiGPUConfig(num_gpus=1)).check_first_step == "auto"
    patches = TrainerHooks(config, 1, "any", print, print, adjust=tool.adjust_arguments).patches()
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
