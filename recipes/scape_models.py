"""GPT-2 and Qwen3 with the virtual ranks as a batch dimension: one pass gives every rank's own gradient.

The parameters of a model lie in one flat vector, tensors of one kind (all layers' c_attn.weight, ...) side by side. A
pass expands them over the ranks without a copy, so that the gradient of the summed losses has one row a rank. Loss and
gradients equal those of transformers' classes of the same weights (tests/test_simulate_scape.py).
"""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

# width, layers; 64 a head
SIZES = {"tiny": (64, 2), "small": (128, 2), "7M": (384, 4), "11M": (384, 6), "25M": (512, 8)}
ROPE_BASE, RMS_EPS, LN_EPS = 10_000.0, 1e-6, 1e-5


def reference_model(family: str, size: str, vocabulary: int, context: int, seed: int) -> torch.nn.Module:
    """The transformers model of a family and size; Qwen3 has three query heads a KV head where they divide."""
    width, layers = SIZES[size]
    heads = max(1, width // 64)
    torch.manual_seed(seed)
    if family == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        settings = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": context}
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **settings, **dropout))
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 3 if heads % 3 == 0 else 1,
            head_dim=64,
            max_position_embeddings=context,
            rms_norm_eps=RMS_EPS,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
            tie_word_embeddings=True,
        )
    )


@dataclass(frozen=True)
class Kind:
    """All layers' tensors of one name: `layers` tensors of `shape`, from entry `first` of the flat vector on."""

    name: str
    first: int
    layers: int
    shape: tuple[int, ...]
    row_dim: int  # 1 for GPT-2's Conv1D, 0 elsewhere

    @property
    def numel(self) -> int:
        """Entries of one tensor."""
        return torch.Size(self.shape).numel()

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.layers * self.numel)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) >= 2


def kind_of(name: str) -> str:
    """A parameter's name without its layer's number."""
    return re.sub(r"\.\d+\.", ".", name)


def flatten(model: torch.nn.Module) -> tuple[list[Kind], torch.Tensor]:
    """(kinds, parameters in one fp32 vector): matrices first, then norms and biases."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        found[kind_of(name)].append(p.detach())
    kinds, parts, first = [], [], 0
    for name, tensors in sorted(found.items(), key=lambda item: item[1][0].dim() < 2):
        row_dim = int(isinstance(model, GPT2LMHeadModel) and bool(re.search(r"c_(attn|proj|fc)\.weight", name)))
        kinds.append(Kind(name, first, len(tensors), tuple(tensors[0].shape), row_dim))
        parts.extend(t.reshape(-1) for t in tensors)
        first = kinds[-1].span.stop
    return kinds, torch.cat(parts).float()


def _norm_dims(x: torch.Tensor) -> tuple[int]:
    return (x.shape[-1],)


def _layer_norm(x, weight, bias):
    return functional.layer_norm(x, _norm_dims(x), eps=LN_EPS) * weight[:, None].float() + bias[:, None].float()


def _rms_norm(x, weight):
    return functional.rms_norm(x.float(), _norm_dims(x), eps=RMS_EPS) * weight.float()


def _attend(q, k, v, ranks: int):
    """q, k, v: [sequences, heads, context, 64]; returns [ranks, tokens of a rank, width]."""
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(ranks, -1, out.shape[1] * out.shape[3])


def _layers(w: dict, prefix: str) -> list[dict]:
    """The weights of each layer, by their names after `prefix`."""
    mine = {name.removeprefix(prefix): layers for name, layers in w.items() if name.startswith(prefix)}
    return [{name: layers[i] for name, layers in mine.items()} for i in range(len(next(iter(mine.values()))))]


def gpt2_block(x: torch.Tensor, w: dict, batch: int) -> torch.Tensor:
    """One layer. x: [ranks, batch*context, width] fp32; w: its weights, [ranks, *shape]."""
    ranks, tokens, width = x.shape
    dtype = w["attn.c_attn.weight"].dtype

    def dense(x, name):
        return torch.baddbmm(w[f"{name}.bias"][:, None], x, w[f"{name}.weight"])

    qkv = dense(_layer_norm(x, w["ln_1.weight"], w["ln_1.bias"]).to(dtype), "attn.c_attn")
    q, k, v = qkv.view(ranks * batch, tokens // batch, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
    x = x + dense(_attend(q, k, v, ranks), "attn.c_proj")
    inner = dense(_layer_norm(x, w["ln_2.weight"], w["ln_2.bias"]).to(dtype), "mlp.c_fc")
    return x + dense(functional.gelu(inner, approximate="tanh"), "mlp.c_proj")


def gpt2_hidden(w: dict, x: torch.Tensor, batch: int, block=gpt2_block) -> torch.Tensor:
    """What the logits are made of. x: [ranks, batch*context, width] fp32 token embeddings; w: a list a kind."""
    context = x.shape[1] // batch
    places = w["transformer.wpe.weight"][0].float()[:, None, :context]
    x = x + places.expand(-1, batch, -1, -1).reshape(x.shape)
    for layer in _layers(w, "transformer.h."):
        x = block(x, layer, batch)
    return _layer_norm(x, w["transformer.ln_f.weight"][0], w["transformer.ln_f.bias"][0])


def _rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def qwen3_block(x: torch.Tensor, w: dict, batch: int) -> torch.Tensor:
    """As gpt2_block."""
    ranks, tokens, _ = x.shape
    dtype, context = w["self_attn.q_proj.weight"].dtype, tokens // batch
    frequency = ROPE_BASE ** (-torch.arange(0, 64, 2, device=x.device).float() / 64)
    angle = torch.outer(torch.arange(context, device=x.device).float(), frequency).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()

    def dense(x, name):
        return torch.bmm(x, w[f"{name}.weight"].transpose(1, 2))

    def norm(x, name):
        return _rms_norm(x, w[f"{name}.weight"][:, None]).to(dtype)

    def heads(x, name):
        x = dense(x, f"self_attn.{name}_proj").view(ranks, batch, context, -1, 64)
        if name != "v":
            x = _rms_norm(x, w[f"self_attn.{name}_norm.weight"][:, None, None, None])
        return x.flatten(0, 1).transpose(1, 2)

    y = norm(x, "input_layernorm")
    q, k = (_rotate(heads(y, name), cos, sin).to(dtype) for name in "qk")
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, heads(y, "v")))
    x = x + dense(_attend(q, k, v, ranks), "self_attn.o_proj")
    y = norm(x, "post_attention_layernorm")
    return x + dense(functional.silu(dense(y, "mlp.gate_proj")) * dense(y, "mlp.up_proj"), "mlp.down_proj")


def qwen3_hidden(w: dict, x: torch.Tensor, batch: int, block=qwen3_block) -> torch.Tensor:
    """As gpt2_hidden."""
    for layer in _layers(w, "model.layers."):
        x = block(x, layer, batch)
    return _rms_norm(x, w["model.norm.weight"][0][:, None])


FAMILIES = {
    "gpt2": (gpt2_hidden, gpt2_block, "transformer.wte.weight"),
    "qwen": (qwen3_hidden, qwen3_block, "model.embed_tokens.weight"),
}


def rank_losses(family: str, block, names: list[str], leaves, windows: torch.Tensor) -> torch.Tensor:
    """Each rank's mean next-token loss, [ranks]. leaves: [ranks, layers, *shape] a kind; windows: int64 [ranks, batch,
    context + 1] byte values."""
    hidden, _, embedding = FAMILIES[family]
    w = {name: leaf.unbind(1) for name, leaf in zip(names, leaves, strict=True)}
    table = w[embedding][0]
    ranks, batch = windows.shape[:2]
    # a product with one-hot rows is exact, and its gradient is a product again: no sort, no atomics
    vocabulary = torch.arange(table.shape[1], device=table.device)
    tokens = (windows[:, :, :-1].flatten(1)[..., None] == vocabulary).to(table.dtype)
    x = hidden(w, torch.bmm(tokens, table).float(), batch, block).to(table.dtype)
    logits = torch.bmm(x, table.transpose(1, 2)).float()
    target = windows[:, :, 1:].flatten()
    return functional.cross_entropy(logits.flatten(0, 1), target, reduction="none").view(ranks, -1).mean(1)


class RankGradients:
    """[ranks, N] gradients of a flat parameter vector; on CUDA one captured graph, compiled where that works.

    flat: [N] fp32, read at every call; the model's products run in `dtype`. `losses`: [ranks], of the last call.
    """

    def __init__(self, family, kinds, flat, ranks, batch, context, dtype=torch.float32, compiled=False, graph=False):
        self.kinds, self.flat, self.dtype, self.family = kinds, flat, dtype, family
        self.grads, self.losses = flat.new_zeros(ranks, flat.numel()), flat.new_zeros(ranks)
        self.windows = torch.zeros(ranks, batch, context + 1, dtype=torch.int64, device=flat.device)
        block = FAMILIES[family][1]
        # one layer is compiled, once: all are alike
        self.block = torch.compile(block, dynamic=False) if compiled else block
        self.graph = None
        if graph:
            self._capture()

    def _pass(self) -> None:
        ranks, cast = len(self.losses), self.flat.to(self.dtype)
        leaves = [
            cast[kind.span].view(kind.layers, *kind.shape).expand(ranks, -1, *kind.shape).requires_grad_()
            for kind in self.kinds
        ]
        names = [kind.name for kind in self.kinds]
        losses = rank_losses(self.family, self.block, names, leaves, self.windows)
        for kind, grad in zip(self.kinds, torch.autograd.grad(losses.sum(), leaves), strict=True):
            self.grads[:, kind.span].copy_(grad.reshape(ranks, -1))
        self.losses.copy_(losses.detach())

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._pass()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._pass()
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"no CUDA graph, every kernel is launched: {str(error)[:300]}", flush=True)
            return
        self.graph = graph

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        self.windows.copy_(windows)
        if self.graph is None:
            self._pass()
        else:
            self.graph.replay()
        return self.grads
