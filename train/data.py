# SPDX-License-Identifier: Apache-2.0
"""From documents to batches: packing, shuffling, sharding over processes, and the place reached.

Documents are laid end to end in an order drawn by the seed; row i is tokens i·t … i·t + t of that
line, so a row is found from its number alone. Grain draws the rows of each epoch in a new order;
its iterator's state (one number) goes into the checkpoint. A document cut by the end of a row goes
on in the next one as if it began there. No target lies in another document than its input.
"""

import dataclasses
from collections.abc import Iterator

import grain
import jax
import numpy as np

from train import corpus
from train.config import TrainConfig, UserError
from train.tokenizer import ByteTokenizer, JsonTokenizer
from train.tokenizer import load as load_tokenizer

# (b, t) arrays by name: tokens, targets and seq_idx int32, loss_mask bool.
Batch = dict[str, np.ndarray]
Tokenizer = ByteTokenizer | JsonTokenizer


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
      train: Rows learnt from.
      validation: Rows the loss is measured on.
      tokenizer: None when only token arrays are read.
    """

    train: "PackedRows"
    validation: "PackedRows"
    tokenizer: Tokenizer | None


def load(config: TrainConfig) -> Data:
    """Reads and packs the documents of a run.

    Raises:
      UserError: a file or token is wrong; the vocabulary is too small for the tokenizer.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, data.end_id)
    vocab_size = config.model.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size: wanted at least {tokenizer.vocab_size} for the tokenizer "
            f"{tokenizer.name}, got {vocab_size}"
        )
    train = corpus.read(data.train, data, tokenizer, vocab_size, "data.train")
    if data.validation:
        paths = data.validation
        validation = corpus.read(paths, data, tokenizer, vocab_size, "data.validation")
    else:
        train, validation = corpus.split(train, data.validation_fraction, config.seed)
    return Data(
        PackedRows(train, data.seq_len, config.seed),
        PackedRows(validation, data.seq_len, config.seed),
        tokenizer,
    )


class PackedRows:
    """Rows of `seq_len` tokens cut from documents laid end to end.

    Args:
      documents: The documents.
      seq_len: Tokens in a row.
      seed: Seed of the documents' order.
    """

    def __init__(self, documents: corpus.Documents, seq_len: int, seed: int):
        order = np.random.default_rng(seed).permutation(len(documents.spans))
        self.seq_len = seq_len
        self.num_tokens = documents.num_tokens
        self._streams = documents.streams
        self._spans = documents.spans[order]
        self._starts = np.concatenate([[0], np.cumsum(documents.lengths[order])])

    def __len__(self) -> int:
        return -(-self.num_tokens // self.seq_len)

    def __getitem__(self, row: int) -> Batch:
        """Returns row `row` as arrays (t,): tokens, targets, seq_idx, loss_mask."""
        length = self.seq_len + 1
        tokens = np.zeros(length, np.int32)
        seq_idx = np.full(length, -1, np.int32)
        position, filled = int(row) * self.seq_len, 0
        document = int(np.searchsorted(self._starts, position, side="right")) - 1
        for number in range(length):
            if filled == length or document == len(self._spans):
                break
            stream, start, stop = self._spans[document]
            start += position + filled - self._starts[document]
            piece = self._streams[stream][start : min(stop, start + length - filled)]
            tokens[filled : filled + len(piece)] = piece
            seq_idx[filled : filled + len(piece)] = number
            filled += len(piece)
            document += 1
        same = (seq_idx[1:] == seq_idx[:-1]) & (seq_idx[1:] >= 0)
        return {
            "tokens": tokens[:-1],
            "targets": np.where(same, tokens[1:], 0).astype(np.int32),
            "seq_idx": seq_idx[:-1],
            "loss_mask": same,
        }


def training_batches(rows: PackedRows, config: TrainConfig) -> grain.DatasetIterator:
    """Endless batches, this process's share of each; resumes through get_state and set_state.

    The rows of a step do not depend on the number of processes.

    Raises:
      UserError: the batch does not divide among the processes, or there are too few rows.
    """
    batch, processes = config.data.batch_size, jax.process_count()
    if batch % processes:
        raise UserError(f"data.batch_size: wanted a multiple of {processes} processes, got {batch}")
    dataset = grain.MapDataset.source(rows).seed(config.seed).shuffle().repeat()
    dataset = dataset[jax.process_index() :: processes].batch(batch // processes)
    # Rows are cut from arrays in memory or mapped files: one thread keeps ahead of any device.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def validation_batches(rows: PackedRows, batch_size: int, limit: int = 0) -> Iterator[Batch]:
    """Each row once, in order, this process's share; missing rows of the last batch are padding.

    Args:
      rows: The rows.
      batch_size: Rows of a batch on all processes together.
      limit: Batches at most; 0 for all.
    """
    number = -(-len(rows) // batch_size)
    share = batch_size // jax.process_count()
    for index in range(min(number, limit) if limit else number):
        first = index * batch_size + jax.process_index() * share
        numbers = range(first, first + share)
        yield _stacked([rows[i] if i < len(rows) else _padding(rows) for i in numbers])


def to_device(batch: Batch, sharding: jax.sharding.Sharding | None) -> dict[str, jax.Array]:
    """Places a process's share of a batch; with a sharding, as its part of the whole batch."""
    if sharding is None:
        return jax.device_put(batch)
    place = jax.make_array_from_process_local_data
    return {name: place(sharding, array) for name, array in batch.items()}


def _padding(rows: PackedRows) -> Batch:
    """A row of nothing but padding."""
    zeros = np.zeros(rows.seq_len, np.int32)
    mask = np.zeros(rows.seq_len, bool)
    return {"tokens": zeros, "targets": zeros, "seq_idx": zeros - 1, "loss_mask": mask}


def _stacked(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
