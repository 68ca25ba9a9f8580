"""Kernel of codec none: fp16, bf16 or fp32 as they are, summed over messages, NaN in its canonical bits."""

import triton
import triton.language as tl


@triton.jit
def _block(wire, out, at, inside, message_stride, messages, NAN: tl.constexpr, HALF: tl.constexpr,
           ALIGN: tl.constexpr):  # fmt: skip
    total = tl.load(wire + at, mask=inside, other=0.0).to(tl.float32)
    for i in range(1, messages):
        message = tl.multiple_of(wire + i * message_stride, ALIGN)
        total += tl.load(message + at, mask=inside, other=0.0).to(tl.float32)
    if HALF:
        total = total.to(tl.float16).to(tl.float32)
    values = total.to(out.dtype.element_ty)
    if out.dtype.element_ty.primitive_bitwidth == 16:
        bits = tl.where(total == total, values.to(tl.int16, bitcast=True), NAN).to(tl.int16)
        tl.store(out.to(tl.pointer_type(tl.int16)) + at, bits, mask=inside)
    else:
        bits = tl.where(total == total, values.to(tl.int32, bitcast=True), NAN)
        tl.store(out.to(tl.pointer_type(tl.int32)) + at, bits, mask=inside)


@triton.jit(do_not_specialize=["wire", "out", "wire_stride", "message_stride", "messages", "out_stride", "numel"])
def sum_kernel(wire, out, wire_stride: tl.int64, message_stride: tl.int64, messages: tl.int32, out_stride: tl.int64,
               numel: tl.int64, NAN: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
               OUT_ALIGN: tl.constexpr):  # fmt: skip
    """Row program_id(1) of out: the sum in fp32 of `messages` arrays, which start at that row of wire.

    Strides in elements. NAN: the canonical bits in out's type. HALF: the sum passes through fp16.
    """
    row = tl.program_id(1).to(tl.int64)
    wire = tl.multiple_of(wire + row * wire_stride, ALIGN)
    out = tl.multiple_of(out + row * out_stride, OUT_ALIGN)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # a mask that is true everywhere leaves the accesses wide
        _block(wire, out, at, tl.full([BLOCK], True, tl.int1), message_stride, messages, NAN, HALF, ALIGN)
    else:
        _block(wire, out, at, at < numel, message_stride, messages, NAN, HALF, ALIGN)
