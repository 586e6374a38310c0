"""When the launcher starts a run again, and what it takes for progress."""

import errno
import os

from llamajax.config.launch import LaunchConfig
from llamajax.config.training import CheckpointConfig
from llamajax.launching.cause import Cause
from llamajax.launching.hosts import Hosts
from llamajax.launching.output import Output
from llamajax.launching.program import Program, newest_step
from llamajax.launching.run import _is_unfinished, _record, _saved_step, backoff_s, saved_step
from tests.tiny import tiny_config


def test_backoff_doubles_up_to_its_cap():
    config = LaunchConfig(backoff_s=1.0, max_backoff_s=60.0)
    assert [backoff_s(config, restart) for restart in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff_s(config, 10**6) == 60


def test_only_committed_steps_count(tmp_path):
    assert newest_step(None) == newest_step(tmp_path) == 0
    for name in ("5", "12", "30.orbax-checkpoint-tmp", "40.damaged", "x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_step(tmp_path) == 12


def test_steps_of_the_local_tier_count_where_every_process_of_the_host_has_them(tmp_path):
    checkpoint = CheckpointConfig(local_dir=str(tmp_path / "local"), local_every=5)
    config = tiny_config(str(tmp_path / "run"), checkpoint=checkpoint)
    program = Program(
        module="llamajax.train", arguments=(), config=config, hosts=Hosts(), num_local=2, gpus=0, interface=None
    )
    assert saved_step(program) == 0
    (tmp_path / "run/checkpoints/10").mkdir(parents=True)
    assert saved_step(program) == 10
    (tmp_path / "run/checkpoints/.identity").write_text("this run")
    for name in ("0/15", "0/20", "0/25.saving", "1/15", "1/25"):
        (tmp_path / "local" / checkpoint.local_name(tmp_path / "run", "this run") / name).mkdir(parents=True)
        (tmp_path / "local" / checkpoint.local_name(tmp_path / "run", "another") / name / "30").mkdir(parents=True)
    assert saved_step(program) == 15


def test_a_disk_that_fails_is_no_end_of_the_launcher(tmp_path, monkeypatch, capfd):
    """It is what the processes may have ended by."""
    config = tiny_config(
        str(tmp_path / "run"), checkpoint=CheckpointConfig(local_dir=str(tmp_path / "local"), local_every=5)
    )
    program = Program(
        module="llamajax.train", arguments=(), config=config, hosts=Hosts(), num_local=2, gpus=0, interface=None
    )
    (tmp_path / "run/checkpoints/10").mkdir(parents=True)
    (tmp_path / "run/checkpoints/.identity").write_text("this run")
    listdir, failing = os.listdir, str(tmp_path / "local")

    def fails(path):
        if str(path).startswith(failing):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", fails)
    assert saved_step(program) == 10, "what a dead local disk held is lost"
    failing = str(tmp_path / "run")
    assert _saved_step(program, 7, Output()) == 7
    expected = f"launch     {tmp_path}/run/checkpoints: cannot be read: Input/output error; counted as no new checkpoint\n"
    assert capfd.readouterr().err == expected
    assert _is_unfinished(program)
    stat = os.stat

    def fails_too(path, **how):
        if str(path).startswith(failing):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", fails_too)
    _record(program, Cause(rank=0, exit_code=74, lines=("it ended",)), 7, 1.0, Output())
    assert capfd.readouterr().err == f"launch     {tmp_path}/run: the restart is not recorded: Input/output error\n"
