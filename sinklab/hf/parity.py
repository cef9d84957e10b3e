"""Parity check of an exported model: logits, attention, and token ids against transformers."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from sinklab.config.spec import ModelConfig, Spec
from sinklab.data import tokenizer as tokens
from sinklab.hf.files import import_hf_library
from sinklab.model.transformer import Transformer
from sinklab.schema import UserError

# The tolerance is relative to the largest logit, at least 1. Rounding errors of float32 grow with the number of
# layers, so that it is scaled by layers / SHALLOW_LAYERS above that number.
RELATIVE_TOLERANCE, SHALLOW_LAYERS = 1e-5, 4
DEFAULT_TOKENS, MAX_TOKENS = 64, 1024  # compared tokens; more than the default to reach beyond a window
SAMPLE_TEXT = 'The first token receives 42 % of the attention.\n\n    def sink(x): return x[0]  # naïve, 注意, ☃\n'


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The largest differences of logits and attention, and the version of transformers."""

    logits_error: float
    attention_error: float
    transformers_version: str

    def __str__(self) -> str:
        differences = f'logits within {self.logits_error:.1e} and attention within {self.attention_error:.1e}'
        return f'{differences} of transformers {self.transformers_version}'


def require_libraries() -> None:
    for name in ('torch', 'transformers', 'safetensors'):
        import_hf_library(name)


def check_parity(model_dir: Path, spec: Spec, params: dict, length: int) -> ParityReport:
    """Compare a model directory with our model of these parameters.

    Raises:
        UserError: The tokenizer, the logits or the attention weights differ.
    """
    check_tokenizer_parity(model_dir)
    ids_BT = make_sample_ids(spec.model, length)
    own_outputs, hf_outputs = (
        compute_with_sinklab(spec.model, params, ids_BT),
        compute_with_transformers(model_dir, ids_BT),
    )
    differences = [
        float(np.abs(value - reference).max()) for value, reference in zip(own_outputs, hf_outputs, strict=True)
    ]
    allowed = (
        RELATIVE_TOLERANCE
        * max(1.0, float(np.abs(own_outputs[0]).max()))
        * max(1.0, spec.model.layers / SHALLOW_LAYERS)
    )
    report = ParityReport(*differences, import_hf_library('transformers').__version__)
    if not all(value <= allowed for value in differences):
        raise UserError(f'{report}, and {allowed:.1e} is allowed: what was written is not this model, and is deleted')
    return report


def make_sample_ids(model: ModelConfig, length: int) -> np.ndarray:
    """Make two random sequences of token ids.

    They are longer than the attention window if `length` and MAX_TOKENS allow it.
    """
    past_window = (model.mask.window or 0) + 8
    num_tokens = min(length, past_window if DEFAULT_TOKENS < past_window <= MAX_TOKENS else DEFAULT_TOKENS)
    return np.random.default_rng(0).integers(0, model.vocabulary, (2, num_tokens)).astype(np.int32)


def compute_with_sinklab(model: ModelConfig, params: dict, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (logits_BTV, attention_LBHTS) in float32; each sequence is one document."""
    mask = dataclasses.replace(model.mask, document=False)
    model = dataclasses.replace(model, dtype='float32', mask=mask)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(model, ids_BT.shape[1], nnx.Rngs(0))))

    @jax.jit
    def forward_fn(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTV, intermediates = nnx.merge(graph, params)(ids_BT, capture=True)
        return logits_BTV, intermediates.attention_BHTS

    return tuple(map(np.asarray, forward_fn(params, ids_BT)))


def compute_with_transformers(model_dir: Path, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (logits_BTV, attention_LBHTS) of transformers.

    Attention is eager: no other implementation returns the weights.
    """
    torch, transformers = import_hf_library('torch'), import_hf_library('transformers')
    options = dict(attn_implementation='eager', dtype=torch.float32, local_files_only=True, use_safetensors=True)
    options['trust_remote_code'] = False  # if it is not given, transformers asks on the terminal
    with suppress_transformers_logs(transformers):
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, output_loading_info=True, **options
        )
    if problems := {key: sorted(map(str, value)) for key, value in loading_info.items() if value}:
        raise UserError(f'transformers reads {model_dir} with {problems}')
    with torch.no_grad():
        token_ids = torch.from_numpy(ids_BT.astype(np.int64))
        outputs = model.eval()(input_ids=token_ids, output_attentions=True, use_cache=False)
    return outputs.logits.numpy(), np.stack([layer.numpy() for layer in outputs.attentions])


def check_tokenizer_parity(model_dir: Path) -> None:
    """Refuse a tokenizer for which transformers gives other token ids than our reader."""
    transformers, own_tokenizer = (
        import_hf_library('transformers'),
        tokens.load_tokenizer(model_dir / 'tokenizer.json'),
    )
    with suppress_transformers_logs(transformers):
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        hf_ids = hf_tokenizer(SAMPLE_TEXT, add_special_tokens=False)['input_ids']
    if hf_ids != own_tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False).ids:
        raise UserError(f'transformers makes other ids of a text by {model_dir} than its tokenizer.json does here')


@contextlib.contextmanager
def suppress_transformers_logs(transformers: Any) -> Iterator[None]:
    """Turn off progress bars and warnings of transformers."""
    logging = transformers.utils.logging
    verbosity, has_progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bars:
            logging.enable_progress_bar()
