# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `selective_scan`: one program walks a segment of 128 channels, token by token.

Importable only with Triton installed. Arrays have the padded sizes of `mosaic_steps.Plan`; a
program's state is a (channels, states) tile in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _softplus(v):
    u = tl.exp(-tl.abs(v))
    series = u * (1.0 - u * (0.5 - u * (0.33333334 - u * (0.25 - u * 0.2))))
    return tl.maximum(v, 0.0) + tl.where(u < 0.0625, series, tl.log(1.0 + u))


@triton.jit
def _token(dt_p, x_p, rows_p, t, last, E, shift, ch, ns, N: tl.constexpr, ROW: tl.constexpr,
           SOFTPLUS: tl.constexpr, FLAGS: tl.constexpr):  # fmt: skip
    """(step, x, B, C, restart, real) of token t."""
    inside = (t >= 0) & (t < last)
    step = tl.load(dt_p + t * E + ch, mask=inside, other=0.0).to(tl.float32) + shift
    x = tl.load(x_p + t * E + ch, mask=inside, other=0.0).to(tl.float32)
    B = tl.load(rows_p + t * ROW + ns, mask=(ns < N) & inside, other=0.0)
    C = tl.load(rows_p + t * ROW + N + ns, mask=(ns < N) & inside, other=0.0)
    restart, real = tl.full((), 0.0, tl.float32), tl.full((), 1.0, tl.float32)
    if FLAGS:
        restart = tl.load(rows_p + t * ROW + 2 * N, mask=inside, other=0.0)
        real = tl.load(rows_p + t * ROW + 2 * N + 1, mask=inside, other=0.0)
    if SOFTPLUS:
        step = _softplus(step)
    return step * real, x, B, C, restart, real


@triton.jit
def forward(x_p, dt_p, z_p, rows_p, rate_p, D_p, bias_p, states_p, y_p, end_p, kept_p, sum_p,
            T, E, TILES, PER_SEGMENT, SEGMENTS, GROUPS, PER_GROUP,
            N: tl.constexpr, NP: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
            CHANNELS: tl.constexpr, SOFTPLUS: tl.constexpr, FLAGS: tl.constexpr,
            HAS_Z: tl.constexpr, KEEP: tl.constexpr, OUTPUT: tl.constexpr):  # fmt: skip
    """Outputs from given states, or (not OUTPUT) the segments' states from zero and step sums."""
    block, segment, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ch, ns = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, NP)
    plane = ns[None, :] * E + ch[:, None]
    some = (ns < N)[None, :]
    rate = tl.load(rate_p + plane, mask=some, other=0.0)
    shift = tl.load(bias_p + ch)
    x_p, dt_p, z_p, y_p = (x_p + row * T * E, dt_p + row * T * E, z_p + row * T * E,
                           y_p + row * T * E)  # fmt: skip
    rows_p += (row * GROUPS + block // PER_GROUP) * T * ROW
    at = (row * SEGMENTS + segment) * N * E + plane
    if OUTPUT:
        h = tl.load(states_p + at, mask=some, other=0.0)
        skip = tl.load(D_p + ch)
    else:
        h = tl.zeros((CHANNELS, NP), tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    first = segment * PER_SEGMENT * TILE
    last = tl.minimum(first + PER_SEGMENT * TILE, T)
    step, x, B, C, restart, real = _token(
        dt_p, x_p, rows_p, first, last, E, shift, ch, ns, N, ROW, SOFTPLUS, FLAGS)  # fmt: skip
    for t in range(first, last):
        if KEEP and t % TILE == 0:
            tl.store(kept_p + (row * TILES + t // TILE) * N * E + plane, h, mask=some)
        # The next token's loads, before this one's arithmetic.
        step1, x1, B1, C1, restart1, real1 = _token(
            dt_p, x_p, rows_p, t + 1, last, E, shift, ch, ns, N, ROW, SOFTPLUS, FLAGS)  # fmt: skip
        h = tl.exp2(step[:, None] * rate + restart) * h + (step * x)[:, None] * B[None, :]
        if OUTPUT:
            y = tl.sum(h * C[None, :], axis=1) + skip * x
            if HAS_Z:
                z = tl.load(z_p + t * E + ch).to(tl.float32)
                y = y * z * tl.sigmoid(z)
            tl.store(y_p + t * E + ch, (y * real).to(y_p.dtype.element_ty))
        total += step
        step, x, B, C, restart, real = step1, x1, B1, C1, restart1, real1
    tl.store(end_p + at, h, mask=some)
    if not OUTPUT:
        tl.store(sum_p + (row * SEGMENTS + segment) * E + ch, total)


@triton.jit
def backward(x_p, dt_p, z_p, rows_p, rate_p, D_p, bias_p, dy_p, kept_p, carries_p,
             dx_p, ddt_p, dz_p, drows_p, dA_p, dD_p, dbias_p, carry_p, work_p,
             T, E, TILES, PER_SEGMENT, SEGMENTS, GROUPS, PER_GROUP, BLOCKS,
             N: tl.constexpr, NP: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
             CHANNELS: tl.constexpr, SOFTPLUS: tl.constexpr, FLAGS: tl.constexpr,
             HAS_Z: tl.constexpr):  # fmt: skip
    """All gradients of a segment; the states before a tile's tokens wait in `work`."""
    block, segment, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ch, ns = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, NP)
    plane = ns[None, :] * E + ch[:, None]
    some = (ns < N)[None, :]
    rate = tl.load(rate_p + plane, mask=some, other=0.0)
    shift, skip = tl.load(bias_p + ch), tl.load(D_p + ch)
    begin = row * T * E
    rows_p += (row * GROUPS + block // PER_GROUP) * T * ROW
    drows_p += (row * BLOCKS + block) * T * 2 * N
    at = (row * SEGMENTS + segment) * N * E + plane
    work = work_p + (row * SEGMENTS + segment) * TILE * NP * E + plane
    carry = tl.load(carries_p + at, mask=some, other=0.0)
    dA = tl.zeros((CHANNELS, NP), tl.float32)
    dD, dbias = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    first = segment * PER_SEGMENT
    count = tl.minimum(PER_SEGMENT, TILES - first)
    for i in range(0, count):
        tile = first + count - 1 - i
        h = tl.load(kept_p + (row * TILES + tile) * N * E + plane, mask=some, other=0.0)
        for u in range(0, TILE):
            tl.store(work + u * NP * E, h)
            step, x, B, C, restart, real = _token(
                dt_p + begin, x_p + begin, rows_p, tile * TILE + u, T, E, shift, ch, ns, N, ROW,
                SOFTPLUS, FLAGS)  # fmt: skip
            h = tl.exp2(step[:, None] * rate + restart) * h + (step * x)[:, None] * B[None, :]
        tl.debug_barrier()
        for v in range(0, TILE):
            u = TILE - 1 - v
            t = tile * TILE + u
            before = tl.load(work + u * NP * E)
            step, x, B, C, restart, real = _token(
                dt_p + begin, x_p + begin, rows_p, t, T, E, shift, ch, ns, N, ROW,
                SOFTPLUS, FLAGS)  # fmt: skip
            dout = tl.load(dy_p + begin + t * E + ch).to(tl.float32) * real
            decay = tl.exp2(step[:, None] * rate + restart)
            h = decay * before + (step * x)[:, None] * B[None, :]
            if HAS_Z:
                z = tl.load(z_p + begin + t * E + ch).to(tl.float32)
                gate = tl.sigmoid(z)
                y = tl.sum(h * C[None, :], axis=1) + skip * x
                dz = dout * y * gate * (1.0 + z * (1.0 - gate))
                tl.store(dz_p + begin + t * E + ch, dz.to(dz_p.dtype.element_ty))
                dout = dout * z * gate
            dh = dout[:, None] * C[None, :] + carry
            dB = tl.sum(dh * (step * x)[:, None], axis=0)
            dC = tl.sum(h * dout[:, None], axis=0)
            tl.store(drows_p + t * 2 * N + ns, dB, mask=ns < N)
            tl.store(drows_p + t * 2 * N + N + ns, dC, mask=ns < N)
            dweighted = tl.sum(dh * B[None, :], axis=1)
            carry = dh * decay
            through = carry * before
            dstep = tl.sum(through * rate, axis=1) * 0.6931471805599453 + dweighted * x
            dA += through * step[:, None]
            if SOFTPLUS:
                # 1 - exp(-step), by its series where it is small.
                series = step * (1.0 - step * (0.5 - step * (0.16666667 - step * (
                    0.041666668 - step * 0.008333334))))  # fmt: skip
                dstep = dstep * tl.where(step < 0.125, series, 1.0 - tl.exp(-step))
            dstep = dstep * real
            dx = dweighted * step + skip * dout
            dD += dout * x
            dbias += dstep
            tl.store(dx_p + begin + t * E + ch, dx.to(dx_p.dtype.element_ty))
            tl.store(ddt_p + begin + t * E + ch, dstep.to(ddt_p.dtype.element_ty))
        tl.debug_barrier()
    tl.store(carry_p + at, carry, mask=some)
    tl.store(dA_p + at, dA, mask=some)
    vector = (row * SEGMENTS + segment) * E + ch
    tl.store(dD_p + vector, dD)
    tl.store(dbias_p + vector, dbias)


@triton.jit
def carries(dt_p, z_p, dy_p, rows_p, rate_p, bias_p, carry_p, sum_p,
            T, E, PER_SEGMENT, SEGMENTS, GROUPS, PER_GROUP,
            N: tl.constexpr, NP: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
            CHANNELS: tl.constexpr, SOFTPLUS: tl.constexpr, FLAGS: tl.constexpr,
            HAS_Z: tl.constexpr):  # fmt: skip
    """The state's cotangent before each segment, from zero after it, and the step sums."""
    block, segment, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ch, ns = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, NP)
    plane = ns[None, :] * E + ch[:, None]
    some = (ns < N)[None, :]
    rate = tl.load(rate_p + plane, mask=some, other=0.0)
    shift = tl.load(bias_p + ch)
    begin = row * T * E
    rows_p += (row * GROUPS + block // PER_GROUP) * T * ROW
    carry = tl.zeros((CHANNELS, NP), tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    first = segment * PER_SEGMENT * TILE
    last = tl.minimum(first + PER_SEGMENT * TILE, T)
    for i in range(first, last):
        t = last - 1 - (i - first)
        step, dout, _B, C, restart, real = _token(
            dt_p + begin, dy_p + begin, rows_p, t, T, E, shift, ch, ns, N, ROW,
            SOFTPLUS, FLAGS)  # fmt: skip
        dout = dout * real
        if HAS_Z:
            z = tl.load(z_p + begin + t * E + ch).to(tl.float32)
            dout = dout * z * tl.sigmoid(z)
        carry = tl.exp2(step[:, None] * rate + restart) * (dout[:, None] * C[None, :] + carry)
        total += step
    tl.store(carry_p + (row * SEGMENTS + segment) * N * E + plane, carry, mask=some)
    tl.store(sum_p + (row * SEGMENTS + segment) * E + ch, total)
