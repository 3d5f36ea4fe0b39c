# SPDX-License-Identifier: Apache-2.0
"""The chunked cross-entropy equals the plain one, values and gradients, however it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import BF16_GRAD, FP32_GRAD, FP32_OUT, assert_close, norm_error
from train.loss import next_token_nats

B, T, D, V = 2, 13, 8, 19


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 4)
    hidden = jax.random.normal(keys[0], (B, T, D)).astype(dtype)
    kernel = jax.random.normal(keys[1], (D, V))
    targets = jax.random.randint(keys[2], (B, T), 0, V)
    mask = jax.random.bernoulli(keys[3], 0.7, (B, T))
    return hidden, kernel, targets, mask


def plain(hidden, kernel, targets, mask):
    """The definition: all logits at once, in fp32."""
    logs = jax.nn.log_softmax(hidden.astype(jnp.float32) @ kernel)
    picked = jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(mask, picked, 0))


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_equals_the_plain_cross_entropy_and_its_gradients(chunk):
    hidden, kernel, targets, mask = arrays()

    def chunked(hidden, kernel):
        return next_token_nats(hidden, kernel, targets, mask, chunk)

    wanted = jax.value_and_grad(plain, argnums=(0, 1))(hidden, kernel, targets, mask)
    got = jax.value_and_grad(chunked, argnums=(0, 1))(hidden, kernel)
    assert_close("nats", got[0], wanted[0], FP32_OUT, norm_error)
    assert_close("nats without gradient", chunked(hidden, kernel), wanted[0], FP32_OUT, norm_error)
    for name, a, b in zip(("dhidden", "dkernel"), got[1], wanted[1], strict=True):
        assert_close(name, a, b, FP32_GRAD, norm_error)


def test_bf16_hidden_states_keep_fp32_logits_and_kernel_gradients():
    hidden, kernel, targets, mask = arrays(jnp.bfloat16)
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)

    def chunked(hidden, kernel):
        return next_token_nats(hidden, kernel, targets, mask, 4)

    wanted = jax.value_and_grad(plain, argnums=(0, 1))(
        hidden.astype(jnp.float32), rounded, targets, mask
    )
    got = jax.value_and_grad(chunked, argnums=(0, 1))(hidden, kernel)
    # The products of bf16 numbers are exact in fp32, so the loss has fp32's accuracy.
    assert_close("nats", got[0], wanted[0], FP32_OUT, norm_error)
    assert got[1][1].dtype == jnp.float32
    for name, a, b in zip(("dhidden", "dkernel"), got[1], wanted[1], strict=True):
        assert_close(name, a, b, BF16_GRAD, norm_error)


def test_masked_targets_have_no_influence():
    hidden, kernel, targets, mask = arrays()
    other = jnp.where(mask, targets, (targets + 1) % V)
    gradient = jax.grad(next_token_nats)
    np.testing.assert_array_equal(
        gradient(hidden, kernel, targets, mask, 4), gradient(hidden, kernel, other, mask, 4)
    )
    assert not np.any(np.asarray(gradient(hidden, kernel, targets, mask, 4))[~np.asarray(mask)])


def test_no_array_of_the_compiled_step_has_the_whole_logits():
    hidden, kernel, targets, mask = arrays()

    def chunked(hidden, kernel):
        return next_token_nats(hidden, kernel, targets, mask, 4)

    text = jax.jit(jax.grad(chunked, argnums=(0, 1))).lower(hidden, kernel).as_text()
    assert f"tensor<{B}x4x{V}xf32>" in text
    for rows in (f"{B}x{T}x{V}", f"{B}x16x{V}", f"4x{B}x4x{V}"):
        assert f"tensor<{rows}x" not in text
