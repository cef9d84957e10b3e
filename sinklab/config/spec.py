"""The schema of a config: each field with its type, allowed values, default and help.

The defaults are the paper's 60M baseline; configs/default.py makes a config file of them.
"""

import dataclasses
import functools
import sys
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

MAX_FLOAT = sys.float_info.max
# Steps and array indices are int32.
PositiveInt = Annotated[int, Meta(ge=1, lt=2**31, description='a whole number of at least 1, below 2^31')]
NonNegativeInt = Annotated[int, Meta(ge=0, lt=2**31, description='a whole number of at least 0, below 2^31')]
Bool = Annotated[bool, Meta(description='True or False')]
FiniteFloat = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT, description='a finite number')]
PositiveFloat = Annotated[float, Meta(gt=0, le=MAX_FLOAT, description='a finite number above 0')]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=MAX_FLOAT, description='a finite number of at least 0')]
OpenUnitInterval = Annotated[float, Meta(gt=0, lt=1, description='a number between 0 and 1, both excluded')]
LeftOpenUnitInterval = Annotated[float, Meta(gt=0, le=1, description='a number above 0 and at most 1')]
UnitInterval = Annotated[float, Meta(ge=0, le=1, description='a number from 0 to 1')]
DecayRate = Annotated[float, Meta(ge=0, lt=1, description='a number of at least 0 and below 1')]
Seed = Annotated[int, Meta(ge=0, lt=2**32, description='a whole number from 0 to 2^32 - 1')]
NonEmptyStr = Annotated[str, Meta(min_length=1, description='a text that is not empty')]

# The normalizers that each similarity can be combined with.
NORMALIZERS_BY_SIMILARITY: dict[str, tuple[str, ...]] = {
    'exp': ('sum', 'p_norm', 'plus_one'),
    'softpick': ('sum',),
    'sigmoid': ('none', 'sum', 'p_norm', 'count'),
    'elu1': ('none', 'sum', 'p_norm', 'count'),
    'relu': ('count', 'none', 'sum'),
    'identity': ('none', 'clamped', 'count', 'sum'),
}

# Similarities of operations that are known by another name: `--config.model.attention=softmax`.
SIMILARITIES_BY_NAME = {'softmax': 'exp', 'linear': 'identity'} | {name: name for name in NORMALIZERS_BY_SIMILARITY}

SimilarityName = Literal[*NORMALIZERS_BY_SIMILARITY]
NormalizerName = Literal[
    *dict.fromkeys(normalizer for pair in NORMALIZERS_BY_SIMILARITY.values() for normalizer in pair)
]
FeatureMapName = Literal['identity', 'elu1', 'mlp']
PositionName = Literal[
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
MAX_RELATIVE_DISTANCE = 128  # relative positions do not distinguish keys from this distance on
REGISTERED: set[str] = set()  # 'metric NAME' and 'FFN activation NAME' of users
FFN_NAMES = ['relu', 'gelu', 'swish', 'reglu', 'geglu', 'geglu_tanh', 'swiglu']  # and those that users register
FFNName = Annotated[str, Meta(min_length=1, description=f'{", ".join(FFN_NAMES)}, or a registered name')]
BackendName = Literal['auto', 'dense', 'chunked', 'tpu', 'gpu', 'cudnn']
GateName = Literal['none', 'elementwise', 'headwise', 'shared', 'value', 'value_state']
DtypeName = Literal['bfloat16', 'float32']

# Fields that may change when a run resumes: no bit of a parameter depends on them. The last bits of the parameters do
# depend on the other fields of `log` and on `probe.keys`, because the metrics of a step are compiled into the step.
CHANGEABLE_PROBE_FIELDS = ('every_steps', 'sequences', 'length', 'inputs', 'domain', 'prepend')
CHANGEABLE_FIELDS = ('valid', 'checkpoint', 'log.every_steps', *(f'probe.{name}' for name in CHANGEABLE_PROBE_FIELDS))
CHANGEABLE_PREFIXES = tuple(f'{name}.' for name in CHANGEABLE_FIELDS)


def is_changeable(path: str) -> bool:
    """Return whether a field, given as a dotted path, may change when a run resumes."""
    return f'{path}.'.startswith(CHANGEABLE_PREFIXES)


# Schedules whose learning rates do not depend on the number of steps, so that a run can be extended.
EXTENDABLE_SCHEDULES = ('constant',)

# What a warm start takes from the parent checkpoint: the prefix before RUN in --from. '': all of it.
WarmStartTakes = Literal['', 'params']


# Activations that a layer can save for its backward pass, ordered by the bytes that they take relative to the
# computation that is not repeated.
SAVEABLE_ACTIVATIONS = {
    'attention': 'outputs of heads and statistics of their rows: kernels do not run again',
    'qkv': 'queries, keys and values: products are recomputed only if a norm, feature map or gate reads the result',
    'middle': 'residual stream between attention and FFN: the product with W_O is recomputed only if a norm reads it',
    'ffn': 'input of the activation, and its gate: the two products of the FFN are not recomputed',
}


def parse_saved_activations(remat: str) -> set[str]:
    """Parse --remat into the set of activations that are saved.

    Args:
        remat: `none` (all of SAVEABLE_ACTIVATIONS are saved), `full` (none is saved), or some of their names,
            separated by commas.

    Returns:
        Names of activations. Unknown names are returned as they are; the caller checks them.
    """
    return {'none': set(SAVEABLE_ACTIVATIONS), 'full': set()}.get(remat, set(remat.split(',')))


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Attention operation.

    A_ij = gain * weight(s_ij) / Z(sum_l mass(s_il)), s_ij = <f(q_i), f(k_j)> / sqrt(K) + b_ij + offset log T.
    """

    similarity: SimilarityName = 'exp'
    """Function that turns the score of a query and a key into the weight of the key."""
    normalizer: NormalizerName = 'sum'
    """What the weights of a row are divided by, as a function of the sum of the row."""
    feature_map: FeatureMapName = 'identity'
    """Map applied to queries and keys before their product: none, elu + 1, or a learned MLP."""
    gain: PositiveFloat = 1.0
    """Factor of all attention weights; with softmax, the sum of each row."""
    power: PositiveFloat | None = None
    """p of normalizer `p_norm`; None with other normalizers."""
    gamma: FiniteFloat = 0.0
    """Lower end of clipped softmax, at most 0: attention becomes clip((zeta - gamma) A + gamma, 0, 1)."""
    zeta: PositiveFloat = 1.0
    """Upper end of clipped softmax, at least 1."""
    offset: FiniteFloat = 0.0
    """Constant added to every score, in units of log(data.length): -1 is the bias of Apple's sigmoid attention."""


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary position encoding (RoPE).

    At position t, dimensions i and i + K/2 are rotated by the angle t * f_i, with f_i = base^(-2i/K). Scaling for
    longer contexts lowers these frequencies.
    """

    base: PositiveFloat = 10_000.0
    """Base of the frequencies (theta in Hugging Face configs)."""
    scaling: Literal['none', 'linear', 'llama3'] = 'none'
    """How frequencies are scaled for longer contexts: `linear` divides all of them by `factor`, `llama3` only
    the low ones."""
    factor: PositiveFloat | None = None
    """Divisor of the scaled frequencies; None without scaling."""
    slow: PositiveFloat | None = None
    """For `llama3`: a frequency with fewer turns than this in `length` tokens is divided by `factor`."""
    fast: PositiveFloat | None = None
    """For `llama3`: a frequency with more turns than this in `length` tokens is not changed."""
    length: PositiveInt | None = None
    """For `llama3`: the context length before scaling, in tokens."""


@dataclasses.dataclass(frozen=True)
class GlobalLayersConfig:
    """Global layers: every n-th layer ignores `mask.window` and has a position encoding of its own.

    In Gemma 3 the other (local) layers have a window and a lower RoPE base. In SmolLM3 the global layers have no
    position encoding (NoPE).
    """

    every: PositiveInt | None = None
    """n: the layers n, 2n, ..., counted from 1, are global; None: no layer is."""
    position: Literal['rotary', 'none'] = 'rotary'
    """Position encoding of global layers."""
    rotary: RotaryConfig = RotaryConfig()
    """Rotary position encoding of global layers; used with `global_layers.position=rotary` only."""


@dataclasses.dataclass(frozen=True)
class MaskConfig:
    """Attention mask. With all fields None or False it is causal.

    `window`, `block` and `document` each hide keys; `prefix` shows keys of the prefix that the causal mask hides.
    """

    prefix: PositiveInt | None = None
    """Number of first tokens to which the causal mask does not apply, so that they also see each other (prefix LM).
    The training loss does not count them, the validation loss does."""
    window: PositiveInt | None = None
    """Number of keys that a query sees, its own included (sliding window)."""
    block: PositiveInt | None = None
    """Block size: a query sees only keys of its own block of this many tokens."""
    document: Bool = False
    """True: a query sees only keys of its own document."""


@dataclasses.dataclass(frozen=True)
class LearnedKVConfig:
    """Learned keys and values that every query sees besides the text (attention biases, Table 3)."""

    kind: Literal['none', 'sink_token', 'k', 'kv', 'v', 'logit'] = 'none'
    """Learned keys or values besides the text (attention biases, Table 3): a sink token, a key, a key and a value,
    a value, or a logit."""
    shared: Bool = False
    """True: one bias for all heads of a layer; False: one for each head."""
    key_width: PositiveInt | None = None
    """Number of first dimensions of the key that are learned, the others being 0; None: all."""
    value: Literal['learned', 'zero', 'first', 'uniform'] = 'learned'
    """Value of the bias: learned, zero, or fixed along e_1 (`first`) or (1, ..., 1) (`uniform`)."""
    value_norm: PositiveFloat | None = None
    """Norm of a fixed value (`first` or `uniform`); None otherwise."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    layers: PositiveInt = 10
    """Number of transformer blocks."""
    width: PositiveInt = 768
    """Width of the residual stream (d_model)."""
    heads: PositiveInt = 8
    """Number of query heads of each layer."""
    kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); None: as many as `heads`."""
    head_width: PositiveInt = 96
    """Width of a head (d_head)."""
    ffn_width: PositiveInt = 1536
    """Width of the hidden layer of the feed-forward network (d_ff)."""
    vocabulary: PositiveInt = 50432
    """Number of token ids; of a tokenizer that is trained here, its size."""
    position: PositionName = 'rotary'
    """Position encoding."""
    rotary: RotaryConfig = RotaryConfig()
    """Rotary position encoding; used with `position=rotary` only."""
    global_layers: GlobalLayersConfig = GlobalLayersConfig()
    """Layers without a window and with another position encoding."""
    scaled_embedding: Bool = False
    """True: embeddings are multiplied by the square root of `width` (not where they are the output head)."""
    ffn: FFNName = 'swiglu'
    """Activation of the feed-forward network; names with `glu` have a gate, and `geglu_tanh` has GELU's approximation
    by tanh."""
    norm: Literal['pre', 'post', 'sandwich', 'res_post'] = 'pre'
    """Where RMSNorm stands: before each sublayer, after its sum with the residual stream (`post`), before and after
    the sublayer (`sandwich`), or after it only (`res_post`, of Swin Transformer V2 and OLMo 2)."""
    norm_kind: Literal['rms', 'gated_rms', 'dynamic_tanh'] = 'rms'
    """The norm at these places: RMSNorm, RMSNorm times a sigmoid gate of low rank that reads it (GatedNorm), or
    gain * tanh(alpha x) + bias (DynamicTanh). Norms of queries, keys and heads are RMSNorm."""
    qkv_bias: Bool = False
    """True: learned biases of the query, key and value projections."""
    qk_norm: Bool = False
    """True: RMSNorm of queries and keys, over each head."""
    head_norm: Bool = False
    """True: RMSNorm of the output of each head."""
    forget_gate: Bool = False
    """True: the score of a key is reduced by a learned amount for each later token up to the query (Forgetting
    Transformer), instead of by a bias of `position`."""
    value_residual: Bool = False
    """True: each layer attends to the mean of its values and of those of the first layer (value residual)."""
    exclusive: Literal['none', 'fixed', 'gated'] = 'none'
    """Exclusive self-attention (XSA): the output of each head loses its component along the token's own value
    (`fixed`), or a learned multiple of it (`gated`)."""
    combination: Literal['concatenate', 'add', 'add_wide', 'differential'] = 'concatenate'
    """How outputs of heads become one vector: concatenated, added (`add_wide`: values as wide as the model), or with
    every second head, times a sigmoid gate, subtracted from the head before it (`differential`)."""
    gate: GateName = 'none'
    """Sigmoid gate: `elementwise`, `headwise` and `shared` multiply the attention output (one gate for each
    dimension, one for each head, or one for each dimension that all heads share); `value` multiplies the values;
    `value_state` multiplies the output of each head by a gate that is computed from the token's own value."""
    norm_epsilon: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    tied: Bool = False
    """True: the output head is the embedding matrix."""
    initialization: Literal['released', 'released_even', 'gpt2', 'torch'] = 'released'
    """Distribution of the initial parameters: as the released code (`released_even`: also scaling the last
    map of FFNs other than SwiGLU by depth), as GPT-2, or as PyTorch defaults."""
    dtype: DtypeName = 'bfloat16'
    """Type of the computation; parameters and attention statistics are float32."""
    attention: AttentionConfig = AttentionConfig()
    """The attention operation."""
    mask: MaskConfig = MaskConfig()
    """The attention mask."""
    learned_kv: LearnedKVConfig = LearnedKVConfig()
    """Attention biases."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def layer_types(self) -> tuple['ModelConfig', ...]:
        """The config of local layers, and that of global layers if there are any."""
        if self.global_layers.every is None:
            return (self,)
        fields = dict(position=self.global_layers.position, rotary=self.global_layers.rotary)
        return self, dataclasses.replace(self, mask=dataclasses.replace(self.mask, window=None), **fields)

    @property
    def layer_type_indices(self) -> tuple[int, ...]:
        """The index in `layer_types` of the config of each layer."""
        every = self.global_layers.every
        return tuple(int(every is not None and layer % every == 0) for layer in range(1, self.layers + 1))


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    name: Literal['adamw', 'sgd', 'muon', 'orthoadam'] = 'adamw'
    """Optimizer: AdamW, SGD with momentum, Muon, or AdamW in a random orthogonal basis (OrthoAdam)."""
    peak_learning_rate: PositiveFloat = 4e-4
    """Learning rate after the warm-up."""
    final_share: UnitInterval | None = None
    """Learning rate of the last step as a share of the peak, for schedule `cosine`; None for `constant`."""
    schedule: Literal['constant', 'cosine'] = 'constant'
    """Learning rate after the warm-up: constant, or a cosine that ends at `final_share`."""
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up from 0."""
    steps: PositiveInt = 20_000
    """Number of updates."""
    batch_size: PositiveInt = 512
    """Sequences of each update, over all devices."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of all parameters; each step multiplies them by 1 - learning rate * weight decay."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient, above which it is scaled down; None: no clipping."""
    beta1: DecayRate = 0.9
    """First-moment decay of AdamW; the momentum of `sgd` and `muon`."""
    beta2: DecayRate | None = 0.95
    """Second-moment decay of AdamW, which `muon` uses for parameters that are not matrices; None for `sgd`."""
    epsilon: PositiveFloat | None = 1e-8
    """Epsilon of AdamW; None for `sgd`."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    task: Literal['text', 'backcopy'] = 'text'
    """`text`: next-token prediction on documents; `backcopy`: the synthetic task Bigram-Backcopy."""
    source: NonEmptyStr = 'stdlib'
    """Where documents come from: `stdlib` (the files of Python's standard library), `stdlib:functions` (cut
    before each function, method and class), `text:GLOB`, `chat:GLOB`, `tfds:NAME`, `mixture:FILE` or `store:DIR`."""
    tokenizer: NonEmptyStr = 'train'
    """`train`: train a byte-level BPE tokenizer on the source; otherwise the path of a tokenizer.json."""
    end_token: NonNegativeInt = 0
    """Id of the token that ends each document."""
    fixed_token: NonNegativeInt = 1
    """Id of the token that `fixed_position` writes and that serves as BOS."""
    length: PositiveInt = 2048
    """Tokens of a training window (context length)."""
    held_out: OpenUnitInterval = 0.15
    """Share of the documents that is held out for validation and probes."""
    share: LeftOpenUnitInterval = 1.0
    """Share of the training windows that is used."""
    bos: Literal['none', 'documents'] = 'none'
    """`documents`: BOS at the start of every document."""
    packing: Bool = True
    """True: documents follow one another, and each window has the next T + 1 tokens; False: each window has the first
    T + 1 tokens of a document, and shorter documents are left out, not padded."""
    loss: Literal['all', 'assistant'] = 'all'
    """Targets that count: all, or those of assistant turns of a chat."""
    fixed_position: PositiveInt | None = None
    """Position, from 1, at which every window has `fixed_token`; None: nowhere."""
    fixed_held_out: Bool = True
    """True: validation and probe sequences have the fixed token as well."""
    random_first: PositiveInt | None = None
    """First position, from 1, of training and validation windows that holds a random token; None: none."""
    random_last: PositiveInt | None = None
    """Last position that holds a random token."""
    positions: Literal['continued', 'reset'] = 'continued'
    """`reset`: positions start again at 0 with each document; `continued`: they run through the window."""
    triggers: PositiveInt | None = None
    """For `backcopy`: number of trigger characters, the most frequent ones; None for text."""
    seed: Seed = 0
    """Seed of the order of the training windows and of random tokens."""


@dataclasses.dataclass(frozen=True)
class ValidationConfig:
    every_steps: NonNegativeInt = 1000
    """Steps between two measurements of the validation loss; 0: only at the start and at the end."""
    windows: PositiveInt = 800
    """Number of held-out windows."""
    domain: NonEmptyStr | None = None
    """Domain of the held-out documents, for a corpus with several; None: all."""


@dataclasses.dataclass(frozen=True)
class ProbeConfig:
    every_steps: NonNegativeInt = 250
    """Steps between two probes, which measure attention; 0: only at the start and at the end."""
    sequences: PositiveInt = 100
    """Number of probe sequences."""
    length: Annotated[int, Meta(ge=2, description='at least 2')] = 64
    """Tokens of a probe sequence (T of the metrics)."""
    keys: PositiveInt = 10
    """Importance alpha_k and Sink_k are reported for keys 1 to this number."""
    inputs: Literal['natural', 'random', 'repeated'] = 'natural'
    """Probe inputs: held-out texts, ids drawn from the vocabulary, or one id repeated."""
    domain: NonEmptyStr | None = None
    """Domain of natural inputs, for a corpus with several; None: all."""
    prepend: Literal['none', 'bos', 'eos'] = 'none'
    """Token before each probe text."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    schedule: Literal['linear', 'log'] = 'linear'
    """`log`: also save steps 1, 2, 4, 8, ..., as Pythia does, and never delete these checkpoints."""
    every_steps: NonNegativeInt = 1000
    """Steps between two checkpoints; 0: only at the end."""
    every_minutes: NonNegativeFloat = 0.0
    """Minutes after the last checkpoint until another one is saved, by the clock of process 0; 0: by
    steps only."""
    keep: Annotated[int, Meta(ge=2, description='at least 2, so that there is one before the newest')] = 3
    """Number of newest checkpoints that are kept."""
    keep_every_steps: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this are never deleted; 0: none."""

    def is_log_step(self, step: int) -> bool:
        """Return whether the schedule `log` saves and keeps this step, a power of 2."""
        return self.schedule == 'log' and step & (step - 1) == 0


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every_steps: PositiveInt = 10
    """Steps between two lines of training metrics."""
    sinks: Bool = False
    """True: log sink metrics of the training batch as well, over its whole length (names end with /context)."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """The config of a run; `sinklab.config.validate.parse_config` makes a valid one from a nested mapping."""

    model: ModelConfig = ModelConfig()
    """The model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    data: DataConfig = DataConfig()
    """The data."""
    valid: ValidationConfig = ValidationConfig()
    """The validation loss."""
    probe: ProbeConfig = ProbeConfig()
    """The probes of attention."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoints."""
    log: LogConfig = LogConfig()
    """The training metrics."""
    seed: Seed = 0
    """Seed of the initial parameters."""


@functools.cache
def get_field_types(config_class: type = Spec, prefix: str = '') -> dict[str, Any]:
    """Return the type of each field by its dotted path, with its allowed values."""
    field_types: dict[str, Any] = {}
    for name, hint in get_type_hints(config_class, include_extras=True).items():
        nested = dataclasses.is_dataclass(hint)
        field_types |= get_field_types(hint, f'{prefix}{name}.') if nested else {f'{prefix}{name}': hint}
    return field_types


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of a run on devices. It is never part of a row, because the result does not depend on it."""

    data: PositiveInt | None = None
    """Size of the mesh axis that splits the batch only; None: the number of TPU slices or GPU nodes, 1 on a CPU."""
    fsdp: PositiveInt | None = None
    """Size of the mesh axis that splits the batch and the parameters; None: all devices of a slice or node."""
    tensor: PositiveInt = 1
    """Devices that split heads, feed-forward networks and the vocabulary."""
    micro_batch: PositiveInt | Literal['default'] | None = None
    """Sequences that are computed at once, over all devices; gradients accumulate. None: the whole batch. `default`
    (that of the command line): parts of a large batch on a CPU, otherwise the whole batch."""
    remat: str = 'none'
    """Activations that the backward pass computes again: `none`, `full`, `auto` (as few as fit in memory), `default`
    (that of the command line: the fastest on a CPU, otherwise `none`), or the names of SAVEABLE_ACTIVATIONS that are
    saved, separated by commas, so that the others are computed again."""
    attention: BackendName = 'auto'
    """Attention backend."""

    def get_micro_batch_size(self, batch_size: int) -> int:
        """Return how many sequences of a batch are computed at once; raise ValueError if that is not chosen yet."""
        if self.micro_batch == 'default':
            raise ValueError('the micro-batch is not chosen yet; see device_layout.choose_micro_batch')
        return self.micro_batch or batch_size
