"""CPU seconds, nodes and memory of capturing Llama's training step (forward, loss, backward) on fake tensors.

    OMP_NUM_THREADS=1 python benchmarks/capture_time.py                    # Llama-3-8B shapes at 4, 8, 16, 32 layers
    OMP_NUM_THREADS=1 python benchmarks/capture_time.py --big              # Llama-3-405B shapes at 80 and 126 layers

Each row is a process of its own, so that its peak memory is its own; "imports" is the peak before the model is built.
No weights are allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8},
}


def llama(size: str, layers: int):
    """LlamaForCausalLM in bf16 on the meta device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SIZES[size],
        num_hidden_layers=layers,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def measure(size: str, layers: int, batch: int, sequence: int) -> dict[str, float]:
    import torch
    from meshwright.partitioner.capture import capture

    model = llama(size, layers)
    ids = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    before = peak_mb()
    start = time.process_time()
    graph = capture(model, (), {"input_ids": ids, "labels": ids}, loss=lambda out, target: out.loss)
    return {"cpu": time.process_time() - start, "nodes": len(graph.fx.nodes), "imports": before, "peak": peak_mb()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", action="store_true", help="Llama-3-405B shapes at 80 and 126 layers")
    parser.add_argument("--layers", type=int, nargs="*", help="these numbers of layers instead")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = "405b" if options.big else "8b"
    rows = options.layers or ([80, 126] if options.big else [4, 8, 16, 32])
    if options.one:
        print(json.dumps(measure(size, rows[0], options.batch, options.sequence)))
        return
    shape = ["--batch", str(options.batch), "--sequence", str(options.sequence), *(["--big"] if options.big else [])]
    print(f"Llama-3-{size.upper()} shapes, batch {options.batch} x {options.sequence}, bf16")
    print("| layers | CPU s | CPU s a layer | nodes | imports MB | peak MB |\n|---|---|---|---|---|---|")
    for layers in rows:
        command = [sys.executable, __file__, "--one", "--layers", str(layers), *shape]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
        row = json.loads(done.stdout.splitlines()[-1])
        each = row["cpu"] / layers
        cells = (layers, f"{row['cpu']:.2f}", f"{each:.3f}", row["nodes"], row["imports"], row["peak"])
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
