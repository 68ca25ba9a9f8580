"""The share of each sparse tensor that is sent, as a function of the step (SCAPE's geometric warm-up)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DensitySchedule:
    """d(t) = target^(clamp(t-1-hold, 0, warmup)/warmup) for steps t = 1, 2, ...

    1.0 for `hold_steps` more steps after the first, then geometric to `target` over `warmup_steps`.
    warmup_steps = 0: 1.0 while t <= 1 + hold_steps, then the target.
    """

    target: float
    warmup_steps: int = 0
    hold_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise ValueError(f"density must lie in (0, 1], got {self.target} (0.01 keeps 1 %)")
        for name in ("warmup_steps", "hold_steps"):
            value = getattr(self, name)
            if value < 0 or value != int(value):
                raise ValueError(f"{name} must be a whole number of steps >= 0, got {value}")

    def __call__(self, step: int) -> float:
        """The density of step `step`, counted from 1."""
        past_hold = step - 1 - self.hold_steps
        if past_hold <= 0:
            return 1.0
        if past_hold >= self.warmup_steps:
            return self.target
        return self.target ** (past_hold / self.warmup_steps)

    def kept(self, step: int, numel: int) -> int:
        """How many of a tensor's `numel` entries step `step` sends: max(1, ceil(d(step)*numel))."""
        return min(numel, max(1, math.ceil(self(step) * numel)))
