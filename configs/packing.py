"""How do packing and BOS bear on the sink? Masks over documents, BOS in training and in what the model then reads.

    sinklab train --config=configs/packing.py:document_bos --workdir=runs/document_bos

From "Why do LLMs attend to the first token?" (Barbero et al.; a model of 120M, 30B tokens). `causal` sees across
documents, `document` does not. BOS stands before every document (`bos`), or there and at the start of every window
(`fixed`). Sink and loss are of BOS + text; in rows that end in `_text`, of text alone, the training being that of the
row before. Decided: the base is LLaMA-2's block at 12 layers of 768, 124M parameters with one of its two tables, and
28,610 steps of the default's 2^20 tokens; shapes, batch and rate are not stated, so they are chosen, the rest being
the default. Threshold and length, which are not stated either, are the usual ones (0.3, T = 64), and positions go on
over documents. `fixed` is both, for the slides write "fix a BOS in the first position" beside "bos: yes"; a BOS at
the first place alone is the other reading, --config.data.bos=none. A token that a row prepends is prepended in the
probe alone; validation windows are packed as in training.
"""

from configs.table import table

BASE = {
    'model.layers': 12,
    'model.heads': 12,
    'model.head_width': 64,
    'model.ffn_width': 2048,
    'optimizer.steps': 28_610,
}

CAUSAL = {'data.fixed_position': None}  # lest a size fix the first token
DOCUMENT = CAUSAL | {'model.mask.document': True}
BOS = {'data.bos': 'documents'}
FIXED_BOS = BOS | {'data.fixed_position': 1}
PROBE_BOS = {'probe.prepend': 'bos'}
NOT_FIXED_HELD_OUT = {'data.fixed_held_out': False}

SOURCE = 'Barbero et al., 2504.02732, as in the slides of Gu (threshold and T not stated)'
KEPT_BOS_NOTE = 'Validation windows keep the BOS of their documents here, so that the loss is not of text alone.'


def make_row(diff, sink, loss, **fields):
    return dict(diff=diff, published={'sink/1': sink, 'valid/loss': loss}, source=SOURCE, **fields)


ROWS = {
    'causal': make_row(CAUSAL, 65.15, 2.70),
    'causal_eos': make_row(
        CAUSAL | {'probe.prepend': 'eos'},
        65.10,
        2.69,
        note='EOS stands in for BOS; here it does so in the probe alone.',
    ),
    'causal_fixed': make_row(CAUSAL | FIXED_BOS | PROBE_BOS, 90.84, 2.69),
    'causal_fixed_text': make_row(CAUSAL | FIXED_BOS | NOT_FIXED_HELD_OUT, 0.05, 7.56, note=KEPT_BOS_NOTE),
    'document': make_row(DOCUMENT, 28.23, 2.67),
    'document_bos': make_row(DOCUMENT | BOS | PROBE_BOS, 83.33, 2.67),
    'document_bos_text': make_row(DOCUMENT | BOS, 50.24, 2.68, note=KEPT_BOS_NOTE),
    'document_fixed': make_row(DOCUMENT | FIXED_BOS | PROBE_BOS, 90.56, 2.67),
    'document_fixed_text': make_row(DOCUMENT | FIXED_BOS | NOT_FIXED_HELD_OUT, 0.00, 7.78, note=KEPT_BOS_NOTE),
    'document_reset': dict(
        diff=DOCUMENT | {'data.positions': 'reset', 'model.position': 'learned'},
        published={},
        source='the other reading of Barbero et al., 2504.02732',
        note='Whether positions begin anew with a document is not stated; with rotary ones it makes no difference.',
    ),
}

get_config = table(ROWS, BASE)
