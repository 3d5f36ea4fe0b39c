# SPDX-License-Identifier: Apache-2.0
"""Reading files: what may be given, how it becomes documents, and how wrong files are refused."""

import json

import numpy as np
import pytest

from train import corpus
from train.config import DataConfig, UserError
from train.tokenizer import ByteTokenizer

END = ByteTokenizer.end_id


def read(*paths, tokenizer=None, vocab_size=257, **config):
    return corpus.read(
        tuple(map(str, paths)),
        DataConfig(**config),
        tokenizer or ByteTokenizer(),
        vocab_size,
        "data.train",
    )


def texts(documents):
    """The documents as lists of ids."""
    return [documents.streams[s][a:b].tolist() for s, a, b in documents.spans.tolist()]


def as_document(text):
    return [END, *text.encode(), END]


def test_a_text_file_is_a_document_that_begins_and_ends(tmp_path):
    (tmp_path / "a.txt").write_text("héllo")
    assert texts(read(tmp_path / "a.txt")) == [as_document("héllo")]


def test_a_directory_gives_its_files_in_order_without_empty_ones(tmp_path):
    for name, text in (("b.txt", "bee"), ("a.txt", "ay"), ("empty.txt", ""), ("c.md", "see")):
        (tmp_path / name).write_text(text)
    assert texts(read(tmp_path)) == [as_document(t) for t in ("ay", "bee", "see")]
    assert texts(read(tmp_path, glob="*.md")) == [as_document("see")]
    assert texts(read(tmp_path / "*.txt")) == [as_document("ay"), as_document("bee")]


def test_jsonl_lines_are_documents(tmp_path):
    lines = [json.dumps({"text": "one"}), "", json.dumps({"text": "two", "more": 1})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert texts(read(tmp_path / "a.jsonl")) == [as_document("one"), as_document("two")]


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_token_arrays_are_cut_at_end_tokens(tmp_path, suffix):
    tokens = np.array([7, 8, END, 9, END, END, 1, 2, 3], np.uint16)
    file = tmp_path / f"a.{suffix}"
    np.save(file, tokens) if suffix == "npy" else tokens.tofile(file)
    assert texts(read(file)) == [[7, 8, END], [END, 9, END], [END, 1, 2, 3]]


def test_a_token_array_without_end_tokens_is_one_document(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.int32))
    documents = corpus.read(
        (str(tmp_path / "a.npy"),), DataConfig(tokenizer="none"), None, 257, "data.train"
    )
    assert texts(documents) == [list(range(10))]


def test_python_stdlib_is_real_text_without_its_tests():
    documents = read(corpus.PYTHON_STDLIB)
    assert documents.num_tokens > 5_000_000
    assert len(documents.spans) > 300


def test_split_holds_whole_documents_back_and_loses_none(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number} " * 10)
    documents = read(tmp_path)
    train, validation = corpus.split(documents, 0.2, seed=1)
    assert sorted(texts(train) + texts(validation)) == sorted(texts(documents))
    assert 0 < validation.num_tokens <= 0.2 * documents.num_tokens
    again = corpus.split(documents, 0.2, seed=1)
    assert texts(again[1]) == texts(validation)
    assert texts(corpus.split(documents, 0.2, seed=2)[1]) != texts(validation)


def test_split_cuts_a_single_document(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 98)
    train, validation = corpus.split(read(tmp_path), 0.1, seed=0)
    assert (train.num_tokens, validation.num_tokens) == (90, 10)


def wrong_files(folder):
    (folder / "empty.txt").write_text("")
    (folder / "nothing").mkdir()
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "field.jsonl").write_text('{"body": "x"}\n')
    (folder / "blank.jsonl").write_text("\n\n")
    np.save(folder / "high.npy", np.array([1, 300, 2]))
    np.save(folder / "low.npy", np.array([1, -1, 2]))
    np.save(folder / "float.npy", np.ones(3))
    np.save(folder / "square.npy", np.ones((2, 2), int))
    (folder / "torn.npy").write_bytes(b"\x93NUMPY")
    (folder / "odd.bin").write_bytes(b"abc")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.txt", "absent.txt (does not exist)"),
        ("empty.txt", "empty.txt (empty)"),
        ("nothing", "wanted files **/* in"),
        ("*.rst", "got none for the pattern"),
        ("bad.jsonl", "bad.jsonl:2: wanted a JSON object"),
        ("field.jsonl", "field.jsonl:1: wanted a text field 'text'"),
        ("blank.jsonl", "got only empty files"),
        ("high.npy", "token ids wanted in 0 ... 256, got 300 at 1"),
        ("low.npy", "token ids wanted in 0 ... 256, got -1 at 1"),
        ("float.npy", "wanted one axis of integers, got float64"),
        ("square.npy", "got int64 of shape (2, 2)"),
        ("torn.npy", "torn.npy: wanted a token array"),
        ("odd.bin", "odd.bin: wanted a token array"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path, name, message):
    wrong_files(tmp_path)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_files_and_text_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.train: wanted at least one file"):
        read()
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"data\.tokenizer: wanted 'bytes' or a JSON file"):
        corpus.read((str(tmp_path / "a.txt"),), DataConfig(), None, 257, "data.train")
