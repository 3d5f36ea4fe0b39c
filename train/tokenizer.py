# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: bytes, which need no file, or any `tokenizers` JSON file.

Every document begins and ends with `end_id`, so a model can write from nothing and can stop.
`token_bytes` says how many bytes of text each id stands for; bits per byte are counted with it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.config import UserError

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class ByteTokenizer:
    """Ids 0 ... 255 are the bytes of the text; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_id = 256

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of a document, without end tokens."""
        return np.frombuffer(text, np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; ids that are not bytes are left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    @property
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,), int32. Bytes of text per id."""
        return np.array([1] * 256 + [0], np.int32)


class JsonTokenizer:
    """A tokenizer stored by the `tokenizers` library as one JSON file.

    Args:
      path: The file.
      end_id: Token that ends a document; when None, the vocabulary's own (<|endoftext|>, ...).

    Raises:
      UserError: the file is missing, is not a tokenizer, or has no end token.
    """

    def __init__(self, path: str | Path, end_id: int | None = None):
        import tokenizers

        if not Path(path).is_file():
            raise UserError(f"data.tokenizer: wanted 'bytes' or a JSON file, got {path} (no file)")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"data.tokenizer: {path} is not a tokenizers file: {error}") from None
        self.name = str(path)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        found = [self._tokenizer.token_to_id(token) for token in _END_TOKENS]
        found = [token for token in (end_id, *found) if token is not None]
        if not found:
            raise UserError(
                f"data.end_id: {path} has none of {', '.join(_END_TOKENS)}; wanted an id, got none"
            )
        self.end_id = found[0]

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of a document (UTF-8), without end tokens."""
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.asarray(ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; end tokens are left out."""
        return self._tokenizer.decode([i for i in ids if i != self.end_id])

    @property
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,), int32. Bytes of text per id."""
        byte_level = '"ByteLevel"' in self._tokenizer.to_str()
        special = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        sizes = np.zeros(self.vocab_size, np.int32)
        for token in range(self.vocab_size):
            if token not in special and token != self.end_id:
                text = self._tokenizer.id_to_token(token) or ""
                # One character per byte in a byte-level vocabulary.
                sizes[token] = len(text) if byte_level else _spelled_bytes(text)
        return sizes


def load(name: str, end_id: int | None = None) -> ByteTokenizer | JsonTokenizer | None:
    """The tokenizer of `DataConfig.tokenizer`; None for "none"."""
    if name == "none":
        return None
    if name == "bytes":
        return ByteTokenizer()
    return JsonTokenizer(name, end_id)


def _spelled_bytes(token: str) -> int:
    """Bytes of a token in a vocabulary that spells spaces as ▁ and odd bytes as <0x0A>."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.removeprefix("##").replace("▁", " ").encode())
