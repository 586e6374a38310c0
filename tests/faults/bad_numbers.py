"""R10 and R11: numbers that go wrong: in the data, in gradients, in the memory of one device."""

import json
import pathlib
from typing import Any

import numpy as np

from llamajax.errors import CorruptionError, DivergedError
from tests.faults import results, scene
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, golden, passing_over
from tests.faults.results import Failure, Figures, Result, Try
from tests.faults.scene import End, Scene

POISON = "☠"
"""In documents whose batches spoil a step; a text of three bytes, each a token that no other document has."""
POISON_TOKEN = 3 + POISON.encode()[0]
BAD = {
    "NaN in a batch": ("nan", 0.01),
    "Inf in a batch": ("inf", 0.01),
    "NaN again and again": ("nan", 0.03),
    "NaN without end": ("nan", 1.0),
    "spikes of the loss": ("spike", 0.02),
}
"""Effect of a poisoned batch, and the share of documents with poison."""
LIVE = ("a flip of one bit", "a flip of one bit, then a kill", "a device that flips again and again")


def run_bad_batches(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """R10: runs on data of which some batches give gradients that are not finite, or a loss far above the others'."""

    def one(a_try: Try) -> Figures:
        does, share = BAD[a_try.kind]
        folder = where.new_directory("poison")
        settings = poisoned(where, folder, share, a_try.seed)
        environment = {"LLAMAJAX_CAMPAIGN_POISON": f"{does}:{POISON_TOKEN}"}
        if does == "spike":
            settings |= {"recovery.spike_zscore": 8, "recovery.spike_window": 16}
        with BrokenRun(where, a_try.rng.choice([1, 2]), settings, environment=environment) as spoilt:
            spoilt.start()
            if a_try.kind != "NaN without end":  # killed meanwhile, it must pass over the same rows
                wanted = a_try.rng.randint(5, 50)
                spoilt.wait(lambda: spoilt.step >= wanted, STARTS_S + ENDS_S, f"step {wanted}")
                spoilt.kill_all()
                if spoilt.by_hand:
                    spoilt.wait(lambda: not spoilt.running, STARTS_S, "end", or_ended=True)
                    spoilt.start()
            codes = spoilt.finish()
            must_be_finite(spoilt)
            rollbacks = [event for event in spoilt.events if event["event"] == "rollback"]
            if a_try.kind == "NaN without end":
                assert codes[-1] == DivergedError.exit_code, f"ended with {codes}: {spoilt.last_line}"
                assert "Traceback" not in spoilt.output
                return {"rollbacks": len(rollbacks)}
            assert codes[-1] == 0, f"ended with {codes}: {spoilt.last_line}"
            records = map(json.loads, (spoilt.run_dir / "metrics.jsonl").read_text().splitlines())
            num_skipped = [record["train/skipped_steps"] for record in records if "train/skipped_steps" in record][-1]
            if does == "spike" or a_try.kind == "NaN again and again":
                assert rollbacks, "it never went back"
                assert all(event["num_rows"] > 0 for event in rollbacks)
                killed, unkilled = End(spoilt.run_dir), golden(where, spoilt.num_processes, settings, environment)
                assert killed.windows == unkilled.windows, f"passed over {killed.windows}, unkilled {unkilled.windows}"
                killed.must_equal(passing_over(spoilt, environment))
            else:
                assert num_skipped > 0, "no step was skipped"
                spoilt.must_equal_golden(environment)
        return {"rollbacks": len(rollbacks)}

    return results.attempt("R10", list(BAD), count, seed, one, jobs=jobs)


def poisoned(where: Scene, folder: pathlib.Path, share: float, seed: int) -> dict[str, str | int]:
    """Settings of a run on the scene's text, of which some documents have poison; a tokenizer that knows none of it."""
    draw = np.random.default_rng(seed)
    lines = (where.directory / "text.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    for number in draw.choice(len(texts), round(share * len(texts)), replace=False):
        texts[number] = f"{POISON} {texts[number]}"
    (folder / "text.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    scene.train_tokenizer(where.directory / "text.jsonl", folder / "tokenizer.model")
    return {
        "data.sources": json.dumps([{"kind": "jsonl", "paths": [str(folder / "text.jsonl")]}]),
        "data.tokenizer.path": str(folder / "tokenizer.model"),
        "train.max_nonfinite_steps": 2,
        "recovery.max_rollbacks": 100 if share < 1 else 3,
    }


def must_be_finite(spoilt: BrokenRun) -> None:
    """Fails if a checkpoint holds a number that is not finite."""
    for path in (spoilt.run_dir / "checkpoints").iterdir():
        if path.name.isdecimal():
            for name, array in scene.arrays(path):
                assert not np.issubdtype(array.dtype, np.floating) or np.isfinite(array).all(), f"{path.name}: {name}"


def run_flips(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """R11: bits flip in the part of a state that one of eight devices holds; and, a few times, in whole runs."""
    from llamajax.config.file import load_config
    from llamajax.parallel.mesh import make_mesh
    from llamajax.parallel.startup import select_platform
    from llamajax.step.state import init_state
    from tests.faults.flips import missed

    live = max(1, count // 10)
    result = results.attempt("R11", LIVE, live, seed, lambda a_try: _flip_in_a_run(where, a_try), jobs=jobs)
    config = load_config(where.config, ["mesh.num_cpu_devices=8", "mesh.data=4", "mesh.fsdp=2"])
    select_platform(config.mesh)
    import jax

    jax.set_mesh(make_mesh(config.mesh))
    not_found = missed(init_state(config), count - live, seed)
    result.kinds["a flip in one of eight devices"] = count - live
    result.tries += count - live
    result.passed += count - live - len(not_found)
    result.failures += [Failure(seed, "a flip in one of eight devices", line) for line in not_found]
    return result


def _flip_in_a_run(where: Scene, a_try: Try) -> Figures:
    settings = {"mesh.data": 2, "mesh.fsdp": 1, "recovery.checksum_every": 10}
    golden(where, 2, settings)
    with BrokenRun(where, 2, settings) as spoilt:
        spoilt.start()
        wanted, rank = a_try.rng.randint(3, 40), a_try.rng.randrange(2)
        spoilt.wait(lambda: spoilt.step >= wanted, STARTS_S + ENDS_S, f"step {wanted}")
        spoilt.lay("after step", rank, "flip bits", always="again" in a_try.kind, seed=a_try.seed)
        spoilt.wait_for_fault("after step", rank)
        on_record = spoilt.step
        if "kill" in a_try.kind:
            spoilt.wait(lambda: bool(corruptions(spoilt)), ENDS_S, "finding it", or_ended=True)
            spoilt.kill_all()
            if spoilt.by_hand:
                spoilt.wait(lambda: not spoilt.running, STARTS_S, "end", or_ended=True)
                spoilt.start()
        codes = spoilt.finish()
        found = corruptions(spoilt)
        assert found, "it was not found"
        late = found[0]["step"] - on_record
        # Replicas are compared before every save; two steps may have been under way.
        assert late <= scene.SAVE_EVERY + 2, f"found {late} steps later"
        if "again" in a_try.kind:
            assert codes[-1] == CorruptionError.exit_code, f"ended with {codes}: {spoilt.last_line}"
            assert found[-1]["kind"] == "lasting", f"told to be {found[-1]['kind']}"
            assert "Traceback" not in spoilt.output
        else:
            assert codes[-1] == 0, f"ended with {codes}: {spoilt.last_line}"
            spoilt.must_equal_golden()
    return {"steps until a flip is found": late}


def corruptions(spoilt: BrokenRun) -> list[dict[str, Any]]:
    """Returns the run's records of replicas that differ."""
    return [event for event in spoilt.events if event["event"] == "corruption"]
