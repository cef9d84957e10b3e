"""Small open models with random weights in the format of transformers, and their outputs in transformers."""

import numpy as np

from benchmarks.open_families import SAMPLE_TEXT, VOCABULARY, make_config, make_tokenizer_json, save_model

__all__ = ['SAMPLE_TEXT', 'VOCABULARY', 'make_configs', 'make_tokenizer_json', 'run_transformers', 'save_model']


def make_configs() -> dict:
    """Return a config of each family, by its name."""
    families = 'gpt2', 'gpt_neox', 'opt', 'llama', 'mistral', 'qwen3', 'gemma', 'gpt_oss', 'jamba'
    return {family: make_config(family) for family in families}


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
