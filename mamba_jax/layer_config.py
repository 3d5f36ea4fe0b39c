# SPDX-License-Identifier: Apache-2.0
"""What a layer is: the options of each mixer and of attention, as frozen dataclasses.

Imports nothing of ours; `config.py` builds a model's config from these. Field names and defaults
are those of mamba_ssm. Derived sizes are properties; every wrong value raises ValueError naming the
field, what was wanted and what came.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, Self

# Options of the original that choose one of its kernels or its placement, not what is computed.
_DROPPED = frozenset(
    (
        *("use_fast_path", "use_mem_eff_path", "fuse_pregate_headwise_norm", "process_group"),
        *("sequence_parallel", "layer_idx", "n_layer", "device", "dtype"),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Construction from a mapping and type checks, shared by every config."""

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Builds the config from a mapping.

        Raises:
          ValueError: an unknown field (the nearest known one is suggested), a missing field or a
            bad value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        options = {
            name: value for name, value in options.items() if name in known or name not in _DROPPED
        }
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"{cls.__name__}: unknown field {name!r}{hint} (fields: {', '.join(known)})"
                )
        for field in dataclasses.fields(cls):
            missing = dataclasses.MISSING
            optional = field.default is not missing or field.default_factory is not missing
            if not optional and field.name not in options:
                raise ValueError(f"{cls.__name__}: missing field {field.name!r}")
        return cls(**options)

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            if not _has_type(value, hints[field.name]):
                wanted = _spelled(hints[field.name])
                raise ValueError(
                    f"{type(self).__name__}: {field.name} must be {wanted}; got {value!r}"
                )

    def _require(self, condition: bool, field: str, wanted: str) -> None:
        if not condition:
            raise ValueError(
                f"{type(self).__name__}: {field} must be {wanted}; got {getattr(self, field)!r}"
            )

    def _require_positive(self, *fields: str) -> None:
        for field in fields:
            self._require(getattr(self, field) > 0, field, "greater than 0")

    def _require_dt_range(self) -> None:
        self._require_positive("dt_min", "dt_init_floor")
        self._require(self.dt_max >= self.dt_min, "dt_max", f"at least dt_min={self.dt_min}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba1Config(Options):
    """Options of a Mamba-1 mixer (Gu & Dao 2023, arXiv:2312.00752, section 3.4).

    Attributes:
      d_model: Width of the input and output.
      d_state: States per channel, n.
      d_conv: Width of the causal convolution, w.
      expand: d_inner = expand · d_model.
      dt_rank: Rank of the step-size projection; "auto" is ceil(d_model / 16).
      dt_min, dt_max: Range of the initial step sizes (log-uniform), dimensionless.
      dt_init: "random" or "constant" initial dt_proj weights, of size dt_scale / sqrt(dt_rank).
      dt_scale: See dt_init.
      dt_init_floor: Smallest initial step size.
      conv_bias: Whether the convolution has a bias.
      bias: Whether in_proj and out_proj have biases.
      bcdt_norm_eps: When given, B, C and the low-rank dt pass a parameter-free RMS norm with this
        eps (Falcon-Mamba); None leaves them as they are.
    """

    d_model: int
    d_state: int = 16
    d_conv: int = 4
    expand: float = 2
    dt_rank: int | str = "auto"
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init: str = "random"
    dt_scale: float = 1.0
    dt_init_floor: float = 1e-4
    conv_bias: bool = True
    bias: bool = False
    bcdt_norm_eps: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("d_model", "d_state", "d_conv", "expand", "dt_scale")
        self._require_dt_range()
        self._require(self.dt_init in ("random", "constant"), "dt_init", "'random' or 'constant'")
        is_rank = isinstance(self.dt_rank, int) and self.dt_rank > 0
        self._require(is_rank or self.dt_rank == "auto", "dt_rank", "'auto' or greater than 0")

    @property
    def d_inner(self) -> int:
        """Channels of the scan, e."""
        return int(self.expand * self.d_model)

    @property
    def rank(self) -> int:
        """The step-size projection's rank, k."""
        return math.ceil(self.d_model / 16) if self.dt_rank == "auto" else int(self.dt_rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(Options):
    """Options of a Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060, section 7).

    Attributes:
      d_model, d_state, d_conv, expand: As in Mamba1Config.
      conv_init: When given, convolution weights start uniform in ±conv_init.
      headdim: Channels per head, p; must divide d_ssm.
      d_ssm: Channels that pass the scan; the other d_inner - d_ssm form a gated MLP beside it.
        None is d_inner.
      ngroups: Groups of heads that share B and C, g; must divide the number of heads.
      A_init_range: Range of the initial -A (uniform).
      D_has_hdim: Whether D has one entry per channel instead of one per head.
      rmsnorm: Whether a gated RMS norm precedes out_proj (else z gates inside the scan).
      norm_before_gate: Whether that norm comes before the gate.
      dt_min, dt_max, dt_init_floor: Initial step sizes, as in Mamba1Config.
      dt_limit: Step sizes are clamped to this range after softplus.
      bias, conv_bias: Whether the projections and the convolution have biases.
      chunk_size: Tokens per matrix product of the scan; changes speed and rounding, not meaning.
    """

    d_model: int
    d_state: int = 128
    d_conv: int = 4
    conv_init: float | None = None
    expand: float = 2
    headdim: int = 64
    d_ssm: int | None = None
    ngroups: int = 1
    A_init_range: tuple[float, float] = (1, 16)
    D_has_hdim: bool = False
    rmsnorm: bool = True
    norm_before_gate: bool = False
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    dt_limit: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    conv_bias: bool = True
    chunk_size: int = 256

    def __post_init__(self):
        super().__post_init__()
        self._require_positive(
            "d_model", "d_state", "d_conv", "expand", "headdim", "ngroups", "chunk_size"
        )
        self._require_dt_range()
        low, high = self.A_init_range
        self._require(0 < low <= high, "A_init_range", "a pair 0 < low <= high")
        low, high = self.dt_limit
        self._require(0 <= low <= high, "dt_limit", "a pair 0 <= low <= high")
        if self.d_ssm is not None:
            self._require(
                0 < self.d_ssm <= self.d_inner, "d_ssm", f"in 1 ... d_inner={self.d_inner}"
            )
        divides = self.d_ssm_inner % self.headdim == 0
        self._require(divides, "headdim", f"a divisor of d_ssm={self.d_ssm_inner}")
        divides = self.nheads % self.ngroups == 0
        self._require(divides, "ngroups", f"a divisor of the number of heads {self.nheads}")

    @property
    def d_inner(self) -> int:
        """Inputs of out_proj, e."""
        return int(self.expand * self.d_model)

    @property
    def d_ssm_inner(self) -> int:
        """Channels of the scan: d_ssm, or d_inner when that is None."""
        return self.d_inner if self.d_ssm is None else self.d_ssm

    @property
    def d_mlp(self) -> int:
        """Channels of the gated MLP beside the scan; usually 0."""
        return self.d_inner - self.d_ssm_inner

    @property
    def nheads(self) -> int:
        """Heads of the scan, h."""
        return self.d_ssm_inner // self.headdim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba3Config(Options):
    """Options of a Mamba-3 mixer: trapezoidal rule, rotary state, optionally MIMO.

    Attributes:
      d_model, d_state, expand, headdim, ngroups: As in Mamba2Config.
      rope_fraction: Share of the state's channels that rotate, 0.5 or 1.0.
      dt_min, dt_max, dt_init_floor: Initial step sizes, as in Mamba1Config.
      A_floor: The decay rate A is at most -A_floor.
      is_outproj_norm: Whether an RMS norm over each head precedes the gate.
      is_mimo: Whether several inputs and outputs share a state.
      mimo_rank: Their number, r; 1 is used when is_mimo is False.
      chunk_size: As in Mamba2Config.
      A_activation: A = -f(dd_A) with "heavy_tail": f(v) = 1 + v for v >= 0, else 1 / (1 - v), or
        "softplus", which weights trained before June 2026 need.
      dropout: Accepted because files carry it; must be 0, as the original ignores it.
    """

    d_model: int
    d_state: int = 128
    expand: float = 2
    headdim: int = 64
    ngroups: int = 1
    rope_fraction: float = 0.5
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    A_floor: float = 1e-4
    is_outproj_norm: bool = False
    is_mimo: bool = False
    mimo_rank: int = 4
    chunk_size: int = 64
    A_activation: str = "heavy_tail"
    dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        self._require_positive(
            "d_model", "d_state", "expand", "headdim", "ngroups", "mimo_rank", "chunk_size"
        )
        self._require_dt_range()
        self._require(self.A_floor >= 0, "A_floor", "at least 0")
        self._require(self.dropout == 0, "dropout", "0 (the original ignores it)")
        self._require(self.rope_fraction in (0.5, 1.0), "rope_fraction", "0.5 or 1.0")
        self._require(self.num_angles > 0, "d_state", "large enough for one rotary angle")
        activations = ("heavy_tail", "softplus")
        self._require(
            self.A_activation in activations, "A_activation", " or ".join(map(repr, activations))
        )
        divides = self.d_inner % self.headdim == 0
        self._require(divides, "headdim", f"a divisor of d_inner={self.d_inner}")
        divides = self.nheads % self.ngroups == 0
        self._require(divides, "ngroups", f"a divisor of the number of heads {self.nheads}")

    @property
    def d_inner(self) -> int:
        """Channels of the scan, e."""
        return int(self.expand * self.d_model)

    @property
    def nheads(self) -> int:
        """Heads of the scan, h."""
        return self.d_inner // self.headdim

    @property
    def rank(self) -> int:
        """MIMO rank r; 1 for SISO."""
        return self.mimo_rank if self.is_mimo else 1

    @property
    def num_angles(self) -> int:
        """Rotary angles per head, a."""
        rotated = int(self.d_state * self.rope_fraction)
        return (rotated - rotated % 2) // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Options):
    """Options of the attention layer of hybrid models (mamba_ssm's MHA).

    Attributes:
      d_model: Width of the input and output.
      num_heads, num_heads_kv: Query heads, and key/value heads shared by consecutive query heads.
      head_dim: Channels per head; None is d_model / num_heads.
      mlp_dim: Width of a gated MLP fused into the projections, rounded up to 256; 0 for none.
      qkv_proj_bias, out_proj_bias: Whether the projections have biases.
      softmax_scale: None is head_dim ** -0.5.
      causal: Whether a token sees only itself and earlier ones.
      d_conv: Width of a causal convolution over q, k and v; 0 for none.
      rotary_emb_dim: Rotated channels per head; 0 for none.
      rotary_emb_base: Base of the rotary frequencies.
      rotary_emb_interleaved: Whether adjacent channels pair up, instead of the two halves.
    """

    d_model: int
    num_heads: int
    num_heads_kv: int | None = None
    head_dim: int | None = None
    mlp_dim: int = 0
    qkv_proj_bias: bool = True
    out_proj_bias: bool = True
    softmax_scale: float | None = None
    causal: bool = False
    d_conv: int = 0
    rotary_emb_dim: int = 0
    rotary_emb_base: float = 10000.0
    rotary_emb_interleaved: bool = False

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("d_model", "num_heads", "rotary_emb_base")
        self._require(self.mlp_dim >= 0, "mlp_dim", "at least 0")
        self._require(self.d_conv >= 0, "d_conv", "at least 0")
        if self.num_heads_kv is not None:
            fits = self.num_heads_kv > 0 and self.num_heads % self.num_heads_kv == 0
            self._require(fits, "num_heads_kv", f"a divisor of num_heads={self.num_heads}")
        if self.head_dim is None:
            divides = self.d_model % self.num_heads == 0
            self._require(divides, "num_heads", f"a divisor of d_model={self.d_model}")
        fits = self.rotary_emb_dim % 2 == 0 and 0 <= self.rotary_emb_dim <= self.headdim
        self._require(fits, "rotary_emb_dim", f"even and at most head_dim={self.headdim}")

    @property
    def headdim(self) -> int:
        """Channels per head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def nheads_kv(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_heads_kv is None else self.num_heads_kv

    @property
    def d_mlp(self) -> int:
        """Channels of the fused gated MLP: mlp_dim rounded up to 256, then halved."""
        return -(-self.mlp_dim // 256) * 128


def _has_type(value: Any, hint: Any) -> bool:
    """Whether `value` fits an annotation made of int, float, bool, str, None, tuple, dict, |."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        items = options[:1] * len(value) if options[-1] is Ellipsis else options
        return len(value) == len(items) and all(map(_has_type, value, items))
    if options:
        return any(_has_type(value, option) for option in options)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spelled(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
