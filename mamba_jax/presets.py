# SPDX-License-Identifier: Apache-2.0
"""The sizes that were published, as data: `MambaLMHeadModel(PRESETS["mamba2-130m"], ...)`.

A checkpoint needs none of this, it carries its config; these are for training anew, for benchmarks
and for memory estimates.
"""

from mamba_jax.config import MambaConfig

_SIZES = {
    "130m": (768, 24),
    "370m": (1024, 48),
    "790m": (1536, 48),
    "1.4b": (2048, 48),
    "2.8b": (2560, 64),
}
# The same widths and depths; Mamba-2 has slightly fewer parameters.
_MAMBA2_NAMES = {"790m": "780m", "1.4b": "1.3b", "2.8b": "2.7b"}
_MAMBA2 = {"ssm_cfg": {"layer": "Mamba2"}, "pad_vocab_size_multiple": 16}
_ATTENTION = {
    "causal": True,
    "d_conv": 4,
    "head_dim": 128,
    "num_heads": 30,
    "out_proj_bias": False,
    "qkv_proj_bias": False,
    "rotary_emb_dim": 64,
}
_LLAMA_VOCABULARY = 128256

PRESETS: dict[str, MambaConfig] = {
    **{f"mamba-{name}": MambaConfig(d_model=d, n_layer=n) for name, (d, n) in _SIZES.items()},
    **{
        f"mamba2-{_MAMBA2_NAMES.get(name, name)}": MambaConfig(d_model=d, n_layer=n, **_MAMBA2)
        for name, (d, n) in _SIZES.items()
    },
    "mamba2attn-2.7b": MambaConfig(
        d_model=2560,
        n_layer=64,
        attn_layer_idx=(9, 18, 27, 36, 45, 56),
        attn_cfg=_ATTENTION,
        **_MAMBA2,
    ),
    "mamba3-siso-187m": MambaConfig(
        d_model=768,
        n_layer=12,
        d_intermediate=1536,
        vocab_size=_LLAMA_VOCABULARY,
        ssm_cfg={"layer": "Mamba3"},
    ),
    "mamba3-mimo-1.5b": MambaConfig(
        d_model=2048,
        n_layer=24,
        d_intermediate=3824,
        vocab_size=_LLAMA_VOCABULARY,
        ssm_cfg={"layer": "Mamba3", "is_mimo": True, "mimo_rank": 4, "chunk_size": 16},
    ),
}
