"""Options of a model, combinations of options, and tokens for the tests of whole models."""

import numpy as np
from tiny_specs import OPERATIONS, make_attention_config

LENGTH = 12
TOKENS = 1 + np.random.default_rng(0).permutation(299)[: 2 * LENGTH].reshape(2, LENGTH).astype(np.int32)
TOKENS[0, 4], TOKENS[1, 6] = 0, 0  # end-of-text tokens


def make_operation_changes(similarity, normalizer, **options):
    attention_config = make_attention_config(similarity, normalizer, **options)
    names = ('similarity', 'normalizer', 'feature_map', 'power')
    return {f'model__attention__{name}': getattr(attention_config, name) for name in names}


def make_model_changes(**changes):
    """Return changes of fields of the model, with __ for the dot."""
    return {f'model__{name}': value for name, value in changes.items()}


POSITIONS = (
    *('none', 'absolute', 'learned', 'relative_paper_code', 'relative_paper_printed'),
    *('relative_paper_negative', 'relative_t5', 'alibi', 'rotary'),
)
RESET_DOCUMENTS = dict(model__mask__document=True, data__positions='reset')
ROTARY_LLAMA3 = make_model_changes(
    rotary__base=500.0,
    rotary__scaling='llama3',
    rotary__factor=4.0,
    rotary__slow=0.5,
    rotary__fast=2.0,
    rotary__length=24,
    head_width=8,
)
GEMMA3 = make_model_changes(
    layers=3,
    kv_heads=2,
    norm='sandwich',
    qk_norm=True,
    ffn='geglu_tanh',
    scaled_embedding=True,
    mask__window=3,
    global_layers__every=2,
    global_layers__rotary__base=500.0,
)
K_ZERO = make_model_changes(learned_kv__kind='k', learned_kv__value='zero')
SIGMOID = make_operation_changes('sigmoid', 'none')
OPTIONS = {
    **{
        f'{similarity}-{normalizer}': make_operation_changes(similarity, normalizer)
        for similarity, normalizer in OPERATIONS
    },
    'p_norm of a third': make_operation_changes('exp', 'p_norm', power=1 / 3),
    'kernel elu1': make_model_changes(attention__feature_map='elu1'),
    'kernel mlp': make_operation_changes('identity', 'none') | make_model_changes(attention__feature_map='mlp'),
    'kernel mlp, clamped': make_operation_changes('identity', 'clamped')
    | make_model_changes(attention__feature_map='mlp'),
    'gain': make_model_changes(attention__gain=0.1),
    'clipped softmax': make_model_changes(attention__gamma=-0.1, attention__zeta=1.5),
    'offset': SIGMOID | make_model_changes(attention__offset=-1.0),
    **{f'position {kind}': make_model_changes(position=kind) for kind in POSITIONS},
    'rotary base': make_model_changes(rotary__base=50.0),
    'rotary linear': make_model_changes(rotary__scaling='linear', rotary__factor=2.5),
    'rotary llama3': ROTARY_LLAMA3,
    'global layers without positions': make_model_changes(
        layers=3, global_layers__every=2, global_layers__position='none'
    ),
    'scaled embedding': make_model_changes(scaled_embedding=True, tied=True),
    'kv heads': make_model_changes(kv_heads=2),
    'one kv head': make_model_changes(kv_heads=1),
    'qkv bias': make_model_changes(qkv_bias=True),
    'tied': make_model_changes(tied=True),
    'alibi of 6 heads': make_model_changes(position='alibi', heads=6),
    **{
        f'ffn {kind}': make_model_changes(ffn=kind)
        for kind in ('relu', 'gelu', 'swish', 'reglu', 'geglu', 'geglu_tanh', 'swiglu')
    },
    **{f'norm {kind}': make_model_changes(norm=kind) for kind in ('pre', 'post', 'sandwich', 'res_post')},
    **{f'norm {kind}': make_model_changes(norm_kind=kind) for kind in ('gated_rms', 'dynamic_tanh')},
    'forget gate': make_model_changes(forget_gate=True, position='none'),
    'value residual': make_model_changes(value_residual=True),
    **{f'exclusive {kind}': make_model_changes(exclusive=kind) for kind in ('fixed', 'gated')},
    'differential': make_model_changes(combination='differential', kv_heads=2),
    'norm_epsilon': make_model_changes(norm_epsilon=0.5),
    'qk_norm': make_model_changes(qk_norm=True),
    'head_norm': make_model_changes(head_norm=True),
    **{f'heads {kind}': make_model_changes(combination=kind) for kind in ('add', 'add_wide')},
    **{
        f'gate {kind}': make_model_changes(gate=kind)
        for kind in ('elementwise', 'headwise', 'shared', 'value', 'value_state')
    },
    'sink token': make_model_changes(learned_kv__kind='sink_token'),
    'k, zero': K_ZERO,
    'k, first': make_model_changes(learned_kv__kind='k', learned_kv__value='first', learned_kv__value_norm=2.0),
    'k, uniform': make_model_changes(learned_kv__kind='k', learned_kv__value='uniform', learned_kv__value_norm=2.0),
    'k, shared': K_ZERO | make_model_changes(learned_kv__shared=True),
    'k, 2 dimensions': K_ZERO | make_model_changes(learned_kv__key_width=2),
    'kv': make_model_changes(learned_kv__kind='kv'),
    'kv, shared': make_model_changes(learned_kv__kind='kv', learned_kv__shared=True),
    'kv, 1 dimension': make_model_changes(learned_kv__kind='kv', learned_kv__key_width=1),
    'v': make_model_changes(learned_kv__kind='v'),
    'v, shared': make_model_changes(learned_kv__kind='v', learned_kv__shared=True),
    'logit': make_model_changes(learned_kv__kind='logit'),
    'logit, shared': make_model_changes(learned_kv__kind='logit', learned_kv__shared=True),
    'prefix': make_model_changes(mask__prefix=3),
    'window': make_model_changes(mask__window=3),
    'block': make_model_changes(mask__block=5),
    'documents': make_model_changes(mask__document=True),
}
COMBINATIONS = {
    'sigmoid, kv': SIGMOID | make_model_changes(learned_kv__kind='kv'),
    'linear, kv, add_wide': make_operation_changes('identity', 'none')
    | make_model_changes(learned_kv__kind='kv', combination='add_wide'),
    'softpick, logit': make_operation_changes('softpick', 'sum') | make_model_changes(learned_kv__kind='logit'),
    'off by one, k, offset': make_operation_changes('exp', 'plus_one')
    | K_ZERO
    | make_model_changes(attention__offset=0.5),
    'relu by its count, kv, window': make_operation_changes('relu', 'count')
    | make_model_changes(learned_kv__kind='kv', mask__window=4),
    'kernel elu1, k': make_model_changes(attention__feature_map='elu1') | K_ZERO,
    'alibi, k': make_model_changes(position='alibi') | K_ZERO,
    't5, logit': make_model_changes(position='relative_t5', learned_kv__kind='logit'),
    'none, logit': make_model_changes(position='none', learned_kv__kind='logit'),
    'learned, sink token': make_model_changes(position='learned', learned_kv__kind='sink_token'),
    'alibi, sink token, documents': make_model_changes(
        position='alibi', learned_kv__kind='sink_token', mask__document=True
    ),
    'post, sink token, prefix': make_model_changes(norm='post', learned_kv__kind='sink_token', mask__prefix=3),
    'window, kv, qk_norm': make_model_changes(learned_kv__kind='kv', qk_norm=True, mask__window=3),
    'prefix, window': make_model_changes(mask__prefix=3, mask__window=5),
    'head norm, v, value gate': make_model_changes(head_norm=True, learned_kv__kind='v', gate='value'),
    'add, kv shared, gate of values': make_model_changes(
        combination='add', learned_kv__kind='kv', learned_kv__shared=True, gate='value_state', norm='sandwich'
    ),
    **{
        f'documents, reset, {kind}': RESET_DOCUMENTS | make_model_changes(position=kind)
        for kind in ('absolute', 'learned')
    },
    **{
        f'reset, {kind}': make_model_changes(position=kind) | dict(data__positions='reset')
        for kind in ('absolute', 'rotary')
    },
    'documents, reset, sink token': RESET_DOCUMENTS | make_model_changes(learned_kv__kind='sink_token'),
    'kv heads, biases, qk_norm, kv, value gate': make_model_changes(
        kv_heads=2, qkv_bias=True, qk_norm=True, learned_kv__kind='kv', gate='value'
    ),
    'global layers, Gemma 3': GEMMA3,
    'global layers, linear, sink token, documents': make_model_changes(
        head_width=8,
        layers=4,
        learned_kv__kind='sink_token',
        mask__window=4,
        mask__document=True,
        global_layers__every=3,
        global_layers__rotary__base=500.0,
        global_layers__rotary__scaling='linear',
        global_layers__rotary__factor=4.0,
    ),
    'kv heads, tied, add_wide': make_model_changes(kv_heads=2, tied=True, combination='add_wide'),
    'value residual, sink token, kv heads, value gate': make_model_changes(
        value_residual=True, learned_kv__kind='sink_token', kv_heads=2, gate='value', norm='sandwich'
    ),
    'forget gate, kv, kv heads': make_model_changes(forget_gate=True, learned_kv__kind='kv', kv_heads=2),
    'exclusive, kv, value gate, kv heads': make_model_changes(
        exclusive='fixed', learned_kv__kind='kv', gate='value', kv_heads=2
    ),
    'differential, sandwich of gated norms, sink token': make_model_changes(
        combination='differential', kv_heads=1, norm='sandwich', norm_kind='gated_rms', learned_kv__kind='sink_token'
    ),
    'kernel elu1 normalized, k': make_operation_changes('identity', 'sum') | K_ZERO,
}
