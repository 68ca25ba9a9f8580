"""docs/wire_formats.md once more, in numpy, one group at a time: what the codecs' bytes are compared with."""

import numpy as np
import torch

G = 128
f32 = np.float32
QMAX = {"fp8": 448, "int8": 127, "hadamard-int8": 127, "hadamard-int6": 31, "hadamard-int4": 7}


def _e4m3_values():
    """The 127 non-negative finite values of E4M3 from its definition, by code."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


E4M3 = _e4m3_values()


def e4m3_code(value: float) -> int:
    """Nearest code, ties to the even one."""
    magnitude = min(abs(float(value)), 448.0)
    above = int(np.searchsorted(E4M3, magnitude))
    below = max(above - 1, 0)
    down, up = magnitude - E4M3[below], E4M3[above] - magnitude
    code = above if up < down or (up == down and above % 2 == 0) else below
    return code | (0x80 if np.signbit(value) else 0)


def e4m3_value(code: int) -> float:
    return float(E4M3[code & 0x7F]) * (-1 if code & 0x80 else 1)


def fwht(v: np.ndarray) -> np.ndarray:
    """Walsh-Hadamard transform in natural order: the halves first, then their sum and difference."""
    if len(v) == 1:
        return v
    a, b = fwht(v[: len(v) // 2]), fwht(v[len(v) // 2 :])
    return np.concatenate([a + b, a - b])


def hadamard(size: int) -> np.ndarray:
    """The matrix by its closed form, (-1)^(number of ones in i & j)."""
    return np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(size)] for i in range(size)], dtype=np.float64)


def groups_of(x: torch.Tensor) -> list[np.ndarray]:
    flat = x.detach().reshape(-1).float().numpy()
    return [flat[i : i + G] for i in range(0, len(flat), G)]


# codec taco
def _sum_by_halves(v: np.ndarray) -> f32:
    v = list(v)
    while len(v) > 1:
        half = len(v) // 2
        v = [f32(a + b) for a, b in zip(v[:half], v[half : 2 * half], strict=True)] + v[2 * half :]
    return f32(v[0])


def _taco_group(x: np.ndarray, widened: bool) -> tuple[list[int], f32, f32]:
    power = f32(1)
    if widened:
        amax = np.abs(x).max()
        if not np.isfinite(amax):
            return [0] * len(x), f32("nan"), f32("nan")
        if amax < 2.0**-118:
            x = np.zeros_like(x)
        elif not 2.0**-30 <= amax <= 2.0**30:
            power = f32(2.0 ** np.floor(np.log2(np.float64(amax))))
            x = x / power
    mean = f32(_sum_by_halves(x * x) / f32(len(x)))
    alpha = np.clip(f32(448) / np.sqrt(f32(mean + f32(1e-6))), f32(1e-3), f32(1e3))
    y = alpha * x
    size = 2 ** int(np.log2(len(x)))
    y[:size] = fwht(y[:size]) / f32(np.sqrt(size))
    s = np.clip(np.abs(y).max() / f32(448), f32(1e-12), f32(1e6))
    return [e4m3_code(v) for v in np.clip(y / s, -448, 448)], f32(s), f32(alpha / power)


def encode_taco(x: torch.Tensor, widened: bool = True) -> bytes:
    with np.errstate(all="ignore"):
        parts = [_taco_group(group, widened) for group in groups_of(x)]
    codes = bytes(code for part in parts for code in part[0])
    return codes + b"".join(p[1].tobytes() for p in parts) + b"".join(p[2].tobytes() for p in parts)


def decode_taco(wire: bytes, numel: int) -> np.ndarray:
    """In float64 with H as a matrix."""
    groups = -(-numel // G)
    s, alpha = np.frombuffer(wire[numel:], f32).astype(np.float64).reshape(2, groups)
    out = []
    for i in range(groups):
        y = np.array([e4m3_value(c) for c in wire[i * G : min((i + 1) * G, numel)]]) * s[i]
        size = 2 ** int(np.log2(len(y)))
        y[:size] = hadamard(size) @ y[:size] / np.sqrt(size)
        out.append(y / alpha[i])
    return np.concatenate(out)


# codecs with one bf16 scale
def _bf16_up(value: f32) -> int:
    """Bits of the smallest bf16 that is not below a non-negative fp32."""
    bits = int(np.asarray(value, f32).view(np.uint32))
    return (bits >> 16) + (bits & 0xFFFF != 0)


def _bf16_value(bits: int) -> f32:
    return np.array(bits << 16, np.uint32).view(f32)[()]


def _pack(codes: list[int], name: str) -> bytes:
    """Codes as one little-endian number, lowest first."""
    bits = 8 if name in ("fp8", "int8") else int(name[-1])
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


def _unpack(payload: bytes, name: str) -> list[int]:
    bits = 8 if name in ("fp8", "int8") else int(name[-1])
    number = int.from_bytes(payload, "little")
    return [number >> (bits * i) & (2**bits - 1) for i in range(len(payload) * 8 // bits)]


def encode_scaled(x: torch.Tensor, name: str) -> bytes:
    qmax, payload, scales = QMAX[name], b"", b""
    with np.errstate(all="ignore"):
        for group in groups_of(x):
            group = np.pad(group, (0, G - len(group)))
            y = fwht(group * f32(2**-7)) if name.startswith("hadamard") else group
            amax = np.abs(y).max()
            if not np.isfinite(amax):
                scale, q = 0x7FC0, np.zeros(G)
            elif amax < 2.0**-118:
                scale, q = 0, np.zeros(G)
            else:
                scale = _bf16_up(f32(amax / f32(qmax)))
                q = np.clip(y / _bf16_value(scale), -qmax, qmax)
            codes = [e4m3_code(v) for v in q] if name == "fp8" else [int(np.rint(v)) + qmax for v in q]
            payload += _pack(codes, name)
            scales += scale.to_bytes(2, "little")
    return payload + scales


def decode_scaled(wire: bytes, numel: int, name: str) -> np.ndarray:
    """In float64; q and s are exact there, so is the product."""
    groups = -(-numel // G)
    size = (len(wire) - 2 * groups) // groups
    out = []
    for i in range(groups):
        codes = _unpack(wire[i * size : (i + 1) * size], name)
        scale = np.float64(_bf16_value(int.from_bytes(wire[groups * size + 2 * i :][:2], "little")))
        q = np.array([e4m3_value(c) for c in codes] if name == "fp8" else [c - QMAX[name] for c in codes])
        out.append(scale * (hadamard(G) @ q if name.startswith("hadamard") else q))
    return np.concatenate(out)[:numel]


def encode(x: torch.Tensor, name: str) -> bytes:
    return encode_taco(x) if name == "taco" else encode_scaled(x, name)


def decode(wire: bytes, numel: int, name: str) -> np.ndarray:
    return decode_taco(wire, numel) if name == "taco" else decode_scaled(wire, numel, name)
