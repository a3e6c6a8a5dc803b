"""Models for pipelines, in float64: what stages share, skip and use twice; and one step of them on a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import meshwright as mw
import torch
import torch.nn.functional as F
from random_plans import GPT, Block, differs
from torch import nn
from zoo_plain import UNet

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
MESHES: dict[str, dict[str, int]] = {
    "pp2": {"pp": 2},
    "pp3": {"pp": 3},
    "pp4": {"pp": 4},
    "dp2xpp2": {"dp": 2, "pp": 2},
    "tp2xpp2": {"tp": 2, "pp": 2},
    "dp2xtp2xpp2": {"dp": 2, "tp": 2, "pp": 2},
}
Inputs = dict[str, Any]


class Untied(GPT):
    """A GPT with a head of its own, and rows that count for nothing: micro-batches have unequal numbers of tokens."""

    def __init__(self):
        super().__init__(layers=3)
        self.head = nn.Linear(12, 13, bias=False)

    def forward(self, ids: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten(), ignore_index=0)


class EncoderDecoder(nn.Module):
    """Every decoder layer reads what the encoder gives; one embedding serves both."""

    def __init__(self, d: int = 12, vocab: int = 13, heads: int = 2, layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList(Block(d, heads, heads, 0.0) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(d, heads, heads, 0.0) for _ in range(layers))
        self.cross = nn.ModuleList(nn.MultiheadAttention(d, heads, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, x = self.tokens(ids), self.tokens(out)
        for block in self.encoder:
            h = block(h, None)
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = block(x, None)
            x = x + cross(x, h, h, need_weights=False)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Twice(nn.Module):
    """One layer used at both ends, another twice in a row; a value that goes on to every layer."""

    def __init__(self, d: int = 10):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.frozen = nn.Parameter(torch.randn(d), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(d))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.a(x))
        h = torch.tanh(self.b(first)) * self.frozen
        h = torch.tanh(self.b(h)) + first
        h = torch.tanh(self.c(h)) * first.sigmoid()
        return F.mse_loss(self.a(h), y)


def _tokens(rows: int, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 13, (rows, length))


MODELS: dict[str, Callable[[int], tuple[nn.Module, Inputs]]] = {
    "gpt": lambda rows: (Untied(), {"ids": _tokens(rows), "y": _tokens(rows)}),
    "tied": lambda rows: (GPT(layers=2), {"ids": _tokens(rows), "y": _tokens(rows)}),
    "encoder-decoder": lambda rows: (
        EncoderDecoder(),
        {"ids": _tokens(rows, 5), "out": _tokens(rows), "y": _tokens(rows)},
    ),
    "unet": lambda rows: (UNet(), {"x": torch.randn(rows, 3, 8, 8), "y": torch.randint(0, 2, (rows, 8, 8))}),
    "twice": lambda rows: (Twice(), {"x": torch.randn(rows, 10), "y": torch.randn(rows, 10)}),
}


def rows_for(mesh: dict[str, int], micro_batches: int) -> int:
    """A batch whose last micro-batch is smaller than the others, each with a row for every data rank."""
    each = 2 * mesh.get("dp", 1)
    return each * micro_batches - each // 2


def complaints(name: str, mesh: dict[str, int], micro_batches: int, **options: Any) -> list[str]:
    """What is wrong with a step in a pipeline: loss, gradients, buffers and parameters against one device."""
    torch.manual_seed(0)
    return wrong_in(*MODELS[name](rows_for(mesh, micro_batches)), mesh, micro_batches, **options)


def wrong_in(model: nn.Module, batch: Inputs, mesh: dict[str, int], micro_batches: int, **options: Any) -> list[str]:
    """`complaints`, of a model and a batch."""
    model = model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    twin = copy.deepcopy(model)
    loss = twin(**batch)
    loss.backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in twin.named_parameters()}
    adamw(twin).step()
    compiled = mw.compile(model, mw.Mesh(**mesh, device="cpu"), optimizer=adamw, micro_batches=micro_batches, **options)  # type: ignore[arg-type]
    got = compiled.step(**batch)
    have = {what: compiled.gather(what) for what in ("grads", "params", "buffers")}
    pairs = {"loss": (loss.detach(), got)}
    pairs |= {f"gradient of {n}": (g, have["grads"][n]) for n, g in grads.items()}
    pairs |= {n: (p.detach(), have["params"][n]) for n, p in twin.named_parameters()}
    pairs |= {n: (b, have["buffers"][n]) for n, b in twin.named_buffers()}
    found = []
    for what, (want, mine) in pairs.items():
        if want is None or mine is None:
            found += [] if want is mine else [f"{what}: want {want}, got {mine}"]
        elif why := differs(want, mine, 1e-9):
            found.append(f"{what}: {why}")
    return found


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
