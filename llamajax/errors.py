"""Errors a user can cause, each with the exit code its command ends with.

Every message is one line: what is wrong, where (``file:line`` or the key), the rule, the remedy.
Our own invariants are ``assert``s and never end up here.
"""

import io
import re
import sys

OUT_OF_MEMORY, DEVICE_ERROR, INTERNAL_ERROR, DISK_ERROR, TRY_AGAIN, GIVE_UP = 5, 69, 70, 74, 75, 93
"""Exit codes for what is no `UserError`: the device's memory, a device or network that failed, a defect of ours, the disk;
what a new start may help (a process that was lost or stuck), and what it will not."""
CAN_HELP = (DEVICE_ERROR, DISK_ERROR, TRY_AGAIN)
"""Those after which a new start may get further."""


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
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return short if short.isprintable() else repr(short)
