"""Emergence: the step at which a sink emerges, by learning rate, weight decay and width.

    sinklab sweep --config=configs/emergence.py --size=quickstart --seeds=0,1,2,3,4 --jobs=2 --workdir=runs/emergence
    sinklab report runs/emergence --png

The page and the images of the second command have the step of emergence along each of the three hyperparameters. The
published learning rates and weight decays are rows of optimization.py. The other
values are of this project, and so are the widths of the residual stream, which keep the heads and the FFN width.
"""

from sinklab.configs import optimization
from sinklab.configs.publications import THIS_PROJECT
from sinklab.configs.table import make_row, scale_with_size, table

ROWS = {
    **{
        name: optimization.ROWS[name] for name in ('rate_4e-4_20k', 'rate_1e-4_20k', 'rate_2e-4_20k', 'rate_8e-4_20k')
    },
    'decay_0.01': optimization.ROWS['decay_0.01'],
    'decay_0.05': make_row(scale_with_size({'optimizer.weight_decay': 0.05}), THIS_PROJECT, note='not published'),
    'decay_0.2': make_row(scale_with_size({'optimizer.weight_decay': 0.2}), THIS_PROJECT, note='not published'),
    'decay_0.5': optimization.ROWS['decay_0.5'],
    'width_384': make_row(scale_with_size({'model.width': 384}), THIS_PROJECT, note='not published'),
    'width_1536': make_row(scale_with_size({'model.width': 1536}), THIS_PROJECT, note='not published'),
}

get_config = table(ROWS)
