# SPDX-License-Identifier: Apache-2.0
"""One function, however it is called: whole, in pieces, by tokens, packed, padded, unrolled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax import MambaConfig, MambaLMHeadModel, init_cache
from tests.mamba_jax.models import ATTENTION, CONFIGS, ids, model
from tests.tolerances import LOGITS, assert_close

NAMES = sorted(CONFIGS)


@jax.jit
def run(model, ids, seq_idx=None, cache=None):
    return model(ids, seq_idx=seq_idx, cache=cache)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pieces", [(3, 1, 3), (2, 5), (1,) * 7], ids=str)
def test_pieces_with_a_cache_equal_the_whole(name, pieces):
    lm, tokens = model(name), ids(2, 7)
    whole = run(lm, tokens)
    cache = lm.init_cache(2, max_length=7)
    start, parts = 0, []
    for length in pieces:
        logits, cache = run(lm, tokens[:, start : start + length], cache=cache)
        parts.append(logits)
        start += length
    assert_close("logits", jnp.concatenate(parts, axis=1), whole, LOGITS)
    np.testing.assert_array_equal(cache.num_tokens, [7, 7])


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_apart(name):
    """Lengths below and above the convolution's width, an unused id, padding between and after."""
    lm = model(name)
    lengths = [3, 5, 1, 6]
    documents = [ids(1, length, seed=length) for length in lengths]
    pieces = [(documents[0], 0), (documents[1], 4), (documents[2], 5), (documents[3], 2)]
    tokens, seq_idx = [], []
    for document, index in pieces:
        tokens += [document, jnp.full((1, 2), 60, jnp.int32)]
        seq_idx += [jnp.full(document.shape, index), jnp.full((1, 2), -1)]
    packed = run(lm, jnp.concatenate(tokens, 1), jnp.concatenate(seq_idx, 1).astype(jnp.int32))
    start = 0
    for document, _ in pieces:
        alone = run(lm, document)
        assert_close("logits", packed[:, start : start + alone.shape[1]], alone, LOGITS)
        start += alone.shape[1] + 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_now_or_later(name, side):
    """Prompts of unequal length in one batch go on as each would alone."""
    lm = model(name)
    lengths, time = [2, 7, 5], 7
    tokens = ids(3, time)
    position = jnp.arange(time)[None, :]
    short = jnp.asarray(lengths)[:, None]
    is_real = position >= time - short if side == "left" else position < short
    seq_idx = jnp.where(is_real, 0, -1).astype(jnp.int32)
    cache = lm.init_cache(3, max_length=9)
    logits, cache = run(lm, tokens, seq_idx, cache)
    np.testing.assert_array_equal(cache.num_tokens, lengths)
    more, _ = run(lm, tokens[:, :1], cache=cache)
    for row, length in enumerate(lengths):
        real = np.asarray(tokens[row])[np.asarray(is_real[row])][None]
        whole = run(lm, jnp.concatenate([real, tokens[row : row + 1, :1]], axis=1))
        got = logits[row][np.asarray(is_real[row])][None]
        assert_close(f"row {row}", got, whole[:, :length], LOGITS)
        assert_close(f"row {row}, next token", more[row : row + 1], whole[:, length:], LOGITS)


@pytest.mark.parametrize("name", NAMES)
def test_last_only_is_the_last_real_token(name):
    lm, tokens = model(name), ids(2, 6)
    seq_idx = jnp.asarray([[0, 0, 0, -1, -1, -1], [-1, 0, 0, 0, 0, 0]], jnp.int32)
    every = run(lm, tokens, seq_idx)
    last = lm(tokens, seq_idx=seq_idx, last_only=True)
    assert_close("logits", last[:, 0], jnp.stack([every[0, 2], every[1, 5]]), LOGITS)
    assert_close("logits", lm(tokens, last_only=True), run(lm, tokens)[:, -1:], LOGITS)


@pytest.mark.parametrize("name", NAMES)
def test_no_token_sees_the_future(name):
    lm, tokens = model(name), ids(1, 8)
    before = run(lm, tokens)
    after = run(lm, tokens.at[0, 5].add(1))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(np.asarray(before[:, 5:] - after[:, 5:])).max(axis=-1) > 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_remat_and_unroll_change_neither_logits_nor_gradients(name):
    tokens = ids(2, 6)

    @jax.jit
    def loss_and_grads(lm):
        return jax.value_and_grad(lambda lm: jnp.mean(lm(tokens) ** 2))(lm)

    loss, grads = loss_and_grads(model(name))
    for options in ({"remat": True}, {"unroll": True}):
        other_loss, other = loss_and_grads(model(name, **options))
        assert_close("loss", other_loss, loss, 1e-6)
        for (path, got), wanted in zip(
            jax.tree.leaves_with_path(other), jax.tree.leaves(grads), strict=True
        ):
            assert_close(jax.tree_util.keystr(path), got, wanted, 1e-5)


@pytest.mark.parametrize("name", ["Mamba1", "Mamba2", "Mamba3"])
def test_a_cache_does_not_grow_with_the_sequence(name):
    lm = model(name)
    cache = lm.init_cache(1)
    shapes = jax.tree.map(jnp.shape, cache)
    _, cache = run(lm, ids(1, 50), cache=cache)
    assert jax.tree.map(jnp.shape, cache) == shapes


def test_the_state_can_be_kept_in_bfloat16_and_parameters_stay_float32():
    lm = model("Mamba2", dtype=jnp.bfloat16)
    cache = lm.init_cache(1, state_dtype=jnp.bfloat16)
    logits, cache = run(lm, ids(1, 5), cache=cache)
    assert logits.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.layers)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(lm))} == {"float32"}
    assert_close("logits", logits, run(model("Mamba2"), ids(1, 5)), 3e-2)


class TestBadInput:
    def test_shapes_and_dtypes(self):
        lm = model("Mamba1")
        with pytest.raises(ValueError, match=r"input_ids must have shape .*got \(2, 0\)"):
            lm(jnp.zeros((2, 0), jnp.int32))
        with pytest.raises(ValueError, match=r"input_ids must have shape .*got \(3,\)"):
            lm(jnp.zeros((3,), jnp.int32))
        with pytest.raises(TypeError, match=r"input_ids must be integers; got float32"):
            lm(jnp.zeros((1, 3)))
        with pytest.raises(ValueError, match=r"seq_idx must have the shape of input_ids"):
            lm(jnp.zeros((1, 3), jnp.int32), seq_idx=jnp.zeros((1, 4), jnp.int32))

    def test_a_token_outside_the_vocabulary_is_named_or_loud(self):
        lm = model("Mamba1")
        with pytest.raises(ValueError, match=r"must be in 0 ... 63; got 64 at \[1, 2\]"):
            lm(jnp.asarray([[0, 1, 2], [3, 4, 64]], jnp.int32))
        with pytest.raises(ValueError, match=r"got -1 at \[0, 0\]"):
            lm(jnp.asarray([[-1, 1]], jnp.int32))
        traced = run(lm, jnp.asarray([[0, 64]], jnp.int32))
        assert np.isfinite(traced[:, 0]).all() and np.isnan(traced[:, 1]).all()

    def test_padding_may_hold_any_id(self):
        lm = model("Mamba1")
        seq_idx = jnp.asarray([[0, -1, 0]], jnp.int32)
        got = lm(jnp.asarray([[5, 999, 7]], jnp.int32), seq_idx=seq_idx)
        assert_close("logits", got[:, ::2], lm(jnp.asarray([[5, 7]], jnp.int32)), LOGITS)

    def test_caches(self):
        with pytest.raises(ValueError, match="batch must be at least 1; got 0"):
            init_cache(CONFIGS["Mamba1"], 0)
        with pytest.raises(ValueError, match="max_length must be given"):
            init_cache(CONFIGS["hybrid"], 1)

    def test_a_full_attention_cache_is_loud(self):
        """A row without room ends in NaN; a row with room is none the worse for it."""
        lm = model("hybrid")
        seq_idx = jnp.asarray([[0, 0, 0, 0, 0], [0, 0, 0, 0, -1]], jnp.int32)
        logits, _ = run(lm, ids(2, 5), seq_idx, lm.init_cache(2, max_length=4))
        assert np.isnan(logits[0, 4]).all() and np.isfinite(logits[1, :4]).all()

    def test_a_cache_needs_causal_attention(self):
        config = MambaConfig(
            d_model=32,
            n_layer=1,
            vocab_size=8,
            attn_layer_idx=(0,),
            attn_cfg={**ATTENTION, "causal": False},
        )
        lm = MambaLMHeadModel(config, rngs=nnx.Rngs(0))
        assert np.isfinite(lm(ids(1, 3, 8))).all()
        with pytest.raises(ValueError, match="causal must be True to use a cache; got False"):
            lm(ids(1, 3, 8), cache=lm.init_cache(1, max_length=4))
