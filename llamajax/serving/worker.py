"""The thread that runs the engines, and how requests of the event loop get there and back."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import jax

from llamajax.serving.engine import Engine
from llamajax.serving.sequences import Continuation, Event

News = asyncio.Queue[tuple[int, Event] | None]
"""Events of the continuations of one request, each with the number of its continuation."""


class Worker:
    """Runs engines in a thread of its own, one step of each in turn: programs with collectives must not overtake each
    other."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Prepares a worker for engines on one mesh; `start` starts it."""
        self.failure: BaseException | None = None
        """The error that ended the thread."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called in the thread after such an error."""
        self._engines = engines
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: list[tuple[News, tuple[int, Event] | None]] = []
        self._open: set[News] = set()
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; events are delivered in `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step, and waits for it."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, engine: Engine, works: Sequence[Continuation], news: News) -> None:
        """Adds the continuations of a request to an engine's queue; their events come to `news`, with their numbers.

        None in `news`: no event will follow, because the worker has failed.
        """
        self._open.add(news)
        for number, work in enumerate(works):
            work.tell = partial(self._tell, news, number)
        self._inbox.put(lambda: [engine.submit(work) for work in works])
        if self.failure is not None:
            news.put_nowait(None)

    def forget(self, engine: Engine, works: Sequence[Continuation], news: News) -> None:
        """Ends the continuations of a request that have not ended, and frees their slots."""
        self._open.discard(news)
        self._inbox.put(lambda: [engine.cancel(work) for work in works if not work.is_done])

    def _tell(self, news: News, number: int, event: Event) -> None:
        self._news.append((news, (number, event)))

    def _run(self) -> None:
        try:
            with jax.set_mesh(self._engines[0].mesh):
                while self._take_orders():
                    for engine in self._engines:
                        engine.step()
                    self._deliver()
        except BaseException as error:
            self.failure = error
            self._news += [(news, None) for news in list(self._open)]
            self._deliver()
            self.on_failure()

    def _take_orders(self) -> bool:
        """Does what was asked for meanwhile, or waits for it where there is nothing else to do; returns whether to go on."""
        while True:
            try:
                order = self._inbox.get(block=not any(engine.is_busy for engine in self._engines))
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _deliver(self) -> None:
        news, self._news = self._news, []
        if news and self._loop is not None:
            with suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(_put_all, news)


def _put_all(news: Sequence[tuple[News, tuple[int, Event] | None]]) -> None:
    for target, item in news:
        target.put_nowait(item)
