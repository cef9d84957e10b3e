"""What a run is. No field has a default here; those are written once, in configs/default.py."""

import dataclasses
from typing import Annotated, Any, Literal

from sinklab.record import (
    Count,
    Domain,
    Finite,
    Flag,
    Fraction,
    Momentum,
    Natural,
    Nonnegative,
    Part,
    Positive,
    Seed,
    Share,
    Text,
)

# Each similarity, with the normalizers that it goes with.
PAIRS: dict[str, tuple[str, ...]] = {
    'exp': ('sum', 'p_norm', 'plus_one'),
    'softpick': ('sum',),
    'sigmoid': ('none', 'sum', 'p_norm', 'count'),
    'elu1': ('none', 'sum', 'p_norm', 'count'),
    'relu': ('count', 'none', 'sum'),
    'identity': ('none', 'clamped', 'count', 'sum'),
}

Similarity = Literal[*PAIRS]
Normalizer = Literal[*dict.fromkeys(normalizer for pair in PAIRS.values() for normalizer in pair)]
FeatureMap = Literal['identity', 'elu1', 'mlp']
Position = Literal[
    'none',
    'absolute',
    'learned',
    'relative_paper_code',
    'relative_paper_printed',
    'relative_paper_negative',
    'relative_t5',
    'alibi',
    'rotary',
]
FARTHEST = 128  # from this distance on, relative positions tell keys apart no longer
FFN = Literal['relu', 'gelu', 'swish', 'reglu', 'geglu', 'swiglu']
Backend = Literal['auto', 'dense', 'chunked', 'tpu', 'gpu', 'cudnn']
Gate = Literal['none', 'elementwise', 'headwise', 'shared', 'value', 'value_state']

# By a field of Optimizer, the other fields that its values have use for; those that none names are of use to all.
HYPERPARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    'name': {'adamw': ('beta2', 'epsilon'), 'sgd': (), 'muon': ('beta2', 'epsilon')},
    'schedule': {'constant': (), 'cosine': ('final_share',)},
}

# What a run may have otherwise from one attempt on: no bit of a parameter depends on it. On the rest of log and on
# probe.keys the last bits do, for what is logged of a step is compiled with it.
PROBED = ('every_steps', 'sequences', 'length', 'inputs', 'domain', 'prepend')
CHANGEABLE = ('valid', 'checkpoint', 'log.every_steps', *(f'probe.{name}' for name in PROBED))
# Schedules whose steps are the same however many follow, so that a run may be given more.
OPEN_ENDED = ('constant',)

# Fields that came after runs were written, and what those runs are.
LATER = {
    'model': {
        'kv_heads': None,
        'rotary': dict(base=10_000.0, scaling='none', factor=None, slow=None, fast=None, length=None),
        'qkv_bias': False,
        'tied': False,
    },
    'valid': {'domain': None},
}


def completed(config: Any) -> Any:
    """A config as an older version wrote it, with the fields that came later."""
    if not isinstance(config, dict):
        return config
    return config | {
        part: later | config[part] for part, later in LATER.items() if isinstance(config.get(part), dict)
    }


# What a fork may take along of a checkpoint, as it stands before RUN in --from; without a word, all of it.
Takes = Literal['', 'params']


# What a layer may keep for its backward pass, by the bytes that it takes for what is not computed again.
KEPT = {
    'attention': 'what heads have aggregated, with the statistics of its rows: kernels are not run again',
    'qkv': 'queries, keys and values: their products, norms and rotations are not made again',
    'middle': 'the stream between attention and FFN: the product with W_O is not made again',
    'ffn': 'what goes into the activation, and its gate: the two products of the FFN are not made again',
}


def names_kept(remat: str) -> set[str]:
    """Those of KEPT, or unknown ones, that --remat=none, full or NAMES keeps."""
    return {'none': set(KEPT), 'full': set()}.get(remat, set(remat.split(',')))


@dataclasses.dataclass(frozen=True)
class Attention:
    """A_ij = gain * weight(s_ij) / Z(sum_j mass(s_ij)), s_ij = <f(q_i), f(k_j)> / sqrt(K) + b_ij + offset log T."""

    similarity: Similarity
    normalizer: Normalizer
    feature_map: FeatureMap
    gain: Positive
    power: Positive | None  # p of p_norm
    offset: Finite  # in units of log(data.length): -1 is Apple's sigmoid


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Dimensions i and i + K/2 turn by t * f_i at place t, f_i = base^(-2i/K), and slower where that is scaled."""

    base: Positive
    scaling: Literal['none', 'linear', 'llama3']  # f_i / factor: of all, or of those that turn little in `length`
    factor: Positive | None
    slow: Positive | None  # of llama3: what turns less often than that in `length` is scaled whole
    fast: Positive | None  # and what turns more often not at all
    length: Count | None


@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query sees is the intersection; all None and False: what is not after it."""

    prefix: Count | None  # the first tokens, seen by all, and no loss on them
    window: Count | None  # so many keys, the last of them the query's own
    block: Count | None  # the keys of the query's own block of so many
    document: Flag  # the query's own document


@dataclasses.dataclass(frozen=True)
class Columns:
    """What every query sees beside the text (Table 3: attention biases), and how it is made."""

    kind: Literal['none', 'sink_token', 'k', 'kv', 'v', 'logit']
    shared: Flag  # one for all heads of a layer
    key_width: Count | None  # how many of a key's first dimensions are learned, the others being 0; None: all
    value: Literal['learned', 'zero', 'first', 'uniform']  # of the column k: zero, or fixed along e_1 or (1, ..., 1)
    value_norm: Positive | None  # of a fixed value


@dataclasses.dataclass(frozen=True)
class Model:
    layers: Count
    width: Count
    heads: Count
    kv_heads: Count | None  # of keys and values, each for as many heads of queries; None: as many
    head_width: Count
    ffn_width: Count
    vocabulary: Count
    position: Position
    rotary: Rotary
    ffn: FFN
    norm: Literal['pre', 'post', 'sandwich']
    qkv_bias: Flag  # what is learned and added to queries, keys and values
    qk_norm: Flag
    head_norm: Flag  # RMSNorm of each head's output
    combination: Literal['concatenate', 'add', 'add_wide']  # of heads
    gate: Gate
    norm_epsilon: Positive
    tied: Flag  # the head is the embedding
    initialization: Literal['released', 'released_even', 'gpt2', 'torch']
    dtype: Literal['bfloat16', 'float32']  # of the computation; parameters and statistics are float32
    attention: Attention
    mask: Mask
    columns: Columns

    @property
    def groups(self) -> int:
        """How many heads keys and values have."""
        return self.kv_heads or self.heads


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: Literal[*HYPERPARAMETERS['name']]
    peak_learning_rate: Positive
    final_share: Part | None  # of the peak, where the cosine ends
    schedule: Literal[*HYPERPARAMETERS['schedule']]
    warmup_steps: Natural
    steps: Count
    batch_size: Count
    weight_decay: Nonnegative
    clip_norm: Positive | None
    beta1: Momentum  # the momentum of sgd and muon
    beta2: Momentum | None
    epsilon: Positive | None


@dataclasses.dataclass(frozen=True)
class Data:
    task: Literal['text', 'backcopy']
    source: Text  # stdlib | text:GLOB | chat:GLOB | tfds:NAME | mixture:FILE | store:DIR
    tokenizer: Text  # train | path of a tokenizer.json
    end_token: Natural  # the id that ends a document
    fixed_token: Natural  # the id that stands at a fixed place, and as BOS
    length: Count
    held_out: Fraction  # of the documents
    share: Share  # of the training windows, the others being left out
    bos: Literal['none', 'documents']  # BOS at the start of every document
    loss: Literal['all', 'assistant']  # on every token, or on those of the assistant in a chat
    fixed_position: Count | None  # this place of every sequence holds fixed_token
    fixed_held_out: Flag  # of validation and probe sequences, too
    random_first: Count | None  # these places of every training and validation window hold random tokens
    random_last: Count | None
    positions: Literal['continued', 'reset']  # at the start of a document
    triggers: Count | None  # of backcopy: so many of the most frequent characters
    seed: Seed


@dataclasses.dataclass(frozen=True)
class Valid:
    every_steps: Natural  # 0: only at the start and the end, here and in Probe
    windows: Count
    domain: Text | None  # of the held-out documents: those of this one of a corpus that has several


@dataclasses.dataclass(frozen=True)
class Probe:
    every_steps: Natural
    sequences: Count
    length: Annotated[int, Domain('at least 2', lambda x: x >= 2)]
    keys: Count  # importance is reported for keys 1..keys
    inputs: Literal['natural', 'random', 'repeated']  # held-out texts; ids drawn from the vocabulary; one id each
    domain: Text | None  # of natural inputs: this one of a corpus that has several
    prepend: Literal['none', 'bos', 'eos']  # a token before each text


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every_steps: Natural  # 0: only at the end
    every_minutes: Nonnegative  # since the one before, by the clock of process 0; 0: by steps alone
    keep: Annotated[int, Domain('at least 2, so that there is one before the newest', lambda x: x >= 2)]  # the last
    keep_every_steps: Natural  # and those of these steps for ever; 0: none


@dataclasses.dataclass(frozen=True)
class Log:
    every_steps: Count
    sinks: Flag  # also those of the training batch, over its whole length
    rows: Flag  # and what is measured of whole rows, whose weights are computed once more


@dataclasses.dataclass(frozen=True)
class Spec:
    model: Model
    optimizer: Optimizer
    data: Data
    valid: Valid
    probe: Probe
    checkpoint: Checkpoint
    log: Log
    seed: Seed


@dataclasses.dataclass(frozen=True)
class Hardware:
    """How a run is laid on devices. Never part of a row: the result is the same on all of them."""

    data: Count | None = None  # None, here and of fsdp: from the devices
    fsdp: Count | None = None
    tensor: Count = 1
    micro_batch: Count | None = None  # sequences at once, over all devices; None: the whole batch
    remat: str = 'none'  # what is computed again: nothing; full: all; auto; or all but some of KEPT
    attention: Backend = 'auto'

    def sequences(self, batch: int) -> int:
        """Of a batch, how many are read at once."""
        return self.micro_batch or batch
