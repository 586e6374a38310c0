"""R5: files of a checkpoint are damaged in every way; the damage is found, its file named, the newest good step taken."""

import itertools
import pathlib
import random
import shutil
from collections.abc import Callable

from tests.faults import results
from tests.faults.broken_run import BrokenRun, golden
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

FILES = {
    "array data": "state/**/d/*",
    "array index": "state/**/manifest.ocdbt",
    "array metadata": "state/[!dom]*",
    "metadata of a process": "state/array_metadatas/*",
    "arrays.json": "arrays.json",
    "meta.json": "meta.json",
    "tokenizer": "files/*",
    "manifest": "manifest.json",
}
"""Every kind of file in a step: its name and what finds it."""
WHOLE_EVERY = 51
"""Tries, of which one goes through a start of the run; without a factor in common with the number of kinds."""


def flip(path: pathlib.Path, rng: random.Random, other: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path: pathlib.Path, rng: random.Random, other: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content)) // 4096 * 4096
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def truncate(path: pathlib.Path, rng: random.Random, other: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def swap(path: pathlib.Path, rng: random.Random, other: pathlib.Path) -> None:
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Callable[[pathlib.Path, random.Random, pathlib.Path], object]] = {
    "a bit flipped": flip,
    "4 KiB of zeros": zero,
    "truncated": truncate,
    "deleted": lambda path, rng, other: path.unlink(),
    "swapped with another": swap,
    "appended to": lambda path, rng, other: path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 100))),
    "that of an older step": lambda path, rng, other: shutil.copy(other, path),
}
KINDS = [f"{name}, {damage}" for damage, name in itertools.product(DAMAGES, FILES)]


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Damages `count` files, each in a copy of a run of two processes that has two steps."""
    # They bring jax, which groups that start processes of their own do without.
    from llamajax.checkpoint.steps import newest_good
    from llamajax.config.parallel import MeshConfig
    from llamajax.parallel.startup import select_platform

    select_platform(MeshConfig(num_cpu_devices=8))
    golden(where, 2, {})
    with BrokenRun(where, 2, by_hand=True, step_s=0) as whole:
        whole.start()
        codes = whole.finish()
        assert not any(codes), whole.last_line

        def one(a_try: Try) -> Figures:
            through_a_start = a_try.seed % WHOLE_EVERY == 0
            with BrokenRun(where, 2, by_hand=True, step_s=0) as damaged:
                shutil.copytree(whole.run_dir, damaged.run_dir)
                good, newest = sorted(int(path.name) for path in (damaged.run_dir / "checkpoints").iterdir())[-2:]
                bad_files = damage(damaged.run_dir / "checkpoints", good, newest, a_try)
                if through_a_start:
                    damaged.start()
                    codes = damaged.finish()
                    assert not any(codes), f"ended with {codes}: {damaged.last_line}"
                    assert f"continuing from step {good}" in damaged.output, damaged.output[-1000:]
                    told = next(line for line in damaged.output.splitlines() if "is damaged:" in line)
                    damaged.must_equal_golden()
                else:
                    step, found = newest_good(damaged.run_dir / "checkpoints")
                    assert step == good, f"step {step} was taken for the newest good one"
                    told = str(found[newest])
                assert any(file in told for file in bad_files), f"{bad_files} are bad, but told was {told}"
            return {}

        return results.attempt("R5", KINDS, count, seed, one, jobs=jobs)


def damage(checkpoints: pathlib.Path, good: int, newest: int, a_try: Try) -> list[str]:
    """Damages a file of the newest step; the paths of those that are bad then."""
    name, _, kind = a_try.kind.partition(", ")
    step_dir, rng = checkpoints / str(newest), a_try.rng
    before = {path: path.read_bytes() for path in step_dir.rglob("*") if path.is_file()}
    candidates = sorted(path for path in step_dir.glob(FILES[name]) if path.is_file() and path.stat().st_size)
    assert candidates, f"a step has no {name}"
    for _ in range(1000):
        path = rng.choice(candidates)
        if kind == "that of an older step":
            older = checkpoints / str(good) / path.relative_to(step_dir)
            other = older if older.exists() else rng.choice(sorted((checkpoints / str(good) / "state").glob("**/d/*")))
        else:
            other = rng.choice(sorted(before.keys() - {path}))
        if kind.startswith(("swapped", "that of")) and other.read_bytes() == before[path]:
            # The tokenizer is the same in all steps: a copy of it damages nothing.
            candidates = [candidate for candidate in candidates if candidate != path] or sorted(before)
            continue
        DAMAGES[kind](path, rng, other)
        bad = [p for p, content in before.items() if not p.exists() or p.read_bytes() != content]
        if bad:
            if bad == [step_dir / "manifest.json"] and kind == "that of an older step":
                return ["state/", "manifest.json", "meta.json"]  # a manifest that is whole blames the files it does not fit
            return [path.relative_to(step_dir).as_posix() for path in bad]
    raise AssertionError(f"no {name} can be {kind}")
