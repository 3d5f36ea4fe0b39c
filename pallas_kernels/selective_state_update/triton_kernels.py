# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `selective_state_update`; importable only with Triton installed."""

import triton
import triton.language as tl


@triton.jit
def update(state_p, x_p, dt_p, A_p, B_p, C_p, D_p, z_p, bias_p, slots_p, y_p, new_p,
           H, P, G, low, high,
           N: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr, DT_P: tl.constexpr,
           A_PN: tl.constexpr, D_P: tl.constexpr, BIAS_P: tl.constexpr, HAS_D: tl.constexpr,
           HAS_Z: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """One token of BP channels of one head."""
    block, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, n = block * BP + tl.arange(0, BP), tl.arange(0, NP)
    in_p, some = p < P, (p < P)[:, None] & (n < N)[None, :]
    slot = tl.load(slots_p + token).to(tl.int64)
    at = p[:, None] * N + n[None, :]
    old = tl.load(state_p + (tl.maximum(slot, 0) * H + head) * P * N + at, mask=some, other=0.0)
    x = tl.load(x_p + (token * H + head) * P + p, mask=in_p, other=0.0).to(tl.float32)
    if DT_P:
        step = tl.load(dt_p + (token * H + head) * P + p, mask=in_p, other=0.0).to(tl.float32)
    else:
        step = tl.load(dt_p + token * H + head + 0 * p).to(tl.float32)
    step += tl.load(bias_p + (head * P + p if BIAS_P else head + 0 * p), mask=in_p, other=0.0)
    if SOFTPLUS:
        u = tl.exp(-tl.abs(step))
        series = u * (1.0 - u * (0.5 - u * (0.33333334 - u * (0.25 - u * 0.2))))
        step = tl.maximum(step, 0.0) + tl.where(u < 0.0625, series, tl.log(1.0 + u))
    if LIMIT:
        step = tl.minimum(tl.maximum(step, low), high)
    if A_PN:
        A = tl.load(A_p + head * P * N + at, mask=some, other=0.0)
        decay = tl.exp(step[:, None] * A)
    else:
        decay = tl.exp(step * tl.load(A_p + head))[:, None]
    group = token * G + head // (H // G)
    B = tl.load(B_p + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    C = tl.load(C_p + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    new = decay * old.to(tl.float32) + (step * x)[:, None] * B[None, :]
    y = tl.sum(new * C[None, :], axis=1)
    if HAS_D:
        y += x * tl.load(D_p + (head * P + p if D_P else head + 0 * p), mask=in_p, other=0.0)
    if HAS_Z:
        z = tl.load(z_p + (token * H + head) * P + p, mask=in_p, other=0.0).to(tl.float32)
        y *= z * tl.sigmoid(z)
    y = tl.where(slot >= 0, y, 0.0)
    tl.store(y_p + (token * H + head) * P + p, y.to(y_p.dtype.element_ty), mask=in_p)
    tl.store(new_p + (token * H + head) * P * N + at, new.to(new_p.dtype.element_ty), mask=some)
