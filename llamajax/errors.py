"""Errors a user can cause, each with the exit code its command ends with.

Every message is one line: what is wrong, where (``file:line`` or the key), the rule, the remedy.
Our own invariants are ``assert``s and never end up here.
"""

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator

OUT_OF_MEMORY, DEVICE_ERROR, INTERNAL_ERROR, DISK_ERROR, TRY_AGAIN, GIVE_UP = 5, 69, 70, 74, 75, 93
"""Exit codes for what is no `UserError`: the device's memory, a device or network that failed, a defect of ours, the disk;
what a new start may help (a process that was lost or stuck), and what it will not."""
CAN_HELP = (DEVICE_ERROR, DISK_ERROR, TRY_AGAIN)
"""Those after which a new start may get further."""

WHEELS = {
    "absl": "absl-py", "array_record": "array_record", "chex": "chex", "cloudpickle": "cloudpickle", "etils": "etils",
    "flax": "flax", "fsspec": "fsspec", "gigatoken": "gigatoken", "google.protobuf": "protobuf", "grain": "grain",
    "jax": "jax", "jaxlib": "jaxlib",
    "jaxtyping": "jaxtyping", "jinja2": "jinja2", "numpy": "numpy", "optax": "optax", "orbax.checkpoint": "orbax-checkpoint",
    "orjson": "orjson",
    "portpicker": "portpicker", "pyarrow": "pyarrow", "rich": "rich", "sentencepiece": "sentencepiece",
    "tensorboardX": "tensorboardX", "tensorstore": "tensorstore", "tokenizers": "tokenizers",
    "transformers": "transformers", "yaml": "pyyaml",
}  # fmt: skip
"""Modules that commands import, also through each other, and what brings them. Images for GPUs come without some of them."""


class UserError(ValueError):
    """A mistake of the user's or their machine's; entry points print it without a traceback."""

    exit_code = 1


class UnequalError(UserError):
    """Numbers of a run's mesh and forms that are not one device's."""

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
    """A device that computes or keeps wrong numbers, again and again; without it, the same command would do."""

    exit_code = 6


class CheckpointError(UserError):
    """A checkpoint that is damaged, of another model, or being written by another process."""

    exit_code = 65


class DiskError(UserError):
    """A disk that fails or is full where data is read or kept, or a store that cannot be reached; nothing is wrong with the
    data."""

    exit_code = DISK_ERROR


class SaveError(UserError):
    """A checkpoint that could not be written; those before it are whole."""

    exit_code = DISK_ERROR


class DivergedError(UserError):
    """Steps keep going wrong, as often as the run may go back; running the same command again would not help."""

    exit_code = GIVE_UP


def missing_package(error: ModuleNotFoundError) -> EnvironmentMismatchError | None:
    """What to tell of a module that is not there, with all others that are not; None for one of our own."""
    name = error.name or ""
    if name.partition(".")[0] in ("", "llamajax", "converters"):
        return None
    package = next((module for module in WHEELS if f"{name}.".startswith(f"{module}.")), name.partition(".")[0])
    wheel = WHEELS.get(package, package)
    if _is_there(package):
        return EnvironmentMismatchError(f"{name}: is not in the {package} that is installed; run pip install -U {wheel}")
    wheels = {brings for module, brings in WHEELS.items() if not _is_there(module)} | {wheel}
    return EnvironmentMismatchError(f"{name}: is not installed; run pip install {' '.join(sorted(wheels))}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it is in
        return False


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around what a command imports: ends it with one line if a package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (told := missing_package(error)) is None:
            raise
        print(told, file=sys.stderr)
        sys.exit(told.exit_code)


def show_any_text() -> None:
    """From here on, characters that the encoding of standard output or error lacks are printed as escapes, such as `\\xe9`.

    Else a name, a text that a model writes, or a bar of progress would end the command where it is printed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not what a notebook or a test has put in its place
            stream.reconfigure(errors="backslashreplace")


def without_passwords(text: str) -> str:
    """The text with `...` for user and password in addresses such as https://USER:PASSWORD@HOST."""
    return re.sub(r"(?<=://)[^\s/@:]*:[^\s/@]+@", "...@", text)


def show(text: str) -> str:
    """Text as it can stand in a message of one line."""
    return show_path(text if len(text) <= 60 else f"{text[:57]}...")


def show_path(path: str) -> str:
    """A path as it can stand in a message of one line: whole, since its end is the name of the file."""
    return path if path.isprintable() else repr(path)
