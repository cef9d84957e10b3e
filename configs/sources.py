"""Publications that several config files name as the source of numbers, statements and rows."""

GU_V1 = 'Gu et al. (v1)'
GU_ICLR = 'Gu et al. (ICLR)'
BARBERO = 'Barbero et al., 2504.02732'
GUO = 'Guo et al., 2410.13835'
KAUL = 'Kaul et al., 2410.17174 (GPT2-130M, 256 tokens, 40k steps)'
XIAO = 'Xiao et al., 2309.17453'
THIS_PROJECT = 'this project'
