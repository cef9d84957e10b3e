"""Numbers of open models against the formulas of the paper, in NumPy float64 on what transformers returns.

Two tiny random models are always checked, and pretrained models if SINKLAB_TEST_MODELS or build/models has their
files.
"""

import os
from pathlib import Path

import numpy as np
import open_models
import pytest

pytest.importorskip('torch', reason='open models need torch, which has no wheel here')
pytest.importorskip('transformers', reason='open models need transformers')

import torch
import transformers

import sinklab
from benchmarks import open_families

pytestmark = pytest.mark.slow  # transformers takes seconds to import

TOLERANCE, THRESHOLD = 1e-5, 0.3
NUM_TEXTS, LENGTH = 20, 64
MODEL_DIRS = [Path(path) for path in (os.environ.get('SINKLAB_TEST_MODELS'), 'build/models') if path]


def list_pretrained_models():
    """Return the references of GGUF files and of folders of transformers."""
    files = [f'gguf:{path}' for folder in MODEL_DIRS for path in sorted(folder.glob('*.gguf'))]
    return files + [f'hf:{path.parent}' for folder in MODEL_DIRS for path in sorted(folder.glob('*/config.json'))]


PRETRAINED_MODELS = list_pretrained_models()


def load_with_transformers(ref):
    """Load a model and its tokenizer without sinklab."""
    kind, _, path = ref.partition(':')
    options = dict(dtype=torch.float32, attn_implementation='eager')
    if kind == 'gguf':
        path, name = os.path.split(path)
        options |= dict(gguf_file=name, quantization_config=transformers.GgufConfig(dequantize=True))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, gguf_file=name)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval(), tokenizer


def run_with_hooks(model, ids_PT):
    """Return for each layer its attention, its output, and the outputs of its projections, in float64."""
    layers, hooks = [{} for _ in model.model.layers], []

    def record(layer_arrays, name):
        def hook(module, args, output):
            layer_arrays[name] = np.float64((output[0] if isinstance(output, tuple) else output).numpy())

        return hook

    for layer, layer_arrays in zip(model.model.layers, layers, strict=True):
        hooks.append(layer.register_forward_hook(record(layer_arrays, 'residual_PTD')))
        for name in ('q', 'k', 'v'):
            projection = getattr(layer.self_attn, f'{name}_proj')
            hooks.append(projection.register_forward_hook(record(layer_arrays, name)))
    with torch.inference_mode():
        outputs = model(torch.as_tensor(ids_PT), output_attentions=True, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    for index, (attention, layer_arrays) in enumerate(zip(outputs.attentions, layers, strict=True)):
        layer_arrays['attention_PHTS'] = np.float64(attention.numpy())
        if index + 1 < len(layers):  # the last one of transformers is normalized
            np.testing.assert_array_equal(
                outputs.hidden_states[index + 1].numpy(), np.float32(layer_arrays['residual_PTD'])
            )
    return layers


def rotate(array_PHTK, base):
    """Apply rotary positions: dimensions i and i + K / 2 are rotated by t / base^(2i / K)."""
    length, width = array_PHTK.shape[-2:]
    angle_TK = np.outer(np.arange(length), base ** (-np.arange(0, width, 2) / width))
    first, second = np.split(array_PHTK, 2, -1)
    cos, sin = np.cos(angle_TK), np.sin(angle_TK)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def normalize(array, norm):
    """Apply the RMS norm of Gemma 3, whose weights are stored less 1."""
    mean_square = (array**2).mean(-1, keepdims=True)
    return array / np.sqrt(mean_square + norm.eps) * (1 + np.float64(norm.weight.detach().numpy()))


def find_rotary_base(config, index):
    parameters = config.rope_parameters
    if 'rope_theta' not in parameters:
        parameters = parameters[config.layer_types[index]]
    assert parameters.get('rope_type', 'default') == 'default'
    return parameters['rope_theta']


def compute_heads(model, layers):
    """Return query, key and value, each LPHTK, as attention uses them.

    Queries are scaled so that scores are <q, k> / sqrt(K).
    """
    heads = {name: [] for name in 'qkv'}
    for index, (layer, layer_arrays) in enumerate(zip(model.model.layers, layers, strict=True)):
        attention, num_heads = layer.self_attn, layer_arrays['attention_PHTS'].shape[1]
        for name, arrays in heads.items():
            array_PHTK = (
                layer_arrays[name].reshape(*layer_arrays[name].shape[:2], -1, attention.head_dim).swapaxes(1, 2)
            )
            if name in 'qk':
                if norm := getattr(attention, f'{name}_norm', None):
                    array_PHTK = normalize(array_PHTK, norm)
                array_PHTK = rotate(array_PHTK, find_rotary_base(model.config, index))
            if name == 'q':
                array_PHTK = array_PHTK * attention.scaling * np.sqrt(attention.head_dim)
            arrays.append(array_PHTK.repeat(num_heads // array_PHTK.shape[1], 1))
    return [np.stack(arrays) for arrays in heads.values()]


def compute_expected_numbers(model, ids_PT):
    """Compute the numbers of the paper (sections 3 and 7.1) by their definitions."""
    layers = run_with_hooks(model, ids_PT)
    attention = np.stack([layer_arrays['attention_PHTS'] for layer_arrays in layers])
    residual = np.stack([layer_arrays['residual_PTD'] for layer_arrays in layers])
    query, key, value = compute_heads(model, layers)
    length = attention.shape[-1]

    score = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weight = np.where(attention > 0, np.exp(score - score.max(-1, keepdims=True)), 0)
    np.testing.assert_allclose(
        weight / weight.sum(-1, keepdims=True), attention, atol=2e-4
    )  # q and k are the right ones

    numbers = {}
    for k in (1, 2, 3):
        alpha = attention[..., k - 1 :, k - 1].sum(-1) / (length - k + 1)
        numbers |= {f'alpha/{k}': alpha.mean(), f'sink/{k}': 100 * (alpha > THRESHOLD).mean()}
    with np.errstate(divide='ignore', invalid='ignore'):
        numbers['entropy/row'] = -np.nansum(attention * np.log(attention), -1).mean()
    output = attention @ value
    norm = np.linalg.norm
    share = attention[..., 0] * norm(value[..., :1, :], axis=-1) / norm(output, axis=-1)
    numbers['contribution/1'] = share[..., 1:].mean()
    for layer, norm_T in enumerate(norm(residual, axis=-1).mean(1), 1):
        numbers[f'norm/ratio/{layer:02}'] = norm_T[0] / norm_T[1:].mean()
    for name, array in (('query', query), ('key', key), ('value', value)):
        first, other = norm(array, axis=-1)[..., 0].mean(), norm(array, axis=-1)[..., 1:].mean()
        numbers |= {f'norm/{name}/1': first, f'norm/{name}/other': other, f'norm/{name}/ratio': first / other}
    norm_products = norm(query, axis=-1)[..., :, None] * norm(key, axis=-1)[..., None, :]
    for name, matrix in (
        ('cos', query @ key.swapaxes(-1, -2) / norm_products),
        ('norms', norm_products),
        ('score', score),
    ):
        first = matrix[..., 1:, 0].mean()
        other = np.mean([matrix[..., i, 1 : i + 1].mean(-1) for i in range(1, length)])
        numbers |= {f'qk/{name}/1': first, f'qk/{name}/other': other, f'qk/{name}/difference': first - other}
    return numbers


def cut_texts(tokenizer, sources, num_texts, length):
    """Return the shortest beginnings of texts that have `length` tokens, and ids_PT without sinklab."""

    def encode(text):
        return tokenizer(text)['input_ids']

    texts = []
    for source in sources:
        if len(encode(source[: 20 * length])) >= length:
            size = next(size for size in range(20 * length + 1) if len(encode(source[:size])) >= length)
            texts.append(source[:size])
        if len(texts) == num_texts:
            break
    assert len(texts) == num_texts
    return texts, np.array([encode(text)[:length] for text in texts])


def check_numbers(ref, sources, num_texts, length):
    """Compare sinklab.open(ref).measure(...) with the numbers of the paper's definitions."""
    model, tokenizer = load_with_transformers(ref)
    texts, ids_PT = cut_texts(tokenizer, sources, num_texts, length)
    expected = compute_expected_numbers(model, ids_PT)
    opened = sinklab.open(ref)
    np.testing.assert_array_equal(opened.ids(texts), ids_PT)
    measured = opened.measure(text=texts)
    for name, number in expected.items():
        np.testing.assert_allclose(measured[name], number, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    return measured


def read_library():
    """Yield the source code of Python's standard library."""
    for path in sorted(Path(os.__file__).parent.glob('*.py')):
        yield path.read_text(encoding='utf-8')


@pytest.mark.parametrize('family', ['llama', 'gemma3_text'])
def test_numbers_of_tiny_model_match_formulas(family, tmp_path):
    config = open_families.make_config(family)
    open_families.save_model(config, tmp_path, open_models.make_tokenizer_json())
    measured = check_numbers(f'hf:{tmp_path}', read_library(), 4, 24)
    assert measured['alpha/1'] > 0


@pytest.mark.parametrize('ref', PRETRAINED_MODELS or [None])
def test_numbers_of_pretrained_model_match_formulas(ref):
    if ref is None:
        pytest.skip(
            f'no pretrained model in {" or ".join(map(str, MODEL_DIRS))}; SINKLAB_TEST_MODELS=DIR names a folder '
            'with GGUF files or folders of transformers'
        )
    measured = check_numbers(ref, read_library(), NUM_TEXTS, LENGTH)
    assert measured['sink/1'] > 10
