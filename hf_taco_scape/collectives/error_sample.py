"""The error that a codec makes on real messages, sampled now and then."""

import torch


class ErrorSampler:
    """Encodes one message per direction a second time and keeps its error; which layer's rotates."""

    _STRIDE = 7  # coprime to usual layer counts, so that samples visit all layers

    def __init__(self) -> None:
        self.errors: dict[str, torch.Tensor] = {}
        self._arms = 0
        self._calls = {"forward": 0, "backward": 0}
        self._due = {"forward": None, "backward": None}

    def arm(self) -> None:
        """Take a sample of one of the next messages of each direction."""
        for direction, calls in self._calls.items():
            self._due[direction] = (self._arms * self._STRIDE) % calls if calls else 0
        self._calls = dict.fromkeys(self._calls, 0)
        self._arms += 1

    @torch.no_grad()
    def see(self, x: torch.Tensor, codec, direction: str) -> None:
        """Count a message; measure it if it is the one that is due."""
        if self._due[direction] == self._calls[direction] and x.numel():
            flat = x.detach().reshape(-1)
            decoded = codec.decode(codec.encode(flat), flat.numel(), torch.float32)
            exact = flat.float()
            # an all-zero message (a padded batch, a fresh head) has no relative error
            self.errors[direction] = (decoded - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny)
            self._due[direction] = None
        self._calls[direction] += 1
