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

from sinklab.configs.publications import GU_V1, PULL_264, QIU_2026, SUN, YE, ZHAI, ZHOU
from sinklab.configs.sizes import QUICKSTART, SIZES, SMOKE
from sinklab.configs.table import make_row, scale_with_size, table

EIGHT_HEADS = {'model.heads': 8, 'model.head_width': 8}


def make_heads_row(count, **fields):
    return make_row(scale_with_size({'model.heads': count, 'model.head_width': 768 // count}), **fields)


def make_gate_row(name, attention, activation, mean, perplexity):
    return make_row(
        {'model.gate': name},
        'Qiu et al., 2505.06708 (mixture of experts 15A2B, 400B tokens)',
        note='Without a gate: first-token attention 0.467, largest activation 1053, perplexity 6.026.',
        first_token_attention=attention,
        max_activation=activation,
        mean_gate=mean,
        perplexity=perplexity,
    )


TABLE_8, TABLE_9 = f'{GU_V1}, Table 8', f'{GU_V1}, Table 9'
SUN_SOURCE = f'{SUN} (sink ratio by a threshold of their own)'
PRE_NORM_NOTE = 'Pre-norm has a sink ratio of 46.0 and a spike of 3818 there.'
NARROW_NOTE = 'At a fixed model width, heads of width 8 have a sink ratio of 4.1 there, and of width 128 of 46.0.'

ROWS = {
    'swiglu': make_row({}, f'{GU_V1}, Tables 8 and 9', 18.18, 3.73),
    'relu': make_row({'model.ffn': 'relu'}, TABLE_8, 16.90, 3.82),
    'gelu': make_row({'model.ffn': 'gelu'}, TABLE_8, 14.76, 3.79),
    'swish': make_row({'model.ffn': 'swish'}, TABLE_8, 17.89, 3.80),
    'reglu': make_row({'model.ffn': 'reglu'}, TABLE_8, 13.88, 3.75),
    'geglu': make_row({'model.ffn': 'geglu'}, TABLE_8, 17.86, 3.73),
    **{
        f'{name}_even': make_row(
            {'model.ffn': name, 'model.initialization': 'released_even'},
            f'none: {TABLE_8}, with equal initialization',
            note='No result was published. The last matrix is scaled by depth, as in the table only for SwiGLU.',
        )
        for name in ('relu', 'gelu', 'swish', 'reglu', 'geglu')
    },
    'post_norm': make_row(
        {'model.norm': 'post'}, f'{GU_V1}, appendix D.3', sink=13.54, note='No loss was published.'
    ),
    'sandwich_norm': make_row({'model.norm': 'sandwich'}, SUN_SOURCE, note=PRE_NORM_NOTE, sink_ratio=44.7, spike=520),
    'qk_norm': make_row({'model.qk_norm': True}, SUN_SOURCE, note=PRE_NORM_NOTE, sink_ratio=42.0, spike=92),
    'gated_norm': make_row(
        {'model.norm_kind': 'gated_rms'},
        QIU_2026,
        note='A gate of rank 16 in each norm, which mitigates outliers by its abstract. No sink number is known.',
    ),
    'dynamic_tanh': make_row(
        {'model.norm_kind': 'dynamic_tanh'}, SUN_SOURCE, note=PRE_NORM_NOTE, sink_ratio=61, spike=153
    ),
    'head_norm': make_row(
        {'model.head_norm': True},
        '2605.06611 (152M, 4 seeds)',
        note='Without head norm 2.781. The sink and its spikes are suppressed.',
        loss_at_152m=2.742,
    ),
    'heads_4': make_heads_row(4, source=TABLE_9, sink=10.68, loss=3.74),
    'heads_2': make_heads_row(2, source=TABLE_9, sink=12.95, loss=3.76),
    'heads_1': make_heads_row(1, source=TABLE_9, sink=19.50, loss=3.78),
    'heads_16': make_heads_row(16, source=SUN_SOURCE, note=NARROW_NOTE),
    'heads_32': make_heads_row(32, source=SUN_SOURCE, note=NARROW_NOTE),
    'xsa': make_row(
        {'model.exclusive': 'fixed'},
        f'{ZHAI} (0.7B to 2.7B, 100B tokens)',
        note='Exclusive self-attention. Better on eight tasks at each size; no sink result was published.',
    ),
    'xsa_gated': make_row(
        {'model.exclusive': 'gated'},
        f'{PULL_264} (124M, 10 runs)',
        note='Exclusive self-attention with a learned share of each head. Its loss is 3.279, without it 3.283.',
    ),
    'value_residual': make_row(
        {'model.value_residual': True},
        f'{ZHOU} (82M to 468M)',
        note='Avoids value drain; 13.3 % fewer parameters for the same loss. No sink number was published.',
    ),
    'differential': make_row(
        {'model.combination': 'differential'} | scale_with_size({'model.heads': 16, 'model.kv_heads': 8}),
        YE,
        note='Twice as many queries; pairs of heads with the same key are subtracted. A loss 0.02 to 0.03 lower '
        'after a trillion tokens; no sink number was published.',
    ),
    'add': make_row({'model.combination': 'add'}, TABLE_9, 21.76, 3.74),
    'add_wide': make_row(
        {'model.combination': 'add_wide'},
        f'the other reading of {TABLE_9}',
        note='Values as wide as the model. The code was not released; the published number is in the row `add`.',
    ),
    'gate_elementwise': make_gate_row('elementwise', 0.048, 94, 0.116, 5.761),
    'gate_headwise': make_gate_row('headwise', 0.073, 98, 0.172, 5.792),
    'gate_shared': make_gate_row('shared', 0.301, 286, 0.271, 5.801),
    'gate_value': make_gate_row('value', 0.297, 125, 0.221, 5.820),
    'gate_value_state': make_row(
        {'model.gate': 'value_state'},
        '2510.09017 (OPT-125m)',
        note='Without a gate: perplexity 15.95, kurtosis 2177.',
        perplexity=15.49,
        kurtosis=34.8,
    ),
}

get_config = table(
    ROWS,
    sizes=SIZES
    | {'quickstart': QUICKSTART | EIGHT_HEADS, 'smoke': SMOKE | {'model.heads': 8, 'model.head_width': 2}},
)
