"""Dense and chunked attention compared with released modules of the authors on random weights."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_specs import make_attention_config, make_case_params, make_tiny_spec

from sinklab.attn import chunked
from sinklab.metrics import sink
from sinklab.model.positions import SinusoidalPosition
from sinklab.model.transformer import compute_logits
from sinklab.train import state

pytestmark = pytest.mark.slow  # the shapes of every operation are compiled
ARRAYS_DIR = Path(__file__).with_name('released')
LENGTH, HEADS = 24, 4
SIZES = {
    'model__width': 32,
    'model__head_width': 8,
    'model__ffn_width': 48,
    'model__vocabulary': 64,
    'data__length': LENGTH,
    'data__tokenizer': 'neox.json',  # a tokenizer trained here has more ids
}
# The released code normalizes the rows of attention for these normalizers.
NORMALIZERS_WITH_NORMALIZED_ROWS = ('none', 'clamped')


def make_spec(**changes):
    return make_tiny_spec(**SIZES, **changes)


def make_operation_spec(*pair, feature_map='identity'):
    spec, attention_config = make_spec(), dataclasses.replace(make_attention_config(*pair), feature_map=feature_map)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, attention=attention_config))


VARIANTS = {
    'default': make_spec(),
    'nope': make_spec(model__position='none'),
    'absolute': make_spec(model__position='absolute'),
    'learnable': make_spec(model__position='learned'),
    'relative': make_spec(model__position='relative_paper_code'),
    'alibi': make_spec(model__position='alibi'),
    'prefix3': make_spec(model__mask__prefix=3),
    'relu': make_spec(model__ffn='relu'),
    'gelu': make_spec(model__ffn='gelu'),
    'geglu': make_spec(model__ffn='geglu'),
    'k_head_bias': make_spec(model__learned_kv__kind='k', model__learned_kv__value='zero'),
    'kv_bias': make_spec(model__learned_kv__kind='kv', model__learned_kv__shared=True),
    'v_bias': make_spec(model__learned_kv__kind='v', model__learned_kv__shared=True),
    'sim_sigmoid_norm': make_operation_spec('sigmoid', 'sum'),
    'sim_sigmoid_no_norm': make_operation_spec('sigmoid', 'none'),
    'sim_elu_no_norm': make_operation_spec('elu1', 'none'),
    'elu_norm': make_operation_spec('identity', 'sum', feature_map='elu1'),
    'elu_no_norm': make_operation_spec('identity', 'none', feature_map='elu1'),
    'linear_no_norm': make_operation_spec('identity', 'none'),
    'mlp_norm': make_operation_spec('identity', 'clamped', feature_map='mlp'),
}


def load_released_arrays(name):
    """Return all arrays of a variant, with the weights that all variants share."""
    result = {}
    for variant in ('default', name):
        with np.load(ARRAYS_DIR / f'{variant}.npz') as arrays:
            result |= dict(arrays)
    return result


def make_parameters(weights, spec):
    """Return the released weights in the layout of sinklab."""
    layers = [make_layer(weights, layer, spec) for layer in range(2)]
    result = dict(
        embedding_VD=weights['transformer.wte.weight'],
        head_VD=weights['lm_head.weight'],
        norm=dict(gain_D=weights['transformer.ln_f.weight']),
        blocks=jax.tree.map(lambda *leaves: np.stack(leaves), *layers),
    )
    return result | ({'position': dict(table_TD=weights['wpe.weight'])} if spec.model.position == 'learned' else {})


def make_layer(weights, layer, spec):
    prefix = f'transformer.h.{layer}.'
    layer_weights = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
    norms = {
        f'{branch}_norms': dict(before=dict(gain_D=layer_weights[f'norm_{norm_number}.weight']))
        for norm_number, branch in enumerate(('attention', 'ffn'), 1)
    }
    # Rows of a PyTorch linear weight are its outputs: for each head, query, key and value.
    query, key, value = np.moveaxis(layer_weights['attn.attn.weight'].reshape(HEADS, 3, 8, 32), (1, 3), (0, 1))
    attention_params = dict(query_DHK=query, key_DHK=key, value_DHK=value)
    attention_params |= dict(output_HKD=layer_weights['attn.proj.weight'].T.reshape(HEADS, 8, 32))
    column_params = {
        f'{sinklab_name}_HK': layer_weights[f'attn.{released_name}_bias'].reshape(-1, 8)
        for sinklab_name, released_name in (('key', 'k'), ('value', 'v'))
        if f'attn.{released_name}_bias' in layer_weights
    }
    feature_map_params = {
        sinklab_name: layer_weights[f'attn.kernel_{released_name}.weight'].T
        for sinklab_name, released_name in FEATURE_MAP_NAMES
        if f'attn.kernel_{released_name}.weight' in layer_weights
    }
    attention_params |= ({'learned_kv': column_params} if column_params else {}) | (
        {'feature_map': feature_map_params} if feature_map_params else {}
    )
    ffn = {
        sinklab_name: layer_weights[f'mlp.{released_name}.weight'].T
        for sinklab_name, released_name in FFN_NAMES[spec.model.ffn].items()
    }
    return dict(attention=attention_params, ffn=ffn, **norms)


FEATURE_MAP_NAMES = (('in_KK', 'mlp1'), ('out_KK', 'mlp2'))
MLP_NAMES = dict(in_DF='fc', out_FD='proj')
FFN_NAMES = {
    'swiglu': dict(gate_DF='swiglu.w1', in_DF='swiglu.w2', out_FD='swiglu.w3'),
    'geglu': dict(gate_DF='fc_1', in_DF='fc_2', out_FD='proj'),
    'relu': MLP_NAMES,
    'gelu': MLP_NAMES,
}


def make_model(spec, weights):
    """Return a sinklab model with the released weights."""
    structure, abstract = state.make_abstract_model(spec)
    params = jax.tree.map(jnp.asarray, make_parameters(weights, spec))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, nnx.to_pure_dict(abstract))
    return nnx.merge(structure, params)


def add_rounded_sinusoids(weights):
    """Add a position table of sinusoids, rounded to bfloat16 as in the released code."""
    sinusoid_TD = SinusoidalPosition(None, LENGTH, None).embed(jnp.zeros((1, LENGTH, 32)), np.arange(LENGTH)[None])[0]
    return weights | {'wpe.weight': np.float32(sinusoid_TD.astype(jnp.bfloat16))}


def load_case(name):
    """Return (spec, released arrays) of a variant; rounded sinusoids become a learned table."""
    spec, weights = VARIANTS[name], load_released_arrays(name)
    return (VARIANTS['learnable'], add_rounded_sinusoids(weights)) if name == 'absolute' else (spec, weights)


def assert_close(actual, reference):
    np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', VARIANTS)
def test_dense_attention_matches_released_logits_and_attention(name):
    spec, weights = load_case(name)
    with jax.disable_jit():
        logits_BTV, captured = make_model(spec, weights)(weights['ids'], capture=True)
    attention_LBHTS = captured.attention_BHTS
    has_normalized_rows = spec.model.attention.normalizer in NORMALIZERS_WITH_NORMALIZED_ROWS
    assert_close(logits_BTV, weights['logits'])
    assert_close(
        sink.normalize_rows(attention_LBHTS) if has_normalized_rows else attention_LBHTS,
        weights['attn'][..., -LENGTH:, :],
    )


@pytest.mark.parametrize('name', make_case_params(VARIANTS, list(VARIANTS)[::2]))
def test_chunked_attention_matches_released_logits_and_key_means(name, monkeypatch):
    monkeypatch.setattr(chunked, 'CHUNK_SIZE', 8)
    spec, weights = load_case(name)
    with jax.disable_jit():
        model = make_model(spec, weights)
        hidden_BTD, captured = model.compute_hidden(weights['ids'], backend='chunked', num_first_keys=LENGTH)
        assert_close(compute_logits(hidden_BTD, model.head_VD[...]), weights['logits'])
    key_attention_sums = captured.key_attention_sums
    has_normalized_rows = spec.model.attention.normalizer in NORMALIZERS_WITH_NORMALIZED_ROWS
    actual_LBHS = key_attention_sums.share_BHS if has_normalized_rows else key_attention_sums.raw_BHS
    assert_close(actual_LBHS / LENGTH, weights['attn'][..., -LENGTH:, :].mean(-2))


def test_exact_sinusoids_differ_from_released_logits_by_table_rounding():
    """Expect rounding of at most 2^-9 of an entry, in an embedding with entries of order 1/4."""
    weights = load_released_arrays('absolute')
    with jax.disable_jit():
        logits_BTV, _ = make_model(VARIANTS['absolute'], weights)(weights['ids'])
    max_error = np.abs(logits_BTV - weights['logits']).max()
    assert 1e-4 < max_error < 2e-2
