"""Tests of llamajax.processes.exit."""

import os
import signal
import subprocess
import sys

import jax
import pytest

from llamajax.processes.exit import exit_code

COMPILING = """
import threading, time
import jax, jax.numpy as jnp
from llamajax.processes.exit import end_with

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
    program = f"from llamajax.processes.exit import end_process; print('the end'); end_process({code}, distributed=False)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        outcome = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered, check=False)
    assert (outcome.returncode, outcome.stderr) == (code or 74, b"")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("INTERNAL: Failed to synchronize: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", 69),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error", 69),
        ("UNAVAILABLE: the coordinator is gone", 69),
        ("INVALID_ARGUMENT: Executable expected shape f32[2]", 70),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes", 5),
    ],
)
def test_what_fails_outside_the_program_may_be_tried_again(capsys, message, code):
    def work():
        raise jax.errors.JaxRuntimeError(message)

    assert exit_code(work, memory_remedy="less", disk="x", disk_remedy="y") == code
    assert message in capsys.readouterr().err


def test_the_same_words_of_a_program_are_a_defect(capsys):
    def work():
        raise RuntimeError("INTERNAL: not jax's")

    assert exit_code(work, memory_remedy="less", disk="x", disk_remedy="y") == 70
    assert "Traceback" in capsys.readouterr().err
