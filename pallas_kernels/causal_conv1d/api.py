# SPDX-License-Identifier: Apache-2.0
"""`causal_conv1d`: what the arguments mean, and their checks; `reference.py` is the definition."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.causal_conv1d.checks import canonical_activation, check_state
from pallas_kernels.validation import Arg, check, check_positive

OPERATION = dispatch.Operation(
    "causal_conv1d",
    {
        "xla": "pallas_kernels.causal_conv1d.xla",
        # After one that runs anywhere: by name only, until its tests have run on a card.
        "mosaic": "pallas_kernels.causal_conv1d.mosaic",
        "reference": "pallas_kernels.causal_conv1d.reference",
    },
)


def causal_conv1d(
    x: Float[Array, "b t e"],
    weight: Float[Array, "e w"],
    bias: Float[Array, "e"] | None = None,
    *,
    activation: str | None = None,
    seq_idx: Int[Array, "b t"] | None = None,
    initial_state: Float[Array, "b w-1 e"] | Float[Array, "b s w-1 e"] | None = None,
    num_documents: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b t e"], Float[Array, "b w-1 e"] | Float[Array, "b s w-1 e"]]:
    """Convolves every channel with its own few taps, looking only back in time.

        y[t] = act(bias + sum over j of weight[:, j] * x[t - (w - 1) + j])

    where x before the first token is `initial_state`, or zero. Tap w-1 meets the current token.

    Source: the convolution of Gu & Dao 2023, arXiv:2312.00752, figure 3. Mirrors causal_conv1d
    `causal_conv1d_fn` with time before channels; seq_idx and states may be combined here.

    Axes: b batch, t sequence, e channels, w taps, s documents.

    Args:
      x: (b, t, e), float.
      weight: (e, w), float. Taps, the oldest first; any w of at least 1.
      bias: (e,), float. Zero when omitted.
      activation: None, or "silu" (also spelled "swish").
      seq_idx: (b, t), int. Document of each token; no tap reaches into another document. Negative
        for padding: y is 0, and the taps of later tokens pass over it, so that it may stand
        anywhere. One document when omitted.
      initial_state: (b, w-1, e), float. Inputs before the first document of each row, whatever its
        id, the oldest first. (b, s, w-1, e) with `num_documents`. Zero when omitted.
      num_documents: s, to carry one state per document instead of one per row: `seq_idx`, then
        needed, takes values 0 ... s-1 (each one run of tokens per row) and chooses the initial
        state. None for one state per row.
      implementation: None for the fastest that supports the call, or "mosaic", "xla" or
        "reference"; a named one that cannot run raises.

    Returns:
      y: (b, t, e), dtype of x.
      final_state: (b, w-1, e), dtype of `initial_state`, of x without one. The last w-1 inputs,
        the oldest first, of the document of the row's last real token, continued to the left by
        the initial state (first document) or zeros; of a row of nothing but padding its initial
        state. With `num_documents` (b, s, w-1, e): the same for each document; of one that does
        not occur its initial state.

    Raises:
      TypeError: an argument has the wrong kind of dtype.
      ValueError: a shape disagrees with the axes above; `num_documents` without `seq_idx`; unknown
        `activation` or `implementation`.
      NotImplementedError: the named implementation cannot run these arguments; the message gives
        each reason.

    Precision: everything inside is float32 (float64 if any array is float64); y is rounded once.
      With bf16 x the silu of "mosaic" is right to 2e-4.
    Gradients: every float array, through both outputs.
    """
    op = "causal_conv1d"
    sizes = check(
        op,
        Arg("x", x, "b t e"),
        Arg("weight", weight, "e w"),
        Arg("bias", bias, "e"),
        Arg("seq_idx", seq_idx, "b t", "int"),
    )
    check_positive(op, "num_documents", num_documents)
    if num_documents is not None and seq_idx is None:
        raise ValueError(f"{op}: num_documents needs seq_idx to choose the documents; got None")
    sizes |= {} if num_documents is None else {"s": num_documents}
    state_axes = "b w-1 e" if num_documents is None else "b s w-1 e"
    check_state(op, "initial_state", initial_state, state_axes, sizes)
    arrays = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "seq_idx": seq_idx,
        # With one tap there is no state to read.
        "initial_state": None if sizes["w"] == 1 else initial_state,
    }
    arguments = {name: None if v is None else jnp.asarray(v) for name, v in arrays.items()}
    arguments |= {"activation": canonical_activation(op, activation)}
    arguments |= {"num_documents": num_documents}
    y, final_state = dispatch.run(OPERATION, arguments, implementation)
    return y, final_state.astype(x.dtype if initial_state is None else initial_state.dtype)
