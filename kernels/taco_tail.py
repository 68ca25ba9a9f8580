"""Codec taco's last group when it has fewer than 128 elements: statistics over its own length, the transform over the
largest power of two that fits. One program a message; a sum over messages loops over them."""

import triton
import triton.language as tl

from .groups import GROUP, SMALLEST_AMAX, canonical_nan, clamp, nan_max
from .taco import adaptive_scale, load_scale, range_factor, second_scale, store_scale, wire_scales


@triton.jit
def _columns():
    return tl.arange(0, GROUP)[None, :]


@triton.jit
def _sum_by_halves(x, length):
    """fp32[1]: the first `length` of x[1, 128] summed as the torch twin does: by halves, an odd one waits."""
    i = _columns()
    for _ in tl.static_range(7):
        half = length // 2
        other = tl.gather(x, tl.where(i < half, i + half, tl.where(i == half, half * 2, i)), 1)
        x = tl.where(i < half, x + other, other)
        length = length - half
    return tl.sum(tl.where(i == 0, x, 0.0), 1)


@triton.jit
def _transform(x, length):
    """H / sqrt(size) on the largest power of two of x[1, 128] that `length` holds; the rest stays."""
    i = _columns()
    size = length * 0 + 1
    for _ in tl.static_range(6):
        size = tl.where(size * 2 <= length, size * 2, size)
    for step in tl.static_range(6):
        stride = 1 << step
        other = tl.gather(x, i ^ stride, 1)
        stepped = tl.where((i & stride) == 0, x + other, other - x)
        x = tl.where((i < size) & (stride < size), stepped, x)
    root = tl.sqrt_rn(tl.full(x.shape, 1.0, tl.float32) * size.to(tl.float32))
    return tl.where(i < size, tl.div_rn(x, root), x)


@triton.jit
def _encode(x, wire, length, whole, numel, SCALE_ALIGN: tl.constexpr):
    i = _columns()
    amax = tl.reduce(tl.abs(x), 1, nan_max)
    factor = range_factor(amax)
    x = x * factor[:, None]
    count = tl.full(amax.shape, 1.0, tl.float32) * length.to(tl.float32)
    alpha = adaptive_scale(tl.div_rn(_sum_by_halves(x * x, length), count))
    y = _transform(x * alpha[:, None], length)
    s = second_scale(tl.reduce(tl.abs(y), 1, nan_max))
    q = tl.div_rn(y, tl.broadcast_to(s[:, None], y.shape))
    sent = (amax >= SMALLEST_AMAX) & (amax < float("inf"))
    codes = tl.where(sent[:, None], q, 0.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(wire + whole * GROUP + i, codes, mask=i < length)
    s, alpha = wire_scales(s, alpha, amax, factor)
    one = tl.arange(0, 1)
    store_scale(wire + numel + (whole + one) * 4, s, SCALE_ALIGN)
    store_scale(wire + numel + (whole * 2 + 1 + one) * 4, alpha, SCALE_ALIGN)


@triton.jit
def _decode(wire, length, whole, numel, limit, SCALE_ALIGN: tl.constexpr):
    i = _columns()
    one = tl.arange(0, 1)
    s = load_scale(wire + numel + (whole + one) * 4, True, SCALE_ALIGN)[:, None]
    alpha = load_scale(wire + numel + (whole * 2 + 1 + one) * 4, True, SCALE_ALIGN)[:, None]
    codes = tl.load(wire + whole * GROUP + i, mask=i < length, other=0)
    y = _transform(codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * s, length)
    return clamp(tl.div_rn(y, tl.broadcast_to(alpha, y.shape)), limit)


@triton.jit
def _decode_sum(wire, message_stride, messages, length, whole, numel, limit, SCALE_ALIGN: tl.constexpr):
    total = _decode(wire, length, whole, numel, limit, SCALE_ALIGN)
    for i in range(1, messages):
        total += _decode(wire + i * message_stride, length, whole, numel, limit, SCALE_ALIGN)
    return total


@triton.jit(do_not_specialize=["x", "wire", "x_stride", "wire_stride", "whole", "numel"])
def encode_tail_kernel(x, wire, x_stride: tl.int64, wire_stride: tl.int64, whole: tl.int64, numel: tl.int64,
                       SCALE_ALIGN: tl.constexpr):  # fmt: skip
    """The group behind the `whole` first ones of row program_id(0) of x."""
    row, i = tl.program_id(0).to(tl.int64), _columns()
    length = (numel - whole * GROUP).to(tl.int32)
    values = tl.load(x + row * x_stride + whole * GROUP + i, mask=i < length, other=0.0).to(tl.float32)
    _encode(values, wire + row * wire_stride, length, whole, numel, SCALE_ALIGN)


@triton.jit(do_not_specialize=["wire", "out", "wire_stride", "message_stride", "messages", "out_stride", "whole",
                               "numel", "limit"])  # fmt: skip
def decode_sum_tail_kernel(wire, out, wire_stride: tl.int64, message_stride: tl.int64, messages: tl.int32,
                           out_stride: tl.int64, whole: tl.int64, numel: tl.int64, limit: tl.float32,
                           SCALE_ALIGN: tl.constexpr):  # fmt: skip
    """That group of row program_id(0) of out: the sum of `messages` messages, which start at that row of wire."""
    row, i = tl.program_id(0).to(tl.int64), _columns()
    length = (numel - whole * GROUP).to(tl.int32)
    total = _decode_sum(wire + row * wire_stride, message_stride, messages, length, whole, numel, limit, SCALE_ALIGN)
    at = row * out_stride + whole * GROUP + i
    inside, number, nan = i < length, total == total, canonical_nan(out)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside & number)
    tl.store(out.to(tl.pointer_type(nan.dtype)) + at, tl.broadcast_to(nan, at.shape), mask=inside & (number == 0))


@triton.jit(do_not_specialize=["wire", "out", "message_stride", "messages", "whole", "numel", "limit"])
def decode_sum_encode_tail_kernel(wire, out, message_stride: tl.int64, messages: tl.int32, whole: tl.int64,
                                  numel: tl.int64, limit: tl.float32, SCALE_ALIGN: tl.constexpr,
                                  HALF: tl.constexpr):  # fmt: skip
    """That group of the message `out` of the sum of `messages` messages in wire. HALF: the sum passes through fp16."""
    length = (numel - whole * GROUP).to(tl.int32)
    total = _decode_sum(wire, message_stride, messages, length, whole, numel, limit, SCALE_ALIGN)
    if HALF:
        total = total.to(tl.float16).to(tl.float32)
    _encode(total, out, length, whole, numel, SCALE_ALIGN)
