"""Determines what the launcher starts: the program, its configuration, and the numbering of processes and devices."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamajax.config.bases import files_of
from llamajax.config.command import parse_args, parse_run
from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.generate import GenerateConfig
from llamajax.config.launch import LaunchConfig
from llamajax.config.run import Config
from llamajax.config.shipped import find_config
from llamajax.config.yaml_text import COPIES
from llamajax.disk import names_in
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.launching.hosts import COORDINATOR, Hosts, num_gpus
from llamajax.processes import domains

AnyConfig = Config | EvaluateConfig | GenerateConfig

_CONFIG, _ENABLED = "--config", "--distributed.enabled"
_BINDER = Path(__file__).with_name("bind.py")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The processes that this host runs, and the part of their configuration that the launcher needs."""

    module: str
    arguments: tuple[str, ...]
    config: AnyConfig
    hosts: Hosts
    num_local: int
    """Number of processes on this host."""
    gpus: int
    """Number of GPUs of this host that they share; 0 if the CPU computes."""
    interface: str | None
    """Network interface that they use; None: any, but only loopback with one host."""
    nccl: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """NCCL's settings for the domain of this host."""
    config_texts: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Contents of the configuration file and of its bases when they were read, by absolute path."""
    config_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Copies that processes read in place of these files."""

    @property
    def num_processes(self) -> int:
        """Number of processes on all hosts."""
        return self.num_local * self.hosts.count

    @property
    def ranks(self) -> range:
        """Ranks of the processes on this host."""
        return range(self.hosts.own * self.num_local, (self.hosts.own + 1) * self.num_local)

    @property
    def run_dir(self) -> Path | None:
        """Directory of a training run, which resumes from its checkpoints; None: a restart could not reuse anything."""
        return Path(self.config.run_dir).expanduser() if isinstance(self.config, Config) else None

    @property
    def start_s(self) -> float | None:
        """Time limit in seconds for the first report of a process; None: it need not report."""
        watchdog = self.config.watchdog if isinstance(self.config, Config) else None
        return watchdog.start_s if watchdog is not None and watchdog.enabled else None

    @property
    def devices(self) -> str:
        """Devices of each process, for people."""
        if emulated := self.config.mesh.num_cpu_devices:
            return f"{emulated} emulated device{'s' if emulated > 1 else ''}"
        per_process = self.gpus // self.num_local
        return f"{per_process} GPU{'s' if per_process > 1 else ''}" if per_process else "the CPU"

    def command(self) -> list[str]:
        """Returns the command of every process; the process ends with the launcher."""
        return bound([sys.executable, "-m", self.module, *self.arguments])

    def with_config_in(self, folder: Path) -> "Program":
        """Returns the program with copies of its configuration files in `folder`; later edits affect only new runs."""
        copies = {path: folder / "config" / f"{number}.yaml" for number, path in enumerate(self.config_texts)}
        try:
            (folder / "config").mkdir()
            for path, copy in copies.items():
                copy.write_bytes(self.config_texts[path])
        except OSError:  # a full disk does not end the run
            return self
        return dataclasses.replace(self, config_copies={path: str(copy) for path, copy in copies.items()})

    def environment(self, rank: int, address: str, bind_address: str | None) -> dict[str, str]:
        """Returns the environment variables for process `rank`, in addition to the launcher's own.

        Args:
            rank: rank among all processes of the run.
            address: `host:port` where they meet.
            bind_address: address on which process 0 listens; None: it determines that itself.
        """
        interface = self.interface or ("lo" if self.hosts.count == 1 else None)
        told = {
            **self.nccl,
            "LLAMAJAX_NUM_PROCESSES": str(self.num_processes),
            "LLAMAJAX_PROCESS_ID": str(rank),
            COORDINATOR: address,
            "PYTHONUNBUFFERED": "1",  # lines appear when they are printed
        }
        if self.config_copies:
            told[COPIES] = json.dumps(self.config_copies)
        if bind_address is not None:
            told["JAX_COORDINATOR_BIND_ADDRESS"] = bind_address
        if self.gpus:
            share = self.gpus // self.num_local
            first = (rank - self.ranks.start) * share
            if interface is not None and "NCCL_SOCKET_IFNAME" not in os.environ | told:
                told["NCCL_SOCKET_IFNAME"] = interface
            told["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + share)))
        return told


def bound(command: Sequence[str]) -> list[str]:
    """Returns the command, which starts with a path, as one that ends with this process, even if this process is killed."""
    return [sys.executable, "-I", "-S", str(_BINDER), str(os.getpid()), *command]


def find_program(
    config: LaunchConfig, arguments: Sequence[str], hosts: Hosts, environment: Mapping[str, str] = os.environ
) -> Program:
    """Reads the program's configuration, as each of its processes will.

    Exits as the program itself does for mistakes, `--help` and `--print_config`.

    Raises:
        ConfigError: the configuration does not fit this number of processes and devices.
        EnvironmentMismatchError: the GPUs cannot be divided among the processes.
    """
    gpus = num_gpus(environment)
    is_given = any(argument.partition("=")[0] == _ENABLED for argument in arguments)
    joined = tuple(arguments) if is_given else (*arguments, _ENABLED, "true")
    several = (config.num_processes or gpus or 1) * hosts.count > 1
    read = _read(config.module, joined if several else arguments)
    if read.mesh.num_cpu_devices:
        gpus = 0
    num_local = config.num_processes or gpus or 1
    if several and num_local * hosts.count == 1:  # there are GPUs, but the CPU emulates devices
        several, read = False, _read(config.module, arguments)
    if gpus % num_local:
        raise EnvironmentMismatchError(
            f"num_processes: {num_local} processes cannot share the {gpus} GPUs of this host equally; choose another number,"
            " or hide some with CUDA_VISIBLE_DEVICES"
        )
    config_texts = {os.path.abspath(path): Path(path).read_bytes() for path in _config_files(arguments)}
    program = Program(
        module=config.module,
        arguments=joined if several else tuple(arguments),
        config=read,
        hosts=hosts,
        num_local=num_local,
        gpus=gpus,
        interface=config.interface,
        nccl=_nccl(read, hosts, environment),
        config_texts=config_texts,
    )
    _check(program)
    return program


def _nccl(config: AnyConfig, hosts: Hosts, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns NCCL's settings for the domain of this host.

    Raises:
        EnvironmentMismatchError: the run has several hosts and domains, and this host is in none.
    """
    if not isinstance(config, Config):
        return {}
    if hosts.count > 1:
        domains.check_domain(config.hardware, environment)
    return domains.nccl_settings(config.hardware, environment)


def _read(module: str, arguments: Sequence[str]) -> AnyConfig:
    prog = f"python -m {module}"
    match module:
        case "llamajax.evaluate":
            return parse_args(arguments, prog=prog, root=EvaluateConfig).config
        case "llamajax.generate":
            return parse_args(arguments, prog=prog, root=GenerateConfig, check=GenerateConfig.file_problems).config
        case _:
            return parse_run(arguments, prog=prog).config


def _config_files(arguments: Sequence[str]) -> list[str]:
    """Returns the file that `--config` names and its bases, for arguments that have been parsed without errors.

    Raises:
        ConfigError: `--config` names something that can be read only once.
    """
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, is_joined, value = argument.partition("=")
        if name == _CONFIG:
            path = find_config(value if is_joined else following)
            if path is None or not os.path.isfile(path):
                raise ConfigError(f"--config: {path} is not a file that the launched processes can read; write it to one")
            return files_of(path)
    return []


def _check(program: Program) -> None:
    config, distributed = program.config, program.config.distributed
    if program.num_processes > 1 and not distributed.enabled:
        raise ConfigError(f"distributed.enabled: false, but {program.num_processes} processes are started; remove it")
    for field in dataclasses.fields(distributed):
        if (
            field.name in ("coordinator_address", "num_processes", "process_id")
            and getattr(distributed, field.name) is not None
        ):
            raise ConfigError(f"distributed.{field.name}: set, but the launcher sets it; remove it")
    per_process = config.mesh.num_cpu_devices or program.gpus // program.num_local
    if not isinstance(config, Config) or not per_process or _may_have_steps(program):
        return  # a resumed run chooses its micro-batches for the available devices
    if found := config.placement_problems(per_process * program.num_processes):
        of_all = f" ({program.num_processes} process{'es' if program.num_processes > 1 else ''} x {program.devices})"
        raise ConfigError("\n".join(f"{problem}{of_all}" for problem in found))


def _may_have_steps(program: Program) -> bool:
    try:
        return newest_step(program.run_dir) > 0
    except OSError:  # its processes will report it, and are started again
        return True


def newest_step(run_dir: Path | None) -> int:
    """Returns the newest committed step of a run; 0 if there is none."""
    return max(steps_in(run_dir / "checkpoints"), default=0) if run_dir is not None else 0


def steps_in(directory: Path) -> set[int]:
    """Returns the steps in a directory, from the names in it."""
    return {int(name) for name in names_in(directory) if name.isascii() and name.isdecimal()}
