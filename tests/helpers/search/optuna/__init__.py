"""A backend for `Trainer.hyperparameter_search` with what transformers calls of Optuna: trials in a fixed order.

Put its parent folder on the path of a script.
"""

import types

__version__ = "5.0.0"

ORDER = [
    {"learning_rate": 0.05, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "bias": True},
    {"learning_rate": 0.02, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "bias": True},
    {"learning_rate": 0.1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "bias": False},
    {"learning_rate": 0.01, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bias": False},
]
# The trial that is not worth going on with, and how many fit into the time that the script gives.
PRUNED, FIT = 1, 3


class TrialPruned(Exception):
    pass


class FixedTrial:
    def __init__(self, params, number=0):
        self.params, self.number = params, number

    def suggest(self, name):
        return self.params[name]


class Trial(FixedTrial):
    def __init__(self, number, study):
        super().__init__({}, number)
        self.study, self.value = study, None

    def suggest(self, name):
        self.params[name] = ORDER[self.number][name]
        return self.params[name]

    def report(self, value, step):
        self.value = value

    def should_prune(self):
        return self.number == PRUNED


trial = types.SimpleNamespace(FixedTrial=FixedTrial, BaseTrial=FixedTrial)


class Study:
    def __init__(self):
        self.trials = []

    def _is_multi_objective(self):
        return False

    def optimize(self, objective, n_trials, timeout=None, **_):
        for number in range(n_trials if timeout is None else FIT):
            now = Trial(number, self)
            try:
                now.value = objective(now)
            except TrialPruned:
                continue
            self.trials.append(now)

    @property
    def best_trial(self):
        return min(self.trials, key=lambda t: t.value)


def create_study(**_):
    return Study()
