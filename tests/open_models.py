"""Small open models with random weights in the format of transformers, and their outputs in transformers."""

import numpy as np

from benchmarks.open_families import (
    SAMPLE_TEXT,
    VOCABULARY,
    make_tokenizer_json,
    save_model,
)

__all__ = ['SAMPLE_TEXT', 'VOCABULARY', 'make_configs', 'make_tokenizer_json', 'run_transformers', 'save_model']


def make_configs() -> dict:
    """Return a config of each family, by its name."""
    import transformers as hf

    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    llama = common | dict(intermediate_size=48, num_key_value_heads=2)
    gpt2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128)
    experts = dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=64)
    mamba = dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2)
    return {
        'gpt2': hf.GPT2Config(**gpt2),
        'pythia': hf.GPTNeoXConfig(**common, intermediate_size=64),
        'opt': hf.OPTConfig(**common, ffn_dim=64, word_embed_proj_dim=32),
        'llama': hf.LlamaConfig(**llama),
        'mistral': hf.MistralConfig(**llama, sliding_window=8),
        'qwen3': hf.Qwen3Config(**llama, head_dim=16),
        'gemma': hf.GemmaConfig(**llama, head_dim=16),
        'gpt_oss': hf.GptOssConfig(**llama, **experts),
        'jamba': hf.JambaConfig(**llama | mamba, use_mamba_kernels=False),
    }


def run_transformers(model, ids_PT):
    """Run a model in transformers.

    Returns:
        (attention_LPHTS of the layers with attention, residual_LPTD after each layer but the last).
    """
    import torch

    with torch.no_grad():
        outputs = model(torch.as_tensor(ids_PT), output_attentions=True, output_hidden_states=True, use_cache=False)
    attention = np.stack([array.numpy() for array in outputs.attentions if array is not None])
    return attention, np.stack([array.numpy() for array in outputs.hidden_states[1:-1]])
