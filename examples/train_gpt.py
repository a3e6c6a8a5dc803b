"""Trains a small GPT on real text, the sources of Python's own standard library, on any mesh.

    python examples/train_gpt.py --mesh dp=2,tp=2                           # all ranks in this process
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,tp=2      # the same, one rank a process

With --check (the default) a plain one-device run of the same model on the same batches follows, and the two loss curves
must agree.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import meshwright as mw
import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

VOCAB = 256  # bytes
AGREE = 1e-3  # the largest relative difference of two losses that counts as the same curve

Losses = list[float]
Batch = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(d, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), Attention(d, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, d: int, layers: int, heads: int, seq: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, d), nn.Embedding(seq, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def axes_of(mesh: str) -> dict[str, Any]:
    """The axes in a text such as "dp=2,tp=2"."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}


def adamw(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)


def corpus(limit: int = 4_000_000) -> torch.Tensor:
    """Bytes of the standard library's sources, in a fixed order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: torch.Tensor, steps: int, batch: int, seq: int) -> Iterator[Batch]:
    """The global batches; every rank and both runs see the same."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - seq - 1, (batch,), generator=generator)
        rows = torch.stack([text[i : i + seq + 1] for i in starts.tolist()]).long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(
    name: str, step: Callable[[torch.Tensor, torch.Tensor], float], data: list[Batch], console: Console
) -> Losses:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    losses = []
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as progress:
        task = progress.add_task(name, total=len(data), loss=float("nan"))
        for x, y in data:
            losses.append(step(x, y))
            progress.update(task, advance=1, loss=losses[-1])
    return losses


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """One step of the same training program without Meshwright."""

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def plot(curves: dict[str, Losses], path: Path) -> None:
    """The curves, and below them how far apart they are: one line on the other shows little."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    rows = figure.subplots(len(curves), sharex=True, height_ratios=(3, 1)[: len(curves)], squeeze=False)[:, 0]
    for (name, losses), (width, style) in zip(curves.items(), ((4.0, "-"), (1.2, "--")), strict=False):
        rows[0].plot(range(1, len(losses) + 1), losses, style, linewidth=width, alpha=0.8, label=name)
    rows[0].set(title="A small GPT on the sources of Python's standard library", ylabel="loss (nats a byte)")
    rows[0].legend()
    if len(curves) == 2:
        apart = [abs(x - y) / abs(y) for x, y in zip(*curves.values(), strict=True)]
        rows[1].semilogy(range(1, len(apart) + 1), [max(a, 1e-9) for a in apart], ".", color="tab:red", markersize=4)
        rows[1].axhline(AGREE, color="grey", linestyle=":", label=f"allowed, {AGREE:g}")
        rows[1].set(ylabel="relative difference")
        rows[1].legend()
    for row in rows:
        row.grid(alpha=0.3)
    rows[-1].set(xlabel="step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def agree(ours: Losses, plain: Losses, console: Console) -> bool:
    worst = max(abs(x - y) / abs(y) for x, y in zip(ours, plain, strict=True))
    verdict = "agrees" if worst <= AGREE else "DOES NOT AGREE"
    console.print(f"{verdict} with one device: largest relative difference of the loss {worst:.2e}")
    return worst <= AGREE


def main(
    mesh: Annotated[str, typer.Option(help="axes and sizes, such as dp=2,tp=2")] = "dp=2,tp=2",
    steps: int = 60,
    batch: Annotated[int, typer.Option(help="sequences in the global batch")] = 16,
    seq: int = 64,
    d: Annotated[int, typer.Option("--width", help="width of the model")] = 128,
    layers: int = 4,
    heads: int = 4,
    lr: float = 1e-3,
    check: Annotated[bool, typer.Option(help="also train on one device, and compare")] = True,
    plot_to: Annotated[Path, typer.Option("--plot", help="picture of the loss curves")] = Path("out/loss.png"),
    print_plan: Annotated[bool, typer.Option(help="print what was chosen")] = True,
) -> None:
    """Train on a mesh; with --check, prove that the loss curve is the one-device curve."""
    leader = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not leader)
    data = list(batches(corpus(), steps, batch, seq))

    torch.manual_seed(0)
    model = GPT(d, layers, heads, seq)
    plain = GPT(d, layers, heads, seq)
    plain.load_state_dict(model.state_dict())
    console.print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on mesh {mesh}")

    x, y = data[0]
    compiled = mw.compile(
        model, mw.Mesh(**axes_of(mesh)), args=(x,), kwargs={"target": y}, loss=loss_fn, optimizer=adamw(lr)
    )
    if print_plan:
        console.print(str(compiled.plan), markup=False, highlight=False)
    ours = train(f"mesh {mesh}", lambda x, y: float(compiled.step(x, target=y)), data, console)
    curves = {f"mesh {mesh}": ours}
    console.print(f"loss {ours[0]:.4f} -> {ours[-1]:.4f}")
    if not leader:
        return
    if check:
        curves["one device"] = train("one device", plain_step(plain, adamw(lr)(plain)), data, console)
    plot(curves, plot_to)
    console.print(f"loss curves in {plot_to}")
    if check and not agree(ours, curves["one device"], console):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
