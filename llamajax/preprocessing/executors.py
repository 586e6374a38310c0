"""Executes the work in processes of this machine or of a Ray cluster. The results are the same, to the last byte."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from typing import Any, Protocol

import pyarrow

from llamajax.errors import EnvironmentMismatchError
from llamajax.preprocessing.work import Tell

MAX_LOST = 3
"""Maximum number of times that a process may be lost in a row, with no task finished in between."""
LOOK_EVERY_S = 0.2
"""Interval in seconds for forwarding the messages of workers."""

_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends
_told: tuple[Connection, Lock]
"""Pipe for progress messages in a local worker, and the lock that it holds while it writes to the pipe."""


class Executor(Protocol):
    """Interface that calls functions with tasks, several at a time."""

    num_workers: int
    """Number of tasks that run at a time."""

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        """Yields the results in the order of the tasks.

        Raises:
            EnvironmentMismatchError: workers are lost repeatedly.
            Exception: the first exception of a call; other calls in progress are cancelled.
        """
        ...

    def map_telling(self, function: Callable[[Any, Tell], None], tasks: Sequence[Any], tell: Tell) -> None:
        """Calls functions that return nothing but report progress: `tell` is called in this process. See `map`."""
        ...

    def close(self) -> None:
        """Ends the workers."""
        ...


class LocalExecutor:
    """Processes of this machine, which end with this process. Each computes in one thread."""

    def __init__(self, num_workers: int) -> None:
        """Creates the executor; processes start when there is work."""
        self.num_workers = num_workers
        self._workers: _Workers | None = None

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        """See `Executor`."""
        return self._results(function, tasks, lambda name, arguments: None)

    def map_telling(self, function: Callable[[Any, Tell], None], tasks: Sequence[Any], tell: Tell) -> None:
        """See `Executor`."""
        for _ in self._results(functools.partial(_tell_of_worker, function), tasks, tell):
            pass

    def close(self) -> None:
        """See `Executor`."""
        if self._workers is not None:
            self._workers.kill()
            self._workers = None

    def _results(self, function: Callable[[Any], Any], tasks: Sequence[Any], tell: Tell) -> Iterator[Any]:
        """Yields the results in order, each as soon as those before it are available."""
        results: dict[int, Any] = {}
        num_given = num_lost = 0
        while num_given < len(tasks):
            try:
                for _ in self._work_off(function, tasks, results, num_given, tell):
                    num_lost = 0
                    while num_given in results:
                        yield results.pop(num_given)
                        num_given += 1
            except BrokenProcessPool:
                self.close()
                num_lost += 1
                if num_lost == MAX_LOST:
                    raise EnvironmentMismatchError(
                        f"--workers: {MAX_LOST} times in a row one of {self.num_workers} processes was killed, perhaps"
                        " because memory ran out; use fewer, and run the same command again to continue"
                    ) from None
                tell("log", ("lost       a process was killed; its work continues after its last shard",))
            except BaseException:
                self.close()
                raise

    def _work_off(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], results: dict[int, Any], first: int, tell: Tell
    ) -> Iterator[None]:
        """Adds the results of the unfinished tasks, starting at `first`, to `results` as they arrive."""
        if self._workers is None:
            self._workers = _Workers(self.num_workers)
        left = iter([number for number in range(first, len(tasks)) if number not in results])
        running: dict[Future[Any], int] = {}
        while True:
            while len(running) < 2 * self.num_workers and (number := next(left, None)) is not None:
                running[self._workers.submit(function, tasks[number])] = number
            self._workers.pass_on(tell, all_of_it=not running)
            if not running:
                return
            done, _ = wait(running, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
            for future in done:
                results[running.pop(future)] = future.result()
                yield


class _Workers:
    """A pool of processes, and their messages. When one is killed, all are replaced: it may have held one of their locks."""

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        reader, self._writer = context.Pipe(duplex=False)
        self._lock = context.Lock()
        self._told: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        # Reads in its own thread, which hangs without harm when a process is killed in the middle of a message.
        threading.Thread(target=_read_on, args=(reader, self._told), name="told by workers", daemon=True).start()
        begin = functools.partial(_begin, os.getpid(), self._writer, self._lock)
        self._pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=begin)

    def submit(self, function: Callable[[Any], Any], task: Any) -> Future[Any]:
        """Makes a process call the function; starts one if the pool is not full."""
        with _deaf_to_ctrl_c():
            return self._pool.submit(function, task)

    def pass_on(self, tell: Tell, *, all_of_it: bool) -> None:
        """Calls `tell` with the new messages; with `all_of_it`, when no worker is busy, with all of them."""
        if all_of_it:
            with self._lock:
                self._writer.send(("", ()))
        while all_of_it or not self._told.empty():
            name, arguments = self._told.get()
            if not name:
                return
            tell(name, arguments)

    def kill(self) -> None:
        """Kills the processes, whatever they do."""
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        self._writer.close()  # the last writer, so that the thread ends


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Protects the work inside from Ctrl-C, and starts processes that ignore Ctrl-C from the beginning.

    Ctrl-C reaches all processes of a terminal, and this process ends the others. It is handled when the context ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))  # another thread may receive it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _read_on(reader: Connection, into: "queue.SimpleQueue[Any]") -> None:
    with reader:
        while True:
            try:
                into.put(reader.recv())
            except (EOFError, OSError):  # even after half a message
                return


def _begin(parent: int, writer: Connection, lock: Lock) -> None:
    """Initializes a local worker."""
    global _told
    _told = writer, lock
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(128 + signal.SIGKILL)
    compute_in_one_thread()


def compute_in_one_thread() -> None:
    """Limits this process's libraries to one thread, because other processes use the other processors."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pyarrow.set_cpu_count(1)


def _tell_of_worker(function: Callable[[Any, Tell], None], task: Any) -> None:
    writer, lock = _told

    def tell(name: str, arguments: tuple[Any, ...]) -> None:
        with lock:
            writer.send((name, arguments))

    function(task, tell)
