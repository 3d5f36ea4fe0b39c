# SPDX-License-Identifier: Apache-2.0
"""Batches: packing loses and crosses nothing; order is fixed, resumable and shared out exactly."""

import itertools

import jax
import numpy as np
import pytest

from tests.train import tiny
from train import corpus, data
from train.config import DataConfig, UserError
from train.tokenizer import ByteTokenizer

END = ByteTokenizer.end_id
WORDS = ["a", "bcd", "efghijklmnopqrst" * 3, "uv", "wxyz" * 5]


def packed(directory, seq_len=8):
    for number, word in enumerate(WORDS):
        (directory / f"{number}.txt").write_text(word)
    read = (str(directory),), DataConfig(), ByteTokenizer(), 257, "data.train"
    return data.PackedRows(corpus.read(*read), seq_len, seed=3)


def pairs(batch):
    """Every (input, target) that counts."""
    mask = np.asarray(batch["loss_mask"])
    return list(zip(batch["tokens"][mask].tolist(), batch["targets"][mask].tolist(), strict=True))


@pytest.mark.parametrize("seq_len", [1, 2, 8, 64, 1000])
def test_every_next_token_of_every_document_is_a_target_once(tmp_path, seq_len):
    rows = packed(tmp_path, seq_len)
    documents = [[END, *word.encode(), END] for word in WORDS]
    wanted = [pair for d in documents for pair in itertools.pairwise(d)]
    found = [pair for row in range(len(rows)) for pair in pairs(rows[row])]
    assert sorted(found) == sorted(wanted)


def test_rows_are_full_and_documents_are_told_apart(tmp_path):
    rows = packed(tmp_path)
    assert rows.num_tokens == sum(len(word) + 2 for word in WORDS)
    for number in range(len(rows)):
        row = rows[number]
        assert {name: array.shape for name, array in row.items()} == {
            name: (8,) for name in ("tokens", "targets", "seq_idx", "loss_mask")
        }
        if number < len(rows) - 1:
            assert (row["seq_idx"] >= 0).all()
        # A document begins with END, except one that goes on from the row before.
        begins = np.flatnonzero(np.diff(row["seq_idx"]) > 0) + 1
        assert (row["tokens"][begins] == END).all()
        # The last token of a document has no target.
        assert not row["loss_mask"][begins - 1].any()
    assert (rows[len(rows) - 1]["seq_idx"] == -1).any()


def test_batches_repeat_with_the_seed_and_resume_from_their_state(tmp_path):
    text = tiny.write_text(tmp_path)
    config = tiny.config(tmp_path, text)
    rows = data.load(config).train
    batches = data.training_batches(rows, config)
    for _ in range(3):
        next(batches)
    state = batches.get_state()
    # Further than one epoch, so that its end and the new order are passed.
    number = 2 * len(rows) // config.data.batch_size
    wanted = [next(batches) for _ in range(number)]
    resumed = data.training_batches(data.load(config).train, config)
    resumed.set_state(state)
    for batch in wanted:
        other = next(resumed)
        for name, array in batch.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_processes_share_each_batch_without_changing_it(tmp_path, monkeypatch):
    config = tiny.config(tmp_path, tiny.write_text(tmp_path))
    rows = data.load(config).train

    def steps(processes, number=5):
        found = []
        for process in range(processes):
            monkeypatch.setattr(jax, "process_count", lambda: processes)
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            batches = data.training_batches(rows, config)
            found.append([next(batches)["tokens"] for _ in range(number)])
        shares = [np.concatenate(step) for step in zip(*found, strict=True)]
        return [sorted(map(bytes, share)) for share in shares]

    assert steps(1) == steps(2) == steps(4)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(UserError, match="wanted a multiple of 3 processes, got 4"):
        data.training_batches(rows, config)


def test_validation_sees_each_row_once_and_pads_the_last_batch(tmp_path):
    rows = packed(tmp_path)
    batches = list(data.validation_batches(rows, 4))
    assert sum(batch["loss_mask"].sum() for batch in batches) == rows.num_tokens - len(WORDS)
    assert batches[-1]["tokens"].shape == (4, 8)
    assert len(list(data.validation_batches(rows, 4, limit=2))) == 2


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path):
    model = tiny.MODEL.from_dict({**tiny.MODEL.to_dict(), "vocab_size": 256})
    config = tiny.config(tmp_path, tiny.write_text(tmp_path), model=model)
    with pytest.raises(UserError, match=r"model\.vocab_size: wanted at least 257 .* got 256"):
        data.load(config)
