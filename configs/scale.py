"""Scale: softmax and sigmoid at 60M, 150M, 350M and 1B parameters.

    sinklab train --config=configs/scale.py:softmax_1b --workdir=runs/softmax_1b --remat=auto

The rows of 60M are those of the paper. The rows of 1B have its published numbers and the settings of its released
config (22 layers of 2048, 40k steps, 41.9B tokens, a constant learning rate of 4e-4; the contents of its two scripts
are swapped). The paper finds no massive activations in the sigmoid model. The rows of 150M and 350M are of this
project and not published. They show how Sink_1 and the step at which a sink emerges change with size, before the cost
of 1B. Their heads are 128 wide and their FFN has 2.75 times the model width, as at 1B.
"""

from sinklab.configs.attention import SIGMOID
from sinklab.configs.publications import GU_V1, THIS_PROJECT
from sinklab.configs.table import make_row, scale_with_size, table


def make_size_diff(layers, width, ffn_width):
    """Return the fields of a model whose heads are 128 wide."""
    sizes = {'model.layers': layers, 'model.width': width, 'model.head_width': 128, 'model.ffn_width': ffn_width}
    return scale_with_size(sizes)


# 154M, 341M and 1.13B parameters without the embeddings. 150M has as many steps and heads as 60M.
SIZE_150M = make_size_diff(12, 1024, 2816)
SIZE_350M = make_size_diff(17, 1280, 3520) | scale_with_size({'model.heads': 10, 'optimizer.steps': 30_000})
SIZE_1B = make_size_diff(22, 2048, 5632) | scale_with_size({'model.heads': 16, 'optimizer.steps': 40_000})
UNPUBLISHED = dict(source=THIS_PROJECT, note='A size between two sizes of the paper.')

ROWS = {
    'softmax_60m': make_row({}, f'{GU_V1}, Table 4', 18.18, 3.73),
    'sigmoid_60m': make_row(SIGMOID, f'{GU_V1}, Table 4 (proxy scores)', 0.44, 3.70),
    'softmax_150m': make_row(SIZE_150M, **UNPUBLISHED),
    'sigmoid_150m': make_row(SIZE_150M | SIGMOID, **UNPUBLISHED),
    'softmax_350m': make_row(SIZE_350M, **UNPUBLISHED),
    'sigmoid_350m': make_row(SIZE_350M | SIGMOID, **UNPUBLISHED),
    'softmax_1b': make_row(SIZE_1B, f'{GU_V1}, section 7.3', 45.11, 3.07),
    'sigmoid_1b': make_row(SIZE_1B | SIGMOID, f'{GU_V1}, section 7.3 (proxy scores)', 2.46, 3.10),
}

get_config = table(ROWS)
