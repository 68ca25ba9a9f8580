"""Three wire forms of a mask of k among n entries; numel and k decide which is shortest, so every rank agrees.

bitmask    ceil(n/8) bytes            one bit an entry, lowest bit first
block256   k + 2*ceil(n/256) bytes    16-bit counts, one a block of 256, then 8-bit offsets within the block
int32      4*k bytes                  the indices
"""

import torch

BLOCK = 256
_SIZE = {
    "bitmask": lambda numel, k: -(-numel // 8),
    "block256": lambda numel, k: k + 2 * -(-numel // BLOCK),
    "int32": lambda numel, k: 4 * k,
}


def encoded_bytes(numel: int, k: int, encoding: str) -> int:
    """Wire bytes of k of numel entries in one encoding."""
    return _SIZE[encoding](numel, k)


def choose_encoding(numel: int, k: int) -> str:
    """The encoding with the fewest bytes; equal sizes go to the first of bitmask, block256, int32."""
    fits = [name for name in _SIZE if name != "int32" or numel <= 2**31]
    return min(fits, key=lambda name: _SIZE[name](numel, k))


def encode(chosen: torch.Tensor, k: int, encoding: str) -> torch.Tensor:
    """bool [n] with k entries set -> uint8 [encoded_bytes(n, k, encoding)], on the same device."""
    numel = chosen.numel()
    if encoding == "bitmask":
        bits = torch.nn.functional.pad(chosen.view(torch.uint8), (0, -numel % 8)).view(-1, 8)
        weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=chosen.device)
        return (bits * weights).sum(1, dtype=torch.uint8)
    indices = _true_indices(chosen, k)
    if encoding == "int32":
        return indices.to(torch.int32).view(torch.uint8)
    blocks = torch.nn.functional.pad(chosen.view(torch.uint8), (0, -numel % BLOCK)).view(-1, BLOCK)
    counts = blocks.sum(1, dtype=torch.int16)
    return torch.cat([counts.view(torch.uint8), (indices % BLOCK).to(torch.uint8)])


def decode(payload: torch.Tensor, numel: int, k: int, encoding: str) -> torch.Tensor:
    """The inverse of `encode`: uint8 payload -> int64 [k], the chosen indices in ascending order."""
    if encoding == "bitmask":
        shifts = torch.arange(8, dtype=torch.uint8, device=payload.device)
        bits = ((payload[:, None] >> shifts) & 1).view(-1)[:numel]
        return _true_indices(bits.view(torch.bool), k)
    if encoding == "int32":
        # a slice of a longer message need not start at a multiple of four bytes; a copy does
        return payload.clone().view(torch.int32).to(torch.int64)
    n_blocks = -(-numel // BLOCK)
    counts = payload[: 2 * n_blocks].clone().view(torch.int16).to(torch.int64)
    starts = torch.arange(0, n_blocks * BLOCK, BLOCK, device=payload.device)
    return starts.repeat_interleave(counts, output_size=k) + payload[2 * n_blocks :]


def _true_indices(chosen: torch.Tensor, k: int) -> torch.Tensor:
    # knowing k beforehand, the device need not report a size to the host
    return torch.nonzero_static(chosen, size=k).view(-1)
