"""Model size: how the number of parameters affects the sink.

    sinklab sweep --config=configs/model_size.py --size=small --seeds=3 --workdir=runs/model_size
    sinklab report runs/model_size --png
    sinklab claims --config=configs/model_size.py --size=small --seeds=3 --workdir=runs/claims_small

A row is named after its parameters in millions, without the embeddings. Its layers and widths are the same at every
size; the vocabulary, the length and the optimizer are those of the size. All rows have the same number of steps. In
the rows `*_equal_tokens` they have the same batch size, too; in the other rows the batch size is proportional to the
number of parameters. The row `1.3m` has the batch size of the size, and at `--size=small` it is the baseline.
"""

from sinklab.configs.claims import NEEDS_SIZE_SMALL, make_claim
from sinklab.configs.publications import GU_V1, THIS_PROJECT
from sinklab.configs.table import make_row, scale, table


def make_shape(layers, width):
    return {
        'model.layers': layers,
        'model.width': width,
        'model.heads': 4,
        'model.head_width': width // 4,
        'model.ffn_width': 3 * width,
    }


def count_millions(shape):
    """Count the parameters of attention and FFNs, in millions."""
    width = shape['model.width']
    return shape['model.layers'] * width * (4 * width + 3 * shape['model.ffn_width']) / 1e6


def make_proportional_row(shape):
    share = count_millions(shape) / count_millions(SHAPES[REFERENCE])
    batch = scale('optimizer.batch_size', share) if share != 1 else {}
    return make_row(shape | batch, SOURCE, note='Tokens in proportion to the parameters.')


SOURCE = f'{THIS_PROJECT}; {GU_V1}, Figure 1, is of Pythia'
SHAPES = {
    '0.05m': make_shape(4, 32),
    '0.2m': make_shape(4, 64),
    '0.7m': make_shape(6, 96),
    '1.3m': make_shape(6, 128),
    '2.9m': make_shape(6, 192),
}
REFERENCE = '1.3m'

ROWS = {name: make_proportional_row(shape) for name, shape in SHAPES.items()} | {
    f'{name}_equal_tokens': make_row(shape, SOURCE, note='The tokens of the size.')
    for name, shape in SHAPES.items()
    if name != REFERENCE
}


def make_size_claim(row):
    name, _, suffix = row.partition('_')
    is_smaller = count_millions(SHAPES[name]) < count_millions(SHAPES[REFERENCE])
    statement = (
        f'A model of {name.upper()} parameters, trained on {"as many tokens" if suffix else "tokens in proportion"}, '
        f'has {"less" if is_smaller else "more"} of a sink than one of {REFERENCE.upper()}.'
    )
    comparison = f'model_size:{row}', '<' if is_smaller else '>', f'model_size:{REFERENCE}'
    return make_claim(statement, f'on {GU_V1}, Figure 1', comparison, untestable_at=NEEDS_SIZE_SMALL)


# The claim `size` of claims.py is that of 0.2m_equal_tokens.
CLAIMS = {f'size_{row}': make_size_claim(row) for row in ROWS if row != REFERENCE}

get_config = table(ROWS)
