"""Published numbers that a sweep does not compare with its runs, and why; rows carry them to be read.

Where another verb measures the same of a finished run, the reason names it.
"""

HARNESS = 'an accuracy of lm-evaluation-harness; sinklab evaluate measures it of a checkpoint, no run does by itself'
CACHE = 'a perplexity with a cache of X first and Y last keys over one book; sinklab stream has it of any text'
OTHER_SINK = 'a sink by another threshold, length and choice of positions, in words that do not fix a formula'
ACTIVATION = (
    'an entry of the residual stream, over other texts and layers; sinklab measure has spike/top/01, '
    'spike/massive/01 and spike/kurtosis/01, those after the first block, and so of each'
)
OTHER_TEXT = 'a loss on a text and with a tokenizer that are not at hand; valid/loss has the same place'

UNMEASURED = {
    'sink_ratio': OTHER_SINK,
    'sink_rate': OTHER_SINK,
    'first_token_attention': 'alpha_1 over other lengths and texts; alpha/1/context has the same place',
    'first_token_argmax_rate': 'how often a query gives most to the first token; importances are means over queries',
    'sparsity': 'how many entries of the matrix are 0 to within a tolerance that is not stated',
    'mean_gate': 'the mean of a gate, which is not captured',
    'spike': ACTIVATION,
    'max_activation': ACTIVATION,
    'massive_activation': ACTIVATION,
    'kurtosis': ACTIVATION,
    'perplexity': OTHER_TEXT,
    'loss_at_152m': OTHER_TEXT,
    **{f'perplexity/{kept}': CACHE for kept in ('0+1024', '1+1023', '2+1022', '4+1020')},
    'arc_challenge': HARNESS,
    'arc_easy': HARNESS,
    'hellaswag': HARNESS,
    'lambada': HARNESS,
    'openbookqa': HARNESS,
    'piqa': HARNESS,
    'winogrande': HARNESS,
}
