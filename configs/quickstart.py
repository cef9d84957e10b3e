"""A sink emerges on a laptop, on real text, in minutes; without a normalizer it does not.

    make quickstart
    sinklab train --config=configs/quickstart.py:softmax --workdir=runs/quickstart/softmax --remat
    sinklab sweep --config=configs/quickstart.py --seeds=0,1,2 --workdir=runs/directions --remat

Rows of the other tables, at the size that sizes.py calls quickstart, where `softmax` has a fixed first token as well.
Expected at eps 0.3, T = 64: softmax Sink_1 above 30 %, sigmoid below 2 %; docs/results/quickstart.md has the figures
of three seeds, what the sigmoid arm does instead, and which of the paper's directions are found at this size.
"""

from configs import attention, columns, data, optimization
from configs.table import table

ROWS = {
    **{name: attention.ROWS[name] for name in ('softmax', 'sigmoid', 'sigmoid_normalized')},
    **{name: columns.ROWS[name] for name in ('k', 'kv', 'sink_token', 'v')},
    'fixed_2': data.ROWS['fixed_2'],
    **{name: optimization.ROWS[name] for name in ('decay_0.01', 'rate_2e-4_20k')},
}

get_config = table(ROWS, usual='quickstart')
