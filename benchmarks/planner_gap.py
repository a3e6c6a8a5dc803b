"""How far the planner's choice is from the best: cost, lower bound and gap of models on meshes of one and two axes.

    OMP_NUM_THREADS=1 python benchmarks/planner_gap.py                             # all, the table of docs/planner.md
    OMP_NUM_THREADS=1 python benchmarks/planner_gap.py --model llama --layers 1 --mesh gpu

Training steps of models with realistic sizes on the meta device: nothing is allocated. Axes have free names, so that
every choice is open. *cost*: the plan with every reshard that it emits. *bound*: no plan of one choice a call costs
less (`partitioner/certify.py`). Seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import meshwright as mw
import torch
from meshwright.partitioner.capture import capture
from meshwright.partitioner.certify import certify
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.planner import Options, make_plan
from torch import nn

MESHES: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": 8},
    "node": {"node": 8, "gpu": 8, "links": {"node": "ib-ndr"}},
}
HIDDEN, SEQUENCE, VOCABULARY = 4096, 4096, 32768


class WithLoss(nn.Module):
    """A transformers model that returns only its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


def transformer(model: str, config: str, experts: str = "", **settings: Any) -> nn.Module:
    import transformers

    settings |= {"vocab_size": VOCABULARY, "use_cache": False}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        built = getattr(transformers, model)(getattr(transformers, config)(**settings)).train()
    torch.set_default_dtype(torch.float32)
    if experts:
        built.set_experts_implementation(experts)
    return WithLoss(built)


def ids(batch: int, length: int = SEQUENCE) -> dict[str, torch.Tensor]:
    x = torch.empty(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": x, "labels": x}


DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": SEQUENCE, "tie_word_embeddings": False,
}  # fmt: skip


def llama(layers: int, batch: int):
    return transformer("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=layers, **DECODER), ids(batch)


def mixtral(layers: int, batch: int):
    more: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": layers}
    return transformer("MixtralForCausalLM", "MixtralConfig", "batched_mm", **more, **DECODER), ids(batch)


def gpt2(layers: int, batch: int):
    sizes: dict[str, Any] = {"n_positions": SEQUENCE, "n_embd": HIDDEN, "n_layer": layers, "n_head": 32}
    drop: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformer("GPT2LMHeadModel", "GPT2Config", **sizes, **drop), ids(batch)


def t5(layers: int, batch: int):
    sizes: dict[str, Any] = {"d_model": HIDDEN, "d_kv": 128, "d_ff": 4 * HIDDEN, "num_heads": 32, "dropout_rate": 0.0}
    more: dict[str, Any] = {"num_layers": layers, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = transformer("T5ForConditionalGeneration", "T5Config", **sizes, **more)
    labels = torch.empty(batch, SEQUENCE // 4, dtype=torch.int64, device="meta")
    return model, ids(batch) | {"labels": labels}


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm, and a skip."""

    def __init__(self, width: int):
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.nb(self.b(torch.relu(self.na(self.a(x))))))


class ResNet(nn.Module):
    """A stem, one stage of residual blocks, a pool and a classifier."""

    def __init__(self, layers: int, width: int = 256):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(layers)))
        self.head = nn.Linear(width, 1024)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.blocks(torch.relu(self.norm(self.stem(x))))
        return nn.functional.cross_entropy(self.head(h.mean((2, 3))), labels)


def resnet(layers: int, batch: int):
    with torch.device("meta"):
        model = ResNet(layers)
    x = torch.empty(8 * batch, 3, 224, 224, device="meta")
    return model, {"x": x, "labels": torch.empty(8 * batch, dtype=torch.int64, device="meta")}


MODELS: dict[str, Callable[[int, int], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": llama, "gpt2": gpt2, "t5": t5, "mixtral": mixtral, "resnet": resnet,
}  # fmt: skip


def captured(name: str, layers: int, batch: int) -> Graph:
    model, given = MODELS[name](layers, batch)
    return capture(model, (), given, loss=lambda out, target: out)


def row(name: str, layers: int, batch: int, mesh_name: str, limit: float) -> str:
    graph = captured(name, layers, batch)
    mesh, options = mw.Mesh(**MESHES[mesh_name], device="h100"), Options()
    start = time.process_time()
    graph, plan = make_plan(graph, mesh, options)
    planned = time.process_time()
    found = certify(graph, mesh, options, plan, limit)
    done = time.process_time()
    cells = [
        name, str(layers), str(batch), str(mesh), f"{found.cost:.6f}", f"{found.bound:.6f}", f"{100 * found.gap:.3f}%",
        f"{planned - start:.1f}", f"{done - planned:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--mesh", nargs="*", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--layers", type=int, nargs="*", help="by default 1 and 2 on one axis, 1 on two")
    parser.add_argument("--batch", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of the solver a row")
    options = parser.parse_args()
    print("| model | layers | batch | mesh | cost s | bound s | gap | plan | certify |")
    print("|---" * 9 + "|")
    for mesh in options.mesh:
        for name in options.model:
            for layers in options.layers or ((1, 2) if mesh == "gpu" else (1,)):
                for batch in options.batch:
                    print(row(name, layers, batch, mesh, options.limit), flush=True)


if __name__ == "__main__":
    main()
