"""The server's half of the pair, for `flwr run`: over SuperNodes, or in Flower's own simulation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.federated.federated_option import FitOptions
from unsloth_multigpu.federated.flower_strategy import nodes_needed
from unsloth_multigpu.federated.training import LimitedGrid, ServerPlan, Training, save_model
from unsloth_multigpu.logs import Console, get_logger

_log = get_logger(__name__)
_POLL_S = 1.0
# What `flwr run --run-config` may set, and num-clients; every other name goes to the clients.
_RUN_CONFIG = {
    "num-server-rounds": "num_rounds",
    "output-dir": "output_dir",
    "resume": "resume",
    "min-success": "min_success",
    "round-timeout-s": "round_timeout_s",
}


def make_server_app(plan: ServerPlan) -> ServerApp:
    """A ServerApp that trains as `FederatedServer.fit` does.

    Its settings are those of the run: num-server-rounds (3), num-clients (nodes to wait for; 0 = those that the
    strategy needs, 2 at least), output-dir, resume, min-success, round-timeout-s. What else is set there goes to the
    clients. With output-dir the rounds are saved, and at the end the model, as by `FederatedServer.save`, in its folder
    "final".
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        options, least = run_options(context.run_config)
        with closing(Console()):
            found = wait_for_nodes(grid, least or nodes_needed(plan.new_strategy()), options.round_timeout_s)
            training = Training(plan, grid, least or found, options)
            result = training.run()
            if options.output_dir is not None:
                save_model(training, Path(options.output_dir) / "final")
            _log.info("%s", result.report)

    return app


def run_options(run_config: Mapping[str, Any]) -> tuple[FitOptions, int]:
    """The options of a run, and how many nodes it waits for; raises ConfigError where a value cannot be used."""
    config = dict(run_config)
    least = config.pop("num-clients", 0)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise ConfigError(f"num-clients={least!r}; expected a number of nodes.", hint="Change num-clients.")
    given = {option: config.pop(name) for name, option in _RUN_CONFIG.items() if name in config}
    # TOML has no None.
    options = FitOptions(config=config, **{name: value for name, value in given.items() if value != ""})
    return options, least


def wait_for_nodes(grid: Grid, least: int, timeout_s: float) -> int:
    """Waits until `least` nodes are connected, and counts those that are; raises FederatedError after `timeout_s`."""
    limited = LimitedGrid(grid, f"the start, with {least} nodes,", timeout_s)
    while (found := len(limited.get_node_ids())) < least:
        time.sleep(_POLL_S)
    return found
