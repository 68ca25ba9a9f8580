"""Random numbers under tensor parallelism.

Outside a block's split part all ranks must draw the same numbers (residual dropout acts on replicated activations);
inside it each rank must draw its own (attention dropout acts on this rank's heads). With sequence parallelism residual
dropout acts on pieces, and a whole layer draws from the rank's own stream. The inner stream is seeded from one draw of
the outer one, so it is a function of the outer state: activation recomputation, which restores that state, draws the
same masks again.
"""

import torch
from torch import nn

_MIX = 0x9E3779B97F4A7C15  # odd, so that different ranks get different seeds
_SEED_BITS = 63


class SplitRng:
    """Switches the default generators to a rank's own stream between `enter` and `leave`.

    `probability` is the path of the dropout probability from the block or layer (`attn_dropout.p`), read at each call.
    Nothing happens in evaluation or at probability 0; otherwise saving and restoring the states costs microseconds.
    """

    def __init__(self, tp_rank: int, probability: str) -> None:
        self._tp_rank, self._probability = tp_rank, probability.split(".")
        self._saved: list[tuple[torch.Generator, torch.Tensor]] = []

    def enter(self, block: nn.Module, device: torch.device) -> None:
        self._saved = []  # an exception, also the one that ends a recomputation early, may have skipped `leave`
        probability = block
        for name in self._probability:  # torch.compile cannot trace operator.attrgetter
            probability = getattr(probability, name)
        if not block.training or probability == 0:
            return
        draw = int(torch.randint(2**62, ()))
        seed = (draw + (self._tp_rank + 1) * _MIX) % 2**_SEED_BITS
        generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
        self._saved = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)

    def leave(self) -> None:
        for generator, state in self._saved:
            generator.set_state(state)
        self._saved = []
