"""The one place that creates process groups: world = dp x tp, with tp the fastest axis (neighbours share a node)."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ParallelDims:
    """Sizes, this process's coordinates and its two groups (None in a world of one process).

    Ranks [d*tp, (d+1)*tp) form a tensor-parallel group and hold one copy of the model; ranks with the same place in
    their tp group form a data-parallel group and hold the same slices. A group may have one member.
    """

    tp_size: int = 1
    dp_size: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None

    def wide_groups(self) -> list[dist.ProcessGroup]:
        """The groups that have more than one member."""
        sized = ((self.tp_size, self.tp_group), (self.dp_size, self.dp_group))
        return [group for size, group in sized if size > 1]

    @classmethod
    def build(cls, tp_size: int, settings: dict | None = None) -> "ParallelDims":
        """Create the groups; collective over the world.

        ValueError where `tp_size` does not divide the world, and where ranks disagree on it or on `settings`.
        """
        started = dist.is_available() and dist.is_initialized()
        world, rank = (dist.get_world_size(), dist.get_rank()) if started else (1, 0)
        if world > 1:
            agree({"tp_size": tp_size, **(settings or {})})
        check_tp_size(tp_size, world)
        if world == 1:
            return cls()
        dp_size = world // tp_size
        # every process creates every group, in one order: new_group is collective over the world
        tp_groups = [dist.new_group(list(range(d * tp_size, (d + 1) * tp_size))) for d in range(dp_size)]
        dp_groups = [dist.new_group(list(range(t, world, tp_size))) for t in range(tp_size)]
        dp_rank, tp_rank = divmod(rank, tp_size)
        return cls(
            tp_size, dp_size, tp_rank, dp_rank,
            tp_groups[dp_rank], dp_groups[tp_rank],
        )  # fmt: skip


def agree(settings: dict, group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank of `group`, naming the field and the values, where `settings` differ; collective.

    Ranks that were started with different arguments would abort inside a collective, or wait for ever.
    """
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, settings, group=group)
    for name in settings:
        values = {rank: other.get(name) for rank, other in enumerate(everyone)}
        if any(value != values[0] for value in values.values()):
            listed = ", ".join(f"rank {rank} has {value!r}" for rank, value in values.items())
            raise ValueError(f"the processes were started with different settings: {name}: {listed}")


def check_tp_size(tp_size: int, world: int) -> None:
    """ValueError where `tp_size` processes cannot be had or do not divide the world; the text names the fix."""
    if tp_size < 1:
        raise ValueError(f"tp_size must be at least 1, got {tp_size}")
    if world % tp_size:
        fix = (
            f"launch with `accelerate launch --multi_gpu --num_processes {tp_size} ...`"
            if world == 1
            else f"choose a tp_size that divides {world}, or launch a multiple of {tp_size} processes"
        )
        raise ValueError(f"tp_size {tp_size} does not divide the {world} process(es) of this launch: {fix}")
