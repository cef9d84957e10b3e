"""When does a sink emerge, and how does that move with the learning rate, the weight decay and the width?

    sinklab sweep --config=configs/emergence.py --size=quickstart --seeds=0,1,2,3,4 --jobs=2 --workdir=runs/emergence
    sinklab report runs/emergence --png

The second command writes emergence.png: for each of the three the two probes between which each run's sink emerges.
Rates and decays that were published are rows of optimization.py; those between them, and widths of the residual
stream at the same heads and the same FFN, are of this project.
"""

from configs import optimization
from configs.table import scale_with_size, table


def make_unpublished_row(path, value):
    return dict(diff=scale_with_size({path: value}), published={}, source='this project', note='not published')


ROWS = {
    **{
        name: optimization.ROWS[name] for name in ('rate_4e-4_20k', 'rate_1e-4_20k', 'rate_2e-4_20k', 'rate_8e-4_20k')
    },
    'decay_0.01': optimization.ROWS['decay_0.01'],
    'decay_0.05': make_unpublished_row('optimizer.weight_decay', 0.05),
    'decay_0.2': make_unpublished_row('optimizer.weight_decay', 0.2),
    'decay_0.5': optimization.ROWS['decay_0.5'],
    'width_384': make_unpublished_row('model.width', 384),
    'width_1536': make_unpublished_row('model.width', 1536),
}

get_config = table(ROWS)
