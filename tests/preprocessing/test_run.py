"""Whoever makes a run's data, and however often they are killed, the cache holds the same bytes."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llamajax.config.file import load_config
from llamajax.data.rows.dataset import prepare
from llamajax.errors import ConfigError
from llamajax.preprocessing.run import run
from tests import runs
from tests.preprocessing.made import NUM_FILES, command, contents, made, preprocess, write_config


def trained_on(config, cache):
    """The data as a run makes them by itself."""
    log = []
    dataset = prepare(load_config(config, [f"data.cache_dir={cache}"]), log=log.append)
    return dataset, log


def test_what_it_makes_is_what_training_would_make(tmp_path):
    config = write_config(tmp_path, with_tokenizer=False)
    out = preprocess(config, tmp_path / "ahead", "--workers", "2")
    dataset, log = trained_on(config, tmp_path / "alone")
    assert made(tmp_path / "ahead") == made(tmp_path / "alone")
    assert f"work       {NUM_FILES} of {NUM_FILES} pieces, " in out
    assert re.search(r"^tokenized  [\d,]+ documents in [\d.]+ s, .* MB/s, [\d.]+ M tokens/s by 2 processes$", out, re.M)
    assert [line for line in log if line.startswith("data ")] == [line for line in out.splitlines() if line[:5] == "data "]
    assert out.splitlines()[-1] == (f"finished   all data is in {tmp_path}/ahead; fingerprint {dataset.fingerprint[:16]}")
    before = contents(tmp_path / "ahead")
    again, log = trained_on(config, tmp_path / "ahead")
    assert again.fingerprint == dataset.fingerprint
    assert [line.split()[0] for line in log] == ["source"] * NUM_FILES + ["data"] * NUM_FILES, "nothing is made twice"
    assert contents(tmp_path / "ahead") == before


@pytest.mark.slow
def test_documents_are_cleaned_by_all_workers_as_training_would(tmp_path):
    config = write_config(tmp_path)
    steps = {"filters": {"min_words": 10}, "exact_duplicates": True, "near_duplicates": {"enabled": True}}
    text = json.loads(config.read_text())
    text["data"]["cleaning"] = steps
    config.write_text(json.dumps(text))
    out = preprocess(config, tmp_path / "ahead", "--workers", "2")
    dataset, log = trained_on(config, tmp_path / "alone")
    assert re.search(r"^cleaned    filters: 1,\d\d\d of 1,800 documents stay", out, re.M)
    assert dataset.fingerprint[:16] in out
    assert [line for line in log if line.startswith("data ")] == [line for line in out.splitlines() if line[:5] == "data "]
    ahead, alone = ({name.partition("/")[2]: content for name, content in made(tmp_path / folder).items()
                     if "/report." not in name} for folder in ("ahead", "alone"))  # fmt: skip
    assert ahead == alone


@pytest.mark.slow
def test_parts_of_an_array_make_the_same_and_the_last_one_packs(tmp_path, capsys):
    config = write_config(tmp_path)
    run(load_config(config, [f"data.cache_dir={tmp_path / 'one'}"]), {})
    parts, outs = load_config(config, [f"data.cache_dir={tmp_path / 'parts'}"]), []
    for part in (2, 0, 1):
        capsys.readouterr()
        run(parts, {"--part": f"{part}/3", "--workers": "1"})
        outs.append(capsys.readouterr().out)
    assert [out.splitlines()[-1].split(";")[0] for out in outs[:2]] == ["finished   this part"] * 2
    assert "4 pieces of other parts are missing" in outs[0]
    assert "2 pieces of other parts are missing" in outs[1]
    assert "finished   all data is in" in outs[2]
    assert contents(tmp_path / "parts") == contents(tmp_path / "one")


@pytest.mark.long
def test_parts_at_the_same_time(tmp_path):
    config = write_config(tmp_path)
    preprocess(config, tmp_path / "one")
    commands = [command(config, tmp_path / "parts", "--part", f"{part}/2", "--workers", "1") for part in range(2)]
    processes = [subprocess.Popen(each, cwd=runs.ROOT, stdout=subprocess.PIPE, text=True) for each in commands]
    outs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert any("finished   all data is in" in out for out in outs)
    assert made(tmp_path / "parts") == made(tmp_path / "one")


def children(pid: int) -> list[int]:
    """Processes that were started by this one and run Python's workers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if (
                re.search(rf"^PPid:\s+{pid}$", status.read_text(), re.M)
                and b"spawn_main" in (status.parent / "cmdline").read_bytes()
            ):
                found.append(int(status.parent.name))
    return found


def wait_for(condition, timeout_s=60.0):
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.mark.long
def test_a_worker_that_is_killed_is_replaced(tmp_path):
    config = write_config(tmp_path, num_documents=10_000)
    preprocess(config, tmp_path / "one")
    with subprocess.Popen(
        command(config, tmp_path / "killed", "--workers", "2"), cwd=runs.ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: list((tmp_path / "killed").rglob("shards-2/*/lock")))
        os.kill(random.choice(wait_for(lambda: children(process.pid))), signal.SIGKILL)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "lost       a process was killed; its work continues after its last shard\n" in out
    assert made(tmp_path / "killed") == made(tmp_path / "one")


@pytest.mark.parametrize(
    ("num_documents", "num_kills"),
    [pytest.param(3_000, 2, marks=pytest.mark.slow), pytest.param(10_000, 6, marks=pytest.mark.long)],
)
def test_killed_at_any_moment_it_goes_on_and_leaves_no_worker(tmp_path, num_documents, num_kills):
    config = write_config(tmp_path, num_documents)
    began = time.monotonic()
    preprocess(config, tmp_path / "one")
    took_s = time.monotonic() - began
    draw = random.Random(0)
    for _ in range(num_kills):
        with subprocess.Popen(command(config, tmp_path / "killed"), cwd=runs.ROOT, stdout=subprocess.DEVNULL) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(took_s * draw.uniform(0.2, 0.9))
            workers = children(process.pid)
            process.kill()
        wait_for(lambda workers=workers: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    preprocess(config, tmp_path / "killed")
    assert made(tmp_path / "killed") == made(tmp_path / "one")


@pytest.mark.parametrize("num_signals", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_ends_it_and_its_workers(tmp_path, num_signals):
    config = write_config(tmp_path, num_documents=10_000)
    with subprocess.Popen(
        command(config, tmp_path / "cache"), cwd=runs.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        workers = wait_for(lambda: children(process.pid))
        for _ in range(num_signals):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "interrupted\n")
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_bad_input_is_one_line(tmp_path):
    config = write_config(tmp_path)
    with (tmp_path / "3.jsonl").open("a") as file:
        file.write("oops\n")

    outcome = subprocess.run(command(config, tmp_path / "cache"), cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 3
    where = f"{tmp_path}/3.jsonl:301: data.sources[3].paths"
    assert outcome.stderr.startswith(f"{where}: is not JSON: Expecting value at column 1")
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--part", "3/3", "must be I/N with I from 0 to N - 1, not 3/3; write --part 0/16 to --part 15/16"),
        ("--part", "x", "must be I/N with I from 0 to N - 1, not x; write --part 0/16 to --part 15/16"),
        ("--part", "-1/3", "must be I/N with I from 0 to N - 1, not -1/3; write --part 0/16 to --part 15/16"),
        ("--workers", "0", "must be a number of processes, not 0; write --workers 8"),
        ("--executor", "dask", "dask is unknown; write local or ray"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path, option, value, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{option}: {message}')}$"):
        run(load_config(write_config(tmp_path)), {option: value})


@pytest.mark.slow
def test_ray_is_imported_for_ray_only(tmp_path):
    config = write_config(tmp_path)
    program = (
        "import sys; from llamajax.preprocess import main; main(); assert 'ray' not in sys.modules; print('without ray')"
    )
    arguments = command(config, tmp_path / "cache")[3:]
    outcome = subprocess.run(
        [runs.command(config)[0], "-c", program, *arguments], cwd=runs.ROOT, capture_output=True, text=True, check=False
    )
    assert outcome.stdout.endswith("without ray\n"), outcome.stderr
