"""First in PYTHONPATH this hides the modules that `tests.helpers.run.hide` names from every Python that starts."""

import gc
import os
import sys

sys.modules.update(dict.fromkeys(os.environ["HIDDEN_MODULES"].split(",")))
# Importing makes many objects, and they stay.
gc.set_threshold(50_000)
