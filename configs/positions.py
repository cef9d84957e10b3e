"""Position encodings: in the paper, a sink emerges with all of them.

    sinklab train --config=configs/positions.py:alibi --workdir=runs/alibi

Decided: `relative` has four variants. "Alone" means alpha_1 at T = 64 from the position bias alone.

- `relative_paper_code`: the released code adds the number of the bucket, which is not learned, to every score. The
  bias favours the farthest keys, which explains the high loss. Alone it gives 0.334, above the threshold, so its
  published 35.53 % is a property of the encoding and not of the model.
- `relative_paper_printed`: equation 7 as printed takes the floor earlier (alone 0.225).
- `relative_paper_negative`: the preliminaries print the negative of the bias, which favours the nearest keys (alone
  0.022, below the 0.074 of uniform attention).
- `relative_t5`: T5 learns a number for each bucket and head.

Sinusoids are concatenated and not interleaved, as in the released code. A position bias, including that of ALiBi, is
added after the division by sqrt(K), as in the released code. Appendix A could be read as adding it before the
division; the bias alone would then have alpha_1 = 0.103 (the code) or 0.094 (as printed) at K = 96.
"""

from sinklab.configs.publications import GU_V1
from sinklab.configs.table import table


def make_row(position, sink, loss, **fields):
    published = {'sink/1': sink, 'valid/loss': loss}
    return dict(diff={'model.position': position}, published=published, source=f'{GU_V1}, Table 2', **fields)


def make_unpublished_row(position, source, note):
    return dict(diff={'model.position': position}, published={}, source=source, note=note)


ROWS = {
    'rotary': dict(diff={}, published={'sink/1': 18.18, 'valid/loss': 3.73}, source=f'{GU_V1}, Table 2'),
    'none': make_row('none', 20.35, 3.81),
    'absolute': make_row('absolute', 32.73, 3.74),
    'learned': make_row('learned', 33.13, 3.79),
    'relative_paper_code': make_row(
        'relative_paper_code',
        35.53,
        5.45,
        note='The bias alone has alpha_1 = 0.334 at T = 64, so this is not a sink of the model.',
    ),
    'relative_paper_printed': make_unpublished_row(
        'relative_paper_printed',
        f'{GU_V1}, equation 7',
        'As printed. The published number is that of the code.',
    ),
    'relative_paper_negative': make_unpublished_row(
        'relative_paper_negative',
        'the preliminaries of Gu et al.',
        'The code with the opposite sign, -g(i - j). The bias alone has alpha_1 = 0.022 at T = 64.',
    ),
    'relative_t5': make_unpublished_row(
        'relative_t5', 'Raffel et al., 1910.10683', 'Cited by Gu et al.; no result was published.'
    ),
    'alibi': make_row('alibi', 20.78, 3.71),
}

get_config = table(ROWS)
