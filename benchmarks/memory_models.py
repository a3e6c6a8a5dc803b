"""The models of `benchmarks/memory.py`: eight families of `tests/zoo.py`, large enough for a message to be small beside
the model (about 2 to 5 million parameters)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import zoo  # noqa: E402
from torch import nn  # noqa: E402
from zoo_plain import DiT, UNet  # noqa: E402

WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
ENCODER = zoo.ENCODER | WIDE
B, S = 8, 64


def ids() -> torch.Tensor:
    return torch.randint(3, zoo.VOCAB, (B, S))


def words(model: str, config: str, experts: str | None = None, **settings: Any) -> zoo.Entry:
    x = ids()
    return zoo.transformer(model, config, experts, **(zoo.TOKENS | settings)), {"input_ids": x, "labels": x.clone()}


def decoder(family: str, experts: str | None = None, **settings: Any) -> zoo.Entry:
    sizes = zoo.DECODER | WIDE | settings
    return words(f"{family}ForCausalLM", f"{family}Config", experts, **sizes)


def gpt2() -> zoo.Entry:
    drop: dict[str, Any] = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
    sizes: dict[str, Any] = {"n_positions": S, "n_embd": 256, "n_layer": 4, "n_head": 4, "use_cache": False}
    return words("GPT2LMHeadModel", "GPT2Config", **sizes, **drop)


def bert() -> zoo.Entry:
    model, batch = words("BertForMaskedLM", "BertConfig", **ENCODER, max_position_embeddings=S)
    return model, batch | {"attention_mask": (torch.arange(S) < torch.arange(B)[:, None] * 4 + 32).long()}


def t5() -> zoo.Entry:
    sizes: dict[str, Any] = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 3, "num_heads": 4}
    more: dict[str, Any] = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
    return words("T5ForConditionalGeneration", "T5Config", **sizes, **more)


def vit() -> zoo.Entry:
    model = zoo.transformer(
        "ViTForImageClassification", "ViTConfig", num_labels=10, image_size=32, patch_size=4, **ENCODER
    )
    return model, {"pixel_values": torch.randn(B, 3, 32, 32), "labels": torch.randint(0, 10, (B,))}


def unet() -> zoo.Entry:
    return UNet(96).train(), {"x": torch.randn(B, 3, 16, 16), "y": torch.randint(0, 2, (B, 16, 16))}


def dit() -> zoo.Entry:
    image, noise = torch.randn(2, B, 3, 16, 16)
    batch = {"x": image, "noise": noise, "t": torch.randint(0, 100, (B,)), "y": torch.randint(0, 10, (B,))}
    return DiT(192, 4, 4).train(), batch


def mixtral() -> zoo.Entry:
    return decoder("Mixtral", "batched_mm", num_local_experts=4, num_experts_per_tok=2, hidden_size=128)


FAMILIES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": lambda: decoder("Llama"), "gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit, "mixtral": mixtral,
    "unet": unet, "dit": dit,
}  # fmt: skip
