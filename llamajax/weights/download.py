"""Fetches models from the Hugging Face Hub into its cache, once per machine, and only the files that are needed."""

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.utils import tqdm

from llamajax import disk
from llamajax.config.hub import LIBRARY, HubModel, find_config, hub_model, pin, refusal
from llamajax.data.documents.remote import PAUSES_S
from llamajax.data.progress import TokenizingProgress
from llamajax.errors import ConfigError, DiskError
from llamajax.processes import peers
from llamajax.units import format_bytes
from llamajax.watch.console import say_own
from llamajax.weights.hf_files import PICKLES, TRAVELLING, read_weight_map
from llamajax.weights.safetensors import INDEX, SINGLE

_AT_ONCE = 8
"""Number of files fetched at a time."""
_SMALL = re.compile(rf"config\.json|README\.md|{re.escape(INDEX)}|{TRAVELLING}|[^/]*\.model")

T = TypeVar("T")


def pinned(address: str) -> str:
    """Returns the address with the commit that it has for process 0. Processes call this together.

    Raises:
        ConfigError, DiskError: see `llamajax.config.hub.pin`.
    """
    return peers.of_first(pin(address) if peers.rank() == 0 else None)


def fetched(address: str, *, weights: bool = True) -> Path:
    """Returns the directory of a model on the Hub, in the cache of this machine. Processes call this together.

    Of the processes of a machine, one fetches what is missing and the others wait. A complete model needs no network.

    Args:
        address: hf://ORG/NAME[@REVISION][@COMMIT].
        weights: also fetch the weights; otherwise config.json, tokenizer and the other small files.

    Raises:
        ConfigError: the Hub has no such model with safetensors, does not show it to this user, or cannot be reached.
        DiskError: the disk has no room, or the Hub fails several times.
        OSError: the disk of the cache fails.
    """
    model = hub_model(pinned(address))
    cache = Path(constants.HF_HUB_CACHE)
    folder = cache / ".locks" / f"models--{model.repository.replace('/', '--')}" / f"llamajax-{os.getuid()}"
    record = folder / f"{model.commit}-{'all' if weights else 'small'}.json"
    with _alone(model, folder) as may_write:
        directory = find_config(model).parent
        if not _is_complete(directory, record):
            names = _fetch(model, directory, weights=weights)
            if may_write and names:
                disk.write_atomically(record, json.dumps(names).encode())
    return directory


@contextlib.contextmanager
def _alone(model: HubModel, folder: Path) -> Iterator[bool]:
    """Holds the lock of a model in the cache while the block runs. Yields whether the cache may be written; a cache that may
    not be needs no lock."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)  # other users lock files here, too
        disk.make_folder(folder, 0o700)
    except OSError as error:
        if disk.may_pass(error):
            raise
        yield False
        return
    with disk.locked(folder, wait=False) as is_first:
        if is_first:
            yield True
            return
    if peers.rank() == 0:
        say_own(f"waiting    another process fetches {model}")
    with disk.locked(folder):
        yield True


def _is_complete(directory: Path, record: Path) -> bool:
    """Whether everything is there that an earlier fetch has noted in the record."""
    try:
        return all((directory / name).exists() for name in json.loads(record.read_bytes()))
    except (OSError, ValueError):
        return False


def _fetch(model: HubModel, directory: Path, *, weights: bool) -> list[str]:
    """Fetches the files of a model that are missing. Returns the names of all files that it needs; none if the Hub cannot be
    asked, and what is cached has to do."""
    hub = HfApi(**LIBRARY)
    try:
        info = _reached(model, lambda: hub.model_info(model.repository, revision=model.commit, files_metadata=True))
    except (ConfigError, DiskError):
        if not weights or next(directory.glob("*.safetensors"), None) is not None:
            return []
        raise
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = [name for name in sizes if _SMALL.fullmatch(name) and not (name == INDEX and SINGLE in sizes)]
    _fetch_files(model, directory, names, sizes)
    if weights:
        of_weights = _files_of_weights(model, directory, sizes)
        _fetch_files(model, directory, of_weights, sizes)
        names += of_weights
    return names


def _files_of_weights(model: HubModel, directory: Path, sizes: Mapping[str, int]) -> list[str]:
    """Returns the names of the files with the weights: no second copy in another format."""
    if SINGLE in sizes:
        return [SINGLE]
    if INDEX not in sizes:
        if any(Path(name).suffix in PICKLES for name in sizes):
            remedy = "pickles can run code and are not read; name a model with safetensors"
        else:
            remedy = "name a model of transformers"
        raise ConfigError(f"{model}: has neither {SINGLE} nor {INDEX}; {remedy}")
    names = sorted(set(read_weight_map(directory / INDEX).values()))
    if missing := [name for name in names if name not in sizes]:
        raise ConfigError(f"{model}: {INDEX} names {missing[0]}, which the model lacks; name another revision")
    return names


def _fetch_files(model: HubModel, directory: Path, names: Sequence[str], sizes: Mapping[str, int]) -> None:
    missing = [name for name in names if not (directory / name).exists()]
    total, free = sum(sizes[name] for name in missing), shutil.disk_usage(directory).free
    if total > free:
        raise DiskError(
            f"{model}: {format_bytes(total)} are to be fetched, but only {format_bytes(free)} are free on the disk of"
            f" {constants.HF_HUB_CACHE}; make room, or move the cache with HF_HOME"
        )
    if not missing:
        return
    say_own(f"fetching   {model}: {len(missing)} files, {format_bytes(total)}, to {directory}")
    stop = threading.Event()
    with TokenizingProgress(total, say_own, doing="fetching") as progress:

        def fetch(name: str) -> None:
            bar = _bar(progress.finish_group, stop)
            of_file: dict[str, Any] = {"repo_id": model.repository, "filename": name, "revision": model.commit}
            _reached(model, lambda: hf_hub_download(**of_file, **LIBRARY, tqdm_class=bar))

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as threads:
            try:
                for done in as_completed([threads.submit(fetch, name) for name in missing]):
                    done.result()
            except BaseException:
                stop.set()
                threads.shutdown(cancel_futures=True)
                raise


def _bar(arrived: Callable[[int], None], stop: threading.Event) -> type[tqdm]:
    """Returns the class of a progress bar that shows nothing, and hands the bytes that arrive on."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            arrived(options.get("initial") or 0)  # of an interrupted fetch

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise CancelledError
            arrived(int(n or 0))

        # Bytes on the wire, of huggingface_hub from version 2 on: `update` receives those of the file.
        def update_transfer(self, n: float | None = 1) -> None: ...

        def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None: ...

    return Bar


def _reached(model: HubModel, call: Callable[[], T]) -> T:
    """Returns the result of `call`, which is tried again after failures of the network or the Hub that may pass.

    Raises:
        ConfigError, DiskError: see `refusal`.
        OSError: the local disk fails or is full.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return call()
        except CancelledError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and disk.may_pass(error):
                raise
            refused = refusal(model, error)
            if pause_s is None or not isinstance(refused, DiskError):
                raise refused from error
        time.sleep(pause_s)
    raise AssertionError
