"""Writes the generated pages of the manual's reference, docs/reference/, from the code that they describe; and the table of
options with which `llamajax completion` completes command lines.

    python scripts/reference.py           # writes them
    python scripts/reference.py --check   # names the files that are out of date, and exits with 1

Settings come from the docstrings that make `--help`, commands from their options, Python from signatures and docstrings,
GPUs from their data sheets. The meanings of exit codes are written here, and checked against the codes that exist.
"""

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the code beside this script, whatever is installed

from llamajax import errors
from llamajax.commands import complete
from llamajax.estimates.gpus import GPUS, Gpu
from scripts.manual.commands import commands, completions
from scripts.manual.markdown import NOTE, ROOT, page
from scripts.manual.python import python
from scripts.manual.settings import settings

FOLDER = ROOT / "docs" / "reference"

EXIT_CODES = {
    0: "The command is done, or a signal stopped it and it saved its state.",
    1: "`verify` found a difference.",
    2: "The configuration or the command line is wrong. One line per mistake.",
    3: "Data cannot be read as the configuration says.",
    4: "The machine or the processes are not what the configuration needs: devices, packages, hosts; or `doctor` found a"
    " failure.",
    5: "A device ran out of memory.",
    6: "A device computes or keeps wrong numbers, again and again. Restart without that host.",
    65: "No usable checkpoint exists, or `run_dir` holds another run, is written by another process, or cannot be written.",
    69: "A device or the network failed, as jax's runtime reports it.",
    70: "A defect of llamajax. Please report it with the traceback.",
    74: "The disk, or the store of a remote source, failed; or the last state could not be saved.",
    75: "A process was lost or stuck.",
    93: "The run gave up: steps kept going wrong after rollbacks, or restarts made no progress.",
    130: "A second Ctrl-C, more than two seconds after the first. It waits for nothing.",
    143: "A second SIGTERM, more than two seconds after the first. It waits for nothing.",
}
"""Meaning of each exit code."""

EXIT_TEXT = """\
Every command ends with one of these codes. A mistake of the user's is one line on standard error: what is wrong, where
(`file:line` or the setting), the rule, the remedy. In Python the same line is the text of the error."""
LAUNCHERS_TEXT = """\
All hosts of a run end with the code of the process that failed, or with 75 if a process was lost, so that all launchers
decide alike. After a signal that nobody sent to the launcher, such as SIGKILL by the system, it restarts too.
`max_restarts` restarts in a row without a new checkpoint end with 93. `python -m llamajax.launch --stopped_code 75`
ends a run that a signal stopped with another code than 0, for clusters that take 0 for done."""
GPUS_TEXT = """\
Plans have figures for these GPUs. `hardware.gpu` names one, and a cluster has `hardware.nodes` nodes of
`hardware.gpus_per_node`. The peak is dense bfloat16 with sums in float32. The last bandwidth is that of the network of
a node of eight, each way."""
GPUS_NOTES = """\
- NVLink joins all eight GPUs of a node. A rack GB200 NVL72 is one node: `gpus_per_node: 72`, or the 64 that a run takes
  of it.
- Cards in PCIe slots use PCIe 4, and the RTX 5090 PCIe 5. GeForce cards have no peer-to-peer: what one sends another
  goes through the host's memory. They have no usual network either, so more than one node needs
  `hardware.node_bandwidth`.
- Attention lists the kernels that are compiled for the GPU. Pallas and Triton are llamajax's own. Triton and tokamax
  are extras, which a configuration names with `model.attention_kernel`.
- A run on another GPU measures its peak. A plan of such a GPU is not possible.

The sources of every figure are in `llamajax/estimates/gpus.py` and `llamajax/estimates/machine.py`. If a figure of a
GPU is not published, a plan takes it from another GPU and says so in a line `remark`. [How accurate plans
are](../plan_accuracy.md) compares them with published runs. llamajax itself has measured nothing on a GPU yet."""


def exit_codes() -> str:
    """Returns the page of exit codes."""
    from llamajax.launching import child

    classes: dict[int, list[str]] = {}
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, errors.UserError) and cls is not errors.UserError:
            classes.setdefault(cls.exit_code, []).append(name)
    known = {*classes, *child._MEANINGS, *errors.CAN_HELP, errors.OUT_OF_MEMORY, errors.INTERNAL_ERROR, errors.GIVE_UP}
    assert known <= EXIT_CODES.keys(), known - EXIT_CODES.keys()
    lines = ["# Exit codes", "", NOTE, "", EXIT_TEXT, "", "| code | meaning | error in Python | the launcher restarts |"]
    lines += ["|---|---|---|---|"]
    for code, meaning in EXIT_CODES.items():
        names = ", ".join(f"`{name}`" for name in classes.get(code, []))
        lines.append(f"| {code} | {meaning} | {names} | {'yes' if code in errors.CAN_HELP else ''} |")
    return page([*lines, "", LAUNCHERS_TEXT])


def gpus() -> str:
    """Returns the page of the GPUs that plans have figures for."""
    columns = "`hardware.gpu`", "peak, TFLOP/s", "memory, GiB", "memory, GB/s", "joined by", "GPU to GPU, GB/s", "node, GB/s"
    header = f"| {' | '.join(columns)} | attention | float8 |"
    lines = ["# GPUs", "", NOTE, "", GPUS_TEXT, "", header, "|---|---|---|---|---|---|---|---|---|"]
    return page([*lines, *map(_gpu, GPUS), "", GPUS_NOTES])


def _gpu(gpu: Gpu) -> str:
    kernels = ["cuDNN", "Pallas"]
    kernels += ["Triton"] if gpu.compute_capability in ((8, 0), (9, 0)) else []
    kernels += ["tokamax"] if gpu.compute_capability == (9, 0) else []
    node = "" if gpu.node_bandwidth is None else f"{gpu.node_bandwidth / 1e9:g}"
    return (
        f"| `{gpu.name.lower()}` | {gpu.peak_flops / 1e12:g} | {gpu.memory_bytes / 2**30:.1f}"
        f" | {gpu.memory_bandwidth / 1e9:,.0f} | {gpu.link} | {gpu.gpu_bandwidth / 1e9:g} | {node} | {', '.join(kernels)}"
        f" | {'yes' if gpu.compute_capability >= (8, 9) else 'no'} |"
    )


FILES: dict[Path, Callable[[], str]] = {
    FOLDER / "settings.md": settings,
    FOLDER / "commands.md": commands,
    FOLDER / "exit-codes.md": exit_codes,
    FOLDER / "python.md": python,
    FOLDER / "gpus.md": gpus,
    complete.TABLE: completions,
}
"""Written files, and the function that returns the text of each."""


def main() -> int:
    """Writes or checks the files. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated pages of the reference, and the table of completion.")
    parser.add_argument("--check", action="store_true", help="name the files that are out of date; write nothing")
    check = parser.parse_args().check
    stale = []
    for path, make in FILES.items():
        text = make()
        if not path.is_file() or path.read_text() != text:
            stale.append(path.name)
            if not check:
                path.write_text(text)
    for name in stale:
        print(f"{name}: {'out of date; run python scripts/reference.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
