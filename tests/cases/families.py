"""Real architectures, tiny."""

from __future__ import annotations

import torch

from .registry import DP, PP, TP, Built, registry

CASES, case = registry()


def hf(cls, cfg, **kw):
    import transformers

    torch.manual_seed(84)
    c = getattr(transformers, cfg)(**kw)
    m = getattr(transformers, cls)(c)
    m.config.use_cache = False
    return m.train()


# -- real architectures
@case(
    "hf-gpt2",
    "real architectures",
    "alpa-projects/alpa#863; pytorch/pytorch#129732; uw-syfi/piper#13",
    "GPT-2: tied head, fused transposed qkv weight, odd vocabulary, dataclass output, loss inside.",
    [DP, TP, PP, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}],
    microbatches=2,
)
def hf_gpt2() -> Built:
    m = hf(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=37,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.randint(0, 37, (4, 8))
    return m, (), {"input_ids": ids, "labels": ids.clone()}, lambda o: o.loss


@case(
    "hf-llama-gqa",
    "real architectures",
    "huggingface/transformers#48307; huggingface/transformers#36657",
    "Llama with 4 query and 2 key/value heads, attention mask with padding on the left, labels partly ignored.",
    [DP, TP, {"tp": 4}, PP, {"dp": 2, "tp": 2}],
    microbatches=2,
)
def hf_llama_gqa() -> Built:
    m = hf(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    ids = torch.randint(0, 40, (4, 8))
    mask = (torch.arange(8) >= torch.tensor([0, 3, 1, 5])[:, None]).long()
    return (
        m,
        (),
        {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
        lambda o: o.loss,
    )


@case(
    "hf-vit",
    "real architectures",
    "deepspeedai/DeepSpeedExamples#932; pytorch/pytorch#176446",
    "Vision transformer: patch convolution, class token and learnt positions added as parameters with expand.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
    microbatches=2,
)
def hf_vit() -> Built:
    m = hf(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_channels=3,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return m, (), {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 3, 4, 1])}, lambda o: o.loss


@case(
    "hf-bloom",
    "real architectures",
    "bigscience-workshop/Megatron-DeepSpeed#227; deepspeedai/DeepSpeed#3844; "
    "huggingface/text-generation-inference#1036",
    "Bloom: ALiBi, heads interleaved in the fused weight, biases after row-split layers, tied head.",
    [TP, {"tp": 4}, DP, PP, {"dp": 2, "tp": 2}],
    microbatches=2,
)
def hf_bloom() -> Built:
    m = hf(
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=35,
        hidden_size=16,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    ids = torch.randint(4, 35, (4, 6))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return (
        m,
        (),
        {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
        lambda o: o.loss,
    )
