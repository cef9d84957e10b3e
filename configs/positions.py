"""Does the position encoding bear on the sink? In the paper: hardly; it emerges with all of them.

    sinklab train --config=configs/positions.py:alibi --workdir=runs/alibi

Decided: `relative` comes in four kinds. The released code adds the number of the bucket, unlearned, to every score,
which favours the farthest keys (hence the loss) and alone gives alpha_1 = 0.334 at T = 64, above the threshold: its
35.53 % is of the encoding, not of the model. Equation 7, as printed, takes the floor earlier (0.225); the
preliminaries print its negative, which favours the nearest keys (0.022, below the 0.074 of uniform attention); T5
learns a number for each bucket and head. Sinusoids are concatenated, not interleaved, as released. A bias, of ALiBi
too, is added after the division by sqrt(K), as released; appendix A could be read as before it, by which the bias
alone would have alpha_1 = 0.103 (the code) or 0.094 (as printed) at K = 96.
"""

from configs.table import table


def make_row(position, sink, loss, **fields):
    published = {'sink/1': sink, 'valid/loss': loss}
    return dict(diff={'model.position': position}, published=published, source='Gu et al. (v1), Table 2', **fields)


def make_unpublished_row(position, source, note):
    return dict(diff={'model.position': position}, published={}, source=source, note=note)


ROWS = {
    'rotary': dict(diff={}, published={'sink/1': 18.18, 'valid/loss': 3.73}, source='Gu et al. (v1), Table 2'),
    'none': make_row('none', 20.35, 3.81),
    'absolute': make_row('absolute', 32.73, 3.74),
    'learned': make_row('learned', 33.13, 3.79),
    'relative_paper_code': make_row(
        'relative_paper_code', 35.53, 5.45, note='The bias alone has alpha_1 = 0.334 at T = 64: no sink of the model.'
    ),
    'relative_paper_printed': make_unpublished_row(
        'relative_paper_printed', 'Gu et al. (v1), equation 7', 'As printed; the published number is of the code.'
    ),
    'relative_paper_negative': make_unpublished_row(
        'relative_paper_negative',
        'the preliminaries of Gu et al.',
        'The code with the other sign, -g(i - j); alone it has alpha_1 = 0.022 at T = 64.',
    ),
    'relative_t5': make_unpublished_row(
        'relative_t5', 'Raffel et al., 1910.10683', 'What Gu et al. cite; nothing published.'
    ),
    'alibi': make_row('alibi', 20.78, 3.71),
}

get_config = table(ROWS)
