"""Writes Megatron-LM's tokenized documents in little memory, byte for byte as Megatron-Core's builder does."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from jaxtyping import Int64, Integer

from llamajax.data.tokens.megatron import CHUNK, HEAD, MAGIC, TOKEN_DTYPES, VERSION, paths_of
from llamajax.disk import file_made_whole

_UINT16_BELOW = 65500


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype that Megatron's own tools choose: uint16 for vocabularies below 65,500 tokens, else int32."""
    return np.dtype("<u2" if vocab_size < _UINT16_BELOW else "<i4")


class IndexedDatasetWriter:
    """Writes documents to a pair of files, in order. Use `write_indexed` to create a writer."""

    def __init__(self, dtype: np.dtype, tokens: BinaryIO, lengths: IO[bytes], indices: IO[bytes], modes: IO[bytes] | None):
        """Writes tokens of `dtype` to a `.bin`, and the data of the index to temporary files until the end."""
        self._dtype, self._tokens, self._lengths, self._indices, self._modes = dtype, tokens, lengths, indices, modes
        self._num_sequences = self._num_ended = 0
        self._num_indices = 1
        indices.write(bytes(8))

    def add_item(self, tokens: Integer[np.ndarray, "tokens"], mode: int = 0) -> None:
        """Adds a sequence to the current document, which `end_document` ends; has the arguments of `add_document`."""
        self._add(tokens, [len(tokens)], [mode])

    def end_document(self) -> None:
        """Ends the current document, with all sequences since the previous end, possibly none."""
        self._end(np.array([self._num_sequences]))

    def add_document(
        self,
        tokens: Integer[np.ndarray, "tokens"],
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Adds a document.

        Args:
            tokens: all tokens of the document.
            lengths: lengths of its sequences; None: it is one sequence.
            modes: modes of its sequences, -128 to 127, in a multimodal file; None: all 0.

        Raises:
            ValueError: the lengths do not fit the tokens, or a number exceeds the range of its type.
            OSError: the disk fails.
        """
        lengths = [len(tokens)] if lengths is None else lengths
        self._add(tokens, lengths, modes)
        self.end_document()

    def add_documents(self, tokens: Integer[np.ndarray, "tokens"], lengths: Int64[np.ndarray, "documents"]) -> None:
        """Adds documents of these lengths, each one sequence, as GPT data has them; raises the errors of `add_document`."""
        before = self._num_sequences
        self._add(tokens, lengths, None)
        self._end(np.arange(before + 1, self._num_sequences + 1))

    def _add(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray, modes: Sequence[int] | None) -> None:
        ids, sizes = _as(self._dtype, tokens, "ids of tokens"), _as(np.dtype("<i4"), lengths, "lengths of sequences")
        kinds = _as(np.dtype("i1"), np.zeros(len(sizes)) if modes is None else modes, "modes")
        if sizes.min(initial=0) < 0 or sizes.sum(dtype=np.int64) != len(ids) or len(kinds) != len(sizes):
            raise ValueError(
                f"{len(ids):,} tokens are not {len(sizes):,} sequences of these lengths with {len(kinds):,} modes"
            )
        self._tokens.write(ids.data)
        self._lengths.write(sizes.data)
        if self._modes is not None:
            self._modes.write(kinds.data)
        self._num_sequences += len(sizes)

    def _end(self, indices: np.ndarray) -> None:
        self._indices.write(indices.astype("<i8").data)
        self._num_indices += len(indices)
        self._num_ended = self._num_sequences

    def finish(self, index: BinaryIO) -> None:
        """Writes the index of everything that was added.

        Raises:
            ValueError: the last document was not ended.
            OSError: the disk fails.
        """
        if self._num_ended != self._num_sequences:
            raise ValueError("the last document was not ended: call end_document after its last add_item")
        (code,) = [code for code, dtype in TOKEN_DTYPES.items() if dtype == self._dtype]
        index.write(HEAD.pack(MAGIC, VERSION, code, self._num_sequences, self._num_indices))
        for part in _parts(self._lengths):
            index.write(part)
        end = 0
        for part in _parts(self._lengths):
            ends = end + np.cumsum(np.frombuffer(part, "<i4"), dtype="<i8") * self._dtype.itemsize
            index.write(np.concatenate([[end], ends[:-1]]).astype("<i8").data)
            end = int(ends[-1])
        for file in (self._indices, self._modes):
            for part in [] if file is None else _parts(file):
                index.write(part)


@contextlib.contextmanager
def write_indexed(path: str | Path, dtype: np.dtype, *, with_modes: bool = False) -> Iterator[IndexedDatasetWriter]:
    """Writes a pair of files of any size.

    Both files get their names when the block ends without an error, the `.idx` last; otherwise neither does. An existing
    pair of that name is replaced.

    Args:
        path: the pair, see `paths_of`; its directory must exist.
        dtype: dtype of the tokens, one of `TOKEN_DTYPES`, such as the result of `token_dtype`.
        with_modes: whether sequences have modes.

    Raises:
        ValueError: the last document was not ended.
        OSError: the disk fails.
    """
    bin_path, idx_path = paths_of(path)
    dtype = dtype.newbyteorder("<")
    assert dtype in TOKEN_DTYPES.values()
    with contextlib.ExitStack() as stack:
        lengths, indices, modes = (stack.enter_context(tempfile.TemporaryFile(dir=bin_path.parent)) for _ in range(3))
        index, tokens = (stack.enter_context(file_made_whole(path)) for path in (idx_path, bin_path))
        writer = IndexedDatasetWriter(dtype, tokens, lengths, indices, modes if with_modes else None)
        yield writer
        writer.finish(index)
        idx_path.unlink(missing_ok=True)  # it belongs to another .bin


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    """Yields everything written to the file."""
    file.seek(0)
    while part := file.read(8 * CHUNK):
        yield part


def _as(dtype: np.dtype, values: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    """Returns the values as a contiguous array of this dtype."""
    array, limits = np.asarray(values), np.iinfo(dtype)
    if array.dtype != dtype and array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ValueError(f"{what} from {array.min()} to {array.max()} exceed {dtype.name}, {limits.min} to {limits.max}")
    return np.ascontiguousarray(array, dtype)
