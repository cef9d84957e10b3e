"""Publications that config files name as sources, and their numbers that nothing here measures."""

GU_V1 = 'Gu et al. (v1)'
GU_ICLR = 'Gu et al. (ICLR)'
BARBERO = 'Barbero et al., 2504.02732'
GUO = 'Guo et al., 2410.13835'
KAUL = 'Kaul et al., 2410.17174 (GPT2-130M, 256 tokens, 40k steps)'
XIAO = 'Xiao et al., 2309.17453'
BONDARENKO = 'Bondarenko et al., 2306.12929'
HE = 'He et al., 2405.19279'
LIN = 'Lin et al., 2503.02130'
MIMO = 'MiMo-V2-Flash, 2601.02780'
PULL_117 = 'modded-nanogpt, pull request 117'
PULL_264 = 'modded-nanogpt, pull request 264'
QIU_2026 = 'Qiu et al., 2601.22966'
SUN = 'Sun et al., 2603.05498'
YE = 'Ye et al., Differential Transformer V2 (2026)'
ZHAI = 'Zhai, 2603.09078'
ZHOU = 'Zhou et al., 2410.17897'
THIS_PROJECT = 'this project'

OTHER_SINK_REASON = 'a sink score with another threshold, length and choice of positions, and without a formula'
ACTIVATION_REASON = (
    'an entry of the residual stream, on other texts and layers; sinklab measure gives spike/top/01, '
    'spike/massive/01 and spike/kurtosis/01 after the first block, and the same after each block'
)
OTHER_TEXT_REASON = 'a loss on a text and with a tokenizer that are not available; valid/loss stands in its place'
# {name of a published number that is not measured here: what it is, and why}.
NOT_MEASURED = {
    'sink_ratio': OTHER_SINK_REASON,
    'sink_rate': OTHER_SINK_REASON,
    'first_token_attention': 'alpha_1 on other lengths and texts; alpha/1/context stands in its place',
    'spike': ACTIVATION_REASON,
    'max_activation': ACTIVATION_REASON,
    'kurtosis': ACTIVATION_REASON,
    'perplexity': OTHER_TEXT_REASON,
    'loss_at_152m': OTHER_TEXT_REASON,
}
