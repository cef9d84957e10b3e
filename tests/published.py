"""Published numbers, typed from the sources independently of the configs.

PUBLISHED_NUMBERS has {(file, row): {name: number}}. The first line of a section of TABLES names
its file and its columns. Each other line has a row and its numbers, with `-` for none.
"""

TABLES = """
= optimization: sink/1 valid/loss
rate_8e-4_10k  23.44  3.79
rate_8e-4_20k  32.23  3.70
rate_4e-4_20k  18.18  3.73
rate_2e-4_20k  11.21  3.78
rate_2e-4_40k  16.81  3.68
rate_1e-4_20k   2.90  3.92
rate_1e-4_80k   6.29  3.67
batch_128      16.45  3.92
batch_256      17.19  3.78
batch_1024     16.19  3.68
decay_0        15.20  3.72
decay_0.001    15.39  3.72
decay_0.01     15.23  3.72
decay_0.5      41.08  3.80
decay_1        37.71  3.90
decay_2         6.13  4.23
decay_5         0.01  5.24
= optimization: kurtosis
sgd   5
muon  0.04

= data: sink/1 sink/2 sink/3 sink/4
fixed_1    74.11   0      0     0.01
fixed_2     0     69.03   0     0.01
fixed_3     0      0     69.64  0
random_1   27.03   -      -     -
random_1_2  1.98  14.08   -     -
random_2   20.99   -      -     -
= data: sink/1 valid/loss
amount_5b  18.18  3.73

= packing: sink/1 valid/loss
causal_eos           65.10  2.69
causal               65.15  2.70
causal_fixed         90.84  2.69
causal_fixed_text     0.05  7.56
document             28.23  2.67
document_bos         83.33  2.67
document_bos_text    50.24  2.68
document_fixed       90.56  2.67
document_fixed_text   0.00  7.78

= objective: sink/1 valid/loss
full  18.18  3.73

= positions: sink/1 valid/loss
none                 20.35  3.81
absolute             32.73  3.74
learned              33.13  3.79
relative_paper_code  35.53  5.45
alibi                20.78  3.71
rotary               18.18  3.73

= blocks: sink/1 valid/loss
relu       16.90  3.82
gelu       14.76  3.79
swish      17.89  3.80
reglu      13.88  3.75
geglu      17.86  3.73
swiglu     18.18  3.73
post_norm  13.54  -
heads_4    10.68  3.74
heads_2    12.95  3.76
heads_1    19.50  3.78
add        21.76  3.74
= blocks: sink_ratio spike
sandwich_norm  44.7  520
qk_norm        42.0  92
= blocks: first_token_attention max_activation mean_gate perplexity
gate_elementwise  0.048   94  0.116  5.761
gate_headwise     0.073   98  0.172  5.792
gate_value        0.297  125  0.221  5.820
gate_shared       0.301  286  0.271  5.801
= blocks: perplexity kurtosis
gate_value_state  15.49  34.8
= blocks: loss_at_152m
head_norm  2.742

= columns: sink/star sink/1 valid/loss
none          -      18.18  3.73
sink_token    74.12   0.00  3.72
kv            72.76   0.04  3.72
k             73.34   0.00  3.72
v             -      17.53  3.73
kv_shared     56.61  12.44  3.72
k_shared      68.31   0.23  3.72
k_first_1     70.03   0.06  3.72
k_first_5     44.43   3.71  3.72
k_first_20     1.51  25.88  3.71
k_uniform_1   69.74   2.15  3.72
k_uniform_5   27.99   5.93  3.72
k_uniform_20   0.00  11.21  3.73
k_width_1     32.18   4.74  3.73
k_width_2     30.88   4.96  3.72
k_width_4     30.94   4.39  3.72
k_width_8     31.39   4.54  3.73
k_width_16    23.30   2.19  3.73
k_width_32    51.23   1.94  3.73
k_width_64    69.19   0.04  3.72

= attention: sink/1 valid/loss
softmax                 18.18  3.73
sigmoid                  0.44  3.70
sigmoid_normalized      30.24  3.74
sigmoid_p_1             30.24  3.74
elu1                     0.80  3.69
kernel_elu1_normalized  53.65  4.19
linear                   0.00  3.99
mlp_normalized           0.19  3.85
mlp                      0.74  3.91
alpha_2                 29.10  3.72
alpha_0.2                9.41  3.72
alpha_0.1                3.59  3.76
alpha_0.02               4.53  3.78
sigmoid_decay_0           .64  3.77
sigmoid_decay_0.5         .18  3.76
sigmoid_decay_1           .30  4.06
sigmoid_rate_1e-3         .81  3.68
sigmoid_rate_1e-4         .36  4.08
= attention: fails
elu1_normalized    True
kernel_elu1        True
linear_normalized  True
softmax_p_2        True
softmax_p_3        True
softmax_p_4        True
= attention: sink_rate kurtosis sparsity
softpick  0  340  46.97
= attention: first_token_argmax_rate kurtosis
softmax_off_by_one  0.022  244.7

= context_length: sink/1 valid/loss
full  18.18  3.73

= hypotheses: sink/1 valid/loss
decay_0.1  18.18  3.73
decay_0.5  41.08  3.80
decay_1.0  37.71  3.90
decay_2.0   6.13  4.23

= scale: sink/1 valid/loss
softmax_60m  18.18  3.73
sigmoid_60m   0.44  3.70
softmax_1b   45.11  3.07
sigmoid_1b    2.46  3.10

= extensions: perplexity/0+1024 perplexity/1+1023 perplexity/2+1022 perplexity/4+1020
streaming_vanilla        27.87  18.49  18.05  18.05
streaming_zero_sink   29214     19.90  18.27  18.01
streaming_sink_token   1235     18.01  18.01  18.02
= extensions: arc_challenge arc_easy hellaswag lambada openbookqa piqa winogrande
streaming_vanilla     18.6  45.2  29.4  39.6  16.0  62.2  50.1
streaming_sink_token  19.6  45.6  29.8  39.9  16.6  62.6  50.8
"""


def parse_tables(tables):
    numbers = {}
    for line in filter(None, map(str.strip, tables.splitlines())):
        if line.startswith('='):
            file, columns = line.lstrip('= ').split(':')
            continue
        row, *fields = line.split()
        named_fields = zip(columns.split(), fields, strict=True)
        numbers.setdefault((file, row), {}).update(
            {name: number == 'True' or float(number) for name, number in named_fields if number != '-'}
        )
    return numbers


PUBLISHED_NUMBERS = parse_tables(TABLES)
