"""Models on the Hugging Face Hub: their addresses, the commits behind them, and the file that describes a model."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llamajax import __version__
from llamajax.config.hf_config import CONFIG
from llamajax.config.rules import Bound
from llamajax.errors import ConfigError, DiskError, UserError, missing_package, show, without_passwords

PREFIX = "hf://"
LIBRARY: dict[str, Any] = {"library_name": "llamajax", "library_version": __version__}
"""Name and version of the program, which requests to the Hub carry."""
_REPOSITORY = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_PASSING = {408, 425, 429}


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub."""

    address: str
    """The address as written."""
    repository: str
    """ORG/NAME."""
    revision: str
    """Branch, tag or commit; the default branch if the address names none."""
    commit: str | None
    """Commit, if the address ends with one."""

    def __str__(self) -> str:
        return self.address


def is_on_hub(named: str) -> bool:
    """Whether a setting names a model on the Hub rather than a directory."""
    return named.startswith(PREFIX)


def hub_model(address: str) -> HubModel:
    """Reads hf://ORG/NAME, hf://ORG/NAME@REVISION, and either one followed by @COMMIT, which a run adds to it.

    Raises:
        ConfigError: the address has another form.
    """
    if not is_well_formed(address):
        raise ConfigError(f"{show(address)} {FORM}")
    repository, *rest = address.removeprefix(PREFIX).split("@")
    commit = rest[-1] if rest and _COMMIT.fullmatch(rest[-1]) else None
    revision = "@".join(rest[:-1] if commit is not None and len(rest) > 1 else rest) or "main"
    return HubModel(address, repository, revision, commit)


def is_well_formed(named: str) -> bool:
    """Whether a setting names a directory, or a model on the Hub by an address in the right form."""
    repository, at, revision = named.removeprefix(PREFIX).partition("@")
    return not is_on_hub(named) or bool(
        _REPOSITORY.fullmatch(repository) and (not at or re.fullmatch(r"[\w./@+-]+", revision, re.ASCII))
    )


FORM = "must be hf://ORG/NAME or hf://ORG/NAME@REVISION, such as hf://meta-llama/Llama-3.1-8B"
Weights = Annotated[str, Bound(is_well_formed, FORM)]
"""Type of a setting that names a model, in a directory or on the Hub."""


def is_pin_of(pinned: str, address: str) -> bool:
    """Whether `pinned` is the address with the commit that a run has added to it."""
    return pinned.startswith(f"{address}@") and _COMMIT.fullmatch(pinned.removeprefix(f"{address}@")) is not None


def pin(address: str) -> str:
    """Returns the address with the commit that its revision has now; an address that ends with a commit is unchanged.

    Raises:
        ConfigError: see `find_config`.
        DiskError: see `find_config`.
    """
    model = hub_model(address)
    return address if model.commit else f"{address}@{find_config(model).parent.name}"


def find_config(model: HubModel) -> Path:
    """Returns the cached config.json of a model, in a directory called like the commit; fetches it if it is missing.

    A cached file of a commit needs no network. Without a network, a branch or tag has the commit that it had when its file
    was last fetched.

    Raises:
        ConfigError: the Hub has no such model, or does not show it to this user, or cannot be reached.
        DiskError: the Hub fails, which may pass.
        EnvironmentMismatchError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RevisionNotFoundError
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error

    of_model: dict[str, Any] = {"repo_id": model.repository, "filename": CONFIG, "revision": model.commit or model.revision}
    try:
        cached = Path(hf_hub_download(**of_model, local_files_only=True))
    except LocalEntryNotFoundError:
        cached = None
    if model.commit is not None and cached is not None:
        return cached
    try:
        # Fails at once where the download would try for long.
        newest = get_hf_file_metadata(hf_hub_url(**of_model), **LIBRARY)
        if cached is not None and cached.parent.name == newest.commit_hash:
            return cached
        return Path(hf_hub_download(**of_model, **LIBRARY))
    except Exception as error:
        if cached is None or isinstance(error, RevisionNotFoundError | EntryNotFoundError):
            raise refusal(model, error) from error
        return cached


def refusal(model: HubModel, error: Exception) -> UserError:
    """Returns the one-line error for a model that the Hub did not give.

    Args:
        model: the model.
        error: what huggingface_hub raised.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    hub, repository = without_passwords(constants.ENDPOINT), model.repository
    match error:
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError():
            rule = f"is not complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids fetching it"
            return ConfigError(f"{model}: {rule}; unset HF_HUB_OFFLINE, or name a directory")
        case errors.GatedRepoError():
            remedy = f"accept its conditions at {hub}/{repository}, and set HF_TOKEN to a token of that account"
            return ConfigError(f"{model}: is gated; {remedy}")
        case errors.RepositoryNotFoundError():
            remedy = "correct the name, or set HF_TOKEN to a token that may read it"
            return ConfigError(f"{model}: {hub} has no such model, or it is private; {remedy}")
        case errors.RevisionNotFoundError():
            remedy = "name a branch, a tag or a commit of it, or none for its newest"
            return ConfigError(f"{model}: the model has no revision {show(model.commit or model.revision)}; {remedy}")
        case errors.EntryNotFoundError():
            return ConfigError(f"{model}: has no {CONFIG}; name a model in the form of transformers")
    if status in (401, 403):
        return ConfigError(f"{model}: {hub} refuses access: HTTP {status}; check the token in HF_TOKEN")
    reason = f"HTTP {status}" if status else without_passwords(" ".join(str(error).split()))[:200] or type(error).__name__
    if _is_unreachable(error):
        remedy = "connect this machine, or name a directory"
        return ConfigError(f"{model}: {hub} cannot be reached ({reason}), and nothing is cached; {remedy}")
    if status is not None and status < 500 and status not in _PASSING:
        return ConfigError(f"{model}: {hub} answers {reason}; check the address, and HF_ENDPOINT")
    return DiskError(f"{model}: cannot be fetched from {hub}: {reason}; run the same command again")


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether no connection was made; huggingface_hub uses httpx or httpx2, by its version."""
    return error is not None and (type(error).__name__ in ("ConnectError", "ProxyError") or _is_unreachable(error.__cause__))
