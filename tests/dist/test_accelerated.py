"""Loops with an Accelerator of the script's own make the steps of one process, in ranks that `run` starts."""

import json
from pathlib import Path

import pytest

from tests.helpers.outcome import assert_near
from tests.helpers.run import BARE, PLAIN, run_python, run_well

SCRIPT = Path(__file__).parent / "scripts" / "accelerated.py"
LOOPS = ["uneven", "accumulated", "resumed", "by_tokens", "stream", "diffusion", "trainer"]
# Of a package that is installed.
LIBRARY = """
import torch
from accelerate import Accelerator

def train():
    accelerator = Accelerator()
    model, loader = accelerator.prepare(torch.nn.Linear(3, 1), torch.utils.data.DataLoader(torch.randn(24, 3), 4))
    for batch in loader:
        accelerator.backward(model(batch).sum())
    return len(loader)
"""
USER = """
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2)
import gc, sys, weakref
import torch
from accelerate import Accelerator
from library_loop import train
from torch.utils.data import DataLoader

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(6))

def own():
    print(f"own {len(accelerator.prepare(DataLoader(torch.randn(24, 3), 4)))} {accelerator.num_processes}")

print(f"library {train()}")
accelerator = Accelerator()
own()

first = weakref.ref(Accelerator())
gc.collect()
assert first() is None

class Pairs:
    batch_size, drop_last = 4, False
    def __iter__(self):
        yield from ([0, 1, 2], [3, 4, 5, 6])

def tell_refused(loader):
    try:
        list(accelerator.prepare(loader))
    except ump.SetupError as error:
        print(error)

assert [int(accelerator.gather(row)) for row in accelerator.prepare(DataLoader(range(3), 1))] == [0, 1, 2]
tell_refused(DataLoader(Stream(), 3))
tell_refused(DataLoader(range(7), batch_sampler=Pairs()))
for options in ({"global_batch": "scale"}, {"inexact": "raise"}):
    ump.disable_multi_gpu()
    assert accelerator.num_processes == 2
    sys.stderr.write("[other options]\\n")
    print("[other options]")
    ump.enable_multi_gpu(num_gpus=2, **options)
    print(f"library {train()}")
    accelerator = Accelerator()
    own()
"""


def train(folder, num_ranks, loops):
    out = folder / f"{num_ranks}.json"
    launch = ["-m", "unsloth_multigpu", "run", "--num-gpus", str(num_ranks)] if num_ranks > 1 else []
    run = run_well([*launch, SCRIPT, out, *loops], folder, PLAIN)
    return json.loads(out.read_text()), run.err


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), 1, LOOPS)[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ranks"), 2, LOOPS)


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_samples_norms_rates_and_weights_are_those_of_one_process(loop, alone, ranks):
    assert_near(ranks[0][loop], alone[loop])


def test_loops_do_what_they_are_there_for(alone):
    """Of one process: batches are shuffled anew, the last ones are short, and a schedule ends at zero."""
    uneven = alone["uneven"]
    assert [len(batch) for batch in uneven["ids"]] == [4, 4, 4, 4, 4, 1] * 2
    assert uneven["ids"][0] != uneven["ids"][6]
    assert uneven["steps"][-1][1] == pytest.approx(0.05 / 12)
    assert [row[0] for row in uneven["scored"]["rows"]] == list(range(11))
    assert uneven["scored"]["objects"] == [str(i) for i in range(11)]
    assert [len(alone[loop]["steps"]) for loop in LOOPS if loop != "resumed"] == [12, 4, 6, 5, 2, 6]
    assert alone["trainer"]["kept"]
    assert alone["resumed"]["second"]["ids"] == alone["resumed"]["first"]["ids"][-4:]


def test_uneven_batches_are_told_once(ranks):
    for text in (
        "a batch of 4 rows is 2 + 2 on 2 ranks: exact where the loss is a mean over rows",
        "a batch of 1 rows is 1 + 0 on 2 ranks: losses are weighted as means over these rows",
        "a batch of 1 rows is 1 + 0 on 2 ranks: the loop reads num_processes, so its losses are not weighted",
        "a batch of 5 rows is 3 + 2 on 2 ranks: losses are weighted as means over these rows",
    ):
        assert ranks[1].count(text) == 1


def test_loop_of_a_library_is_told_and_scale_leaves_all_to_accelerate(tmp_path):
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "library_loop.py").write_text(LIBRARY)
    (tmp_path / "user.py").write_text(USER)
    run = run_python(["user.py"], tmp_path, {**BARE, "PYTHONPATH": str(site)})
    assert run.code == 69, run.err
    (kept, scaled, refused), errs = (text.split("[other options]\n") for text in (run.out, run.err))
    assert kept.startswith("library 3\nown 6 1\n")
    assert "batch_size=3: accelerate shares the batches of Stream in equal parts, and there are 2 ranks." in kept
    assert "Pairs gives a batch of 3 rows before the end of a pass, but its batch_size is 4" in kept
    assert (scaled, refused) == ("library 3\nown 3 2\n", "")
    told = "an optimizer step sees 2 times the samples of one process"
    assert [text.count(told) for text in errs[:2]] == [1, 0]
    assert "    accelerator.backward(" in errs[2]
