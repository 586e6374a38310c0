"""The launcher with real processes, of a few lines each: how they end, and when they start again."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from llamajax.config.file import dump_config, load_config
from llamajax.errors import EnvironmentMismatchError
from llamajax.launching.hosts import Hosts
from llamajax.launching.program import Program
from llamajax.launching.run import _meeting_place
from llamajax.processes import addresses
from tests import runs
from tests.launching.programs import Launch, runs_still, seconds_until_gone
from tests.tiny import tiny_config

WAIT = """
def stop(*_):
    with (here / f"heard.{rank}").open("a") as file:
        file.write("x")
    if END:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
(here / f"waits.{rank}").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_lines_of_all_ranks_come_whole_and_told_apart(tmp_path):
    """Also those that a pipe does not hold, and one without an end."""
    body = """
    for number in range(200):
        print(f"{rank} " + "x" * 1000 * (number % 50), flush=number % 7 == 0)
    print("error", rank, file=sys.stderr)
    print(rank, "the end", end="")
    """
    launch = Launch(tmp_path, body, num_processes=4)
    output, errors = launch.process.communicate(timeout=120)
    assert launch.process.returncode == 0
    for rank in range(4):
        prefix = f"[{rank}] " if rank else ""
        printed = [*(f"{rank} {'x' * 1000 * (number % 50)}" for number in range(200)), f"{rank} the end"]
        assert [line for line in output.splitlines() if line.startswith(f"{prefix}{rank} ")] == [prefix + x for x in printed]
        assert f"{prefix}error {rank}" in errors.splitlines()


@pytest.mark.parametrize("lost", ["stdout", pytest.param("stderr", marks=pytest.mark.slow)])
def test_a_reader_that_leaves_ends_nobody_and_takes_no_other_line(tmp_path, lost):
    """More is printed than a pipe holds: who waited for a reader would never end."""
    body = """
    while not (here / "left").exists():
        time.sleep(0.01)
    for stream in (sys.stdout, sys.stderr):
        for number in range(100):
            print("x" * 1000, file=stream)
        print(rank, "the end", file=stream)
    (here / f"ended.{rank}").touch()
    """
    launch = Launch(tmp_path, body)
    gone, left = launch.process.stdout, launch.process.stderr
    if lost == "stderr":
        gone, left = left, gone
    assert gone is not None
    assert left is not None
    gone.close()
    (tmp_path / "left").touch()
    with left:
        lines = left.read().splitlines()
    assert launch.process.wait(timeout=120) == 74
    assert all((tmp_path / f"ended.{rank}").exists() for rank in range(2))
    assert {"0 the end", "[1] 1 the end"} <= set(lines)


@pytest.mark.slow
def test_a_commit_is_not_cut_short_by_anothers_end(tmp_path):
    body = """
    beat = heartbeat.of_this_process()
    if rank == 0:
        beat.tell(commits=True)
        (here / "commits").touch()
        time.sleep(4)
        (here / "committed").touch()
        beat.tell(commits=False)
        time.sleep(600)
    while not (here / "commits").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    launch = Launch(tmp_path, body, "--max_restarts", "0")
    _, lines = launch.end(75)
    assert lines[-1] == "process 0 was ended by the launcher, because of process 1"
    assert (tmp_path / "committed").exists()


def test_who_edits_the_configuration_does_not_change_the_run_that_is_started_again(tmp_path):
    body = """
    from llamajax.config.file import dump_config, load_config

    with (here / f"read.{rank}").open("a") as read:
        print(dump_config(load_config(sys.argv[sys.argv.index("--config") + 1])), file=read)
    if life == 1:
        while not (here / "edited").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    launch = Launch(tmp_path, body, num_processes=1)
    launch.wait_for_file("read.0")
    before = dump_config(load_config(launch.config))
    launch.config.write_text("{")
    (tmp_path / "edited").touch()
    launch.end(0)
    assert (tmp_path / "read.0").read_text() == f"{before}\n" * 2


def test_who_is_killed_ends_all_with_what_they_started_and_is_named(tmp_path):
    body = """
    child = subprocess.Popen(["sleep", "600"])
    (here / f"child.{rank}.new").write_text(str(child.pid))
    (here / f"child.{rank}.new").rename(here / f"child.{rank}")
    time.sleep(600)
    """
    launch = Launch(tmp_path, body, "--max_restarts", "0")
    for rank in range(2):
        launch.wait_for_file(f"child.{rank}")
    (killed,), (other,) = launch.pids(1), launch.pids(0)
    grandchildren = [int((tmp_path / f"child.{rank}").read_text()) for rank in range(2)]
    assert all(map(runs_still, grandchildren))
    os.kill(killed, signal.SIGKILL)
    assert seconds_until_gone(killed, other, *grandchildren) < 20  # two, on a machine that is not busy
    _, lines = launch.end(75)
    assert lines == [
        f"process 1 (pid {killed}) was ended by SIGKILL, by a user or because memory ran out",
        "process 0 was ended by the launcher, because of process 1",
    ]


def test_a_failure_that_a_new_start_cannot_help_is_passed_on(tmp_path):
    """The first cause comes first, whoever ended because of it and however fast."""
    body = """
    if rank == 0:
        sys.exit(3)
    while not (here / "lives.0").exists():
        time.sleep(0.01)
    heartbeat.of_this_process().tell(ended_by=0)
    sys.exit(3)
    """
    launch = Launch(tmp_path, body)
    _, lines = launch.end(3)
    (first,) = launch.pids(0)
    assert lines == [f"process 0 (pid {first}) ended with exit code 3, data", "process 1 ended because of process 0"]


@pytest.mark.parametrize("others", [pytest.param("are ended", marks=pytest.mark.slow), "end by themselves"])
def test_a_stuck_process_is_named_and_not_those_that_wait_for_it(tmp_path, others):
    """It holds Python's lock, and its stacks are written all the same; the other's limit comes first."""
    body = f"""
    import faulthandler
    beat = heartbeat.of_this_process()
    while not all((here / f"lives.{{number}}").exists() for number in range(2)):
        time.sleep(0.01)
    limit = time.monotonic() + 0.5
    if rank == 1:
        (here / "run" / "stacks").mkdir()
        faulthandler.enable(open(here / "run" / "stacks" / "20260101T000000.1.txt", "w"))
        beat.tell(phase="step", doing="loading a batch", step=7, deadline=limit + 0.3)
        hold_python()
    beat.tell(phase="step", doing=heartbeat.WAITING, step=7, deadline=limit)
    time.sleep(1)
    if {others == "end by themselves"}:
        sys.exit(75)
    time.sleep(600)
    """
    launch = Launch(tmp_path, body, "--max_restarts", "0")
    _, lines = launch.end(75)
    (stuck,) = launch.pids(1)
    stacks = tmp_path / "run" / "stacks" / "20260101T000000.1.txt"
    assert lines[0] == (f"process 1 (pid {stuck}) was stuck: loading a batch, in phase step after step 7; stacks: {stacks}")
    expected = {"are ended": "was ended by the launcher, because of", "end by themselves": "waited for"}[others]
    assert lines[1].startswith(f"process 0 {expected} process 1")
    assert "hold_python" in stacks.read_text()


@pytest.mark.slow
def test_a_stopped_process_is_the_cause_of_what_others_say_about_it(tmp_path):
    body = """
    beat = heartbeat.of_this_process()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while heartbeat.read(os.environ[heartbeat.VARIABLE], 1) is None:
        time.sleep(0.01)
    time.sleep(0.5)
    beat.tell(ended_by=1)
    sys.exit(75)
    """
    launch = Launch(tmp_path, body, "--max_restarts", "0")
    _, lines = launch.end(75)
    (stopped,) = launch.pids(1)
    assert lines == [
        f"process 1 (pid {stopped}) was stuck: stopped by a signal",
        "process 0 ended because of process 1",
    ]


@pytest.mark.slow
def test_a_process_that_never_says_anything_is_stuck(tmp_path):
    launch = Launch(tmp_path, WAIT, "--max_restarts", "0", program=["--watchdog.start_s", "1"], num_processes=1)
    _, errors = launch.process.communicate(timeout=120)
    assert launch.process.returncode == 75
    assert "was stuck: it has not reported what it does" in errors


def test_without_progress_it_gives_up_and_says_so(tmp_path):
    launch = Launch(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "--max_restarts", "2", num_processes=1)
    _, lines = launch.end(93)
    waits = [line for line in lines if line.startswith("restart")]
    told = "restart in {} s, from step 0 ({} of 2 without a new checkpoint)"
    assert waits == [told.format(0.1, 1), told.format(0.2, 2)]
    assert lines[-1].startswith(f"gives up after 2 restarts without a new checkpoint in {tmp_path / 'run'} (max_restarts)")
    assert len(launch.pids(0)) == 3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    facts = [(event["event"], event["step"], event["rank"], event["exit_code"], event["after_s"]) for event in events]
    assert facts == [("restart", 0, 0, 75, 0.1), ("restart", 0, 0, 75, 0.2)]
    assert (
        events[0]["cause"]
        == f"process 0 (pid {launch.pids(0)[0]}) was ended by SIGKILL, by a user or because memory ran out"
    )


@pytest.mark.slow
def test_with_progress_it_goes_on_as_long_as_it_takes(tmp_path):
    """A line that a kill tore in the run's events stays apart."""
    body = """
    if life == 5:
        sys.exit(0)
    commit(10 * life)
    with (here / "run" / "events.jsonl").open("a") as file:
        file.write('{"torn')
    sys.exit(74)
    """
    launch = Launch(tmp_path, body, "--max_restarts", "1", num_processes=1)
    launch.end(0)
    records = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert records[::2] == ['{"torn'] * 4
    assert [json.loads(record)["step"] for record in records[1::2]] == [10, 20, 30, 40]
    assert {json.loads(record)["exit_code"] for record in records[1::2]} == {74}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_request_to_stop_is_passed_on_once_and_ends_it(tmp_path, number):
    launch = Launch(tmp_path, WAIT.replace("END", "True"))
    for rank in range(2):
        launch.wait_for_file(f"waits.{rank}")
    for _ in range(3):
        launch.process.send_signal(number)
        time.sleep(0.05)
    assert launch.end(0) == ([], [])
    assert [(tmp_path / f"heard.{rank}").read_text() for rank in range(2)] == ["x", "x"]
    assert [len(launch.pids(rank)) for rank in range(2)] == [1, 1]


@pytest.mark.slow
def test_a_second_request_kills(tmp_path):
    launch = Launch(tmp_path, WAIT.replace("END", "False"))
    for rank in range(2):
        launch.wait_for_file(f"waits.{rank}")
    launch.process.terminate()
    for rank in range(2):
        launch.wait_for_file(f"heard.{rank}")
    time.sleep(2.1)
    launch.process.terminate()
    assert launch.end(128 + signal.SIGTERM)[1] == ["ended all processes at once, on a second signal"]


@pytest.mark.slow
def test_a_request_to_stop_is_heard_before_processes_hear_and_between_lives(tmp_path):
    launch = Launch(tmp_path, "(here / 'waits').touch(); time.sleep(600)", "--stopped_code", "75", num_processes=1)
    launch.wait_for_file("waits")
    launch.process.terminate()
    launch.end(75)
    (tmp_path / "again").mkdir()
    launch = Launch(tmp_path / "again", "sys.exit(75)", "--backoff_s", "600", "--max_backoff_s", "600")
    launch.wait_for((tmp_path / "again" / "run" / "events.jsonl").exists)
    launch.process.send_signal(signal.SIGINT)
    _, lines = launch.end(0)
    assert lines[-1] == "stopped by SIGINT before the restart; nothing was lost"


@pytest.mark.slow
def test_an_interrupt_before_processes_hear_shows_no_traceback(tmp_path):
    launch = Launch(tmp_path, "(here / f'waits.{rank}').touch(); time.sleep(600)")
    for rank in range(2):
        launch.wait_for_file(f"waits.{rank}")
    launch.process.send_signal(signal.SIGINT)
    _, errors = launch.process.communicate(timeout=120)
    assert launch.process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.slow
def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    launch = Launch(tmp_path, WAIT.replace("END", "False"))
    for rank in range(2):
        launch.wait_for_file(f"waits.{rank}")
    launch.process.kill()
    assert seconds_until_gone(*launch.pids(0), *launch.pids(1)) < 20
    launch.process.communicate()


def test_a_mistake_is_told_once_and_nothing_is_started(tmp_path):
    launch = Launch(tmp_path, WAIT, program=["--train.num_steps", "0", "--model.num_layer", "3"])
    output, errors = launch.process.communicate(timeout=120)
    assert (launch.process.returncode, output, len(errors.splitlines())) == (2, "", 2)
    assert not launch.pids(0)


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A launcher that says at its end whether it has imported jax."""
    program = (
        "import atexit, sys; atexit.register(lambda: print('jax' in sys.modules, file=sys.stderr))\n"
        "from llamajax.launch import main; main()"
    )
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_a_check_says_what_would_run_and_where_it_listens_and_takes_no_jax(tmp_path):
    settings = ("--config", str(runs.write_config(tmp_path)), "--mesh.num_cpu_devices", "4")
    outcome = launch("-n", "2", "--check", "--", *settings)
    assert (outcome.returncode, outcome.stderr) == (0, "False\n")
    hosts, processes, meet, listens, command = outcome.stdout.splitlines()
    assert hosts == "hosts      1, this is host 0; from defaults, without cluster variables"
    assert processes == "processes  2 processes of llamajax.train: ranks 0 to 1 of 2, 4 emulated devices each"
    address = meet.removeprefix("meet at    ")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert listens == f"listens on {address} (process 0)"
    assert command == f"command    python -m llamajax.train {' '.join(settings)} --distributed.enabled true"


def test_options_of_the_program_stand_behind_a_dash(tmp_path):
    outcome = launch("-n", "2", "--config", "x.yaml")
    assert (outcome.returncode, outcome.stderr.splitlines()[0][:13]) == (2, "--: required;")
    outcome = launch("-n", "0", "--", "--config", "x.yaml")
    assert (outcome.returncode, outcome.stderr.splitlines()[0]) == (2, "--num_processes: 0 must be positive or unset")
    assert "\n  -n N " in launch("--help").stdout


def program_on(hosts, interface=None, **settings):
    return Program(
        module="llamajax.train", arguments=(), config=tiny_config(**settings), hosts=hosts, num_local=2, gpus=0,
        interface=interface,
    )  # fmt: skip


def test_processes_of_one_host_meet_on_loopback_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:8476")
    address, bind_address = _meeting_place(program_on(Hosts()))
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert bind_address == address
    several = Hosts(count=2, own=0, coordinator="gpu003:1234")
    assert _meeting_place(program_on(several)) == ("gpu003:1234", "0.0.0.0:8476")


def test_an_interface_to_which_the_other_hosts_do_not_come_is_refused(monkeypatch):
    program = program_on(Hosts(count=2, own=0, coordinator="gpu003:1234"), "lo")
    assert _meeting_place(program) == ("127.0.0.1:1234", "127.0.0.1:1234"), "where the name says nothing of this host"
    monkeypatch.setattr(addresses, "own_addresses", lambda host: ["10.0.0.3"])
    with pytest.raises(EnvironmentMismatchError, match=r"connect to gpu003, which is 10\.0\.0\.3 here; set JAX_COORD"):
        _meeting_place(program)


@pytest.mark.parametrize("hears", [True, False])
def test_a_process_stopped_alone_before_it_has_met_the_others_stops_them(tmp_path, hears):
    """They would wait for it until their own limit."""
    body = f"""
    if {hears}:
        heartbeat.of_this_process().tell(phase="start", deadline=time.monotonic() + 600)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (here / f"waits.{{rank}}").touch()
    time.sleep(600)
    """
    launch = Launch(tmp_path, body)
    for rank in range(2):
        launch.wait_for_file(f"waits.{rank}")
    os.kill(launch.pids(1)[0], signal.SIGTERM)
    assert launch.end(0) == ([], [])
