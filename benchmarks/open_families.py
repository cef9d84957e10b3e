"""Check of open model families: tiny random models, measured and compared with transformers.

python benchmarks/open_families.py FOLDER [--families=gptj,falcon] [--out=now.json]
python benchmarks/open_families.py --table --out=now.json

The first command writes models to FOLDER, runs `sinklab measure` and `sinklab.open(...).attention(...)` on each
model, compares the attention with that of transformers, and writes the results to --out. The second command prints
the results by family, which docs/results/open_families.md groups. The exit code is 1 after an internal error, or if
the attention of a model could not be compared or has another shape.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.environment import get_package_versions
from sinklab.errors import format_error
from sinklab.machine import describe_machine

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


def get_hf_attention(model: Any, ids_PT: np.ndarray) -> list[np.ndarray | None]:
    """Return attention_PHTS of each layer from transformers; None for layers without attention."""
    import torch

    with torch.no_grad():
        outputs = model(torch.as_tensor(ids_PT), output_attentions=True, use_cache=False)
    return [
        None if attention is None else attention.numpy() for attention in getattr(outputs, 'attentions', None) or ()
    ]


def get_sinklab_attention(hf_model: Any, ids_PT: np.ndarray) -> list[np.ndarray]:
    """Return attention_PHTS of each layer with attention from sinklab, in the order of the layers."""
    attentions = []

    def collect_layer(layer: dict) -> dict:
        attentions.extend(layer.get('attention_LPHTS', ()))
        return {}

    hf_model.capture(ids_PT, collect_layer)
    return attentions


def compare_attention(hf_model: Any, model: Any, ids_PT: np.ndarray) -> float | None:
    """Return the largest difference between the attention of sinklab and of transformers.

    Columns of learned sinks are not compared, because transformers does not return them.

    Returns:
        The difference; None if transformers returns no attention, inf if the shapes do not match.
    """
    actual, expected = get_sinklab_attention(hf_model, ids_PT), get_hf_attention(model, ids_PT)
    if not any(array is not None for array in expected):
        return None
    if len(actual) < len(expected):  # skip layers without attention; transformers returns states for linear attention
        expected = [expected[layer - 1] for layer in hf_model.array_layers['attention_LPHTS']]
    pairs = [*zip(actual, expected, strict=True)]
    if any(
        reference is None or array[..., -reference.shape[-1] :].shape != reference.shape for array, reference in pairs
    ):
        return float('inf')
    return max(float(np.abs(array[..., -reference.shape[-1] :] - reference).max()) for array, reference in pairs)


def measure_family(family: str, folder: Path, source: Path) -> dict[str, Any]:
    """Measure a family with `sinklab measure` and with `sinklab.open`, and compare it with transformers."""
    import sinklab
    from sinklab.cli.main import main

    try:
        model = save_model(make_config(family), folder, make_tokenizer_json())
    except ValueError as error:
        return dict(answer='not made', why=format_error(error))
    output, errors = io.StringIO(), io.StringIO()
    argv = ['measure', f'hf:{folder}', f'--source=text:{source}', '--inputs=natural,random,repeated']
    argv += ['--sequences=1', '--length=16', '--loss', '--json']
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        exit_code = main(argv)
    lines = errors.getvalue().strip().splitlines()
    if exit_code:
        is_refused = exit_code == 1 and len(lines) == 1
        reason = lines[-1].replace(f'hf:{folder}', 'MODEL')
        return dict(answer='refused' if is_refused else 'internal error', code=exit_code, why=reason)
    result = dict(answer='measured', numbers=json.loads(output.getvalue()))
    loaded_model = sinklab.open(f'hf:{folder}')
    try:
        result['attention'] = list(loaded_model.attention(SAMPLE_TEXT[:30]).matrix_LHTS.shape)
    except Exception as error:
        result['attention'] = format_error(error, with_type=True)
    result['remarks'] = list(getattr(loaded_model.subject, 'remarks', ()))
    ids_PT = np.random.default_rng(0).integers(2, 100, (2, 16))
    try:
        result['difference'] = compare_attention(loaded_model.subject, model, ids_PT)
    except Exception as error:
        result['difference'] = format_error(error, with_type=True)
    return result


def format_answer(result: dict[str, Any]) -> str:
    """Return the table cell of a result."""
    if result['answer'] != 'measured':
        return f'{result["answer"]}: {result["why"].removeprefix("sinklab measure: ")}'.replace('|', '/')
    has_error = isinstance(result['attention'], str)
    return 'measured' + (f'; `.attention()`: {result["attention"]}' if has_error else '')


def format_family_table(results: dict[str, Any]) -> str:
    rows = ['| family | answer | largest difference | not measured |', '|---|---|---|---|']
    for family, result in results.items():
        difference = result.get('difference')
        difference_text = f'{difference:.1g}' if isinstance(difference, float) else difference or '-'
        remarks = '; '.join(result.get('remarks', ()))
        rows.append(f'| `{family}` | {format_answer(result)} | {difference_text} | {remarks} |')
    return '\n'.join(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, nargs='?', help='write the models to this folder')
    parser.add_argument('--families', default=','.join(FAMILIES), metavar='NAME,...')
    parser.add_argument('--out', type=Path, default=Path('open_families.json'), metavar='FILE')
    parser.add_argument('--table', action='store_true', help='measure nothing, and print the results in --out')
    args = parser.parse_args()
    if not (args.folder or args.table):
        parser.error('give a folder for the models, or --table')
    if unknown := [family for family in args.families.split(',') if family not in FAMILIES]:
        parser.error(f'--families: {unknown[0]} is unknown; give some of {", ".join(FAMILIES)}')
    return args


def main(args: argparse.Namespace) -> int:
    if args.table:
        print(format_family_table(json.loads(args.out.read_text())['families']))
        return 0
    import transformers

    warnings.filterwarnings('ignore')
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = {}
    versions = get_package_versions(('torch', 'transformers', 'jax', 'numpy'))
    document = dict(machine=describe_machine(), versions=versions, families=results)
    with tempfile.TemporaryDirectory() as temp_dir:
        os.environ['SINKLAB_CACHE'] = temp_dir  # an empty cache, so that every model is measured again
        source = Path(temp_dir) / 'text.txt'
        source.write_text(SAMPLE_TEXT)
        for family in args.families.split(','):
            folder = args.folder / family
            folder.mkdir(parents=True, exist_ok=True)
            results[family] = measure_family(family, folder, source)
            print(f'{family}: {format_answer(results[family])}, {results[family].get("difference", "-")}', flush=True)
            args.out.write_text(json.dumps(document, indent=1))
    counts = {
        answer: sum(result['answer'] == answer for result in results.values())
        for answer in ('measured', 'refused', 'not made', 'internal error')
    }
    # A difference is a text if the comparison failed, and infinite if the shapes differ.
    num_different = sum(
        isinstance(result.get('difference'), str) or result.get('difference') == float('inf')
        for result in results.values()
    )
    print(
        f'transformers {versions["transformers"]}: {len(results)} families, '
        + ', '.join(f'{answer}: {count}' for answer, count in counts.items())
        + f'; attention not compared or of another shape: {num_different}'
    )
    return 1 if counts['internal error'] or num_different else 0


if __name__ == '__main__':
    sys.exit(main(parse_arguments()))
