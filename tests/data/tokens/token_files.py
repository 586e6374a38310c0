"""Documents in token files of Megatron-LM: written in both ways that there are, and compared."""

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np

from llamajax.data.tokens.megatron import TOKEN_DTYPES, IndexedDataset
from llamajax.data.tokens.megatron_writer import write_indexed

DTYPES = {dtype.name: dtype for dtype in TOKEN_DTYPES.values()}
DOCUMENTS = [[[1, 2, 3]], [], [[255, 0], [], [7]], [[65]]]
MODES = [[2], [], [3, 5, 4], [4]]
"""Modes of the sequences of `DOCUMENTS`."""


def write(
    prefix: pathlib.Path,
    dtype: np.dtype,
    documents: Sequence[Sequence[Sequence[int]]],
    modes: Sequence[Sequence[int]] | None,
) -> None:
    """Writes documents of sequences, every other one sequence by sequence."""
    with write_indexed(prefix, dtype, with_modes=modes is not None) as writer:
        for index, document in enumerate(documents):
            of_document = [0] * len(document) if modes is None else modes[index]
            if index % 2:
                ids = np.array(list(itertools.chain(*document)), np.int64)
                writer.add_document(ids, [len(sequence) for sequence in document], of_document)
            else:
                for sequence, mode in zip(document, of_document, strict=True):
                    writer.add_item(np.array(sequence, np.int64), mode)
                writer.end_document()


def check(dataset: IndexedDataset, documents: Sequence[Sequence[Sequence[int]]]) -> None:
    """Checks that the dataset has these documents, by every way to read it."""
    assert dataset.num_documents == len(documents)
    assert dataset.num_sequences == sum(map(len, documents))
    assert dataset.num_tokens == sum(len(sequence) for document in documents for sequence in document)
    for first, end in itertools.combinations_with_replacement(range(len(documents) + 1), 2):
        offsets = dataset.document_offsets(first, end)
        assert offsets.dtype == np.int64
        parts = [dataset.tokens[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
        assert parts == [list(itertools.chain(*document)) for document in documents[first:end]]
    for index, document in enumerate(documents):
        lengths = dataset.sequence_lengths[dataset.sequences_of(index)]
        assert lengths.tolist() == [len(sequence) for sequence in document]
