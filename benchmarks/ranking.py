"""Does the model rank plans as the clock does? Twelve plans a model, from good to bad, predicted and measured.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/ranking.py                    # GPT, Llama, ResNet, Mixtral
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/ranking.py --model gpt --turns 7

Calibrates first (`mw.calibrate`), so predictions are of this machine. Plans take turns, a whole optimizer step each; of
every plan the median over the turns of the slowest rank's wall seconds, and of the CPU seconds of all ranks. Where
others use the machine, CPU seconds say more; they leave out what a rank waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import meshwright as mw
import numpy as np
import torch
import torch.distributed as dist
from planner_gap import ResNet, WithLoss
from race_model import Config, build, lm_loss
from torch import nn

BATCH, LENGTH, VOCABULARY = 8, 128, 4096


@dataclass(frozen=True)
class Subject:
    """A model with its batch; what pins call its products in forward, all its products, its stream of activations."""

    model: nn.Module
    batch: dict[str, Any]
    loss: Callable[..., torch.Tensor] | None
    heavy: str
    every: str
    stream: str
    image: bool = False


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def gpt() -> Subject:
    model = build(Config(2, 256, 8, BATCH, LENGTH, VOCABULARY))
    return Subject(model, {"ids": tokens(), "target": tokens()}, lm_loss, "op:mm", "mm*", "blocks.[0-9]")


def language(family: str, experts: str = "", **more: Any) -> Subject:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "use_cache": False,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    if experts:
        model.set_experts_implementation(experts)
    ids = tokens()
    return Subject(WithLoss(model), {"input_ids": ids, "labels": ids}, None, "op:mm", "mm*", "model.model.layers.[0-9]")


def resnet() -> Subject:
    batch = {"x": torch.randn(BATCH, 3, 64, 64), "labels": torch.randint(0, 1024, (BATCH,))}
    return Subject(ResNet(2, width=64), batch, None, "op:convolution", "convolution*", "blocks.[0-9]", image=True)


MODELS: dict[str, Callable[[], Subject]] = {
    "gpt": gpt,
    "llama": lambda: language("Llama"),
    "resnet": resnet,
    "mixtral": lambda: language("Mixtral", "batched_mm", num_local_experts=4, num_experts_per_tok=2),
}


def plans(subject: Subject, ranks: int) -> Iterator[tuple[str, dict[str, int], dict[str, Any]]]:
    """Name, mesh and options of twelve plans: roles first, then pins on one free axis."""
    for zero in (0, 3):
        yield f"dp, zero={zero}", {"dp": ranks}, {"zero": zero}
    yield "tp" if not subject.image else "cp", {"tp" if not subject.image else "cp": ranks}, {}
    yield "free", {"x": ranks}, {}
    for name, *texts in IMAGE if subject.image else TEXT:
        named = zip((subject.heavy, subject.every, subject.stream), texts, strict=True)
        yield name, {"x": ranks}, {"pin": {what: text for what, text in named if text}}


TEXT = (
    ("products by output", "[t, h:x]", "", ""),
    ("products by input", "[t, h] +x", "", ""),
    ("products whole", "[t, h]", "", ""),
    ("all products by output", "", "[t, h:x]", ""),
    ("all products by input, stream by hidden", "", "[t, h] +x", "[b, s, h:x]"),
    ("all products whole", "", "[t, h]", ""),
    ("all products whole, stream by hidden", "", "[t, h]", "[b, s, h:x]"),
    ("products by tokens, stream by hidden", "[t:x, h]", "", "[b, s, h:x]"),
)
IMAGE = (
    ("convolutions by output", "[b, c:x, h, w]", "", ""),
    ("convolutions by input", "[b, c, h, w] +x", "", ""),
    ("convolutions whole", "[b, c, h, w]", "", ""),
    ("all convolutions by channels", "", "[b, c:x, h, w]", ""),
    ("all convolutions whole", "", "[b, c, h, w]", ""),
    ("convolutions by rows", "[b, c, h:x, w]", "", ""),
    ("convolutions by batch, stream by channels", "[b:x, c, h, w]", "", "[b, c:x, h, w]"),
    ("all convolutions whole, stream by channels", "", "[b, c, h, w]", "[b, c:x, h, w]"),
)
"""Names, and what is pinned of products in forward, of all products, of the stream; "" where nothing is."""


@dataclass
class Entry:
    """A plan that runs, and what its steps took: (wall of the slowest rank, CPU of all)."""

    name: str
    compiled: mw.Compiled
    took: list[tuple[float, float]]

    def predicted(self) -> float:
        return sum(self.compiled.plan.seconds)

    def median(self, which: int) -> float:
        return statistics.median(t[which] for t in self.took)


def adamw(m: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True)


def compiled(subject: Subject, calibration: mw.Calibration) -> list[Entry]:
    found = []
    for name, axes, options in plans(subject, dist.get_world_size()):
        mesh = mw.Mesh(**axes, device="cpu", calibration=calibration)  # type: ignore[arg-type]
        try:
            made = mw.compile(subject.model, mesh, kwargs=subject.batch, loss=subject.loss, optimizer=adamw, **options)
        except mw.PlanError as fault:
            say(f"{name}: {fault}")
            continue
        found.append(Entry(name, made, []))
    return found


def measure(entry: Entry, batch: dict[str, Any]) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    entry.compiled.step(**batch)
    took = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
    most, total = took.clone(), took.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(most[0]), float(total[1])


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of ranks; equal values share theirs."""

    def ranks(x: list[float]) -> np.ndarray:
        values = np.array(x)
        return np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def show(name: str, entries: list[Entry]) -> None:
    entries = sorted(entries, key=lambda e: e.predicted())
    say(f"\n| {name}, {dist.get_world_size()} processes | predicted ms | wall ms | CPU ms of all |\n|---|---|---|---|")
    for e in entries:
        say(f"| {e.name} | {1e3 * e.predicted():.1f} | {1e3 * e.median(0):.1f} | {1e3 * e.median(1):.1f} |")
    told = [e.predicted() for e in entries]
    wall, cpu = (spearman(told, [e.median(i) for e in entries]) for i in (0, 1))
    compute = spearman([e.compiled.plan.seconds[0] for e in entries], [e.median(1) for e in entries])
    say(f"\nSpearman {wall:.2f} with wall, {cpu:.2f} with CPU; of compute alone {compute:.2f} with CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    calibration = mw.calibrate(mw.Mesh(dp=dist.get_world_size(), device="cpu"))
    say(str(calibration))
    for name in options.model:
        torch.manual_seed(0)
        subject = MODELS[name]()
        entries = compiled(subject, calibration)
        for turn in range(options.turns + 1):
            for entry in entries:
                took = measure(entry, subject.batch)
                if turn:
                    entry.took.append(took)
        show(name, entries)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
