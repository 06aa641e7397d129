"""Scripts that divide by the number of ranks themselves, and those that only look at it."""

import pytest

from unsloth_multigpu.train.rank_arithmetic import find_rank_arithmetic

DIVIDES = {
    'world_size = int(os.environ.get("WORLD_SIZE", 1))\nif world_size != 1:\n    gas = gas // world_size': (
        3,
        "gas // world_size",
    ),
    'gas //= int(os.environ["WORLD_SIZE"])': (1, "gas //= int(os.environ['WORLD_SIZE'])"),
    "steps = len(rows) // (bs * ga * args.world_size)": (1, "len(rows) // (bs * ga * args.world_size)"),
    "rank, n = 0, int(os.environ['WORLD_SIZE'])\nrows = 100 // n": (2, "100 // n"),
    "lr = 1e-4 * dist.get_world_size()": (1, "0.0001 * dist.get_world_size()"),
    "n = max(1, accelerator.num_processes)\nlr = 2e-5\nlr *= n": (3, "lr *= n"),
    "total = bs * PartialState().num_processes": (1, "bs * PartialState().num_processes"),
    "total = bs * (accelerator.num_processes or 1)": (1, "bs * (accelerator.num_processes or 1)"),
    "ranks: int = int(os.getenv('WORLD_SIZE', '1'))\nbatch = 64 // ranks": (2, "64 // ranks"),
    "def f():\n    return steps / trainer.args.world_size": (2, "steps / trainer.args.world_size"),
}
LOOKS = [
    "if int(os.environ.get('WORLD_SIZE', 1)) > 1:\n    device_map = {'': 0}",
    "print('rank %d of %d' % (rank, args.world_size))\nprint('-' * world_size)",
    "n = args.world_size\nprint(f'{n} ranks', n + 1)",
    "print(f'{bs * args.world_size} in all', bs * args.world_size)\nlogger.info('%d', bs * accelerator.num_processes)",
    "rows = rows.map(f, num_proc=config.num_processes // 2)",
    "steps = len(rows) // (bs * ga)",
    "n = pool(args.world_size)\nbatch = 64 // n",
    "class T(Trainer):\n    def compute_loss(self, model):\n        return loss * self.accelerator.num_processes",
    "this is no Python",
    "",
]


@pytest.mark.parametrize("source", DIVIDES)
def test_place_that_divides_is_found(source):
    assert find_rank_arithmetic(source) == DIVIDES[source]


@pytest.mark.parametrize("source", LOOKS)
def test_script_that_only_looks_is_left_alone(source):
    assert find_rank_arithmetic(source) is None
