"""CPU seconds of compiling big models for many ranks: capture, plan (rules, costs, solve), report, lowering.

    OMP_NUM_THREADS=1 python benchmarks/plan_time.py                       # Llama-3-8B shapes, 4 to 80 layers, 3 meshes
    OMP_NUM_THREADS=1 python benchmarks/plan_time.py --big                 # Llama-3-405B shapes, 126 layers, 8 x 8 x 8
    OMP_NUM_THREADS=1 python benchmarks/plan_time.py --others              # encoder-decoder, experts, convolutions, ...
    OMP_NUM_THREADS=1 python benchmarks/plan_time.py --pipeline            # Llama-3-70B shapes, pp8 x dp8 x tp8, h100

`--pipeline` searches stages and schedule too, for 64 micro-batches and for as many as are best, batch 1024 x 8192;
*plan* is all of that search, its reports included.

No weights are allocated. Each row is a process of its own. *plan* is everything between the captured graph and the
choices; *report* is what `plan.summary()` shows (traffic, notes); *lower* makes the mesh-wide program. Free axes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from capture_time import llama, peak_mb

MESHES: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "8": ({"gpu": 8}, {}),
    "8x8": ({"node": 8, "gpu": 8}, {"node": "ib-ndr"}),
    "4x4x4": ({"pod": 4, "node": 4, "gpu": 4}, {"pod": "ib-ndr", "node": "ib-ndr"}),
    "8x8x8": ({"pod": 8, "node": 8, "gpu": 8}, {"pod": "ib-ndr", "node": "ib-ndr"}),
}
BATCH, SEQUENCE = 64, 8192


def causal(model: Any) -> tuple[Any, dict]:
    import torch

    ids = torch.empty(BATCH, SEQUENCE, dtype=torch.int64, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def on_meta(name: str, config: str, experts: str | None = None, **settings: Any) -> Any:
    import torch
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config)(**settings))
    torch.set_default_dtype(torch.float32)
    if experts:
        model.set_experts_implementation(experts)
    return model


def t5() -> tuple[Any, dict]:
    import torch

    sizes = {"d_model": 4096, "d_kv": 128, "d_ff": 10240, "num_layers": 16, "num_heads": 32, "vocab_size": 32128}
    more = {"use_cache": False, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = on_meta("T5ForConditionalGeneration", "T5Config", **sizes, **more)
    ids = torch.empty(BATCH, 2048, dtype=torch.int64, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def mixtral() -> tuple[Any, dict]:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    more = {"num_hidden_layers": 32, "num_local_experts": 8, "vocab_size": 32000, "use_cache": False}
    return causal(on_meta("MixtralForCausalLM", "MixtralConfig", "batched_mm", **sizes, **more))


def resnet() -> tuple[Any, dict]:
    import torch

    model = on_meta("ResNetForImageClassification", "ResNetConfig", depths=[3, 8, 36, 3], num_labels=1000)
    pixels = torch.empty(512, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    return model, {"pixel_values": pixels, "labels": torch.empty(512, dtype=torch.int64, device="meta")}


def distinct() -> tuple[Any, dict]:
    """32 layers, no two of one width."""
    model = llama("8b", 32)
    import torch

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        for i, layer in enumerate(model.model.layers):
            width = 8192 + 256 * i
            mlp: Any = layer.mlp
            mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(4096, width, bias=False) for _ in range(2))
            mlp.down_proj = torch.nn.Linear(width, 4096, bias=False)
    torch.set_default_dtype(torch.float32)
    return causal(model)


def unet() -> tuple[Any, dict]:
    import torch
    from unet import UNet

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model, image = UNet(), torch.empty(512, 4, 64, 64)
        batch = {"image": image, "time": torch.empty(512, 320), "text": torch.empty(512, 77, 768), "noise": image}
    torch.set_default_dtype(torch.float32)
    return model, batch | {"noise": torch.empty_like(image)}


MODELS = {"t5": t5, "mixtral": mixtral, "resnet": resnet, "distinct": distinct, "unet": unet}


def measure(model: str, layers: int, mesh: str) -> dict[str, Any]:
    import gc

    import meshwright as mw
    from meshwright.partitioner import facts, planner
    from meshwright.partitioner.capture import capture
    from meshwright.passes.lower import lower

    module, batch = MODELS[model]() if model in MODELS else causal(llama(model, layers))
    axes: Any = MESHES[mesh][0]
    links = MESHES[mesh][1]
    clock, row = time.process_time, {}
    start = clock()
    graph = capture(module, (), batch, loss=lambda out, target: getattr(out, "loss", out))
    row["capture"], row["calls"] = clock() - start, sum(1 for _ in graph.calls())
    report, real = [0.0], facts.with_facts

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        made = real(*args, **kwargs)
        report[0] += clock() - begin
        return made

    planner.with_facts = timed
    gc.collect()
    start = clock()
    graph, plan = planner.make_plan(graph, mw.Mesh(device="h100", links=links, **axes), planner.Options())
    row["plan"], row["report"] = clock() - start - report[0], report[0]
    start = clock()
    lower(graph, plan)
    row["lower"] = clock() - start
    return row | {"gap": plan.gap, "seconds": sum(plan.seconds), "peak": peak_mb()}


def pipeline(micro_batches: str) -> dict[str, Any]:
    """CPU seconds of capture, of everything that is decided of a pipeline, and of lowering."""
    import meshwright as mw
    import torch
    from meshwright.partitioner.capture import capture
    from meshwright.partitioner.pipeline import Asked
    from meshwright.partitioner.planner import Options
    from meshwright.partitioner.stage_search import plan_step
    from meshwright.passes.lower import lower

    ids = torch.empty(1024, SEQUENCE, dtype=torch.int64, device="meta")
    model, clock = llama("70b", 80), time.process_time
    start = clock()
    graph = capture(model, (), {"input_ids": ids, "labels": ids}, loss=lambda out, target: out.loss)
    captured = clock()
    count = micro_batches if micro_batches == "auto" else int(micro_batches)
    mesh = mw.Mesh(pp=8, dp=8, tp=8, device="h100")
    graph, plan = plan_step(graph, mesh, Options(), count, Asked())
    planned = clock()
    lower(graph, plan)
    row = {"capture": captured - start, "plan": planned - captured, "lower": clock() - planned}
    return row | {"compared": plan.compared, "peak": peak_mb()}


def pipelines() -> None:
    print("| micro_batches | capture | plan | capture + plan | lower | peak MB |")
    print("|---|---|---|---|---|---|")
    for one in ("64", "auto"):
        command = [sys.executable, __file__, "--one", f"pipeline:{one}"]
        r = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        times = (r["capture"], r["plan"], r["capture"] + r["plan"], r["lower"])
        row = f"| {one} | {' | '.join(f'{x:.1f}' for x in times)} | {r['peak']} |"
        print(row, *r["compared"], sep="\n  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--rows", nargs="*", help="model:layers:mesh, such as 8b:32:8x8")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pipeline:
        pipelines()
        return
    if options.one and options.one.startswith("pipeline:"):
        print(json.dumps(pipeline(options.one.partition(":")[2])))
        return
    if options.one:
        model, layers, mesh = options.one.split(":")
        print(json.dumps(measure(model, int(layers), mesh)))
        return
    rows = options.rows or [f"8b:{n}:{m}" for m in ("8", "8x8", "4x4x4") for n in (4, 8, 16, 32, 80)]
    rows = ["405b:126:8x8x8"] if options.big else rows
    rows = [f"{name}:0:{m}" for name in MODELS for m in ("8", "8x8", "4x4x4")] if options.others else rows
    print("| model | layers | mesh | calls | capture | plan | report | lower | all CPU s | gap | peak MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for one in rows:
        out = subprocess.run([sys.executable, __file__, "--one", one], capture_output=True, text=True, env=os.environ)
        if out.returncode:
            print(f"| {one} | failed: {out.stderr.strip().splitlines()[-1][:120]} |", flush=True)
            continue
        r = json.loads(out.stdout.strip().splitlines()[-1])
        parts = [r[k] for k in ("capture", "plan", "report", "lower")]
        gap = "?" if r["gap"] is None else f"{r['gap']:.3%}"
        model, layers, mesh = one.split(":")
        times = " | ".join(f"{x:.2f}" for x in (*parts, sum(parts)))
        print(f"| {model} | {layers} | {mesh} | {r['calls']} | {times} | {gap} | {r['peak']} |", flush=True)


if __name__ == "__main__":
    main()
