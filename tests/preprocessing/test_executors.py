"""Results come in order, errors end the work, and processes that are lost are replaced, but not for ever."""

import os
import signal
import time

import pytest

from llamajax.errors import DataError, EnvironmentMismatchError
from llamajax.preprocessing import executors
from llamajax.preprocessing.executors import LocalExecutor


@pytest.fixture
def executor():
    executor = LocalExecutor(2)
    yield executor
    executor.close()


def slow_square(number):
    time.sleep(0.02 * (number % 3))
    return number * number


def test_results_are_in_the_order_of_the_tasks(executor):
    assert list(executor.map(slow_square, range(20))) == [number * number for number in range(20)]
    assert list(executor.map(slow_square, [])) == []


def say(task, tell):
    for count in range(3):
        tell("advance", (task, count, os.getpid()))


def test_what_workers_tell_arrives(executor):
    told = []
    executor.map_telling(say, range(10), lambda name, arguments: told.append((name, arguments)))
    assert sorted((name, *arguments[:2]) for name, arguments in told) == [
        ("advance", task, count) for task in range(10) for count in range(3)
    ]
    pids = {arguments[2] for _, arguments in told}
    assert len(pids) <= 2
    assert os.getpid() not in pids


def fail_at_three(number):
    if number == 3:
        raise DataError("a.jsonl:3: is not JSON; correct it")
    time.sleep(0.1 if number < 3 else 60)


def test_an_error_ends_the_work_at_once(executor):
    started = time.monotonic()
    with pytest.raises(DataError, match=r"^a.jsonl:3: is not JSON; correct it$"):
        list(executor.map(fail_at_three, range(20)))
    assert time.monotonic() - started < 50
    assert list(executor.map(slow_square, range(3))) == [0, 1, 4], "there is work again after an error"


def die_once(path):
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name


def test_a_process_that_is_killed_is_replaced(executor, tmp_path):
    paths = [tmp_path / str(number) for number in range(4)]
    paths[0].touch()
    paths[2].touch()
    assert list(executor.map(die_once, paths)) == ["0", "1", "2", "3"]


def die(task, tell):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_those_that_are_killed_again_and_again_are_not(executor):
    told = []
    with pytest.raises(
        EnvironmentMismatchError, match=r"^--workers: 3 times in a row one of 2 processes was killed, perhaps"
    ):
        executor.map_telling(die, range(4), lambda name, arguments: told.append((name, *arguments)))
    lost = "lost       a process was killed; its work continues after its last shard"
    assert told == [("log", lost)] * (executors.MAX_LOST - 1)


def environment_of_a_worker(_):
    return os.environ.get("TOKENIZERS_PARALLELISM"), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_is_one_thread_and_deaf_to_ctrl_c(executor):
    assert set(executor.map(environment_of_a_worker, range(4))) == {("false", True)}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
