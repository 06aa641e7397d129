"""A machine that does not reach itself says so at once."""

import subprocess
import sys

import pytest

from tests.helpers.run import environment_with

LISTENS = "from unsloth_multigpu.launch.store import listen_on_loopback; print(listen_on_loopback()[1])"


def listen(set_up):
    """In a network of its own, whose loopback interface is down at first."""
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", f'{set_up} && exec "$@"', "sh"]
    done = subprocess.run([*command, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespace for this user: {done.stderr.strip()}")
    run = subprocess.run(
        [*command, sys.executable, "-c", LISTENS], capture_output=True, text=True, timeout=60, env=environment_with()
    )
    return run.returncode, run.stdout + run.stderr


def test_loopback_that_is_up_is_listened_on():
    code, text = listen("ip link set lo up")
    assert code == 0, text
    assert int(text.split()[-1]) > 0


@pytest.mark.parametrize(
    ("set_up", "why"),
    [("true", "Network is unreachable"), ("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", "Cannot assign")],
    ids=["down", "IPv6 only"],
)
def test_loopback_that_cannot_be_reached_is_an_error_with_a_hint(set_up, why):
    code, text = listen(set_up)
    assert code == 1
    assert "LaunchError: The ranks of this machine cannot meet on 127.0.0.1: [Errno" in text
    assert why in text
    assert "Hint: Bring its loopback interface up" in text
