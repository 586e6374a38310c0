"""Checks Python, the packages that llamajax needs, and variables that make them load other libraries."""

import glob
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llamajax.diagnostics.findings import Finding

TESTED = ((3, 11), (3, 12))
"""Versions of Python that CI runs."""
CUDA_PLUGIN = "jax-cuda{}-plugin"
_VERSIONS_OF_CUDA = (13, 12)
_NOT_OF_USERS = ("test", "dev")
_NO_METADATA = "llamajax is not installed by pip, so its requirements are unknown"


def check_python(version: Sequence[int] = sys.version_info[:3]) -> Iterator[Finding]:
    """Checks the version of Python."""
    text = ".".join(map(str, version))
    names = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
    if tuple(version[:2]) in TESTED:
        yield Finding("Python", "ok", text)
    else:
        yield Finding(
            "Python", "warn", f"{text}: llamajax is tested with {names}", f"make the environment with Python {names}"
        )


def check_packages() -> Iterator[Finding]:
    """Checks the packages that llamajax needs, and which extras are installed."""
    try:
        metadata.distribution("llamajax")
    except metadata.PackageNotFoundError:
        yield Finding("packages", "warn", _NO_METADATA, "pip install -e . in the checkout, or pip install llamajax")
        return
    yield from _broken("llamajax", "", "packages") or [
        Finding("packages", "ok", "all that llamajax needs, in versions that it takes")
    ]
    names = [name for name in metadata.metadata("llamajax").get_all("Provides-Extra") or [] if name not in _NOT_OF_USERS]
    extras = [name for name in names if any(is_of_extra for _, is_of_extra in _requirements("llamajax", name))]
    missing = {name: missing_of("llamajax", name) for name in extras}
    there = ", ".join(name for name in extras if not missing[name]) or "none"
    absent = ", ".join(name for name in extras if missing[name])
    yield Finding("extras", "ok", f"{there}; not installed: {absent or 'none'}")


def check_jax(num_cards: int) -> Iterator[Finding]:
    """Checks that jax, jaxlib, the plugin for GPUs and its libraries are of versions that belong together.

    Args:
        num_cards: number of cards of this host, which need NCCL if there are several.
    """
    versions = {name: version_of(name) for name in ("jax", "jaxlib")}
    if versions["jax"] is None:  # `check_packages` reports it
        return
    plugins = [CUDA_PLUGIN.format(cuda) for cuda in _VERSIONS_OF_CUDA if version_of(CUDA_PLUGIN.format(cuda))]
    broken = _broken("jax", "", "jax")
    for plugin in plugins:
        pjrt = plugin.replace("plugin", "pjrt")
        broken += [
            Finding(
                "jax", "fail", f"{name} {version_of(name) or 'is missing'}, but jax is {versions['jax']}", _again(plugin)
            )
            for name in (plugin, pjrt)
            if version_of(name) != versions["jax"]
        ]
        broken += _broken(plugin, "with-cuda", "CUDA libraries") if version_of(_nccl(plugin)) else []
    if len(plugins) > 1:
        broken.append(
            Finding(
                "jax",
                "fail",
                f"{' and '.join(plugins)} are both installed",
                f"pip uninstall {plugins[1]} {plugins[1].replace('plugin', 'pjrt')}",
            )
        )
    yield from broken
    if not broken:
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield Finding("jax", "ok", text + "".join(f", {plugin} {version_of(plugin)}" for plugin in plugins))
    for plugin in plugins:
        if (nccl := version_of(_nccl(plugin))) is not None:
            yield Finding("NCCL", "ok", f"{nccl}, of the package {_nccl(plugin)}")
        elif num_cards > 1:
            text = f"the package {_nccl(plugin)} is not installed, so jax takes the system's library, of any version"
            yield Finding("NCCL", "warn", text, "pip install 'llamajax[cuda13]'")


def cuda_version() -> int:
    """Returns the major version of CUDA that the installed plugin of jax was built for; 13 without a plugin."""
    return next((cuda for cuda in _VERSIONS_OF_CUDA if version_of(CUDA_PLUGIN.format(cuda))), _VERSIONS_OF_CUDA[0])


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks variables that make jax or NCCL use other libraries, devices or paths than they would."""
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        found = [
            name
            for name in ("libcudnn", "libnccl", "libcublas")
            if glob.glob(os.path.join(glob.escape(folder), f"{name}.so*"))
        ]
        if found:
            text = f"LD_LIBRARY_PATH has {', '.join(found)} in {folder}, which replace those that jax was built with"
            yield Finding("variables", "warn", text, "unset LD_LIBRARY_PATH; the extra cuda13 brings its own libraries")
    for name, effect in {
        "NCCL_P2P_DISABLE": "cards exchange data through the host's memory",
        "NCCL_IB_DISABLE": "hosts exchange data by TCP, without InfiniBand or RoCE",
        "NCCL_SHM_DISABLE": "cards without a direct link exchange data through the network",
        "CUDA_LAUNCH_BLOCKING": "each kernel waits for the one before it",
    }.items():
        if environment.get(name, "0") not in ("", "0"):
            yield Finding(
                "variables", "warn", f"{name}={environment[name]}: {effect}", f"unset {name}, if it is not deliberate"
            )


def version_of(name: str) -> str | None:
    """Returns the installed version of a package; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing_of(name: str, extra: str) -> list[str]:
    """Returns what a package needs, with an extra, and this environment lacks or has in another version: one text each, such
    as `numpy>=2.0 (1.26.4 is installed)`."""
    found = []
    for requirement, _ in _requirements(name, extra):
        version, wanted = version_of(requirement.name), f"{requirement.name}{requirement.specifier}"
        if version is None:
            found.append(f"{wanted} (not installed)")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{wanted} ({version} is installed)")
        elif extra and canonicalize_name(requirement.name) != canonicalize_name(name):
            found += [one for inner in requirement.extras for one in missing_of(requirement.name, inner)]
    return found


def _requirements(name: str, extra: str) -> list[tuple[Requirement, bool]]:
    """Returns what a package needs on this system with an extra, each with whether only the extra needs it."""
    several = [Requirement(text) for text in metadata.requires(name) or []]
    needed = [it for it in several if it.marker is None or it.marker.evaluate({"extra": extra})]
    return [(it, it.marker is not None and not it.marker.evaluate({"extra": ""})) for it in needed]


def _broken(name: str, extra: str, check: str) -> list[Finding]:
    return [
        Finding(check, "fail", f"{name} needs {one}", f"pip install '{one.partition(' ')[0]}'")
        for one in missing_of(name, extra)
    ]


def _again(plugin: str) -> str:
    return f"pip install -U 'jax[{plugin.removeprefix('jax-').removesuffix('-plugin')}]=={version_of('jax')}'"


def _nccl(plugin: str) -> str:
    return f"nvidia-nccl-cu{plugin.removeprefix('jax-cuda').removesuffix('-plugin')}"
