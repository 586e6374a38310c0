"""Processes that a test starts end with the test."""

import pytest

from tests.processes.joined import STARTED


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test():
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()
