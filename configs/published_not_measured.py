"""Published numbers that no metric of a run measures, with the reason.

If another command measures the same number of a finished run, the reason names the command.
"""

LM_EVAL_REASON = (
    'an accuracy of lm-evaluation-harness; sinklab evaluate measures it of a checkpoint, no run does by itself'
)
KV_CACHE_REASON = (
    'a perplexity with a cache of X first and Y last keys over one book; sinklab stream has it of any text'
)
OTHER_SINK_REASON = 'a sink by another threshold, length and choice of positions, in words that do not fix a formula'
ACTIVATION_REASON = (
    'an entry of the residual stream, over other texts and layers; sinklab measure has spike/top/01, '
    'spike/massive/01 and spike/kurtosis/01, those after the first block, and so of each'
)
OTHER_TEXT_REASON = 'a loss on a text and with a tokenizer that are not at hand; valid/loss has the same place'

REASONS_NOT_MEASURED = {
    'sink_ratio': OTHER_SINK_REASON,
    'sink_rate': OTHER_SINK_REASON,
    'first_token_attention': 'alpha_1 over other lengths and texts; alpha/1/context has the same place',
    'first_token_argmax_rate': 'how often a query gives most to the first token; importances are means over queries',
    'sparsity': 'how many entries of the matrix are 0 to within a tolerance that is not stated',
    'mean_gate': 'the mean of a gate, which is not captured',
    'spike': ACTIVATION_REASON,
    'max_activation': ACTIVATION_REASON,
    'massive_activation': ACTIVATION_REASON,
    'kurtosis': ACTIVATION_REASON,
    'perplexity': OTHER_TEXT_REASON,
    'loss_at_152m': OTHER_TEXT_REASON,
    **{f'perplexity/{kept}': KV_CACHE_REASON for kept in ('0+1024', '1+1023', '2+1022', '4+1020')},
    'arc_challenge': LM_EVAL_REASON,
    'arc_easy': LM_EVAL_REASON,
    'hellaswag': LM_EVAL_REASON,
    'lambada': LM_EVAL_REASON,
    'openbookqa': LM_EVAL_REASON,
    'piqa': LM_EVAL_REASON,
    'winogrande': LM_EVAL_REASON,
}
