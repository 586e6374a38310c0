"""Executes the work on a Ray cluster: the one that RAY_ADDRESS names, or one started on this machine."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llamajax.errors import EnvironmentMismatchError
from llamajax.preprocessing.executors import LOOK_EVERY_S, MAX_LOST, compute_in_one_thread
from llamajax.preprocessing.work import Tell

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
try:
    import ray
    import ray.exceptions
    import ray.util.queue
except ImportError as error:
    raise EnvironmentMismatchError("--executor: ray is not installed; run pip install 'llamajax[ray]'") from error


class RayExecutor:
    """Runs Ray tasks with one processor each; Ray moves the tasks of lost processes and hosts to others."""

    def __init__(self, num_workers: int) -> None:
        """Joins the cluster, or starts one with `num_workers` processes here; a cluster has as many workers as
        processors."""
        own = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": num_workers, "include_dashboard": False}
        logging.getLogger("ray").setLevel(logging.ERROR)  # hides recommendations about Ray's own settings
        try:
            ray.init(log_to_driver=False, configure_logging=False, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = os.environ.get("RAY_ADDRESS", "this machine")
            reason = " ".join(str(error).split())
            raise EnvironmentMismatchError(f"--executor: no Ray at {where}: {reason}; correct RAY_ADDRESS") from error
        self.num_workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._told = ray.util.queue.Queue(actor_options={"num_cpus": 0})

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        """See `Executor`."""
        return iter(self._results(_call, function, tasks, lambda name, arguments: None))

    def map_telling(self, function: Callable[[Any, Tell], None], tasks: Sequence[Any], tell: Tell) -> None:
        """See `Executor`."""
        self._results(_call_telling, function, tasks, tell)

    def close(self) -> None:
        """See `Executor`."""
        ray.shutdown()

    def _results(self, call: Any, function: Callable[..., Any], tasks: Sequence[Any], tell: Tell) -> list[Any]:
        shared = ray.put(function)  # once for all tasks
        left = iter(range(len(tasks)))
        running: dict[Any, int] = {}
        results: dict[int, Any] = {}
        while True:
            while len(running) < 2 * self.num_workers and (number := next(left, None)) is not None:
                running[call.remote(shared, tasks[number], self._told)] = number
            for name, arguments in self._told.get_nowait_batch(self._told.qsize()):
                tell(name, arguments)
            if not running:
                return [results[number] for number in range(len(tasks))]
            done, _ = ray.wait(list(running), timeout=LOOK_EVERY_S)
            for reference in done:
                number = running.pop(reference)
                try:
                    results[number] = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError as error:
                    reason = " ".join(str(error).split())
                    raise EnvironmentMismatchError(
                        f"--executor: Ray lost a task {MAX_LOST} times: {reason}; run the same command again to continue"
                    ) from error


@ray.remote(num_cpus=1, max_retries=MAX_LOST - 1)
def _call(function: Callable[[Any], Any], task: Any, told: Any) -> Any:
    compute_in_one_thread()
    return function(task)


@ray.remote(num_cpus=1, max_retries=MAX_LOST - 1)
def _call_telling(function: Callable[[Any, Tell], None], task: Any, told: Any) -> None:
    compute_in_one_thread()
    function(task, lambda name, arguments: told.put((name, arguments)))
