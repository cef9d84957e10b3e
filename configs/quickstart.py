"""Quickstart: a sink emerges in minutes on real text on a laptop; without a normalizer it does not.

    make quickstart
    sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax
    sinklab sweep --config=configs/quickstart.py --seeds=0,1,2 --jobs=2 --workdir=runs/rows

The rows are those of other tables, at the size `quickstart` of sizes.py, where `softmax` also has a fixed first
token. `make quickstart` trains softmax and sigmoid_minus_log_t, which differ in the attention operation only.
docs/results/quickstart.md has the results of eight seeds. The row `sigmoid` is that of the paper, without the offset
of -log T. `sinklab claims` tests other claims of the paper at this size; docs/results/claims.md has the verdicts.
"""

from sinklab.configs import (
    attention,
    data,
    learned_kv,
    optimization,
)
from sinklab.configs.table import table

ROWS = {
    **{name: attention.ROWS[name] for name in ('softmax', 'sigmoid_minus_log_t', 'sigmoid', 'sigmoid_normalized')},
    **{name: learned_kv.ROWS[name] for name in ('k', 'kv', 'sink_token', 'v')},
    'fixed_2': data.ROWS['fixed_2'],
    **{name: optimization.ROWS[name] for name in ('decay_0.01', 'rate_2e-4_20k')},
}

get_config = table(ROWS, default_size='quickstart')
