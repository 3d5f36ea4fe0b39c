# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text survives a round trip, and ids know how many bytes they stand for."""

import numpy as np
import pytest

from train import tokenizer
from train.config import UserError

TEXT = "Zwölf Boxkämpfer jagen Viktor, 12 times.\n\tdef f(x): return x\n" * 20


@pytest.fixture
def json_file(tmp_path):
    """A small byte-level BPE tokenizer trained on TEXT."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([TEXT], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes_and_json_round_trip_and_count_bytes(json_file):
    for loaded in (tokenizer.load("bytes"), tokenizer.load(str(json_file))):
        ids = loaded.encode(TEXT.encode())
        assert loaded.decode([loaded.end_id, *ids.tolist(), loaded.end_id]) == TEXT
        assert loaded.token_bytes[ids].sum() == len(TEXT.encode())
        assert loaded.token_bytes[loaded.end_id] == 0
        assert loaded.token_bytes.shape == (loaded.vocab_size,)
        assert ids.max() < loaded.vocab_size


def test_bytes_that_are_not_text_do_not_stop_decoding():
    assert tokenizer.load("bytes").decode(np.array([104, 105, 255, 256, 260])) == "hi\ufffd"


def test_wrong_tokenizers_are_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"data\.tokenizer: wanted 'bytes' or a JSON file, got"):
        tokenizer.load(str(tmp_path / "absent.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizers file"):
        tokenizer.load(str(tmp_path / "other.json"))
