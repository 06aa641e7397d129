"""Rank 1 is busy before the training, for longer than the others wait. Usage: late.py TIMEOUT_S FOLDER"""

import os
import sys
import time

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2, timeout_s=float(sys.argv[1]))

if os.environ["RANK"] == "1":
    time.sleep(600)

from transformers import TrainingArguments

TrainingArguments("out", report_to=[])
