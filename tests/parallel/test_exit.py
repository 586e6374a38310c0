"""Tests of llamajax.exit."""

import os
import signal
import subprocess
import sys

import pytest

COMPILING = """
import threading, time
import jax, jax.numpy as jnp
from llamajax.parallel.exit import end_with

jax.config.update("jax_platforms", "cpu")

def deep(x):
    for i in range(300):
        x = jnp.sin(x) @ x + i
    return x

def work():
    lowered = jax.jit(deep).lower(jnp.ones((64, 64)))
    threading.Thread(target=lowered.compile, daemon=True).start()
    try:
        print("compiling", flush=True)
        while True:  # a longer wait may begin just after the signal, and sleep through it
            time.sleep(0.1)
    finally:
        print("cleaned up", flush=True)

end_with(work)
"""


def test_sigterm_while_xla_compiles_cleans_up_and_ends_with_its_code():
    process = subprocess.Popen([sys.executable, "-c", COMPILING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    process.terminate()
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (128 + signal.SIGTERM, "cleaned up\n", "")


@pytest.mark.parametrize("code", [0, 3])
def test_output_that_cannot_be_written_is_a_matter_of_the_disk(code):
    program = f"from llamajax.parallel.exit import end_process; print('the end'); end_process({code}, distributed=False)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        outcome = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered, check=False)
    assert (outcome.returncode, outcome.stderr) == (code or 74, b"")
