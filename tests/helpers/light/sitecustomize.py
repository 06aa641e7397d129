"""First in PYTHONPATH this hides what transformers would import only because it is installed: a third of its time."""

import sys

sys.modules.update(dict.fromkeys(("bitsandbytes", "scipy", "sklearn", "torchao")))
