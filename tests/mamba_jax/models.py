# SPDX-License-Identifier: Apache-2.0
"""Tiny models and inputs that the tests of mamba_jax share."""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax import MambaConfig, MambaLMHeadModel

ATTENTION = {"num_heads": 4, "num_heads_kv": 2, "causal": True, "rotary_emb_dim": 4, "d_conv": 3}

MIXERS = {
    "Mamba1": {"layer": "Mamba1", "d_state": 4},
    "Mamba2": {"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2},
    "Mamba3": {"layer": "Mamba3", "d_state": 8, "headdim": 8, "ngroups": 2},
    "Mamba3-mimo": {
        "layer": "Mamba3",
        "d_state": 8,
        "headdim": 8,
        "is_mimo": True,
        "mimo_rank": 2,
        "is_outproj_norm": True,
    },
}

CONFIGS = {
    name: MambaConfig(d_model=32, n_layer=2, vocab_size=61, ssm_cfg=ssm_cfg)
    for name, ssm_cfg in MIXERS.items()
} | {
    "hybrid": MambaConfig(
        d_model=32,
        n_layer=3,
        vocab_size=61,
        d_intermediate=40,
        ssm_cfg=MIXERS["Mamba2"],
        attn_layer_idx=(1,),
        attn_cfg=ATTENTION,
    )
}


def model(name: str, **options) -> MambaLMHeadModel:
    """The model of CONFIGS[name], shaken."""
    return shaken(CONFIGS[name], **options)


def shaken(config: MambaConfig, **options) -> MambaLMHeadModel:
    """A model whose parameters are all away from their special initial values (0 and 1)."""
    graph, state = nnx.split(MambaLMHeadModel(config, rngs=nnx.Rngs(0), **options))

    @jax.jit
    def shake(state):
        leaves, structure = jax.tree.flatten(state)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        moved = [
            leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, moved)

    return nnx.merge(graph, shake(state))


def ids(batch: int, time: int, vocab: int = 61, seed: int = 0) -> jnp.ndarray:
    """Random token ids (b, t)."""
    return jax.random.randint(jax.random.key(seed), (batch, time), 0, vocab, jnp.int32)
