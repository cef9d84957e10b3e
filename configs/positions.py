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

from sinklab.configs.publications import GU_V1, LIN
from sinklab.configs.table import make_row, table

TABLE_2 = f'{GU_V1}, Table 2'

ROWS = {
    'rotary': make_row({}, TABLE_2, 18.18, 3.73),
    'none': make_row({'model.position': 'none'}, TABLE_2, 20.35, 3.81),
    'absolute': make_row({'model.position': 'absolute'}, TABLE_2, 32.73, 3.74),
    'learned': make_row({'model.position': 'learned'}, TABLE_2, 33.13, 3.79),
    'relative_paper_code': make_row(
        {'model.position': 'relative_paper_code'},
        TABLE_2,
        35.53,
        5.45,
        note='The bias alone has alpha_1 = 0.334 at T = 64, so this is not a sink of the model.',
    ),
    'relative_paper_printed': make_row(
        {'model.position': 'relative_paper_printed'},
        f'{GU_V1}, equation 7',
        note='As printed. The published number is that of the code.',
    ),
    'relative_paper_negative': make_row(
        {'model.position': 'relative_paper_negative'},
        'the preliminaries of Gu et al.',
        note='The code with the opposite sign, -g(i - j). The bias alone has alpha_1 = 0.022 at T = 64.',
    ),
    'relative_t5': make_row(
        {'model.position': 'relative_t5'},
        'Raffel et al., 1910.10683',
        note='Cited by Gu et al.; no result was published.',
    ),
    'alibi': make_row({'model.position': 'alibi'}, TABLE_2, 20.78, 3.71),
    'forget_gate': make_row(
        {'model.position': 'none', 'model.forget_gate': True},
        f'{LIN} (760M)',
        note='Forgetting Transformer, without its other changes of the block. No sink result is known.',
    ),
}

get_config = table(ROWS)
