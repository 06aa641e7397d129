"""Hooks into the kernel's shell, so that cells begin and end on all ranks together and an error is shown once."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.group.random_state import device_in_use, read_random_state
from unsloth_multigpu.launch.question import prompts_answered
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.notebook.display import RankMagics
from unsloth_multigpu.notebook.kernel import Cell, Kernel, names_broken_group
from unsloth_multigpu.notebook.kernel_share import Publisher, done_by_rank_0, notebook_patches
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.wire.run import Run

logger = get_logger(__name__)

_ROOT_CAUSE_LIMIT_S = 2.0


class KernelShell:
    """Hooks into a shell, by public functions of IPython only.

    `after_cell` is called between two cells. Programs that cells start get `variables_before`, the kernel's own.

    Attributes:
        publisher: Sends values that only rank 0 computes.
    """

    def __init__(
        self,
        shell: Any,
        kernel: Kernel,
        after_cell: Callable[[], None],
        variables_before: Mapping[str, str | None],
        run: Run,
    ) -> None:
        self._shell = shell
        self._kernel = kernel
        self._after_cell = after_cell
        self._variables_before = variables_before
        self.publisher = Publisher(kernel)
        self._prompts = ExitStack()
        self._magics = RankMagics(shell, kernel, self.publisher, run)
        self._stack = ExitStack()
        # A front end may have a handler of errors: Colab's adds advice to an ImportError.
        self._earlier_handler: tuple[tuple[type[BaseException], ...], Callable[..., Any]] = (), shell.showtraceback
        # Cells within the current one: a magic such as %%capture runs its body as a cell.
        self._nesting_depth = 0
        # Error that was shown at the end of a nested cell. The magic may raise it again in the outer cell.
        self._nested_error: BaseException | None = None
        # Source of the cell in which the hooks were installed.
        self._first_cell = ""

    def open(self, source: str, execution_count: int) -> None:
        """Installs the hooks, and begins the rest of the current cell on the other ranks. Arguments: see `_begin`."""
        shell = self._shell
        self._first_cell = shell.history_manager.input_hist_raw[-1]
        self._stack.callback(setattr, self._kernel, "cell", None)
        self._stack.enter_context(instance_attribute(shell, "run_cell_async", self._wrapped(shell.run_cell_async)))
        shell.events.register("post_run_cell", self._end_first)
        self._stack.callback(self._unregister)
        self._earlier_handler = shell.custom_exceptions, shell.CustomTB
        shell.set_custom_exc((BaseException,), self._on_error)
        self._stack.callback(self._restore_handler)
        self._stack.enter_context(done_by_rank_0(shell, self.publisher, self._variables_before))
        registry = PatchRegistry(notebook_patches(self.publisher.share))
        registry.apply()
        self._stack.callback(registry.undo)
        self._stack.callback(self._prompts.close)
        self._magics.open(self._stack)
        self._begin(source, execution_count)

    def close(self) -> None:
        """Restores the shell."""
        self._stack.close()

    def _restore_handler(self) -> None:
        self._shell.custom_exceptions, self._shell.CustomTB = self._earlier_handler

    def _begin(self, source: str, execution_count: int) -> None:
        """Begins a cell on the other ranks. `execution_count` is its number in the notebook."""
        self._nested_error = None
        self.publisher.begin()
        self._magics.begin()
        self._kernel.begin(source, _random_state(), self._task_of(source), execution_count=execution_count)
        self._prompts.close()
        self._prompts.enter_context(prompts_answered(self.publisher.share))

    def _try_to_begin(self, source: str) -> dict[str, Any]:
        """Begins a cell. If this fails, the returned arguments make IPython show the error and not run the cell."""
        try:
            with self._kernel.uninterruptible():
                self._nesting_depth = 0
                self._begin(source, self._shell.execution_count)
        except BaseException:  # noqa: BLE001  # The front end of an async cell would get no reply.
            return {"preprocessing_exc_tuple": sys.exc_info()}
        return {}

    def _task_of(self, source: str) -> asyncio.Task[Any] | None:
        """Returns the asyncio task of an async cell, else None."""
        if "await" not in source and "async" not in source:
            return None
        with suppress(SyntaxError):  # IPython will show it.
            transformed = self._shell.transform_cell(source)
            if self._shell.should_run_async(source, transformed_cell=transformed, preprocessing_exc_tuple=None):
                return asyncio.current_task()
        return None

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a replacement of `run_cell_async` that begins and ends a cell on all ranks, unless it is nested."""

        @functools.wraps(original)
        async def run_cell_async(
            raw_cell: str, store_history: bool = False, silent: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            run = functools.partial(original, raw_cell, store_history, silent, *args, **kwargs)
            is_nested = self._kernel.current is not None
            # Silent requests of a front end run on rank 0 only, and so do cells of subshells, which are threads.
            is_local = silent or not store_history or threading.current_thread() is not threading.main_thread()
            if not is_nested and not is_local and raw_cell.strip():
                result: Any = None
                error: BaseException | None = None
                try:
                    result = await run(**self._try_to_begin(raw_cell))
                except BaseException as raised:
                    error = raised
                    raise
                finally:
                    self._end(result, error)
                return result
            self._nesting_depth += is_nested
            try:
                return await run()
            finally:
                self._nesting_depth -= is_nested

        return run_cell_async

    def _end_first(self, result: Any) -> None:
        """Ends the cell in which the hooks were installed. `result` is None for an async cell that was cancelled."""
        is_nested = result is not None and result.info.raw_cell.rstrip("\n") != self._first_cell
        if self._kernel.current is not None and not is_nested:
            self._unregister()
            self._end(result)

    def _unregister(self) -> None:
        with suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._end_first)

    def _end(self, result: Any, raised: BaseException | None = None) -> None:
        """Ends the cell on all ranks. Without a result, `raised` has ended the cell, or it was cancelled."""
        cell = self._kernel.current
        if cell is None:  # disable_multi_gpu() was called in it.
            return
        with self._kernel.uninterruptible():
            self._prompts.close()
            error = raised or asyncio.CancelledError()
            if result is not None:
                error = result.error_before_exec or result.error_in_exec
            shown = self._kernel.finish(error or self._nested_error)
            self._magics.end(cell)
            if shown is not None and not isinstance(error, MultiGPUError):
                self._fail(result, shown, is_shown=cell.is_shown)
            try:
                self._after_cell()
            except MultiGPUError as failed:
                self._fail(result, failed, is_shown=False)

    def _fail(self, result: Any, error: BaseException, *, is_shown: bool) -> None:
        """Reports an error to the front end as the cell's, so that nbclient and papermill stop. Shows it if needed."""
        if not is_shown:
            self._shell.showtraceback((type(error), error, None))
        if result is not None:
            result.error_in_exec = error

    def _on_error(
        self,
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        tb: TracebackType,
        tb_offset: int | None = None,
    ) -> None:
        """Called by IPython for every exception of a cell, instead of showing it."""
        cell = self._kernel.current
        if cell is None:
            shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
            return
        cell.error = error
        cell.enter("unwinds")
        with self._kernel.uninterruptible():
            # Else it was shown at the end of the nested cell.
            if error is not self._nested_error:
                self._show(cell, error, tb, tb_offset)
        if self._nesting_depth:
            # The outer cell may continue after an error of a nested one.
            self._nested_error, cell.error = error, None
            cell.enter("runs")

    def _show(self, cell: Cell, error: BaseException, tb: TracebackType, tb_offset: int | None) -> None:
        cause = self._cause_of(cell, error) or error
        if isinstance(cause, KeyboardInterrupt | MultiGPUError):
            cause.__suppress_context__ = True  # The context only follows from it.
        frames: TracebackType | None = tb
        if cause is cell.failure_error:
            # Its message has the traceback of the other rank. Of rank 0's, only the frames of cells are shown.
            cell.is_shown, frames, tb_offset = True, _frames_of_cell(tb, self._shell.user_ns), 0
        elif cause is not error:
            frames = None
        elif isinstance(error, self._earlier_handler[0]):
            self._earlier_handler[1](type(error), error, tb, tb_offset)
            return
        self._shell.showtraceback((type(cause), cause, frames), tb_offset=tb_offset)

    def _cause_of(self, cell: Cell, error: BaseException) -> BaseException | None:
        """Returns the error to show if `error` is a consequence of another rank's error or of Stop; else None."""
        if isinstance(error, asyncio.CancelledError):
            return cell.failure_error
        if not names_broken_group(error) or isinstance(error, MultiGPUError):
            return None
        deadline_s = time.monotonic() + _ROOT_CAUSE_LIMIT_S
        while cell.failure_error is None and cell.stop_s is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if cell.failure_error is None and cell.stop_s is not None:
            return KeyboardInterrupt("Stop was pressed.")
        return cell.failure_error


def _random_state() -> dict[str, Any]:
    """Returns the random state, without the device's if the device is unusable: a cell may still save the model."""
    try:
        return read_random_state(device_in_use())
    except RuntimeError as error:
        logger.warning("random states of the devices may differ between ranks: %s", error)
        return read_random_state()


def _frames_of_cell(tb: TracebackType | None, user_ns: Mapping[str, Any]) -> TracebackType | None:
    """Returns the traceback with only the frames of the user's cells."""
    if tb is None:
        return None
    rest = _frames_of_cell(tb.tb_next, user_ns)
    return TracebackType(rest, tb.tb_frame, tb.tb_lasti, tb.tb_lineno) if tb.tb_frame.f_globals is user_ns else rest
