"""Small open models with random weights, as transformers saves them, and what transformers says of them."""

import json

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = 'import os\n\ndef f(x, y):\n    return os.path.join(x, y)\n\nself.x = y\n' * 8
VOCABULARY = 128


def tokenizer_json() -> str:
    """A byte-level tokenizer of 128 ids, with an end token that is BOS, too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=['<|end|>'], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


def configs() -> dict:
    """A config of each family, by its name."""
    import transformers as hf

    few = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    llama = few | dict(intermediate_size=48, num_key_value_heads=2)
    gpt2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128)
    experts = dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=64)
    mamba = dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2)
    return {
        'gpt2': hf.GPT2Config(**gpt2),
        'pythia': hf.GPTNeoXConfig(**few, intermediate_size=64),
        'opt': hf.OPTConfig(**few, ffn_dim=64, word_embed_proj_dim=32),
        'llama': hf.LlamaConfig(**llama),
        'mistral': hf.MistralConfig(**llama, sliding_window=8),
        'qwen3': hf.Qwen3Config(**llama, head_dim=16),
        'gemma': hf.GemmaConfig(**llama, head_dim=16),
        'gpt_oss': hf.GptOssConfig(**llama, **experts),
        'jamba': hf.JambaConfig(**llama | mamba, use_mamba_kernels=False),
        'bloom': hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4),
    }


def saved(config, folder, tokenizer: str | None = None):
    """A model of a config in a folder, with attention that is far from even."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation='eager', dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and 'embed' not in name and 'wte' not in name:
            weight.data *= 6
        if name.endswith('sinks'):
            weight.data.normal_()
    model.save_pretrained(folder)
    if tokenizer:
        (folder / 'tokenizer.json').write_text(tokenizer)
        told = dict(tokenizer_class='PreTrainedTokenizerFast', bos_token='<|end|>', eos_token='<|end|>')
        (folder / 'tokenizer_config.json').write_text(json.dumps(told))
    return model


def told(model, ids_PT):
    """(attention_LPHTS of the layers that have it, residual_LPTD after each layer but the last) of transformers."""
    import torch

    with torch.no_grad():
        found = model(torch.as_tensor(ids_PT), output_attentions=True, output_hidden_states=True, use_cache=False)
    attention = np.stack([one.numpy() for one in found.attentions if one is not None])
    return attention, np.stack([one.numpy() for one in found.hidden_states[1:-1]])
