"""Runs a launch: starts the processes of this host, and restarts them as long as that can help."""

import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from llamajax.config.launch import LaunchConfig
from llamajax.config.run import Config
from llamajax.disk import keep_from_others
from llamajax.errors import CAN_HELP, DISK_ERROR, GIVE_UP, EnvironmentMismatchError, UserError
from llamajax.launching.cause import Cause, find_cause
from llamajax.launching.group import Group
from llamajax.launching.hosts import find_hosts
from llamajax.launching.output import Output
from llamajax.launching.program import Program, find_program, newest_step, steps_in
from llamajax.launching.signals import Signals
from llamajax.processes import addresses


def main(config: LaunchConfig, arguments: Sequence[str], *, check: bool) -> int:
    """Starts the program with its `arguments`, or with `check` prints what would be started; returns the exit code."""
    keep_from_others()
    try:
        program = find_program(config, arguments, find_hosts(os.environ))
        if check:
            _tell(program)
            return 0
        return launch(config, program)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"launch: {error.filename or 'a process cannot be started'}: {error.strerror}", file=sys.stderr)
        return DISK_ERROR if error.filename else 4


def launch(config: LaunchConfig, program: Program) -> int:
    """Starts the processes, restarts them after failures that a restart can fix, and returns the exit code."""
    shown, in_a_row = Output(), 0
    newest = _saved_step(program, 0, shown)
    with Signals() as signals:
        while True:
            try:
                cause = _live(program, shown, signals)
            except OSError as error:
                if not in_a_row:
                    raise
                line = f"{error.filename or 'a process'}: cannot be started: {error.strerror}"
                cause = Cause(rank=program.ranks.start, exit_code=DISK_ERROR, lines=(line,))
            if signals.kill:
                shown.say("ended all processes at once, on a second signal")
                return 128 + (signals.stop or 0)
            for line in () if cause is None else cause.lines:
                shown.say(line)
            if cause is None:
                return DISK_ERROR if shown.is_lost else config.stopped_code if _is_unfinished(program) else 0
            is_of_use = cause.exit_code in CAN_HELP and program.run_dir is not None and config.max_restarts > 0
            if signals.stop is not None or not is_of_use or cause.is_left:
                return cause.exit_code
            if (step := _saved_step(program, newest, shown)) > newest:
                in_a_row = 0
            newest = step  # lower after a rollback, and counted from there
            if in_a_row == config.max_restarts:
                shown.say(
                    f"gives up after {in_a_row} restart{'s' if in_a_row > 1 else ''} without a new checkpoint in"
                    f" {program.run_dir} (max_restarts); fix the cause above and run the same command again"
                )
                return GIVE_UP
            in_a_row += 1
            after_s = backoff_s(config, in_a_row)
            shown.say(
                f"restart in {after_s:g} s, from step {step} ({in_a_row} of {config.max_restarts} without a new checkpoint)"
            )
            _record(program, cause, step, after_s, shown)
            until = time.monotonic() + after_s
            while signals.stop is None and (left := until - time.monotonic()) > 0:
                signals.wait(left)
            if signals.stop is not None:
                shown.say(f"stopped by {signals.stop.name} before the restart; nothing was lost")
                return config.stopped_code


def _live(program: Program, shown: Output, signals: Signals) -> Cause | None:
    """Runs the processes once; returns the cause of their end, None if they have done their part."""
    address, bind_address = _meeting_place(program)
    shown.say(f"{_summary(program)}{f'; they meet at {address}' if program.num_processes > 1 else ''}")
    with tempfile.TemporaryDirectory(prefix="llamajax-") as heartbeats:
        group = Group(program.with_config_in(Path(heartbeats)), shown, Path(heartbeats), address, bind_address)
        group.live(signals)
    return find_cause(group.children, program.run_dir)


def _meeting_place(program: Program) -> tuple[str, str | None]:
    """Returns where the processes meet, and where process 0 listens, unless it determines that itself."""
    hosts = program.hosts
    alone = f"{addresses.LOOPBACK}:{addresses.free_port()}" if hosts.count == 1 else hosts.coordinator
    if hosts.own > 0:
        return alone, None
    if program.interface is None:  # on one host loopback, whatever the environment sets for runs on several
        return alone, alone if hosts.count == 1 else os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    host, port = addresses.host_and_port(alone)
    own = addresses.interface_address(program.interface)
    named = addresses.join(own, port)
    if hosts.count > 1 and (found := addresses.own_addresses(host)) and own not in found:
        raise EnvironmentMismatchError(
            f"interface: {program.interface} has {own}, but the other hosts connect to {host}, which is {found[0]} here; set"
            f" JAX_COORDINATOR_ADDRESS={named} on all hosts"
        )
    return named, named


def _summary(program: Program) -> str:
    """Describes what runs here, in a line."""
    several, hosts, ranks = program.num_local > 1, program.hosts, program.ranks
    text = f"{program.num_local} process{'es' if several else ''} of {program.module}"
    if hosts.count > 1:
        text += f" on host {hosts.own} of {hosts.count}"
    if program.num_processes > 1:
        text += (
            f": rank{f's {ranks.start} to {ranks.stop - 1}' if several else f' {ranks.start}'} of {program.num_processes}"
        )
    return f"{text}, {program.devices}{' each' if several else ''}"


def _tell(program: Program) -> None:
    """Prints what would be started."""
    address, bind_address = _meeting_place(program)
    hosts = program.hosts
    print(f"hosts      {hosts.count}, this is host {hosts.own}; from {hosts.told_by}")
    print(f"processes  {_summary(program)}")
    if program.num_processes > 1:
        print(f"meet at    {address}")
        if hosts.own == 0:
            print(f"listens on {bind_address or addresses.bind_address_for(*addresses.host_and_port(address))} (process 0)")
    if program.nccl:
        print(f"NCCL       {' '.join(f'{name}={value}' for name, value in program.nccl.items())}, of this host's domain")
    print(f"command    python -m {shlex.join([program.module, *program.arguments])}")


def backoff_s(config: LaunchConfig, restart: int) -> float:
    """Returns the seconds before a restart; the first restart is number 1."""
    return min(config.backoff_s * 2 ** min(restart - 1, 60), config.max_backoff_s)


def saved_step(program: Program) -> int:
    """Returns the newest step that the run has committed, or that all processes of this host have in the local tier."""
    shared, run_dir, config = newest_step(program.run_dir), program.run_dir, program.config
    if not isinstance(config, Config) or run_dir is None or config.checkpoint.local_dir is None:
        return shared
    try:
        identity = (run_dir / "checkpoints" / ".identity").read_text()
    except OSError:
        return shared
    local = Path(config.checkpoint.local_dir).expanduser() / config.checkpoint.local_name(run_dir.absolute(), identity)
    try:
        return max(shared, *set.intersection(*(steps_in(local / str(rank)) for rank in program.ranks)), 0)
    except OSError:  # the disk is gone
        return shared


def _saved_step(program: Program, newest: int, shown: Output) -> int:
    """Returns `saved_step`, or the known `newest` if the disk fails, which may be why the processes ended."""
    try:
        return saved_step(program)
    except OSError as error:
        shown.say(f"{error.filename or program.run_dir}: cannot be read: {error.strerror}; counted as no new checkpoint")
        return newest


def _is_unfinished(program: Program) -> bool:
    """Returns whether a training run has steps left; the same on every host, whichever got the signal that stopped it."""
    if not isinstance(program.config, Config) or "--dry_run" in program.arguments:
        return False
    try:
        num_steps = program.config.train.num_steps or _num_steps_of_start(program.run_dir)
        return num_steps is None or newest_step(program.run_dir) < num_steps
    except OSError:  # the next start will report it
        return True


def _num_steps_of_start(run_dir: Path | None) -> int | None:
    """Returns the number of steps that the run's last start found for `train.num_epochs`; None if it did not get so far."""
    found = None
    with contextlib.suppress(FileNotFoundError):
        for line in (run_dir / "events.jsonl").read_text(errors="replace").splitlines() if run_dir else ():
            with contextlib.suppress(ValueError, AttributeError):  # torn by a kill
                found = json.loads(line).get("num_steps", found)
    return found


def _record(program: Program, cause: Cause, step: int, after_s: float, shown: Output) -> None:
    """Appends the restart to the run's events, which no process writes now; starts a new line after one torn by a kill."""
    assert program.run_dir is not None
    if program.hosts.own > 0:
        return
    facts = {"time": time.time(), "event": "restart", "step": step, "rank": cause.rank, "exit_code": cause.exit_code}
    line = json.dumps(facts | {"cause": cause.lines[0], "after_s": after_s}, ensure_ascii=False) + "\n"
    try:
        if not program.run_dir.is_dir():  # a run that has not started has no events
            return
        with (program.run_dir / "events.jsonl").open("ab+") as events:
            if events.tell():
                events.seek(-1, os.SEEK_END)
                line = line if events.read() == b"\n" else f"\n{line}"
            events.write(line.encode(errors="replace"))
    except OSError as error:
        shown.say(f"{error.filename or program.run_dir}: the restart is not recorded: {error.strerror}")
