"""Learned KV: whether sink tokens and KV, K and V biases take the sink from the first token.

    sinklab train --config=configs/learned_kv.py:kv --workdir=runs/kv

The rows add a column to the attention matrix. The key of the column is not rotated, and every query sees it. Sink_*
measures the column, over the queries of the text and, as in the released code, one query of the column itself. A sink
token is at position 0, and the text begins at position 1.

Some rows have a fixed value: zero in `k`, M e_1 in `k_first_M`, and M (1, ..., 1) / sqrt(K) in `k_uniform_M`. In
`k_width_N` only the first N dimensions of the key are learned. At the quickstart's head width of 16, the rows
`k_width_1` to `k_width_8` are the same.

Decided: the first N dimensions are those of the released half-split rotation, which rotates dimension i together with
i + K/2. The learned key thus meets N different frequencies of the queries, the fastest ones, up to N = K/2. In the
interleaved layout of equation 10 it would meet N/2 pairs.

The header of Table 11 is misprinted. The order of its columns is not shared, shared, not shared, shared, as Table 3
shows.
"""

from sinklab.configs.publications import GU_ICLR, GU_V1
from sinklab.configs.table import make_row, scale_with_size, table

TABLE_3 = f'{GU_V1}, Table 3'


def make_key_row(kind, star, sink, loss, source=TABLE_3, key_width=None, **fields):
    diff = {f'model.learned_kv.{name}': value for name, value in dict(kind=kind, **fields).items()}
    if key_width:
        diff |= scale_with_size({'model.learned_kv.key_width': key_width})
    return make_row(diff, source, sink, loss, **{'sink/star': star})


def make_shared_row(kind, star, sink, loss, **fields):
    return make_key_row(
        kind, star, sink, loss, f'{GU_V1}, Table 11 (its header is misprinted)', shared=True, **fields
    )


def make_fixed_value_row(value, norm, star, sink, loss):
    return make_key_row('k', star, sink, loss, f'{GU_V1}, Table 10', value=value, value_norm=norm)


def make_narrow_key_row(width, star, sink, loss):
    return make_key_row('k', star, sink, loss, f'{GU_ICLR}, Table 13', value='zero', key_width=width)


ROWS = {
    'none': make_row({}, TABLE_3, 18.18, 3.73),
    'sink_token': make_key_row('sink_token', 74.12, 0.00, 3.72),
    'kv': make_key_row('kv', 72.76, 0.04, 3.72),
    'k': make_key_row('k', 73.34, 0.00, 3.72, value='zero'),
    'v': make_row({'model.learned_kv.kind': 'v'}, TABLE_3, 17.53, 3.73),
    'kv_shared': make_shared_row('kv', 56.61, 12.44, 3.72),
    'k_shared': make_shared_row('k', 68.31, 0.23, 3.72, value='zero'),
    'k_first_1': make_fixed_value_row('first', 1.0, 70.03, 0.06, 3.72),
    'k_first_5': make_fixed_value_row('first', 5.0, 44.43, 3.71, 3.72),
    'k_first_20': make_fixed_value_row('first', 20.0, 1.51, 25.88, 3.71),
    'k_uniform_1': make_fixed_value_row('uniform', 1.0, 69.74, 2.15, 3.72),
    'k_uniform_5': make_fixed_value_row('uniform', 5.0, 27.99, 5.93, 3.72),
    'k_uniform_20': make_fixed_value_row('uniform', 20.0, 0.00, 11.21, 3.73),
    'k_width_1': make_narrow_key_row(1, 32.18, 4.74, 3.73),
    'k_width_2': make_narrow_key_row(2, 30.88, 4.96, 3.72),
    'k_width_4': make_narrow_key_row(4, 30.94, 4.39, 3.72),
    'k_width_8': make_narrow_key_row(8, 31.39, 4.54, 3.73),
    'k_width_16': make_narrow_key_row(16, 23.30, 2.19, 3.73),
    'k_width_32': make_narrow_key_row(32, 51.23, 1.94, 3.73),
    'k_width_64': make_narrow_key_row(64, 69.19, 0.04, 3.72),
    'logit': make_row(
        {'model.learned_kv.kind': 'logit'},
        'gpt-oss (OpenAI, 2025)',
        note='A learned score without key and value. No sink result was published.',
    ),
}

get_config = table(ROWS)
