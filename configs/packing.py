"""Packing: how document masks, and BOS in training and in probes, affect the sink.

    sinklab train --config=configs/packing.py:document_bos --workdir=runs/document_bos

The rows come from "Why do LLMs attend to the first token?" (Barbero et al.; a model of 120M, 30B tokens). In `causal`
rows queries see keys of other documents; in `document` rows they do not. BOS is before every document (`bos`), or
before every document and at the start of every window (`fixed`). Sink_k and the loss are measured on BOS + text. In
rows that end in `_text` they are measured on text without BOS; their training is that of the row before. A token that
a row prepends is prepended in probes only; validation windows are packed as in training.

Decided:

- The base is the block of LLaMA-2 with 12 layers of width 768 (124M parameters, counting one of its two embedding
  tables), and 28,610 steps of the default's 2^20 tokens. Shapes, batch size and learning rate are not stated, so they
  are chosen here; all else is the default.
- Threshold and length are not stated; they are the usual ones (0.3, T = 64). Positions continue across documents.
- `fixed` has both kinds of BOS, because the slides write "fix a BOS in the first position" next to "bos: yes". The
  other reading, a BOS at the first position only, is --config.data.bos=none.
"""

from sinklab.configs.publications import BARBERO
from sinklab.configs.table import make_row, table

BASE = {
    'model.layers': 12,
    'model.heads': 12,
    'model.head_width': 64,
    'model.ffn_width': 2048,
    'optimizer.steps': 28_610,
}

CAUSAL = {'data.fixed_position': None}  # override sizes that fix the first token
DOCUMENT = CAUSAL | {'model.mask.document': True}
BOS = {'data.bos': 'documents'}
FIXED_BOS = BOS | {'data.fixed_position': 1}
PROBE_BOS = {'probe.prepend': 'bos'}
NOT_FIXED_HELD_OUT = {'data.fixed_held_out': False}

SOURCE = f'{BARBERO}, as in the slides of Gu (threshold and T not stated)'
KEPT_BOS_NOTE = 'Validation windows keep the BOS of their documents, so that the loss includes BOS.'

ROWS = {
    'causal': make_row(CAUSAL, SOURCE, 65.15, 2.70),
    'causal_eos': make_row(
        CAUSAL | {'probe.prepend': 'eos'}, SOURCE, 65.10, 2.69, 'EOS replaces BOS; here only in the probe.'
    ),
    'causal_fixed': make_row(CAUSAL | FIXED_BOS | PROBE_BOS, SOURCE, 90.84, 2.69),
    'causal_fixed_text': make_row(CAUSAL | FIXED_BOS | NOT_FIXED_HELD_OUT, SOURCE, 0.05, 7.56, KEPT_BOS_NOTE),
    'document': make_row(DOCUMENT, SOURCE, 28.23, 2.67),
    'document_bos': make_row(DOCUMENT | BOS | PROBE_BOS, SOURCE, 83.33, 2.67),
    'document_bos_text': make_row(DOCUMENT | BOS, SOURCE, 50.24, 2.68, KEPT_BOS_NOTE),
    'document_fixed': make_row(DOCUMENT | FIXED_BOS | PROBE_BOS, SOURCE, 90.56, 2.67),
    'document_fixed_text': make_row(DOCUMENT | FIXED_BOS | NOT_FIXED_HELD_OUT, SOURCE, 0.00, 7.78, KEPT_BOS_NOTE),
    'document_reset': make_row(
        DOCUMENT | {'data.positions': 'reset', 'model.position': 'learned'},
        f'the other reading of {BARBERO}',
        note='It is not stated whether positions restart at each document. With rotary positions this has no effect.',
    ),
}

get_config = table(ROWS, BASE)
