"""One life of the processes of a host, looked at from within the launcher."""

import signal
import textwrap
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamajax.config.generate import GenerateConfig
from llamajax.launching.cause import find_cause
from llamajax.launching.child import Child
from llamajax.launching.group import Group
from llamajax.launching.hosts import Hosts
from llamajax.launching.output import Output
from llamajax.launching.program import Program
from llamajax.launching.signals import Signals
from tests import runs
from tests.launching.programs import HEAD
from tests.tiny import tiny_config


def group_of(tmp_path, monkeypatch, body: str, num_local: int = 1) -> Group:
    """Processes of a training run, without a launcher around them."""
    (tmp_path / "program.py").write_text(HEAD + textwrap.dedent(body))
    monkeypatch.setenv("PYTHONPATH", f"{runs.ROOT}:{tmp_path}")
    monkeypatch.setenv("LLAMAJAX_PROCESS_ID", "0")
    program = Program(
        module="program", arguments=(), config=tiny_config(str(tmp_path / "run")), hosts=Hosts(), num_local=num_local,
        gpus=0, interface=None,
    )  # fmt: skip
    beats = tmp_path / "beats"
    beats.mkdir()
    return Group(program, Output(), beats, "127.0.0.1:1", None)


def test_a_process_that_cannot_be_killed_is_given_up_and_told(tmp_path, monkeypatch, capfd):
    """As one whose device's driver hangs: the system does not end it, whoever asks."""
    group = group_of(tmp_path, monkeypatch, "if rank == 0: sys.exit(70)\ntime.sleep(600)", num_local=2)
    left, kill = group.children[1], Child.kill
    monkeypatch.setattr(Child, "kill", lambda child: setattr(child, "killed", child.killed or time.monotonic()))
    monkeypatch.setattr("llamajax.launching.group._DIES_S", 0.5)
    monkeypatch.setattr("llamajax.launching.group._GIVEN_UP_S", 1.0)
    try:
        group.live(cast("Signals", SimpleNamespace(stop=None, kill=False, wait=time.sleep)))
        cause = find_cause(group.children, None)
    finally:
        kill(left)
        left.process.wait()
    assert cause is not None
    assert (cause.exit_code, cause.is_left) == (70, True)
    told = "cannot be killed: the system waits for a device or a disk"
    assert cause.lines[1] == f"process 1 also {told}"
    assert capfd.readouterr().err == f"launch     process 1 (pid {left.process.pid}) {told}\n"


@pytest.mark.parametrize("pause_s", [0.1, pytest.param(3.0, marks=pytest.mark.slow)])
def test_time_in_which_all_stood_still_is_nobodys_fault(tmp_path, monkeypatch, pause_s):
    """A process is past its limit when all go on, and says at once that it has another; but not one that only is late."""
    body = """
    beat = heartbeat.of_this_process()
    beat.tell(phase="step", deadline=time.monotonic() + 0.5)
    (here / "beats").joinpath("told").touch()
    while not (here / "resumed").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    beat.tell(phase="step", deadline=time.monotonic() + 60)
    time.sleep(1)
    """
    group = group_of(tmp_path, monkeypatch, body)

    def wait(seconds: float) -> None:
        told, resumed = tmp_path / "beats" / "told", tmp_path / "resumed"
        time.sleep(seconds)
        if told.exists() and not resumed.exists():
            time.sleep(max(pause_s, 1.5) if pause_s > 1 else 0)
            if pause_s > 1 or group.children[0].stuck:
                resumed.touch()

    group.live(cast("Signals", SimpleNamespace(stop=None, kill=False, wait=wait)))
    assert bool(group.children[0].stuck) == (pause_s < 1)


@pytest.mark.parametrize(
    ("config", "code"), [(GenerateConfig(model="x", prompt=("a",)), -signal.SIGTERM), (tiny_config(), 0)]
)
def test_what_saves_nothing_and_is_stopped_has_not_succeeded(tmp_path, monkeypatch, config, code):
    """A run that was not yet listening has lost nothing."""
    says = "pathlib.Path(__file__).with_suffix('.there').touch()"
    (tmp_path / "waits.py").write_text(f"import pathlib, time; {says}; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = Program(module="waits", arguments=(), config=config, hosts=Hosts(), num_local=1, gpus=0, interface=None)
    signals: Any = SimpleNamespace(stop=None, kill=False)

    def wait(seconds):
        time.sleep(seconds)
        if (tmp_path / "waits.there").exists():
            signals.stop = signal.SIGTERM

    signals.wait = wait
    group = Group(program, Output(), tmp_path, "127.0.0.1:1", None)
    group.live(signals)
    (child,) = group.children
    assert child.code == code
