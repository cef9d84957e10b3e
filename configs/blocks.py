"""Transformer blocks: how the FFN, norms, heads and gates affect the sink.

    sinklab train --config=configs/blocks.py:post_norm --workdir=runs/post_norm

The baseline has pre-norm and 8 heads whose outputs are concatenated. The quickstart size has 8 heads in this file, so
that the rows can divide them as in the paper. Norms and gates come from other papers, whose sink numbers have other
thresholds and models.

Decided:

- The released code scales the initial values of an FFN's last matrix by depth only in SwiGLU, so Table 8 also
  compares initializations. The rows `*_even` scale it in every FFN.
- All FFNs have d_ff = 1536, so FFNs without a gate have two thirds of the parameters of SwiGLU.
- `add` adds head outputs with values as wide as a head (reading A). Its shapes are those that the paper prints, so
  the published number belongs to `add`. `add_wide` has values as wide as the model (reading B).
"""

from sinklab.configs.publications import GU_V1
from sinklab.configs.sizes import QUICKSTART, SIZES, SMOKE
from sinklab.configs.table import scale_with_size, table

EIGHT_HEADS = {'model.heads': 8, 'model.head_width': 8}


def make_row(diff, sink, loss, source, **fields):
    return dict(diff=diff, published={'sink/1': sink, 'valid/loss': loss}, source=source, **fields)


def make_unpublished_row(diff, source, note):
    return dict(diff=diff, published={}, source=source, note=note)


def make_ffn_row(name, sink, loss):
    return make_row({'model.ffn': name}, sink, loss, f'{GU_V1}, Table 8')


def make_even_initialization_row(name):
    return make_unpublished_row(
        {'model.ffn': name, 'model.initialization': 'released_even'},
        f'none: {GU_V1}, Table 8, with equal initialization',
        'No result was published. The last matrix is scaled by depth, as in the table only for SwiGLU.',
    )


def make_heads_row(count, width, sink, loss):
    diff = scale_with_size({'model.heads': count, 'model.head_width': width})
    return make_row(diff, sink, loss, f'{GU_V1}, Table 9')


def make_gate_row(name, attention, activation, mean, perplexity):
    published = dict(
        first_token_attention=attention, max_activation=activation, mean_gate=mean, perplexity=perplexity
    )
    return dict(diff={'model.gate': name}, published=published, source=QIU_SOURCE, note=UNGATED_NOTE)


SUN_SOURCE = 'Sun et al., 2603.05498 (sink ratio by a threshold of their own)'
PRE_NORM_NOTE = 'Pre-norm has a sink ratio of 46.0 and a spike of 3818 there.'
QIU_SOURCE = 'Qiu et al., 2505.06708 (mixture of experts 15A2B, 400B tokens)'
NARROW_NOTE = 'At a fixed model width, heads of width 8 have a sink ratio of 4.1 there, and of width 128 of 46.0.'
UNGATED_NOTE = 'Without a gate: first-token attention 0.467, largest activation 1053, perplexity 6.026.'

ROWS = {
    'swiglu': make_row({}, 18.18, 3.73, f'{GU_V1}, Tables 8 and 9'),
    'relu': make_ffn_row('relu', 16.90, 3.82),
    'gelu': make_ffn_row('gelu', 14.76, 3.79),
    'swish': make_ffn_row('swish', 17.89, 3.80),
    'reglu': make_ffn_row('reglu', 13.88, 3.75),
    'geglu': make_ffn_row('geglu', 17.86, 3.73),
    **{f'{name}_even': make_even_initialization_row(name) for name in ('relu', 'gelu', 'swish', 'reglu', 'geglu')},
    'post_norm': dict(
        diff={'model.norm': 'post'},
        published={'sink/1': 13.54},
        source=f'{GU_V1}, appendix D.3',
        note='No loss was published.',
    ),
    'sandwich_norm': dict(
        diff={'model.norm': 'sandwich'},
        published={'sink_ratio': 44.7, 'spike': 520},
        source=SUN_SOURCE,
        note=PRE_NORM_NOTE,
    ),
    'qk_norm': dict(
        diff={'model.qk_norm': True},
        published={'sink_ratio': 42.0, 'spike': 92},
        source=SUN_SOURCE,
        note=PRE_NORM_NOTE,
    ),
    'gated_norm': make_unpublished_row(
        {'model.norm_kind': 'gated_rms'},
        'Qiu et al., 2601.22966',
        'A gate of rank 16 in each norm, which mitigates outliers by its abstract. No sink number is known here.',
    ),
    'dynamic_tanh': dict(
        diff={'model.norm_kind': 'dynamic_tanh'},
        published={'sink_ratio': 61, 'spike': 153},
        source=SUN_SOURCE,
        note=PRE_NORM_NOTE,
    ),
    'head_norm': dict(
        diff={'model.head_norm': True},
        published={'loss_at_152m': 2.742},
        source='2605.06611 (152M, 4 seeds)',
        note='Without head norm 2.781. The sink and its spikes are suppressed.',
    ),
    'heads_4': make_heads_row(4, 192, 10.68, 3.74),
    'heads_2': make_heads_row(2, 384, 12.95, 3.76),
    'heads_1': make_heads_row(1, 768, 19.50, 3.78),
    **{
        f'heads_{count}': make_unpublished_row(
            scale_with_size({'model.heads': count, 'model.head_width': 768 // count}),
            SUN_SOURCE,
            NARROW_NOTE,
        )
        for count in (16, 32)
    },
    'xsa': make_unpublished_row(
        {'model.exclusive': 'fixed'},
        'Zhai, 2603.09078 (0.7B to 2.7B, 100B tokens)',
        'Exclusive self-attention. Better on eight tasks at each size; no sink result was published.',
    ),
    'xsa_gated': make_unpublished_row(
        {'model.exclusive': 'gated'},
        'modded-nanogpt, pull request 264 (124M, 10 runs)',
        'Exclusive self-attention with a learned share of each head. Its loss is 3.279, without it 3.283.',
    ),
    'value_residual': make_unpublished_row(
        {'model.value_residual': True},
        'Zhou et al., 2410.17897 (82M to 468M)',
        'Avoids value drain; 13.3 % fewer parameters for the same loss. No sink number was published.',
    ),
    'differential': make_unpublished_row(
        {'model.combination': 'differential'} | scale_with_size({'model.heads': 16, 'model.kv_heads': 8}),
        'Ye et al., Differential Transformer V2 (2026)',
        'Twice as many queries; pairs of heads with the same key are subtracted. No sink number was published.',
    ),
    'add': make_row({'model.combination': 'add'}, 21.76, 3.74, f'{GU_V1}, Table 9'),
    'add_wide': make_unpublished_row(
        {'model.combination': 'add_wide'},
        f'the other reading of {GU_V1}, Table 9',
        'Values as wide as the model. The code was not released; the published number is in the row `add`.',
    ),
    'gate_elementwise': make_gate_row('elementwise', 0.048, 94, 0.116, 5.761),
    'gate_headwise': make_gate_row('headwise', 0.073, 98, 0.172, 5.792),
    'gate_shared': make_gate_row('shared', 0.301, 286, 0.271, 5.801),
    'gate_value': make_gate_row('value', 0.297, 125, 0.221, 5.820),
    'gate_value_state': dict(
        diff={'model.gate': 'value_state'},
        published={'perplexity': 15.49, 'kurtosis': 34.8},
        source='2510.09017 (OPT-125m)',
        note='Without a gate: perplexity 15.95, kurtosis 2177.',
    ),
}

get_config = table(
    ROWS,
    sizes=SIZES
    | {'quickstart': QUICKSTART | EIGHT_HEADS, 'smoke': SMOKE | {'model.heads': 8, 'model.head_width': 2}},
)
