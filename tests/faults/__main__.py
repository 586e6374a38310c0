"""The command: `python -m tests.faults [--only R1,R7] [--short] [--seed N] [--json FILE] [--write]`."""

import argparse
import json
import os
import pathlib
import signal
import sys
import traceback

from tests.faults import report
from tests.faults.groups import GROUPS, Group
from tests.faults.results import Failure, Result, tell
from tests.faults.scene import Scene


def main() -> int:
    """Runs the groups that are asked for, one after the other; 1 if anything failed."""
    told = _arguments()
    chosen = [group for group in GROUPS if not told.only or group.name in told.only]
    counts = {group: told.count or (group.short if told.short else group.whole) for group in chosen}
    about = sum(count * group.seconds for group, count in counts.items())
    tell(f"{sum(map(bool, counts.values()))} groups, about {about / 60:.0f} min on two quiet cores")
    done: list[Result] = []
    with Scene(told.slowness, offload=told.offload) as where:
        _end_with(where)
        for group, count in counts.items():
            if count:
                tell(f"{group.name} {group.title}: {count} faults, about {count * group.seconds:.0f} s")
                done.append(_run(group, count, told.seed, where, told.jobs))
                tell(report.line(group, done[-1]))
                _keep(done, told)  # now, so that what is known stays known whatever comes
    for result in done:
        for failure in result.failures:
            tell(f"{result.name} FAILED with --seed {failure.seed}, {failure.kind}: {failure.what}")
    tell(f"{sum(result.good for result in done)} of {len(done)} groups passed")
    return 0 if done and all(result.good for result in done) else 1


def _keep(done: list[Result], told: argparse.Namespace) -> None:
    if told.json is not None:
        facts = report.facts(told.seed, told.slowness) | {"groups": [result.to_json() for result in done]}
        told.json.write_text(json.dumps(facts, indent=1))
    if told.write:
        report.write(done, told.seed, told.slowness)


def _end_with(where: Scene) -> None:
    """Leaves nothing when this process is told to end."""

    def end(number: int, _: object) -> None:
        where.end()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)


def _run(group: Group, count: int, seed: int, where: Scene, jobs: int) -> Result:
    try:
        return group.run(count, seed, where, jobs)
    except Exception as error:  # a defect of the campaign's own; the other groups are still to be tried
        traceback.print_exc()
        return Result(group.name, count, failures=[Failure(seed, "the group itself", f"{type(error).__name__}: {error}")])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="Breaks runs, and proves that nothing is lost."
    )
    names = [group.name for group in GROUPS]
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"groups, of {','.join(names)}")
    parser.add_argument("--short", action="store_true", help="a few tries of the quick groups, four minutes")
    parser.add_argument("--count", type=int, help="tries of each group")
    parser.add_argument("--seed", type=int, default=0, help="of the first try; a failure names its own")
    parser.add_argument("--jobs", type=int, default=1, help="tries at once")
    parser.add_argument("--slowness", type=float, default=1, help="multiplies every limit of time, for busy machines")
    parser.add_argument("--offload", action="store_true", help="keep the runs' state and saved values in host memory")
    parser.add_argument("--json", type=pathlib.Path, help="file for all results")
    parser.add_argument("--write", action="store_true", help=f"put the results into {report.DOCUMENT.name}")
    told = parser.parse_args()
    if unknown := set(told.only) - set(names):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return told


if __name__ == "__main__":
    sys.exit(main())
