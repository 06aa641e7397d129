"""The one fake of a Trainer: what is steered of it, with the signatures of transformers and next to nothing inside.

Tests drive it by hand, which a real one does not let them, and override what they look at. A contract test holds its
methods and attributes against the real ones.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
# Not of the real one: by these a test drives it.
OWN_NAMES = ("event", "steps", "saved")


class FakeCallbackHandler:
    """Calls callbacks in their order."""

    def __init__(self):
        self.callbacks = []

    def remove_callback(self, callback):
        self.callbacks.remove(callback)

    def call_event(self, event, args, state, control, **kwargs):
        for callback in self.callbacks:
            getattr(callback, event)(args, state, control, **kwargs)

    def on_save(self, args, state, control):
        self.call_event("on_save", args, state, control)


class FakeAccelerator:
    """Does nothing to what it is given. It meets no other process."""

    def __init__(self):
        self.scaler = self.ddp_handler = None
        self.num_processes = 1
        self.sync_gradients = True
        self._models = []

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        return model

    def prepare_data_loader(self, data_loader, device_placement=None, slice_fn_for_dispatch=None):
        return data_loader

    def backward(self, loss, **kwargs):
        loss.backward()

    def no_sync(self, model):
        return nullcontext()

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor):
        return tensor

    def gather_for_metrics(self, input_data, use_gather_object=False):
        return input_data

    def reduce(self, tensor, reduction="sum", scale=1.0):
        return tensor


class FakeTrainer:
    """One linear layer; `steps()` goes the way of Hugging Face's loop, as far as callbacks see it."""

    def __init__(self, model=None, **args):
        self.model = self.model_wrapped = torch.nn.Linear(1, 1) if model is None else model
        defaults = {
            "device": torch.device("cpu"),
            "gradient_accumulation_steps": 1,
            "average_tokens_across_devices": True,
            "auto_find_batch_size": False,
            "load_best_model_at_end": False,
            "max_grad_norm": 1.0,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 8,
            "gradient_checkpointing": False,
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "save_total_limit": None,
            "should_save": True,
        }
        self.args = SimpleNamespace(**{**defaults, **args})
        self.state = SimpleNamespace(
            global_step=0,
            epoch=0.0,
            max_steps=0,
            best_model_checkpoint=None,
            best_global_step=None,
            stateful_callbacks={},
            log_history=[],
            save_to_json=lambda json_path: None,
        )
        self.control = SimpleNamespace(**dict.fromkeys(FLAGS, False))
        self.accelerator, self.callback_handler = FakeAccelerator(), FakeCallbackHandler()
        self.optimizer = self.compute_loss_func = None
        self.train_dataset, self.eval_dataset = [], None
        self.model_accepts_loss_kwargs = True
        self.is_fsdp_enabled = self.is_deepspeed_enabled = self.is_in_train = False
        self.gather_function = self.accelerator.gather_for_metrics
        self._globalstep_last_logged = 0
        self._train_batch_size = 2
        self.saved = []  # Steps.

    def add_callback(self, callback):
        self.callback_handler.callbacks.append(callback)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None): ...

    def get_train_dataloader(self):
        return []

    def get_total_train_batch_size(self, args):
        return 1

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return list(epoch_iterator), None

    def _prepare_inputs(self, inputs):
        return inputs

    def training_step(self, model, inputs, num_items_in_batch=None):
        return self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return torch.ones(())

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.5)

    def log(self, logs, start_time=None): ...

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        return {}

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ): ...

    def save_model(self, output_dir=None, _internal_call=False): ...

    def _save_checkpoint(self, model, trial):
        self.saved.append(self.state.global_step)

    def _get_output_dir(self, trial):
        return "/out"

    def _push_from_checkpoint(self, checkpoint_folder):
        raise AssertionError

    def _load_rng_state(self, checkpoint): ...

    def _issue_warnings_after_load(self, load_result): ...

    def event(self, name, **kwargs):
        """Calls the callbacks."""
        self.callback_handler.call_event(name, self.args, self.state, self.control, **kwargs)

    def steps(self, num_steps, num_eval_batches=0, on_step=lambda step: None):
        """The loop of one epoch. `on_step(step)` is called where the step computes."""
        for step in range(1, num_steps + 1):
            on_step(step)
            self.state.global_step = step
            self.control.should_evaluate = num_eval_batches > 0
            self.event("on_step_end")
            for _ in range(num_eval_batches if self.control.should_evaluate else 0):
                self.event("on_prediction_step")
            if self.control.should_save:
                self._save_checkpoint(None, None)
                self.callback_handler.on_save(self.args, self.state, self.control)
            if self.control.should_training_stop:
                break
        self.event("on_epoch_end")
