"""Who does the work: processes of this machine, or those of a Ray cluster. What they make is the same, to the last byte."""

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
"""Times that a process may be lost one after another, without a task that was finished in between."""
LOOK_EVERY_S = 0.2
"""How often what workers tell is passed on."""

_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends
_told: tuple[Connection, Lock]
"""In a local worker: where it tells how it gets on, and what one of all must hold while it does."""


class Executor(Protocol):
    """Calls functions with tasks, some of them at a time."""

    num_workers: int
    """Tasks that are worked on at a time."""

    def map(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        """The results, in the order of the tasks.

        Raises:
            EnvironmentMismatchError: workers are lost again and again.
            Exception: the first that a call raised; what others have begun is broken off.
        """
        ...

    def map_telling(self, function: Callable[[Any, Tell], None], tasks: Sequence[Any], tell: Tell) -> None:
        """As `map`, for what gives no result but tells how it gets on: `tell` is called in this process."""
        ...

    def close(self) -> None:
        """Ends the workers."""
        ...


class LocalExecutor:
    """Processes of this machine, which end with this one. Each computes in one thread."""

    def __init__(self, num_workers: int) -> None:
        """Starts them when there is something to do."""
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
        """The results in order, each as soon as those before it are there."""
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
                        f"--workers: {MAX_LOST} times in a row one of {self.num_workers} processes was killed, perhaps for"
                        " want of memory; take fewer, and run the same command again, which goes on"
                    ) from None
                tell("log", ("lost       a process was killed; what it had begun goes on behind its last shard",))
            except BaseException:
                self.close()
                raise

    def _work_off(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], results: dict[int, Any], first: int, tell: Tell
    ) -> Iterator[None]:
        """Puts the results of the tasks from the first on that have none yet into `results`, as they come."""
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
    """A pool of processes, and what they tell. When one is killed, all are replaced: it may have held a lock of theirs."""

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        reader, self._writer = context.Pipe(duplex=False)
        self._lock = context.Lock()
        self._told: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        # In a thread of its own, which hangs without harm when a process is killed in the middle of a message.
        threading.Thread(target=_read_on, args=(reader, self._told), name="told by workers", daemon=True).start()
        begin = functools.partial(_begin, os.getpid(), self._writer, self._lock)
        self._pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=begin)

    def submit(self, function: Callable[[Any], Any], task: Any) -> Future[Any]:
        """Has a process call the function; one is started if there may be more."""
        with _deaf_to_ctrl_c():
            return self._pool.submit(function, task)

    def pass_on(self, tell: Tell, *, all_of_it: bool) -> None:
        """Calls `tell` with what has been told since; when nobody is at work, with `all_of_it`."""
        if all_of_it:
            with self._lock:
                self._writer.send(("", ()))
        while all_of_it or not self._told.empty():
            name, arguments = self._told.get()
            if not name:
                return
            tell(name, arguments)

    def kill(self) -> None:
        """Ends the processes, whatever they are at."""
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        self._writer.close()  # the last one, so that the thread comes to the end


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Within, no Ctrl-C breaks off what is done, and processes that are started begin, and stay, without hearing it: it
    reaches all processes of a terminal, and this one ends them. It is heard afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))  # another thread may be told of it
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
            except (EOFError, OSError):  # also after half a message
                return


def _begin(parent: int, writer: Connection, lock: Lock) -> None:
    """What a local worker does first."""
    global _told
    _told = writer, lock
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(128 + signal.SIGKILL)
    compute_in_one_thread()


def compute_in_one_thread() -> None:
    """Keeps this process's libraries to one thread, since other processes have the other processors."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pyarrow.set_cpu_count(1)


def _tell_of_worker(function: Callable[[Any, Tell], None], task: Any) -> None:
    writer, lock = _told

    def tell(name: str, arguments: tuple[Any, ...]) -> None:
        with lock:
            writer.send((name, arguments))

    function(task, tell)
