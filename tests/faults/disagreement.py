"""R21: one process of a run is not like the others; all are refused before the first step, and the odd one is named."""

import pathlib
import re
import shutil
import time
from collections.abc import Mapping
from typing import Any

from llamajax.errors import EnvironmentMismatchError
from tests import runs
from tests.faults import results, scene
from tests.faults.broken_run import BrokenRun
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

NUM_PROCESSES = 3
LIMIT_S = 10.0
"""From the start of the last process."""
SETTINGS: dict[str, Mapping[str, Any]] = {
    "learning rate": {"optimizer.learning_rate": 0.02},
    "model": {"model.mlp_dim": 64},
    "seed": {"seed": 2},
    "row length": {"data.seq_len": 64},
    "device count": {"mesh.num_cpu_devices": 2},
    "process count": {"distributed.num_processes": NUM_PROCESSES + 1},
    "data": {},
    "tokenizer": {},
    "code": {},
    "jax version": {},
}
"""Settings of the odd process that differ from the others."""


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Starts `count` runs of three processes, one of them odd."""

    def one(a_try: Try) -> Figures:
        odd = a_try.rng.randrange(1, NUM_PROCESSES)
        with BrokenRun(where, NUM_PROCESSES, by_hand=True) as refused:
            usual = refused.folder / "usual"
            usual.mkdir()
            shutil.copy(where.directory / "text.jsonl", usual)
            scene.train_tokenizer(usual / "text.jsonl", usual / "tokenizer.model")
            its, environment, cwd = oddity(a_try.kind, refused.folder, usual)
            settings = {
                "distributed.enabled": "true", "distributed.coordinator_address": runs.free_address(),
                # So long do others wait for the right process in place of the odd one, which may still come.
                "distributed.initialization_timeout_s": round(5 * where.slowness),
                "distributed.num_processes": NUM_PROCESSES, "mesh.data": NUM_PROCESSES, "mesh.fsdp": 1,
                "train.global_batch_size": 2 * NUM_PROCESSES,
                "data.sources": '[{"kind": "jsonl", "paths": ["text.jsonl"]}]', "data.tokenizer.path": "tokenizer.model",
            }  # fmt: skip
            started = time.monotonic()
            for rank in range(NUM_PROCESSES):
                if rank == odd:
                    refused.start_rank(rank, settings | its, environment, cwd)
                else:
                    refused.start_rank(rank, settings, cwd=usual)
            codes = refused.finish(4 * LIMIT_S)
            took = time.monotonic() - started
            assert refused.step == 0, "it trained"
            assert set(codes) == {EnvironmentMismatchError.exit_code}, f"ended with {codes}: {refused.output[-1500:]}"
            named = set(re.findall(r"process (\d+) (?:differs from process 0 in|of \d+ \()", refused.output))
            assert named == {str(odd)}, f"processes {sorted(named)} are named, not {odd}: {refused.last_line}"
            assert "Traceback" not in refused.output, refused.output[-1500:]
            assert took < LIMIT_S * where.slowness, f"took {took:.1f} s"
            refused.must_leave_none()
        return {"s to the end of all": took}

    return results.attempt("R21", list(SETTINGS), count, seed, one, jobs=jobs)


def oddity(kind: str, folder: pathlib.Path, usual: pathlib.Path) -> tuple[dict[str, Any], dict[str, str], pathlib.Path]:
    """Returns the start of the odd process: settings, environment, working directory."""
    other = folder / "other"
    match kind:
        case "data":
            shutil.copytree(usual, other)
            text = (other / "text.jsonl").read_text()
            (other / "text.jsonl").write_text(text.replace("model", "modem", 1))
            return {"data.cache_dir": str(folder / "cache")}, {}, other
        case "tokenizer":
            shutil.copytree(usual, other)
            scene.train_tokenizer(other / "text.jsonl", other / "tokenizer.model", num_lines=100)
            return {"data.cache_dir": str(folder / "cache")}, {}, other
        case "code":
            shutil.copytree(runs.ROOT / "llamajax", other / "llamajax", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(runs.ROOT / "tests", other / "tests", ignore=shutil.ignore_patterns("__pycache__"))
            loss = other / "llamajax" / "step" / "loss.py"
            loss.write_text(loss.read_text() + "\n")
            return {}, {"PYTHONPATH": str(other)}, usual
        case "jax version":
            return {}, {"LLAMAJAX_CAMPAIGN_JAX_VERSION": "0.0.1"}, usual
    return dict(SETTINGS[kind]), {}, usual
