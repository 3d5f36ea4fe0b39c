# SPDX-License-Identifier: Apache-2.0
"""From files to documents: what `data.train` and `data.validation` name, as token streams.

Every source becomes one stream `end text end text end`; a document is the span from one end token
to the next, both included, so a model learns to begin and to stop. Text is tokenised once at the
start and held in memory; token arrays are mapped from their files and never copied.
"""

import dataclasses
import glob as globbing
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from train.config import DataConfig, UserError
from train.tokenizer import ByteTokenizer, JsonTokenizer

PYTHON_STDLIB = "python-stdlib"
# Parts of the standard library's folder that are not its source, or not installed everywhere.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SCAN = 1 << 24  # tokens of a mapped array looked at together


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents inside token streams.

    Attributes:
      streams: Token arrays, one per source.
      spans: (documents, 3), int64. Stream, first token, token after the last.
    """

    streams: tuple[np.ndarray, ...]
    spans: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """(documents,), int64. Tokens of each document."""
        return self.spans[:, 2] - self.spans[:, 1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())


def read(
    paths: tuple[str, ...],
    config: DataConfig,
    tokenizer: ByteTokenizer | JsonTokenizer | None,
    vocab_size: int,
    field: str,
) -> Documents:
    """Reads the documents of every path.

    Args:
      paths: Files, directories, patterns, or "python-stdlib".
      config: How they are read.
      tokenizer: None when only token arrays are read.
      vocab_size: Ids of token arrays must be below it.
      field: The config field the paths come from, for errors.

    Raises:
      UserError: a path is missing, empty or unreadable; an id is out of range.
    """
    if not paths:
        raise UserError(f"{field}: wanted at least one file or directory, got nothing")
    end_id = tokenizer.end_id if tokenizer and config.end_id is None else config.end_id
    streams = []
    for path in paths:
        arrays = [file for file in _files(path, config, field) if _is_array(file)]
        texts = [file for file in _files(path, config, field) if not _is_array(file)]
        streams += [_array(file, config, vocab_size) for file in arrays]
        if texts:
            if tokenizer is None:
                raise UserError(
                    f"data.tokenizer: wanted 'bytes' or a JSON file for {texts[0]}, got 'none'"
                )
            streams.append(_stream(texts, config, tokenizer, end_id))
    spans = [_spans(stream, end_id, index) for index, stream in enumerate(streams)]
    documents = Documents(tuple(streams), np.concatenate(spans))
    if not documents.num_tokens:
        raise UserError(f"{field}: wanted text, got only empty files in {', '.join(paths)}")
    return documents


def split(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Holds whole documents back for validation, drawn by `seed`; returns (train, validation).

    A single document is cut in two: its end is held back.
    """
    count = len(documents.spans)
    if count == 1:
        stream, start, stop = (int(i) for i in documents.spans[0])
        cut = stop - max(1, int((stop - start) * fraction))
        if cut - start < 2 or stop - cut < 2:
            raise UserError(
                f"data.validation_fraction: {fraction} of a single document of {stop - start} "
                "tokens leaves too little; wanted more text or data.validation, got neither"
            )
        parts = np.array([[stream, start, cut]]), np.array([[stream, cut, stop]])
    else:
        order = np.random.default_rng(seed).permutation(count)
        held = np.cumsum(documents.lengths[order]) <= fraction * documents.num_tokens
        number = min(max(1, int(held.sum())), count - 1)
        parts = documents.spans[np.sort(order[number:])], documents.spans[np.sort(order[:number])]
    return tuple(dataclasses.replace(documents, spans=spans) for spans in parts)


def _files(path: str, config: DataConfig, field: str) -> list[Path]:
    """The files a path stands for, sorted, empty ones left out."""
    if path == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [f for f in root.rglob("*.py") if not _NOT_STDLIB & set(f.relative_to(root).parts)]
    elif Path(path).is_dir():
        found = [f for f in Path(path).glob(config.glob) if not f.name.startswith(".")]
        if not any(f.is_file() for f in found):
            raise UserError(f"{field}: wanted files {config.glob} in {path}, got none")
    elif Path(path).is_file():
        found = [Path(path)]
    elif globbing.has_magic(path):
        found = [Path(f) for f in globbing.glob(path, recursive=True)]
        if not found:
            raise UserError(f"{field}: wanted files, got none for the pattern {path}")
    else:
        raise UserError(f"{field}: wanted a file or directory, got {path} (does not exist)")
    files = sorted(f for f in found if f.is_file())
    full = [f for f in files if f.stat().st_size]
    if not full:
        raise UserError(f"{field}: wanted text, got {path} (empty)")
    return full


def _is_array(file: Path) -> bool:
    return file.suffix in (".npy", ".bin")


def _array(file: Path, config: DataConfig, vocab_size: int) -> np.ndarray:
    """Maps a token array and checks its ids."""
    try:
        if file.suffix == ".npy":
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(file, np.dtype(config.bin_dtype), "r")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: wanted a token array, got {error}") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"{file}: wanted one axis of integers, got {tokens.dtype} of shape {tokens.shape}"
        )
    if not tokens.size:
        raise UserError(f"{file}: wanted tokens, got an empty array")
    for start in range(0, len(tokens), _SCAN):
        part = tokens[start : start + _SCAN]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            place = start + int(part.argmin() if low < 0 else part.argmax())
            raise UserError(
                f"{file}: token ids wanted in 0 ... {vocab_size - 1}, "
                f"got {low if low < 0 else high} at {place}"
            )
    return tokens


def _stream(
    files: list[Path],
    config: DataConfig,
    tokenizer: ByteTokenizer | JsonTokenizer,
    end_id: int,
) -> np.ndarray:
    """Tokenises text files into one stream, an end token before, between and after documents."""
    dtype = np.uint16 if max(tokenizer.vocab_size, end_id + 1) <= 1 << 16 else np.uint32
    end = np.array([end_id], dtype)
    pieces = [end]
    for file in files:
        for place, text in _texts(file, config):
            try:
                ids = tokenizer.encode(text)
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: wanted UTF-8 text, got {error.reason}") from None
            if len(ids):
                pieces += [ids.astype(dtype), end]
    return np.concatenate(pieces)


def _texts(file: Path, config: DataConfig) -> Iterator[tuple[str, bytes]]:
    """Yields (where, text) for each document of a file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: wanted a readable file, got {error.strerror}") from None
    if file.suffix != ".jsonl":
        yield str(file), content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        place, field = f"{file}:{number}", config.text_field
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{place}: wanted a JSON object, got {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise UserError(f"{place}: wanted a text field {field!r}, got {line[:60]!r}")
        yield place, record[field].encode()


def _spans(stream: np.ndarray, end_id: int | None, index: int) -> np.ndarray:
    """(documents, 3). Spans from one end token to the next; a document has at least two tokens."""
    ends = np.zeros(0, np.int64)
    if end_id is not None:
        starts = range(0, len(stream), _SCAN)
        ends = np.concatenate([np.flatnonzero(stream[s : s + _SCAN] == end_id) + s for s in starts])
    first = np.concatenate([[0], ends]) if not len(ends) or ends[0] else ends
    last = len(stream) - 1
    stop = np.concatenate([first[1:], [last]]) + 1
    # Two end tokens side by side hold nothing between them.
    length = stop - first
    empty = (length < 2) | ((length == 2) & np.isin(first, ends) & np.isin(stop - 1, ends))
    spans = np.stack([np.full(len(first), index), first, stop], axis=1).astype(np.int64)
    return spans[~empty]
