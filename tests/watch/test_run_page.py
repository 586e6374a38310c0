"""The page about a run: complete, self-contained, small, safe."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from llamajax import report as report_command
from llamajax.watch import run_log
from llamajax.watch import run_page as report
from tests.html_tags import check_tags

TITLES = (
    "Loss (nats per token)",
    "Learning rate",
    "Gradient norm, before clipping",
    "Tokens per second, all devices",
    "Time per step",
    "Model FLOPs utilization",
)


def write_run(run_dir, num_steps, *, eval_every=10, starts=(0,), stop=True, device_kind="cpu"):
    run_dir.mkdir()
    rng = np.random.default_rng(0)
    losses = (2 + 8 * np.exp(-np.arange(num_steps) / num_steps * 5) + rng.normal(0, 0.1, num_steps)).tolist()
    line = (
        '{"step": %d, "time": %d, "train/loss": %r, "train/grad_norm": 0.5, "train/learning_rate": 0.001, '
        '"perf/step_time_s": 0.5, "perf/data_wait_s": 0.01, "perf/tokens_per_sec": 1024.0, '
        '"perf/tokens_per_sec_per_device": 128.0, "perf/mfu": 0.4, "perf/mfu_full_attention": 0.44}\n'
    )
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            file.write(line % (step, 1_700_000_000 + step, loss))
            if step % eval_every == 0:
                file.write(run_log.encode({"step": step, "time": 1.7e9 + step, "eval/loss": 3.0, "eval/bits_per_byte": 1.0}))
                file.write("\n")
    facts = {"num_steps": num_steps, "num_params": 6_738_415_616, "tokens_per_step": 512, "devices": 8, "jax": "0.10.2"}
    facts |= {"mesh": {"fsdp": 8}, "device_kind": device_kind}
    events = [
        {"time": 1.7e9 + step, "event": "start", "step": step, **facts, "config_sha256": f"{number:064x}"}
        for number, step in enumerate(starts, 0x1000_0000 << 224)
    ]
    if stop:
        events.append({"time": 1.7e9 + num_steps, "event": "stop", "step": num_steps, "reason": "finished"})
    (run_dir / "events.jsonl").write_text("".join(run_log.encode(event) + "\n" for event in events))
    return run_dir


def test_experts_are_told_by_layer_and_over_time(tmp_path):
    run_dir = write_run(tmp_path / "run", 3)
    assert "Experts by layer" not in report.write_report(run_dir).read_text()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("max_load", "min_load", "entropy", "dropped", "late")
    numbers = {f"train/expert_{name}": 0.5 for name in names}
    numbers |= {f"train/expert_{name}_by_layer/{layer}": (layer + 1) / 8 for name in names for layer in range(2)}
    (run_dir / "metrics.jsonl").write_text("".join(run_log.encode(record | numbers) + "\n" for record in records))
    page = report.write_report(run_dir).read_text()
    check_tags(page)
    assert "Experts by layer, step 3" in page
    assert re.search(r"<td>1</td>\s*<td>0\.25</td>\s*<td>0\.25</td>\s*<td>25\.0%</td>\s*<td>25\.00%</td>", page)
    for title in ("Load of an expert (over the mean)", "Tokens that lose an expert, or reach it late"):
        assert title in page


def test_sources_are_told_with_the_epochs_that_are_planned(tmp_path):
    run_dir = write_run(tmp_path / "run", 3)
    assert "<h2>Sources</h2>" not in report.write_report(run_dir).read_text()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = [record | {"data/epochs/0": 0.5 * record["step"], "data/epochs/1": 0.0} for record in records]
    (run_dir / "metrics.jsonl").write_text("".join(run_log.encode(record) + "\n" for record in told))
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(run_log.encode({"time": 1.7e9, "event": "data", "step": 0, "epochs": {"data.sources[0]": 2.5}}) + "\n")
    page = report.write_report(run_dir).read_text()
    assert "<h2>Sources</h2>" in page
    assert "<tr><td>data.sources[0]</td><td>1.50</td><td>2.50</td></tr>" in page
    assert "<tr><td>data.sources[1]</td><td>0.00</td><td>&ndash;</td></tr>" in page


def test_everything_is_on_the_page(tmp_path):
    run_dir = write_run(tmp_path / "my_run", 50, starts=(0, 20))
    (run_dir / "config.yaml").write_text("model:\n  num_layers: 4\n")
    path = report.write_report(run_dir)
    assert path == run_dir / "report.html"
    page = path.read_text()
    assert "<h1>my_run</h1>" in page
    assert "finished &middot; step 50 of 50 &middot; newest record 2023-11-14 22:14:10 UTC" in page
    assert page.count("<figure>") == page.count("<svg ") == 6
    for title in TITLES:
        assert f"<b>{title}</b>" in page
    for text in (
        "<h2>Goodput 49.0% of 0:00:50</h2>",
        "held-out",
        "waiting for data",
        "counting full attention",
        "6,738,415,616",
        ">25.6k<",
        "40.0%",
        "1 restart<",
    ):
        assert text in page
    assert page.count('class="restart"') == 6
    assert page.count("(changed)") == 1
    assert "<td>killed</td>" in page
    assert "<td>step 50: finished</td>" in page
    assert "model:\n  num_layers: 4\n" in page


def test_the_page_loads_nothing_and_its_tags_match(tmp_path):
    page = report.write_report(write_run(tmp_path / "run", 30)).read_text()
    assert not re.findall(r"""(?:src|href|url|@import)\s*[=(]""", page)
    assert "default-src 'none'" in page
    check_tags(page)


@pytest.mark.slow
def test_a_long_run_gives_a_small_page(tmp_path):
    path = report.write_report(write_run(tmp_path / "run", 200_000, eval_every=1000))
    assert path.stat().st_size < 2_000_000
    assert "step 200,000 of 200,000" in path.read_text()


def test_a_run_in_progress(tmp_path):
    run_dir = write_run(tmp_path / "run", 30, eval_every=1000, stop=False)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "ti')
    page = report.write_report(run_dir).read_text()
    assert "running or killed &middot; step 30 of 30" in page
    assert page.count("<figure>") == 6
    (run_dir / "events.jsonl").unlink()
    assert "step 30 &middot;" in report.write_report(run_dir).read_text()


def test_hosts_with_the_slowest_first(tmp_path):
    run_dir = write_run(tmp_path / "run", 30)
    rows = [{"process": n, "host": f"gpu0{n}", "step_time_s": 1.5, "device_s": 0.01 * (1 + n)} for n in range(2)]
    (run_dir / "hosts.json").write_text(json.dumps(rows))
    page = report.write_report(run_dir).read_text()
    assert "<td>1</td><td>gpu01</td><td>1,500.0 ms</td><td>&ndash;</td><td>&ndash;</td><td>20.0 ms</td>" in page
    assert page.index("gpu01") < page.index("gpu00")
    for damaged in ("{}", "[1]", '[{"process": "x", "host": "a"}]', "[", '[{"process": 1}]'):
        (run_dir / "hosts.json").write_text(damaged)
        assert "Hosts" not in report.write_report(run_dir).read_text()


def test_nothing_from_the_run_becomes_markup(tmp_path):
    hostile = "<script>alert(1)</script>&\"'"
    run_dir = write_run(tmp_path / "<img onerror=x>", 30, device_kind=hostile)
    (run_dir / "config.yaml").write_text(f"run_dir: {hostile}\n")
    page = report.write_report(run_dir).read_text()
    assert "<img" not in page
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;") == 2


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        ("nothing", 2, "no such directory"),
        ("no home", 2, "~nobody-of-that-name/run: no such directory"),
        ("no log", 2, "has no metrics.jsonl"),
        ("no step", 2, "holds no step yet"),
        ("damage", 0, "metrics.jsonl:11: not a record, skipped; restore the file or remove the line"),
        ("bad output", 2, "cannot be written: No such file or directory; name another file with --output"),
    ],
)
def test_mistakes_get_one_clear_line(tmp_path, capsys, make, code, message):
    run_dir = tmp_path / "run"
    arguments = [str(run_dir)]
    if make == "no log":
        run_dir.mkdir()
    elif make == "no home":
        arguments = ["~nobody-of-that-name/run"]
    elif make != "nothing":
        write_run(run_dir, 30)
    log = run_dir / "metrics.jsonl"
    if make == "no step":
        log.write_text('{"step": 1, "ti')
    elif make == "damage":
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join([*lines[:10], "\x00\x01\n", *lines[10:]]))
    elif make == "bad output":
        arguments += ["--output", str(tmp_path / "missing" / "page.html")]
    assert report_command.main(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert (captured.out == "") is (code != 0)


def test_the_command_writes_where_it_is_told_and_needs_no_jax(tmp_path):
    run_dir, output = write_run(tmp_path / "run", 30), tmp_path / "page.html"
    code = (
        "import sys; from llamajax import report; code = report.main(sys.argv[1:]);"
        " assert 'jax' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(run_dir), "--output", str(output)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert outcome.stdout.splitlines()[0] == str(output)
    assert outcome.stdout.splitlines()[1:] == ["goodput 49.0%: other 50.0%, data wait 1.0%"]
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert not (run_dir / "report.html").exists()
