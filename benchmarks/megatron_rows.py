"""What Megatron-LM's functional tests hold, beside what the memory model's counts give: rows of dense GPTs.

    python benchmarks/megatron_rows.py [--rows]

    state    elements of the last stage (where the tests' numbers are from) * bytes of an element
             2 + 4 + 12 = 18: bf16 weight, fp32 gradient, fp32 master and moments; 6 + 12 / data ranks with
             --use-distributed-optimizer; and what its libraries keep: cuBLAS 32 MiB on each of two threads
             (CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic runs set), Transformer Engine's 32 MiB, 4 before sm90
    peak     state + layers in flight * what a layer keeps for backward + 6 bytes a logit (fp32 softmax, bf16 gradient)
             a layer: what a captured layer keeps in its plan (`tests/test_saved_activations.py` has the same layer),
             + 5as^2b / t where attention is not flash; 2sbh under full recompute, and then one layer's own
             in flight: 1F1B, last stage: its layers; interleaved with v virtual stages: (v - 1) * p + 1 chunks of them

Rows: data/megatron_rows.csv, of NVIDIA/Megatron-LM d98e8a64, tests/functional_tests/test_cases (BSD-3-Clause).
Left out: experts, FSDP, latent attention, float8, T5, BERT and multimodal models (others have not been written as one
layer here), and runs whose number of GPUs, and with it the share of the sharded optimizer, is not in the row.
"""

from __future__ import annotations

import csv
import statistics
import sys
from functools import cache
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data" / "megatron_rows.csv"
sys.path.insert(0, str(DATA.parent.parent.parent / "tests"))

from test_saved_activations import SPLIT, WHOLE, B, H, S, a_layer  # noqa: E402

GIB, MIB = 2**30, 2**20
VOCABULARY, GPUS = 50257, 8
"""Of GPT-2, padded to a multiple of 128 a tensor rank; of a node, where a row says nothing else."""
PEAK_LOGIT = 6


class Row:
    """One run."""

    def __init__(self, row: dict[str, str]):
        def number(key: str, default: int = 1) -> int:
            return int(float(row[key])) if row[key] else default

        self.name, self.gpu = row["case"], row["gpu"]
        self.layers, self.hidden, self.heads = number("layers"), number("hidden"), number("heads")
        self.kv = number("kv_groups", self.heads)
        self.seq, self.batch, self.ffn = number("seq"), number("mbs"), number("ffn", 4 * self.hidden)
        self.t, self.p, self.c = number("tp"), number("pp"), number("cp")
        self.chunk = number("layers_per_vstage", self.layers // self.p)
        self.data = max(1, number("n_gpus", GPUS) // (self.t * self.p * self.c))
        self.vocab = -(-(number("vocab", VOCABULARY)) // (128 * self.t)) * 128 * self.t
        self.gated, self.untied = bool(row["swiglu"]), bool(row["untied"])
        self.sharded, self.sequence = bool(row["dist_opt"]), bool(row["sequence_parallel"])
        local = self.name.startswith("gpt3_mcore_tp") and not row["attention_backend"]  # own layers, without flash
        self.unfused = row["attention_backend"] == "unfused" or local
        self.full = row["recompute_gran"] == "full"
        self.half = bool(row["fp16"])
        self.alloc, self.peak = float(row["mem_alloc_GiB"]) * GIB, float(row["mem_peak_GiB"]) * GIB

    @property
    def elements(self) -> float:
        """Of the last stage, a tensor rank."""
        h, f, wide = self.hidden, self.ffn, self.hidden * self.kv // self.heads
        linear = (h + 2 * wide) * (h + 1) + h * h + (1 + self.gated) * f * (h + 1) + f * h
        layers = self.layers // self.p * (linear / self.t + 2 * h + 4 * h) + 2 * h
        table = self.vocab * h / self.t
        first = table + self.seq * h if self.p == 1 else 0
        return layers + first + (table if self.p > 1 or self.untied else 0)

    @property
    def state(self) -> float:
        fp16 = 2 if self.half else 0
        each = 18 + fp16 if not self.sharded else 6 + fp16 + 12 / (self.data * self.c)
        engine = 4 * MIB if self.gpu == "A100" else 32 * MIB
        return each * self.elements + 2 * 32 * MIB + engine

    @property
    def layer(self) -> float:
        """Bytes that a layer keeps of a micro-batch."""
        sbh = self.seq * self.batch * self.hidden / self.c
        scores = 5 * self.heads * self.seq**2 * self.batch / self.t / self.c if self.unfused else 0
        gate = 2 * self.seq * self.batch * self.ffn * 2 / self.t / self.c if self.gated else 0
        return coefficient(self.t, self.sequence) * sbh + scores + gate

    @property
    def predicted(self) -> float:
        chunks = self.layers // self.p // self.chunk
        alive = ((chunks - 1) * self.p + 1 if chunks > 1 else 1) * self.chunk
        tokens = self.seq * self.batch / self.c
        kept = alive * self.layer if not self.full else self.layers // self.p * 2 * tokens * self.hidden
        kept += self.layer if self.full else 0
        return self.state + kept + PEAK_LOGIT * tokens * self.vocab / self.t


@cache
def coefficient(t: int, sequence: bool) -> float:
    """What a layer keeps on `t` tensor ranks, in units of sbh, by the plan of a captured one."""
    pins = () if t == 1 else SPLIT if sequence else WHOLE
    return a_layer("none", t, pins)[0] / (S * B * H)


def rows() -> list[Row]:
    with DATA.open() as file:
        return [Row(row) for row in csv.DictReader(line for line in file if not line.startswith("#"))]


def spread(name: str, errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    nine = sizes[int(0.9 * (len(sizes) - 1))]
    shares = [statistics.median(sizes), nine, sizes[-1]]
    return f"| {name} | {len(errors)} | " + " | ".join(f"{100 * s:.1f} %" for s in shares) + " |"


def main(args: list[str]) -> None:
    found = [(r, r.state / r.alloc - 1, r.predicted / r.peak - 1) for r in rows()]
    for r, state, peak in found if "--rows" in args else ():
        print(f"{r.name} {r.gpu}: state {100 * state:+.1f} %, peak {100 * peak:+.1f} %")
    print("| | rows | median | of nine in ten at most | worst |\n|---|---|---|---|---|")
    print(spread("held between steps", [s for _, s, _ in found]))
    print(spread("peak", [p for _, _, p in found]))
    flash = [p for r, _, p in found if not r.unfused]
    print(spread("peak, flash attention", flash))
    print(spread("peak, scores kept", [p for r, _, p in found if r.unfused]))


if __name__ == "__main__":
    main(sys.argv[1:])
