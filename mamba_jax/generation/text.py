# SPDX-License-Identifier: Apache-2.0
"""Strings in, strings out: tokenizers, stop strings, text that appears as it is written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mamba_jax.generation.generate import Generation, generate
from mamba_jax.model import MambaLMHeadModel

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """What is needed of a tokenizer.

    Attributes:
      end_id: Token that ends a text; None when there is none.
    """

    end_id: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        ...


class ByteTokenizer:
    """Ids 0 ... 255 are the bytes of UTF-8; 256 ends a text, as in the models of `train`."""

    end_id = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; other ids are left out, broken characters become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer that the `tokenizers` library stores as one JSON file.

    Args:
      path: The file.

    Raises:
      ValueError: the library is not installed, or the file is no tokenizer.
    """

    def __init__(self, path: str | Path):
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                "tokenizer files need the tokenizers package: pip install 'mamba_jax[hf]'"
            ) from None
        if not Path(path).is_file():
            raise ValueError(f"tokenizer must be 'bytes' or a tokenizer.json; {path} is no file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizers file: {error}") from None
        ends = (self._tokenizer.token_to_id(token) for token in _END_TOKENS)
        self.end_id = next((token for token in ends if token is not None), None)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._tokenizer.decode([int(i) for i in ids])


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Returns the tokenizer "bytes", or the one in a `tokenizer.json` file or its directory."""
    if str(name) == "bytes":
        return ByteTokenizer()
    path = Path(name)
    return JsonTokenizer(path / "tokenizer.json" if path.is_dir() else path)


def generate_text(
    model: MambaLMHeadModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    stop: Sequence[str] = (),
    stream: Callable[[int, str], None] | None = None,
    num_samples: int = 1,
    callback_every: int = 8,
    **options: Any,
) -> list[str]:
    """Continues texts.

    Args:
      model: The model.
      tokenizer: From `load_tokenizer`, or anything with `encode`, `decode` and `end_id`.
      prompts: Texts; an empty one begins with the tokenizer's end token.
      stop: A row ends before the first of these strings that it writes.
      stream: Called with (row, piece of text) as rows grow; the pieces of a row join to its result.
      num_samples: Continuations per prompt.
      callback_every: Tokens between looks at the text.
      **options: Of `generate`; `eos_token_id` is the tokenizer's end token unless given.

    Returns:
      The new text of each row, sample j of prompt i at i · num_samples + j.

    Raises:
      ValueError: no prompts, an empty one without an end token, and what `generate` raises.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one text; got none")
    begin = [] if tokenizer.end_id is None else [tokenizer.end_id]
    ids = [tokenizer.encode(prompt) or begin for prompt in prompts]
    end = options.setdefault("eos_token_id", tokenizer.end_id)
    ends = () if end is None else tuple(np.atleast_1d(np.asarray(end)).tolist())
    rows = [_Row(tokenizer, tuple(stop), ends) for _ in range(len(prompts) * num_samples)]

    def read(tokens: np.ndarray) -> np.ndarray:
        for index, row in enumerate(rows):
            piece = row.add(tokens[index].tolist())
            if piece and stream is not None:
                stream(index, piece)
        return np.array([row.stopped for row in rows])

    watch = {"callback": read, "callback_every": callback_every} if stop or stream else {}
    result: Generation = generate(model, ids, num_samples=num_samples, **watch, **options)
    texts = []
    for index, row in enumerate(rows):
        shown = row.text if watch else ""
        if not watch:
            row.add(result.tokens[index].tolist())
        row.finish()
        if stream is not None and row.text[len(shown) :]:
            stream(index, row.text[len(shown) :])
        texts.append(row.text)
    return texts


class _Row:
    """The text of one row as its tokens arrive.

    Held back: an unfinished character, and an end that may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], ends: tuple[int, ...]):
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stop, self._ends = tokenizer, stop, ends
        self._ids: list[int] = []

    def add(self, ids: list[int]) -> str:
        """Takes new tokens; returns the text that has become certain."""
        if self.stopped:
            return ""
        for position, token in enumerate(ids):
            if token in self._ends:
                ids, self.stopped = ids[:position], True
                break
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        cuts = [text.index(string) for string in self._stop if string in text]
        if cuts:
            self.stopped = True
            return self._grow(text[: min(cuts)])
        if self.stopped:
            return self._grow(text)
        certain = text.rstrip("\ufffd")
        return self._grow(certain[: len(certain) - self._possible_stop(certain)])

    def finish(self) -> None:
        """No token follows: what was held back is text."""
        if not self.stopped:
            self._grow(self._tokenizer.decode(self._ids))

    def _grow(self, text: str) -> str:
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = [
            length
            for string in self._stop
            for length in range(1, len(string))
            if text.endswith(string[:length])
        ]
        return max(lengths, default=0)
