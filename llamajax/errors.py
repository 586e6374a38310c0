"""Errors a user can cause, each with the exit code its command ends with.

Every message is one line: what is wrong, where (``file:line`` or the key), the rule, the remedy.
Our own invariants are ``assert``s, not errors of this module.
"""

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator

OUT_OF_MEMORY, DEVICE_ERROR, INTERNAL_ERROR, DISK_ERROR, TRY_AGAIN, GIVE_UP = 5, 69, 70, 74, 75, 93
"""Exit codes of failures other than `UserError`: out of device memory, failed device or network, defect of llamajax, disk,
lost or stuck process (starting again may help), and failures that starting again does not help."""
CAN_HELP = (DEVICE_ERROR, DISK_ERROR, TRY_AGAIN)
"""Exit codes after which starting again may help."""

WHEELS = {
    "absl": "absl-py", "array_record": "array_record", "chex": "chex", "cloudpickle": "cloudpickle", "etils": "etils",
    "flax": "flax", "fsspec": "fsspec", "gigatoken": "gigatoken", "google.protobuf": "protobuf", "grain": "grain",
    "huggingface_hub": "huggingface-hub", "jax": "jax", "jaxlib": "jaxlib",
    "jaxtyping": "jaxtyping", "jinja2": "jinja2", "numpy": "numpy", "optax": "optax", "orbax.checkpoint": "orbax-checkpoint",
    "orjson": "orjson",
    "packaging": "packaging",
    "portpicker": "portpicker", "pyarrow": "pyarrow", "rich": "rich", "sentencepiece": "sentencepiece",
    "tensorboardX": "tensorboardX", "tensorstore": "tensorstore", "tokenizers": "tokenizers",
    "transformers": "transformers", "yaml": "pyyaml",
}  # fmt: skip
"""Packages that provide the modules that commands import, directly or not. Some images for GPUs lack some of them."""


class UserError(ValueError):
    """A mistake of the user, or a problem of their machine; commands print it without a traceback."""

    exit_code = 1


class UnequalError(UserError):
    """A verification in which the run's mesh and forms compute other numbers than one device."""

    exit_code = 1


class ConfigError(UserError):
    """A configuration that cannot run. One line per problem, all problems at once."""

    exit_code = 2


class DataError(UserError):
    """Data that cannot be read as the configuration says."""

    exit_code = 3


class EnvironmentMismatchError(UserError):
    """The machine is not what the configuration asks for (device count, missing package)."""

    exit_code = 4


class CorruptionError(UserError):
    """A device that repeatedly computes or stores wrong numbers; without it, the same command works."""

    exit_code = 6


class CheckpointError(UserError):
    """A checkpoint that is damaged, belongs to another model, or is being written by another process."""

    exit_code = 65


class DiskError(UserError):
    """A disk that fails or is full, or a store that cannot be reached; the data itself is not wrong."""

    exit_code = DISK_ERROR


class SaveError(UserError):
    """A checkpoint that could not be written; earlier checkpoints are complete."""

    exit_code = DISK_ERROR


class DivergedError(UserError):
    """Steps that still go wrong after the run has gone back as often as it may; running the command again does not help."""

    exit_code = GIVE_UP


def missing_package(error: ModuleNotFoundError) -> EnvironmentMismatchError | None:
    """Returns the error for a missing module, which names all missing packages; None if the module is one of ours."""
    name = error.name or ""
    if name.partition(".")[0] in ("", "llamajax", "converters"):
        return None
    package = next((module for module in WHEELS if f"{name}.".startswith(f"{module}.")), name.partition(".")[0])
    wheel = WHEELS.get(package, package)
    if _is_there(package):
        return EnvironmentMismatchError(f"{name}: is not in the installed {package}; run pip install -U {wheel}")
    wheels = {brings for module, brings in WHEELS.items() if not _is_there(module)} | {wheel}
    return EnvironmentMismatchError(f"{name}: is not installed; run pip install {' '.join(sorted(wheels))}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor does its package exist
        return False


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Ends a command with one line if a package that it imports in this context is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (told := missing_package(error)) is None:
            raise
        print(told, file=sys.stderr)
        sys.exit(told.exit_code)


def show_any_text() -> None:
    """Prints characters that the encoding of standard output or error lacks as escapes, such as `\\xe9`, from now on.

    Otherwise a name, a generated text or a progress bar with such characters would end the command.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not the replacement of a notebook or a test
            stream.reconfigure(errors="backslashreplace")


def without_passwords(text: str) -> str:
    """Returns the text with `...` for user and password in addresses such as https://USER:PASSWORD@HOST."""
    return re.sub(r"(?<=://)[^\s/@:]*:[^\s/@]+@", "...@", text)


def show(text: str) -> str:
    """Returns a text, shortened and escaped for a one-line message."""
    return show_path(text if len(text) <= 60 else f"{text[:57]}...")


def show_path(path: str) -> str:
    """Returns a path, escaped for a one-line message; not shortened, because it ends with the file name."""
    return path if path.isprintable() else repr(path)
