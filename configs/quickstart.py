"""A sink emerges on a laptop, on real text, in minutes; without a normalizer it does not.

    make quickstart
    sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax
    sinklab sweep --config=configs/quickstart.py --seeds=0,1,2 --jobs=2 --workdir=runs/rows

Rows of the other tables, at the size that sizes.py calls quickstart, where `softmax` has a fixed first token as well.
`make quickstart` trains softmax and sigmoid_apple, which differ in the operation alone: docs/results/quickstart.md
has the figures of eight seeds. The paper's plain `sigmoid`, without the offset of -log T, is a row beside them. What
else the paper claims, and whether it is seen at this size: sinklab claims, docs/results/claims.md.
"""

from configs import (
    attention,
    columns,
    data,
    optimization,
)
from configs.table import table

ROWS = {
    **{name: attention.ROWS[name] for name in ('softmax', 'sigmoid_apple', 'sigmoid', 'sigmoid_normalized')},
    **{name: columns.ROWS[name] for name in ('k', 'kv', 'sink_token', 'v')},
    'fixed_2': data.ROWS['fixed_2'],
    **{name: optimization.ROWS[name] for name in ('decay_0.01', 'rate_2e-4_20k')},
}

# Sink_1 at the end, for people: `sinklab sweep` prints it beside what it has measured.
EXPECTED = {
    'rows': {'softmax': '17 to 56 %', 'sigmoid_apple': '0 %'},
    'source': 'eight seeds, docs/results/quickstart.md',
}

get_config = table(ROWS, default_size='quickstart')
