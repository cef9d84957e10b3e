"""Check of open model families: tiny random models, measured and compared with transformers.

    python -m benchmarks.open_families [--families=gptj,falcon]

A line for each family has the largest difference of the attention from that of transformers and what is not
measured, or why `sinklab.open` refuses it. docs/results/open_families.md groups them. The exit code is 1 if an
attention differs.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 128
SAMPLE_TEXT = 'import os\n\ndef f(x, y):\n    return os.path.join(x, y)\n\nself.x = y\n' * 8

# Config fields that many families share.
BASE = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
BASE |= dict(max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=1)
GPT = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=1)
LLAMA = BASE | dict(intermediate_size=48, num_key_value_heads=2)
WIDE_HEADS = LLAMA | dict(head_dim=16)
NARROW_HEADS = LLAMA | dict(head_dim=8)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LOCAL_EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
WINDOW = dict(sliding_window=8)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, head_dim=8)
DEEPSEEK = LLAMA | LATENT | dict(num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=4, n_group=1)
DEEPSEEK |= dict(num_experts_per_tok=2, n_shared_experts=1, topk_group=1, first_k_dense_replace=1)
SPARSE = DEEPSEEK | dict(index_topk=4, index_head_dim=16, index_n_heads=4)
FOUR_LAYERS = LLAMA | dict(num_hidden_layers=4)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1)
DELTA_NET = dict(linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
RECURRENT = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3)

# {model type of transformers: fields of its config}.
FAMILIES: dict[str, dict[str, Any]] = {
    'bloom': dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4),
    'cohere': LLAMA,
    'cohere2': FOUR_LAYERS | WINDOW,
    'deepseek_v3': DEEPSEEK,
    'deepseek_v32': SPARSE,
    'falcon': BASE | dict(num_kv_heads=1),
    'falcon_h1': LLAMA | MAMBA | dict(mamba_d_ssm=64),
    'gemma': WIDE_HEADS,
    'gemma2': WIDE_HEADS | WINDOW | dict(query_pre_attn_scalar=16),
    'gemma3_text': WIDE_HEADS | WINDOW,
    'gemma3n_text': WIDE_HEADS
    | WINDOW
    | dict(
        num_hidden_layers=4,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        layer_types=['sliding_attention', 'full_attention'] * 2,
    ),
    'gemma4_text': WIDE_HEADS
    | WINDOW
    | dict(
        num_hidden_layers=4,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        global_head_dim=32,
        layer_types=['sliding_attention', 'full_attention'] * 2,
    ),
    'glm4': NARROW_HEADS,
    'gpt2': GPT,
    'gpt_bigcode': GPT,
    'gpt_neox': BASE | dict(intermediate_size=48),
    'gpt_oss': WIDE_HEADS | LOCAL_EXPERTS | dict(sliding_window=64),
    'gptj': GPT | dict(rotary_dim=4),
    'granite': LLAMA,
    'granite_swa': LLAMA | WINDOW,
    'jamba': FOUR_LAYERS | dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False),
    'laguna': WIDE_HEADS | MOE | dict(num_attention_heads_per_layer=[4, 8, 4]),
    'lfm2': FOUR_LAYERS | dict(layer_types=['conv', 'full_attention'] * 2),
    'llama': LLAMA,
    'llama4_text': NARROW_HEADS | LOCAL_EXPERTS | dict(intermediate_size_mlp=48, num_hidden_layers=4),
    'longcat_flash': {name: value for name, value in DEEPSEEK.items() if name != 'num_hidden_layers'}
    | dict(num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=24, moe_topk=2, zero_expert_num=1),
    'mamba': RECURRENT | dict(state_size=8),
    'minimax': WIDE_HEADS
    | LOCAL_EXPERTS
    | dict(num_hidden_layers=4, layer_types=['linear_attention', 'full_attention'] * 2, block_size=8),
    'ministral': WIDE_HEADS,
    'mistral': LLAMA | WINDOW,
    'mixtral': LLAMA | LOCAL_EXPERTS,
    'nanochat': NARROW_HEADS,
    'nemotron': LLAMA,
    'olmo': LLAMA,
    'olmo2': LLAMA,
    'olmo3': LLAMA | WINDOW,
    'olmoe': LLAMA | dict(num_experts=4, num_experts_per_tok=2),
    'opt': BASE | dict(ffn_dim=64, word_embed_proj_dim=32),
    'phi': LLAMA,
    'phi3': LLAMA,
    'qwen2': LLAMA,
    'qwen3': WIDE_HEADS,
    'qwen3_moe': WIDE_HEADS | MOE,
    'qwen3_next': WIDE_HEADS
    | MOE
    | DELTA_NET
    | dict(num_hidden_layers=4, linear_num_key_heads=2, shared_expert_intermediate_size=24),
    'rwkv': RECURRENT | dict(attention_hidden_size=32, context_length=128),
    'seed_oss': WIDE_HEADS,
    'smollm3': LLAMA,
    'stablelm': LLAMA,
    'starcoder2': LLAMA,
    'xlnet': dict(vocab_size=VOCABULARY, d_model=32, n_layer=3, n_head=4, d_inner=48),
}


def make_config(family: str) -> Any:
    """Return the tiny config of a family.

    Raises:
        ValueError: the installed transformers has no such model type.
    """
    import transformers

    return transformers.AutoConfig.for_model(family, **FAMILIES[family])


def make_tokenizer_json() -> str:
    """Return a byte-level tokenizer of 128 ids as JSON, whose end token is also BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=['<|end|>'], show_progress=False)
    tokenizer.train_from_iterator([SAMPLE_TEXT], trainer)
    return tokenizer.to_str()


def save_model(config: Any, folder: Path, tokenizer: str | None = None) -> Any:
    """Save a model with random weights whose attention is far from uniform, and return it."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation='eager', dtype=torch.float32
    ).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and 'embed' not in name and 'wte' not in name:
            weight.data *= 6
        if name.endswith('sinks'):
            weight.data.normal_()
    model.save_pretrained(folder)
    if tokenizer:
        (folder / 'tokenizer.json').write_text(tokenizer)
        tokenizer_config = dict(tokenizer_class='PreTrainedTokenizerFast', bos_token='<|end|>', eos_token='<|end|>')
        (folder / 'tokenizer_config.json').write_text(json.dumps(tokenizer_config))
    return model


def compare_attention(hf_model: Any, model: Any, ids_PT: np.ndarray) -> float:
    """Return the largest difference between the attention of sinklab and of transformers.

    Columns of learned sinks are not compared, because transformers does not return them.
    """
    import torch

    attentions: list[np.ndarray] = []

    def collect_layer(layer: dict) -> dict:
        attentions.extend(layer.get('attention_LPHTS', ()))
        return {}

    hf_model.capture(ids_PT, collect_layer)
    with torch.no_grad():
        expected = model(torch.as_tensor(ids_PT), output_attentions=True, use_cache=False).attentions
    if len(attentions) < len(expected):  # transformers returns states for linear attention
        expected = [expected[layer] for layer in hf_model.array_layers['attention_LPHTS']]
    pairs = zip(attentions, expected, strict=True)
    return max(
        float(np.abs(array[..., -reference.shape[-1] :] - reference.numpy()).max()) for array, reference in pairs
    )


def check_family(family: str) -> tuple[bool, str]:
    """Return whether a family is measured correctly or refused, and what was found."""
    import sinklab

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(make_config(family), Path(folder), make_tokenizer_json())
        try:
            subject = sinklab.open(f'hf:{folder}').subject
        except sinklab.UserError as error:
            return True, f'refused: {str(error).replace(folder, family)}'
        difference = compare_attention(subject, model, np.random.default_rng(0).integers(2, 100, (2, 16)))
    return difference <= 1e-6, '; '.join([f'largest difference {difference:.1g}', *subject.remarks])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--families', default=','.join(FAMILIES), metavar='NAME,...')
    families = parser.parse_args().families.split(',')
    warnings.filterwarnings('ignore')
    are_correct = []
    for family in families:
        is_correct, finding = check_family(family)
        are_correct.append(is_correct)
        print(f'{family}: {finding}', flush=True)
    return 0 if all(are_correct) else 1


if __name__ == '__main__':
    sys.exit(main())
