"""S1 to S3 and S5: damaged and hostile inputs, read in capped processes; each is read, or refused by a line."""

from tests.faults.results import Failure, Result, tell
from tests.faults.scene import Scene


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Reads `count` damaged configurations and model directories, and fewer checkpoints, data files and templates."""
    from tests.faults import inputs

    result, said = Result("S"), []

    def say(line: object) -> None:
        said.append(str(line))
        tell(f"S {line}")

    outcomes = inputs.run(count, seed, say)
    for kind, numbers in outcomes.items():
        good = numbers.get(inputs.READ, 0) + numbers.get(inputs.REFUSED, 0)
        result.kinds[kind] = sum(numbers.values())
        result.tries += sum(numbers.values())
        result.passed += good
        result.figures[kind] = ", ".join(f"{number:,} {outcome}" for outcome, number in numbers.items() if number)
    result.failures = [Failure(seed, "inputs", line) for line in said[:20]]
    return result
