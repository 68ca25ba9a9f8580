"""Linear layers split over tensor-parallel ranks, as drop-in modules of Hugging Face's own classes.

For y = x W^T + b with W of shape (out, in), over ranks r:

    colwise   W = [W_0; W_1; ...]  rows   y_r = x W_r^T + b_r   the output stays split     dx = sum_r dy_r W_r
    rowwise   W = [W_0, W_1, ...]  cols   y = sum_r x_r W_r^T + b  the input was split     dx_r = dy W_r

A colwise layer is an ordinary layer with fewer outputs: the sum in its backward belongs to the block's entry (see
sequence.Boundary), once for all layers that read the same input. GPT-2's Conv1D stores W as (in, out).
"""

from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from .sequence import Boundary

OUT_DIM = {nn.Linear: 0, Conv1D: 1}


def linear_kind(module: nn.Module) -> type | None:
    """nn.Linear or Conv1D where `module` is exactly one of them (not a quantised or adapted subclass), else None."""
    return type(module) if type(module) in OUT_DIM else None


class SplitLayer:
    """What the split layers share: `tp_shards` says how each parameter is split, and whole tensors load by slicing.

    The Parameter objects of the original layer are kept, with this rank's slice as their data, so optimizers that
    were built before the split still hold the right ones.
    """

    tp_shards: dict

    def _adopt(self, original: nn.Module, shards: dict, tp_rank: int) -> None:
        nn.Module.__init__(self)
        self.tp_shards, self.tp_rank = shards, tp_rank
        self.train(original.training)
        for name, parameter in original.named_parameters(recurse=False):
            if name in shards:
                parameter.data = shards[name].take(parameter.data, tp_rank)
                parameter.grad = None
            self.register_parameter(name, parameter)
        if "bias" not in self._parameters:
            self.register_parameter("bias", None)
        out_dim = OUT_DIM[type(original)]
        self._set_sizes(self.weight.shape[out_dim], self.weight.shape[1 - out_dim])
        self.register_load_state_dict_pre_hook(_slice_whole_tensors)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[1 - self._out_dim]}, out={self.weight.shape[self._out_dim]}, {self.style}"


class _SplitLinear(SplitLayer, nn.Linear):
    _out_dim = 0

    def _set_sizes(self, out_features: int, in_features: int) -> None:
        self.out_features, self.in_features = out_features, in_features

    def _product(self, x):
        return F.linear(x, self.weight)


class _SplitConv1D(SplitLayer, Conv1D):
    _out_dim = 1

    def _set_sizes(self, out_features: int, in_features: int) -> None:
        self.nf, self.nx = out_features, in_features

    def _product(self, x):
        return x @ self.weight


class _Colwise:
    style = "colwise"

    def __init__(self, original: nn.Module, shards: dict, tp_rank: int) -> None:
        self._adopt(original, shards, tp_rank)


class _Rowwise:
    style = "rowwise"

    def __init__(self, original: nn.Module, shards: dict, tp_rank: int, boundary: Boundary, rng=None) -> None:
        self._adopt(original, shards, tp_rank)
        self.boundary, self.rng = boundary, rng

    def forward(self, x):
        if self.rng is not None:
            self.rng.leave()
        y = self.boundary.leave(self._product(x))
        # autocast computes y in 16 bits; the bias must not widen it again
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ColwiseLinear(_Colwise, _SplitLinear):
    """nn.Linear that holds some output features; input replicated, output (..., out_r) split."""


class ColwiseConv1D(_Colwise, _SplitConv1D):
    """Conv1D that holds some output features."""


class RowwiseLinear(_Rowwise, _SplitLinear):
    """nn.Linear that holds some input features; input (..., in_r) split, output summed over ranks, bias added once."""


class RowwiseConv1D(_Rowwise, _SplitConv1D):
    """Conv1D that holds some input features."""


def _slice_whole_tensors(module, state_dict, prefix, *_) -> None:
    """A state dict may hold whole tensors (a plain checkpoint) or this rank's slices; whole ones are sliced."""
    for name, shard in module.tp_shards.items():
        tensor, parameter = state_dict.get(prefix + name), getattr(module, name)
        if tensor is not None and tensor.shape != parameter.shape and tensor.shape[shard.dim] == shard.full_size:
            state_dict[prefix + name] = shard.take(tensor, module.tp_rank)


COLWISE_LAYERS = {nn.Linear: ColwiseLinear, Conv1D: ColwiseConv1D}
ROWWISE_LAYERS = {nn.Linear: RowwiseLinear, Conv1D: RowwiseConv1D}
