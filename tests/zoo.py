"""Tiny models of many families, from random configurations: `ZOO[name]()` gives a module that returns its 0-d loss, and
the keyword inputs of one batch. Dropout is 0: what is random has cases of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo_plain import DiT, UNet

VOCAB, BATCH, SEQ = 128, 4, 16
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = TOKENS | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

Entry = tuple[nn.Module, dict[str, Any]]


class WithLoss(nn.Module):
    """A transformers model that returns only its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


def transformer(model: str, config: str, experts: str | None = None, **settings: Any) -> WithLoss:
    import transformers

    built = getattr(transformers, model)(getattr(transformers, config)(**settings)).train()
    if experts:
        built.set_experts_implementation(experts)
    return WithLoss(built)


def ids(length: int = SEQ) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, length))


def language(family: str, experts: str | None = None, model: str | None = None, **settings: Any) -> Entry:
    """A decoder-only language model; `settings` beside or in place of DECODER's."""
    config = settings.pop("config", f"{family}Config")
    x = ids()
    built = transformer(model or f"{family}ForCausalLM", config, experts, **(DECODER | settings))
    return built, {"input_ids": x, "labels": x.clone()}


def bare_language(family: str, **settings: Any) -> Entry:
    """A language model whose configuration has names of its own."""
    x = ids()
    return transformer(f"{family}ForCausalLM", f"{family}Config", **(TOKENS | settings)), {"input_ids": x, "labels": x}


def gpt2() -> Entry:
    x = ids()
    sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    drop: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformer("GPT2LMHeadModel", "GPT2Config", **TOKENS, **sizes, **drop), {"input_ids": x, "labels": x}


def gpt_neox() -> Entry:
    drop: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return language("GPTNeoX", **drop)


def opt() -> Entry:
    sizes: dict[str, Any] = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "use_cache": False,
        "dropout": 0.0,
    }
    return bare_language("OPT", **sizes, **more)


def bert() -> Entry:
    x = ids()
    model = transformer("BertForMaskedLM", "BertConfig", **ENCODER, vocab_size=VOCAB, max_position_embeddings=64)
    mask = (torch.arange(SEQ) < torch.tensor([SEQ, 9, 12, 5])[:, None]).long()
    return model, {"input_ids": x, "labels": x.clone(), "attention_mask": mask}


def masked(family: str, **settings: Any) -> Entry:
    """A masked language model on padded rows."""
    x = ids()
    x[1, 9:] = 1
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 1}
    model = transformer(f"{family}ForMaskedLM", f"{family}Config", **ENCODER, **sizes, **settings)
    return model, {"input_ids": x, "labels": x.clone(), "attention_mask": (x != 1).long()}


def t5() -> Entry:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    more: dict[str, Any] = {"vocab_size": VOCAB, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = transformer("T5ForConditionalGeneration", "T5Config", **sizes, **more)
    return model, {"input_ids": ids(), "labels": ids(8)}


def image(family: str, size: int = 32, **settings: Any) -> Entry:
    model = transformer(f"{family}ForImageClassification", f"{family}Config", num_labels=10, **settings)
    return model, {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 10, (BATCH,))}


def swin() -> Entry:
    drop: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    return image(
        "Swin", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, **drop
    )


def clip() -> Entry:
    tower: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = tower | TOKENS | {"max_position_embeddings": 64}
    vision = tower | {"image_size": 32, "patch_size": 8}
    model = transformer("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)
    pixels, mask = torch.randn(BATCH, 3, 32, 32), torch.ones(BATCH, SEQ, dtype=torch.long)
    return model, {"input_ids": ids(), "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


def whisper() -> Entry:
    sizes: dict[str, Any] = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    feed: dict[str, Any] = {
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "dropout": 0.0,
    }
    length: dict[str, Any] = {
        "max_source_positions": 16,
        "max_target_positions": 32,
        "use_cache": False,
        "decoder_start_token_id": 1,
    }
    quiet: dict[str, Any] = {"suppress_tokens": None, "begin_suppress_tokens": None}
    settings = TOKENS | sizes | feed | length | quiet
    model = transformer("WhisperForConditionalGeneration", "WhisperConfig", **settings)
    return model, {"input_features": torch.randn(BATCH, 16, 32), "labels": ids(8)}


def mixtral() -> Entry:
    return language("Mixtral", "batched_mm", num_local_experts=4, num_experts_per_tok=2)


def qwen3_moe() -> Entry:
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return language("Qwen3Moe", "batched_mm", **sizes)


def deepseek_v3() -> Entry:
    routing: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    ranks: dict[str, Any] = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    more: dict[str, Any] = {"first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
    return language("DeepseekV3", "batched_mm", **routing, **ranks, **more)


def mamba2() -> Entry:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "state_size": 4,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
    }
    return bare_language("Mamba2", **sizes, chunk_size=8, use_cache=False)


def unet() -> Entry:
    return UNet().train(), {"x": torch.randn(BATCH, 3, 16, 16), "y": torch.randint(0, 2, (BATCH, 16, 16))}


def dit() -> Entry:
    image, noise = torch.randn(2, BATCH, 3, 16, 16)
    batch = {"x": image, "noise": noise, "t": torch.randint(0, 100, (BATCH,)), "y": torch.randint(0, 10, (BATCH,))}
    return DiT().train(), batch


STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}

BUILD: dict[str, Callable[[], Entry]] = {
    "llama": lambda: language("Llama"),
    "qwen3": lambda: language("Qwen3", head_dim=8),
    "mistral": lambda: language("Mistral", sliding_window=8),
    "gemma3": lambda: language("Gemma3", config="Gemma3TextConfig", head_dim=8, sliding_window=8),
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "bert": bert,
    "t5": t5,
    "vit": lambda: image("ViT", image_size=32, patch_size=8, **ENCODER),
    "clip": clip,
    "whisper": whisper,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "mamba2": mamba2,
    "convnext": lambda: image("ConvNext", **STAGES, drop_path_rate=0.0),
    "resnet": lambda: image("ResNet", **STAGES, embedding_size=8, layer_type="basic"),
    "swin": swin,
    "unet": unet,
    "dit": dit,
    "gemma": lambda: language("Gemma", head_dim=8),
    "phi3": lambda: language("Phi3"),
    "olmo2": lambda: language("Olmo2"),
    "stablelm": lambda: language("StableLm"),
    "granite": lambda: language("Granite"),
    "roberta": lambda: masked("Roberta"),
    "electra": lambda: masked("Electra", embedding_size=16),
    "deit": lambda: image("DeiT", image_size=32, patch_size=8, **ENCODER),
}


def seeded(build: Callable[[], Entry]) -> Callable[[], Entry]:
    def fresh() -> Entry:
        torch.manual_seed(0)
        return build()

    return fresh


ZOO: dict[str, Callable[[], Entry]] = {name: seeded(build) for name, build in BUILD.items()}
