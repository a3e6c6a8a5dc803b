"""The architectures of `hand_plans.py` at realistic widths, on the meta device, and which of their weights are what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from planner_gap import DECODER, transformer
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]
LAYERS = 2


@dataclass(frozen=True)
class Architecture:
    """Attributes:
    build: from (batch, length) to the model and its inputs; of images the length is their side.
    loads: (batch, length): many short, middling, few long.
    stream: modules that hand on the residual stream, [batch, sequence, hidden].
    norms: modules whose output is read by the split products.
    split: per glob of weights the dim that Megatron splits over tp.
    wide: modules that hand on [batch, sequence, split hidden].
    head: the module that makes the logits, and its weight.
    """

    build: Callable[[int, int], Built]
    loads: tuple[tuple[int, int], ...]
    stream: tuple[str, ...]
    norms: tuple[str, ...]
    split: dict[str, int] = field(default_factory=dict)
    wide: tuple[str, ...] = ()
    head: tuple[str, str] = ("", "")


TEXT = ((256, 512), (64, 2048), (32, 8192))


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(batch, length), "labels": tokens(batch, length)}


def llama(batch: int, length: int) -> Built:
    sizes: dict[str, Any] = DECODER | {"max_position_embeddings": length, "num_hidden_layers": LAYERS}
    return transformer("LlamaForCausalLM", "LlamaConfig", **sizes), text(batch, length)


def mixtral(batch: int, length: int) -> Built:
    more: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS}
    sizes = DECODER | {"max_position_embeddings": length}
    return transformer("MixtralForCausalLM", "MixtralConfig", "batched_mm", **more, **sizes), text(batch, length)


def gpt2(batch: int, length: int) -> Built:
    sizes: dict[str, Any] = {"n_positions": length, "n_embd": 2048, "n_layer": LAYERS, "n_head": 16}
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    drop: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformer("GPT2LMHeadModel", "GPT2Config", **sizes, **ids, **drop), text(batch, length)


def bert(batch: int, length: int) -> Built:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    more: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": length}
    drop: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformer("BertForMaskedLM", "BertConfig", **sizes, **more, **drop), text(batch, length)


def t5(batch: int, length: int) -> Built:
    sizes: dict[str, Any] = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "dropout_rate": 0.0}
    more: dict[str, Any] = {"num_layers": LAYERS, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = transformer("T5ForConditionalGeneration", "T5Config", **sizes, **more)
    return model, {"input_ids": tokens(batch, length), "labels": tokens(batch, length // 4)}


def vit(batch: int, side: int) -> Built:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    more: dict[str, Any] = {"num_hidden_layers": LAYERS, "image_size": side, "patch_size": 16, "num_labels": 1024}
    drop: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformer("ViTForImageClassification", "ViTConfig", **sizes, **more, **drop)
    pixels = torch.empty(batch, 3, side, side, dtype=torch.bfloat16, device="meta")
    return model, {"pixel_values": pixels, "labels": torch.empty(batch, dtype=torch.int64, device="meta")}


LLAMA_ATTENTION = {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1}
LLAMA_NORMS = ("model.model.layers.*.*_layernorm", "model.model.norm")
LAYER = "model.model.layers.[0-9]"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        llama, TEXT, (LAYER,), LLAMA_NORMS,
        LLAMA_ATTENTION | {"*.gate_proj.weight": 0, "*.up_proj.weight": 0, "*.down_proj.weight": 1},
        ("*.[qkv]_proj", "*.gate_proj", "*.up_proj"), ("model.lm_head", "model.lm_head.weight"),
    ),
    "gpt2": Architecture(
        gpt2, TEXT, ("model.transformer.h.[0-9]",), ("*.ln_[12f]",),
        {"*.attn.c_attn.weight": 1, "*.attn.c_attn.bias": 0, "*.attn.c_proj.weight": 0, "*.mlp.c_fc.weight": 1,
         "*.mlp.c_fc.bias": 0, "*.mlp.c_proj.weight": 0},
        ("*.mlp.c_fc",), ("model.lm_head", "model.transformer.wte.weight"),
    ),
    "bert": Architecture(
        bert, TEXT, ("*.attention.output.LayerNorm", "model.bert.encoder.layer.[0-9].output.LayerNorm"), (),
        {"*.query.*": 0, "*.key.*": 0, "*.value.*": 0, "*.attention.output.dense.weight": 1,
         "*.intermediate.dense.*": 0, "*.layer.[0-9].output.dense.weight": 1},
        ("*.query", "*.key", "*.value", "*.intermediate.dense"),
        ("model.cls.predictions.decoder", "model.bert.embeddings.word_embeddings.weight"),
    ),
    "t5": Architecture(
        t5, TEXT, ("model.*coder.block.[0-9].layer.[0-9]",), ("*.layer_norm", "*.final_layer_norm"),
        {"*.[qkv].weight": 0, "*.o.weight": 1, "*.wi.weight": 0, "*.wo.weight": 1},
        ("*.[qkv]", "*.wi"), ("model.lm_head", "model.shared.weight"),
    ),
    "mixtral": Architecture(
        mixtral, TEXT, (LAYER,), LLAMA_NORMS,
        LLAMA_ATTENTION | {"*.experts.gate_up_proj": 1, "*.experts.down_proj": 2},
        ("*.[qkv]_proj",), ("model.lm_head", "model.lm_head.weight"),
    ),
    "vit": Architecture(
        vit, ((512, 224), (128, 384), (32, 768)), ("model.vit.layers.[0-9]",),
        ("*.layernorm_before", "*.layernorm_after"),
        {"*.[qkv]_proj.*": 0, "*.o_proj.weight": 1, "*.fc1.*": 0, "*.fc2.weight": 1},
        ("*.[qkv]_proj", "*.fc1"), ("model.classifier", "model.classifier.weight"),
    ),
}  # fmt: skip
