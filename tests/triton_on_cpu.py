"""Triton's interpreter with a GPU's rounding, so that the kernels' logic is tested where there is no GPU.

The interpreter's own conversions between float types truncate or round ties away, and its fma rounds twice; here
torch converts and fp64 holds the product. Import it before any kernel.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
INTEGERS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def convert(data, source, target, rounding_mode):
    values = torch.from_numpy(np.ascontiguousarray(data)).view(TORCH_TYPES[source]).to(TORCH_TYPES[target])
    bits = values.view(torch.uint8).numpy().view(INTEGERS[target.primitive_bitwidth])
    return bits.reshape(data.shape)


def fused_multiply_add(builder, x, y, z):
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


_patch_tensor = interpreter._patch_lang_tensor


def patch_tensor(tensor, scope):
    _patch_tensor(tensor, scope)
    # newer numpy makes no number of an array of one element
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patch_tensor
interpreter._convert_float = convert
interpreter.InterpreterBuilder.create_fma = fused_multiply_add
np.seterr(all="ignore")  # overflow and NaN are cases here, not accidents
