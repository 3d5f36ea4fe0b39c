# SPDX-License-Identifier: Apache-2.0
"""A stretch of chunks of `mamba3_scan` as matrix products: the mathematics of the XLA path.

`block` takes the state before a stretch of tokens and gives their outputs and the state after them;
`xla_loop.py` runs it stretch after stretch. It is an ordinary differentiable function; whatever it
computes on the way lives as long as one stretch. README.md derives the form.

Per-head arrays are (b, c, h, q, ...): c chunks of q tokens each.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import chunking
from pallas_kernels.mamba3_scan import rotary
from pallas_kernels.mamba3_scan.readout import read_out


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a stretch is cut, and what is constant in it.

    Attributes:
      chunk_size: q, tokens of a chunk.
      num_chunks: c, chunks of a stretch.
      norm_eps: As in `mamba3_scan`.
    """

    chunk_size: int
    num_chunks: int
    norm_eps: float

    @property
    def num_tokens(self) -> int:
        """Tokens of a stretch."""
        return self.chunk_size * self.num_chunks


class Carry(NamedTuple):
    """State between stretches: angle (b, h, a) and ssm (b, h, p, n), float32 or wider."""

    angle: Float[Array, "b h a"]
    ssm: Float[Array, "b h p n"]


class Tokens(NamedTuple):
    """Per-token arrays, differentiable; those of rank 3 are float32 or wider and 0 at padding.

    B and C, their biases and the state have their channels in the order of `rotary.pairs_first`.
    `now` weighs a token's input in its own output, `share` in all later ones (its own weight and
    that of the next token's look back); dt turns the angle.
    """

    x: Float[Array, "b t h p"]
    z: Float[Array, "b t h p"] | None
    B: Float[Array, "b t r g n"]
    C: Float[Array, "b t r g n"]
    angles: Float[Array, "b t 1 a"] | Float[Array, "b t h a"]
    dt: Float[Array, "b t h"]
    log_decay: Float[Array, "b t h"]
    now: Float[Array, "b t h"]
    share: Float[Array, "b t h"]


class Marks(NamedTuple):
    """Per-token integers; None where nothing depends on them.

    `document` and that of the token before are as in `packing.Packing`; only the angle needs them,
    as the log decays already forget at a document's first token.
    """

    is_real: Bool[Array, "b t"] | None
    document: Int[Array, "b t"] | None
    document_before: Int[Array, "b t"] | None


class Parameters(NamedTuple):
    """Arrays shared by all tokens, float32 or wider; None where the call left them out."""

    B_bias: Float[Array, "h r n"]
    C_bias: Float[Array, "h r n"]
    D: Float[Array, "h"] | None
    mimo_x: Float[Array, "h r p"] | None
    mimo_z: Float[Array, "h r p"] | None
    mimo_o: Float[Array, "h r p"] | None
    norm_weight: Float[Array, "h p"] | None


def block(
    layout: Layout, parameters: Parameters, carry: Carry, tokens: Tokens, marks: Marks
) -> tuple[Float[Array, "b t h p"] | Float[Array, "b t r h p"], Carry]:
    """Runs one stretch; returns its outputs, in the dtype of x, and the state after it."""
    dtype, wide = tokens.x.dtype, carry.ssm.dtype
    product = partial(_product, dtype)
    (b, t, h, p), (r, _, n) = tokens.x.shape, tokens.B.shape[2:]
    c, q = layout.num_chunks, layout.chunk_size
    angle, last_angle = _angles(layout, carry.angle, tokens, marks)
    maps = ((tokens.B, parameters.B_bias), (tokens.C, parameters.C_bias))
    B, C = (
        _rotated(layout, values, bias, angle).reshape(b, c, h, q * r, n) for values, bias in maps
    )
    x = _per_head(layout, tokens.x).astype(wide)[..., None, :]
    if parameters.mimo_x is not None:
        x = x * parameters.mimo_x[None, None, :, None]
    log_decay, now, share = (
        _per_head(layout, values) for values in (tokens.log_decay, tokens.now, tokens.share)
    )

    to_end = jnp.exp(chunking.sums_after(log_decay)) * share
    own = product("bchyp,bchyn->bchpn", _rows(x * to_end[..., None, None]), B)
    entering, leaving = _pass_states(carry.ssm, own, jnp.sum(log_decay, axis=-1))
    from_start = jnp.exp(chunking.sums_through(log_decay))
    y = product("bchyn,bchpn->bchyp", C, entering)
    y = y.reshape(b, c, h, q, r, p) * from_start[..., None, None]

    weight = _diagonal(now, share) * chunking.segment_decays(log_decay)
    scores = product("bchyn,bchsn->bchys", C, B).reshape(b, c, h, q, r, q, r)
    scores = (scores * weight[:, :, :, :, None, :, None]).reshape(b, c, h, q * r, q * r)
    inside = product("bchys,bchsp->bchyp", scores, _rows(x))
    y = y + inside.reshape(y.shape)

    y = jnp.moveaxis(y, 2, 4).reshape(b, t, r, h, p)
    z = None if tokens.z is None else tokens.z.astype(wide)
    y = read_out(y, tokens.x.astype(wide), parameters.D, z, *parameters[3:], layout.norm_eps)
    return zero_padding(y.astype(dtype), marks.is_real), Carry(last_angle, leaving)


def _angles(
    layout: Layout, entering: Float[Array, "b h a"], tokens: Tokens, marks: Marks
) -> tuple[Float[Array, "b c h q a"], Float[Array, "b h a"]]:
    """The angle after every token, and that after the stretch, which is summed more exactly.

    Sums run over a document's own tokens.
    """
    angles, dt = (_per_head(layout, values) for values in (tokens.angles, tokens.dt))
    steps = rotary.increments(angles, dt)
    c, q = layout.num_chunks, layout.chunk_size
    inside, across = np.tri(q, dtype=bool)[None, None], np.tri(c + 1, dtype=bool)[None]
    if marks.document is not None:
        document = marks.document.reshape(-1, c, q)
        # Documents at the bounds of chunks: before the stretch, then at each chunk's end.
        bounds = jnp.concatenate((marks.document_before[:, :1], document[:, :, -1]), axis=1)
        joins = (document == bounds[:, :-1, None])[:, :, None, :, None]
        inside = inside & (document[..., None] == document[:, :, None])
        across = across & (bounds[..., None] == bounds[:, None])
    inside, across = (jnp.asarray(mask, steps.dtype) for mask in (inside, across))
    sums = partial(_exact_product, "...qs,...hsa->...hqa")
    coarse, rest = (sums(inside[:, :, -1:], part)[..., 0, :] for part in rotary.exact_parts(steps))
    ends = jnp.concatenate((entering[:, None], rotary.wrap(coarse) + rest), axis=1)
    bounds = rotary.wrap(_exact_product("...ij,...jha->...iha", across, ends))
    start = bounds[:, :-1, :, None]
    start = start if marks.document is None else jnp.where(joins, start, 0)
    return rotary.wrap(sums(inside, steps) + start), bounds[:, -1]


def _pass_states(
    state: Float[Array, "b h p n"], own: Float[Array, "b c h p n"], total: Float[Array, "b c h"]
) -> tuple[Float[Array, "b c h p n"], Float[Array, "b h p n"]]:
    """The states before every chunk and after the last: the recurrence over chunks."""
    if own.shape[1] == 1:
        leaving = jnp.exp(total)[:, 0, :, None, None] * state + own[:, 0]
        return state[:, None], leaving
    total = jnp.moveaxis(total, 1, 2)
    leaving = _exact_product("bhij,bjhpn->bihpn", chunking.segment_decays(total), own)
    reach = jnp.moveaxis(jnp.exp(chunking.sums_through(total)), 2, 1)
    leaving = leaving + reach[..., None, None] * state[:, None]
    return jnp.concatenate((state[:, None], leaving[:, :-1]), axis=1), leaving[:, -1]


def _diagonal(
    now: Float[Array, "b c h q"], share: Float[Array, "b c h q"]
) -> Float[Array, "b c h q q"]:
    """`now` on the diagonal, every source's `share` elsewhere."""
    on_diagonal = np.eye(now.shape[-1], dtype=bool)[None, None, None]
    return jnp.where(on_diagonal, now[..., None, :], share[..., None, :])


def _rotated(
    layout: Layout,
    values: Float[Array, "b t r g n"],
    bias: Float[Array, "h r n"],
    angle: Float[Array, "b c h q a"],
) -> Float[Array, "b c h q r n"]:
    """B or C for every head, its bias added and turned, in the dtype of the bias."""
    b, _, r, g, n = values.shape
    c, h = layout.num_chunks, bias.shape[0]
    values = jnp.moveaxis(values.astype(bias.dtype).reshape(b, c, -1, r, g, n), 4, 2)[:, :, :, None]
    bias = bias.reshape(1, 1, g, h // g, 1, r, n)
    return rotary.turn((values + bias).reshape(b, c, h, -1, r, n), angle[:, :, :, :, None])


def _per_head(layout: Layout, values: Float[Array, "b t h ..."]) -> Float[Array, "b c h q ..."]:
    values = values.reshape(values.shape[0], layout.num_chunks, -1, *values.shape[2:])
    return jnp.moveaxis(values, 3, 2)


def _rows(values: Float[Array, "b c h q r p"]) -> Float[Array, "b c h qr p"]:
    return values.reshape(*values.shape[:3], -1, values.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dtype: Any, formula: str, left: Array, right: Array) -> Array:
    """`einsum` of wide arrays with operands rounded to `dtype` and wide sums.

    So are the products of its gradient; left to automatic differentiation, they would mix widths
    and round the gradients themselves.
    """
    return _product_forward(dtype, formula, left, right)[0]


def _product_forward(dtype, formula, left, right):
    wide = left.dtype
    left, right = left.astype(dtype), right.astype(dtype)
    return jnp.einsum(formula, left, right, preferred_element_type=wide), (left, right)


def _product_backward(dtype, formula, saved, cotangent):
    left, right = saved
    inputs, output = formula.split("->")
    first, second = inputs.split(",")
    wide, cotangent = cotangent.dtype, cotangent.astype(dtype)
    return (
        jnp.einsum(f"{output},{second}->{first}", cotangent, right, preferred_element_type=wide),
        jnp.einsum(f"{first},{output}->{second}", left, cotangent, preferred_element_type=wide),
    )


_product.defvjp(_product_forward, _product_backward)


def _exact_product(formula: str, left: Array, right: Array) -> Array:
    """`einsum` that no faster, coarser products may replace."""
    return jnp.einsum(formula, left, right, precision=jax.lax.Precision.HIGHEST)


def zero_padding(values: Array | None, is_real: Bool[Array, "b t"] | None) -> Array | None:
    """Replaces what is at padding by zeros."""
    if values is None or is_real is None:
        return values
    return jnp.where(is_real.reshape(is_real.shape + (1,) * (values.ndim - 2)), values, 0)
