# SPDX-License-Identifier: Apache-2.0
"""What a model is: mamba_ssm's language-model config, whose `config.json` files load unchanged.

The options of single layers are in `layer_config.py`. Every wrong value raises ValueError naming
the field, what was wanted and what came.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

from mamba_jax.layer_config import (
    AttentionConfig,
    Mamba1Config,
    Mamba2Config,
    Mamba3Config,
    Options,
)

__all__ = ["AttentionConfig", "Mamba1Config", "Mamba2Config", "Mamba3Config", "MambaConfig"]

MixerConfig = Mamba1Config | Mamba2Config | Mamba3Config
_MIXERS = {"Mamba1": Mamba1Config, "Mamba2": Mamba2Config, "Mamba3": Mamba3Config}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig(Options):
    """A language model: mamba_ssm's config, whose `config.json` loads unchanged.

    Attributes:
      d_model: Width of the residual stream.
      d_intermediate: Width of the gated MLP after every mixer (rounded up to 128); 0 for none.
      n_layer: Number of blocks.
      vocab_size: Number of token ids.
      ssm_cfg: "layer" ("Mamba1", the default, "Mamba2" or "Mamba3") and options of that mixer.
      attn_layer_idx: Indices of the blocks whose mixer is attention.
      attn_cfg: Options of those (AttentionConfig without d_model).
      rms_norm: RMS norm, or LayerNorm when False.
      residual_in_fp32: Whether the residual stream is kept in fp32.
      fused_add_norm: Kept for round trips; the function computed is the same.
      pad_vocab_size_multiple: The embedding's rows are rounded up to a multiple of this.
      tie_embeddings: Whether the head shares the embedding's weights.
      norm_eps: eps of the block norms and the final norm.
    """

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict = dataclasses.field(default_factory=dict)
    attn_layer_idx: tuple[int, ...] = ()
    attn_cfg: dict = dataclasses.field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        self._require_positive(
            "d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple", "norm_eps"
        )
        self._require(self.d_intermediate >= 0, "d_intermediate", "at least 0")
        layer = self.ssm_cfg.get("layer", "Mamba1")
        if layer not in _MIXERS:
            raise ValueError(
                f"MambaConfig: ssm_cfg['layer'] must be one of {', '.join(_MIXERS)}; got {layer!r}"
            )
        for index in self.attn_layer_idx:
            self._require(
                0 <= index < self.n_layer, "attn_layer_idx", f"in 0 ... {self.n_layer - 1}"
            )
        if self.attn_layer_idx and not self.attn_cfg:
            raise ValueError("MambaConfig: attn_layer_idx needs attn_cfg (num_heads, ...); got {}")
        self.mixer, self.attention  # noqa: B018  built once so that their errors show here

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Reads a `config.json`; errors name the file."""
        path = Path(path)
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"cannot read config {path}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-compatible values; `from_dict` reads them back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, v."""
        multiple = self.pad_vocab_size_multiple
        return -(-self.vocab_size // multiple) * multiple

    @property
    def mixer_kind(self) -> str:
        """ "Mamba1", "Mamba2" or "Mamba3"."""
        return self.ssm_cfg.get("layer", "Mamba1")

    @property
    def mixer(self) -> MixerConfig:
        """The mixer's options, typed."""
        options = {name: value for name, value in self.ssm_cfg.items() if name != "layer"}
        return _MIXERS[self.mixer_kind].from_dict({**options, "d_model": self.d_model})

    @property
    def attention(self) -> AttentionConfig | None:
        """The attention layers' options, typed; None when there are none."""
        if not self.attn_layer_idx:
            return None
        return AttentionConfig.from_dict({**self.attn_cfg, "d_model": self.d_model})

    def layer_kind(self, index: int) -> str:
        """What block `index` mixes with: "attention", "Mamba1", "Mamba2" or "Mamba3"."""
        return "attention" if index in self.attn_layer_idx else self.mixer_kind

    @property
    def runs(self) -> tuple[tuple[str, int, int], ...]:
        """Maximal runs of equal consecutive layers, as (kind, first layer, number of layers)."""
        runs: list[tuple[str, int, int]] = []
        for index in range(self.n_layer):
            kind = self.layer_kind(index)
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((kind, index, 1))
        return tuple(runs)
