"""Hugging Face models in and out: `python -m converters.hf [import] HF_DIR OUT`, `... export RUN_OR_CHECKPOINT OUT`."""

if __name__ == "__main__":
    # --help and mistakes answer before the seconds that importing jax takes; devices are left to training.
    import os

    from converters.hf_cli import parse_args

    ARGUMENTS = parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
else:
    ARGUMENTS = None

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.sharding import AxisType

from converters.hf_export import ExportDType, read_checkpoint
from converters.hf_import import read_model
from llamajax.errors import DISK_ERROR, INTERNAL_ERROR, ConfigError, UserError
from llamajax.manifest import sync
from llamajax.mesh import AXES

VERIFY_BELOW = 2_000_000_000
"""Parameters; larger models are compared only on request, because both sides are then whole in memory, in fp32."""


def convert(
    command: str, source: Path, out: Path, *, dtype: ExportDType | None, verify: bool | None, license: str | None
) -> None:
    """Runs one conversion; `out` appears whole, once everything is done and verified, or not at all.

    Args:
        command: `import` or `export`.
        source: what to read.
        out: the directory to make.
        dtype: type of the weights in `out`, not float16 for an import; None: as in `source`.
        verify: compare logits; None: below two billion parameters.
        license: of the exported model, for its card; None: that of the model it was imported from.

    Raises:
        UserError: one of `llamajax.errors`.
        OSError: the disk.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: exists already; choose another directory, or remove it")
    with jax.set_mesh(jax.make_mesh((1,) * len(AXES), AXES, (AxisType.Explicit,) * len(AXES), devices=jax.devices()[:1])):
        started = time.monotonic()
        if command == "import":
            assert dtype != "float16"
            plan = read_model(source, dtype)
        else:
            plan = read_checkpoint(source, dtype, license)
        print(plan.about, flush=True)
        with made_whole(out) as unfinished:
            nbytes = plan.write(unfinished)
            seconds = time.monotonic() - started
            speed = f"{nbytes / 1e6:,.0f} MB in {seconds:.1f} s, {nbytes / 1e6 / seconds:,.0f} MB/s"
            print(f"wrote      {speed}, checked and on the disk", flush=True)
            if verify or (verify is None and plan.config.num_params < VERIFY_BELOW):
                print(f"verify     {plan.verify(unfinished)}", flush=True)
    print(f"done       {out}")


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A directory to fill, which gets the name `out` at the end, or is removed if something goes wrong."""
    unfinished = out.absolute().with_name(f".{out.name}.{os.getpid()}.writing")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            sync(path)
        unfinished.rename(out)
        sync(unfinished.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def main(arguments: argparse.Namespace) -> int:
    """Converts, and turns what goes wrong into a message and the exit code that is returned."""
    source, out = Path(arguments.source).expanduser(), Path(arguments.out).expanduser()
    try:
        options = {"dtype": arguments.dtype, "verify": arguments.verify, "license": arguments.license}
        convert(arguments.command, source, out, **options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{error.filename or out}: {error.strerror or error}; see to the disk and try again", file=sys.stderr)
        return DISK_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        return INTERNAL_ERROR
    return 0


if ARGUMENTS is not None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception, which cleans up
    sys.exit(main(ARGUMENTS))
