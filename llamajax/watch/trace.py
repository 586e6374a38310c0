"""Records a profiler trace of the devices during some steps, for xprof and Perfetto."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from llamajax.config.run import Config
from llamajax.watch.console import log, say


@contextmanager
def trace(config: Config, start_step: int) -> Iterator[Callable[[int, Any], None]]:
    """Yields a function to call before every step and after the last; it starts and ends the trace of `config.profile`.

    Only process 0 traces: the others do the same work.
    """
    wanted = config.profile.start_step is not None and jax.process_index() == 0
    first = max(config.profile.start_step or 0, start_step + 1)
    after = (config.profile.start_step or 0) + config.profile.num_steps
    running = False

    def end() -> None:
        nonlocal running
        running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # a trace is worth less than the run
            say(f"{config.run_dir}/profile: cannot be written: {str(error).splitlines()[0]}; check the disk")
            return
        log(f"profile    {config.run_dir}/profile, for xprof and https://ui.perfetto.dev")

    def before_step(step: int, state: Any) -> None:
        nonlocal running
        if wanted and first == step < after:
            jax.block_until_ready(state)  # the trace starts and ends between steps
            jax.profiler.start_trace(Path(config.run_dir).expanduser() / "profile", create_perfetto_trace=True)
            running = True
        elif running and (step == after or step > config.train.num_steps):
            jax.block_until_ready(state)
            end()

    try:
        yield before_step
    finally:
        if running:
            end()
