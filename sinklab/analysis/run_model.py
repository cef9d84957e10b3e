"""A checkpoint of a run as a measurable model."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sinklab.analysis.bos import BosMode, apply_bos
from sinklab.analysis.edits import Edit, EditableArray, EditArrays, apply_edits
from sinklab.analysis.model_protocol import (
    ExtractFn,
    MeasurableModel,
    ProgressFn,
    ignore_progress,
    run_in_batches,
)
from sinklab.checkpoint import checkpointer
from sinklab.config.spec import Spec
from sinklab.data.batches import add_training_tokens, set_fixed_token
from sinklab.data.run_data import PREPENDED_IDS, find_tokenizer_file
from sinklab.data.tokenizer import Tokenizer, compute_tokenizer_digest, encode_long_text, load_tokenizer
from sinklab.errors import UserError
from sinklab.loss_mask import is_in_loss, strip_loss_mask
from sinklab.metrics.metric import PROBE_ARRAYS, Arrays, MetricContext, extract_arrays, make_context
from sinklab.metrics.norms import compute_norms
from sinklab.model.attention import get_value_width
from sinklab.model.learned_kv import LEARNED_KV_KINDS, count_learned_kv
from sinklab.model.transformer import compute_logits
from sinklab.parallel import sharding
from sinklab.parallel.device_mesh import make_one_device_mesh
from sinklab.run_dir import RunDir, read_spec
from sinklab.train import sink_probe, state
from sinklab.train.step import make_hidden_states_fn, make_loss
from sinklab.train.validation_loss import make_token_loss

MAX_BATCH_BYTES = 1 << 30  # bytes of captured arrays, or of logits, of a batch


class RunModel(MeasurableModel):
    """A checkpoint of a run. Nothing is written to the run directory.

    `dtype` is the type of activations; None: that of the config.
    """

    def __init__(self, run_dir: RunDir, step: int, bos: BosMode = 'auto', dtype: str | None = None):
        self.run_dir = run_dir
        self.step = step
        self.bos = bos
        self.spec = apply_bos(read_spec(run_dir), bos)
        if dtype:
            self.spec = dataclasses.replace(self.spec, model=dataclasses.replace(self.spec.model, dtype=dtype))
        model = self.spec.model
        self.name = f'{run_dir}@{step}'
        self.dtype = model.dtype
        self.vocabulary = model.vocabulary
        self.max_length = self.spec.data.length
        self.position = model.position
        self.remarks = run_dir.read_remarks()
        self.array_layers = {}  # all layers have all arrays
        # None: losses come from the attention backend of training. (): from full attention matrices, as with edits.
        self.edits: tuple[Edit, ...] | None = None
        self.jit_forward = jit_forward
        has_learned_tokens = LEARNED_KV_KINDS[model.learned_kv.kind].tokens_class.num_tokens > 0
        optional_arrays = {'sink_LPCD': has_learned_tokens, 'gate_LPTH': model.gate != 'none'}
        self.available_arrays = (*PROBE_ARRAYS, *(name for name, exists in optional_arrays.items() if exists))
        layers = range(model.layers)
        vectors = EditableArray(layers, dimensions=model.width)
        queries = EditableArray(layers, model.heads, model.head_width)
        values = EditableArray(layers, model.heads, get_value_width(model))
        self.editable_arrays = dict(
            attention=EditableArray(layers, model.heads),
            **dict(query=queries, key=queries, value=values, head=values, ffn=vectors, residual=vectors),
        )
        has_implicit_key = self.make_context(2).implicit
        learned_names = [f'({model.learned_kv.kind})'] * count_learned_kv(model)
        self.learned_key_names = ['(+1)'] * has_implicit_key + learned_names

    @functools.cached_property
    def params(self) -> dict:
        """The parameters on the first device, with verified digests."""
        abstract_params = state.make_abstract_state(self.spec, make_one_device_mesh())['params']
        return checkpointer.restore_parameters(self.run_dir.path, self.step, abstract_params=abstract_params)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run directory, or that of the token store for a run without tokenizer.json."""
        if self.spec.data.task != 'text':
            raise UserError(f'{self.run_dir} was trained on {self.spec.data.task}, which has no tokenizer; give ids')
        return load_tokenizer(find_run_tokenizer(self.run_dir, self.step, self.spec))

    def encode_text(self, text: str) -> list[int]:
        return encode_long_text(self.tokenizer, text).tolist()

    def add_first_tokens(self, ids: list[int]) -> list[int]:
        """Return token ids with the tokens that probes put before a text, or else in the format of training."""
        prefix_ids = PREPENDED_IDS[self.spec.probe.prepend](self.spec.data)
        if prefix_ids or self.bos == 'none':
            return [*prefix_ids, *ids]
        return strip_loss_mask(add_training_tokens(np.array(ids, np.int32), self.spec.data)).tolist()

    def decode_tokens(self, ids_T: np.ndarray) -> list[str]:
        return [self.decode_token(int(token_id)) for token_id in strip_loss_mask(np.asarray(ids_T))]

    def decode_token(self, token_id: int) -> str:
        """Return the text of a token; for a special token that training adds to sequences, its purpose."""
        data = self.spec.data
        if token_id == data.fixed_token and not self.tokenizer.decode([token_id], skip_special_tokens=True):
            if data.fixed_position is not None:
                return '(fixed token)'
            if data.bos == 'documents' or self.spec.probe.prepend == 'bos':
                return '(BOS)'
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def apply_training_format(self, ids_PT: np.ndarray) -> np.ndarray:
        return set_fixed_token(ids_PT, self.spec.data) if self.spec.data.fixed_held_out else ids_PT

    @functools.cached_property
    def model(self) -> nnx.Module:
        return nnx.merge(state.make_abstract_model(self.spec)[0], self.params)

    def make_context(self, length: int, **overrides: Any) -> MetricContext:
        return make_context(self.spec, length, count_learned_kv(self.spec.model), **overrides)

    def capture(
        self,
        ids_PT: np.ndarray,
        extract: ExtractFn,
        position_T: np.ndarray | None = None,
        on_progress: ProgressFn = ignore_progress,
    ) -> dict[str, np.ndarray]:
        self.check_length(ids_PT)
        return self.run_edited(extract, ids_PT, position_T, on_progress)

    def compute_token_losses(
        self, ids_PT: np.ndarray, position_T: np.ndarray | None = None, bits: int | None = None
    ) -> np.ndarray:
        """Return loss_PT; with `bits`, of the model without edits after simulated quantization (`param_einsum`)."""
        self.check_length(ids_PT)
        if self.edits is None or bits:
            arrays = self.score_tokens(ids_PT, position_T, bits)
        else:
            arrays = self.run_edited('losses', ids_PT, position_T)
        return np.where(is_in_loss(ids_PT[:, 1:]), arrays['loss_LPT'][0], np.nan)

    def compute_gradient_norms(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        """Return norm_LPT of the gradient of the loss at the normalized input of attention, without edits."""
        program = jit_gradient_norms(self.spec, make_hashable(None if position_T is None else position_T[:-1]))
        sequence_bytes = sink_probe.estimate_sequence_bytes(self.spec.model, ids_PT.shape[1])
        # The backward pass keeps about twice as many arrays as a capture.
        return self.run_on_device(program, ids_PT, 3 * sequence_bytes)['norm_LPT']

    def compute_logits(self, ids_PT: np.ndarray) -> np.ndarray:
        self.check_length(ids_PT)
        return self.run_edited('logits', ids_PT)['logits_LPTV'][0]

    def score_tokens(
        self, ids_PT: np.ndarray, position_T: np.ndarray | None = None, bits: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return loss_LPT and is_greedy_LPT of every token but the first, where L is 1, without edits."""
        program = jit_token_scores(self.spec, make_hashable(None if position_T is None else position_T[:-1]), bits)
        return self.run_on_device(program, ids_PT, 4 * ids_PT.shape[1] * self.vocabulary)

    def run_edited(
        self,
        extract: ExtractFn | str,
        ids_PT: np.ndarray,
        position_T: np.ndarray | None = None,
        on_progress: ProgressFn = ignore_progress,
    ) -> dict[str, np.ndarray]:
        """Run `jit_forward` with the edits of this model.

        A copy whose edits have functions compiles programs of its own.
        """
        program = self.jit_forward(self.spec, extract, make_hashable(position_T), self.edits is not None)
        sequence_bytes = sink_probe.estimate_sequence_bytes(self.spec.model, ids_PT.shape[1])
        if isinstance(extract, str):
            sequence_bytes = max(sequence_bytes, 4 * ids_PT.shape[1] * self.vocabulary)
        return self.run_on_device(program, ids_PT, sequence_bytes, on_progress)

    def run_on_device(
        self, program: Callable, ids_PT: np.ndarray, sequence_bytes: int, on_progress: ProgressFn = ignore_progress
    ) -> dict[str, np.ndarray]:
        """Run a program of (edits, params, ids_PT) in batches of MAX_BATCH_BYTES."""
        mesh = make_one_device_mesh()

        def compute(ids_PT: np.ndarray, edits: tuple[Edit, ...]) -> Arrays:
            ids_on_device = sharding.put_batch(strip_loss_mask(ids_PT), mesh)
            return jax.device_get(program(tuple(edit.make_arrays() for edit in edits), self.params, ids_on_device))

        with jax.set_mesh(mesh):
            batch_size = max(1, MAX_BATCH_BYTES // sequence_bytes)
            return run_in_batches(compute, ids_PT, batch_size, on_progress, self.edits or ())

    def copy_with_edits(self, edits: tuple[Edit, ...]) -> 'RunModel':
        """Return a copy of the model with edits; see `MeasurableModel.copy_with_edits`."""
        params, clone = self.params, copy.copy(self)  # read here, so that several copies read them once
        clone.params, clone.edits = params, edits
        if any(callable(edit.value) for edit in edits):  # a function may read variables that have changed
            clone.jit_forward = functools.cache(jit_forward.__wrapped__)
        return clone


@functools.lru_cache(maxsize=16)  # so that other steps of a run use the same compiled program
def jit_forward(
    spec: Spec, extract: ExtractFn | str, positions: tuple[int, ...] | None, takes_edits: bool
) -> Callable:
    """Return the jitted function (edits, params, ids_PT) -> arrays that `extract` keeps of all layers.

    `losses` stands for the loss_LPT of full attention matrices, and `logits` for their logits_LPTV, where L is 1.
    """

    def program(edits: Sequence[EditArrays], params: dict, ids_PT: jax.Array) -> Arrays:
        edit = functools.partial(apply_edits, edits) if takes_edits else None
        forward_fn = make_hidden_states_fn(spec, capture=True, edit=edit, **make_position_kwargs(positions))
        hidden_PTD, head_VD, intermediates = forward_fn(params, ids_PT)
        if extract == 'logits':
            return {'logits_LPTV': compute_logits(hidden_PTD, head_VD)[None]}
        if extract == 'losses':
            logits_PTV = compute_logits(hidden_PTD[:, :-1], head_VD)
            return {'loss_LPT': optax.softmax_cross_entropy_with_integer_labels(logits_PTV, ids_PT[:, 1:])[None]}
        context = make_context(spec, ids_PT.shape[1], count_learned_kv(spec.model))
        return extract(extract_arrays(intermediates, context))

    return jax.jit(program, **state.get_replicated_jit_options(spec, make_one_device_mesh()))


@functools.lru_cache(maxsize=16)
def jit_gradient_norms(spec: Spec, positions: tuple[int, ...] | None) -> Callable:
    """Return the jitted function (no edits, params, ids_PT of T + 1) -> norm_LPT of the gradient at `normed_LPTD`."""

    def program(_: tuple, params: dict, ids_PT: jax.Array) -> Arrays:
        def compute_loss(change_LPTD: jax.Array) -> jax.Array:
            def add_change(
                layer: jax.Array, target: str, array_BSHX: jax.Array, num_before: int, *is_visible: jax.Array
            ) -> jax.Array:
                if target != 'normed':
                    return array_BSHX
                return array_BSHX.at[:, num_before:, 0].add(change_LPTD[layer].astype(array_BSHX.dtype))

            options = dict(capture=True, edit=add_change, **make_position_kwargs(positions))
            return make_loss(spec, spec.model.mask.prefix or 1, **options)(params, ids_PT)

        num_texts, num_tokens = ids_PT.shape
        shape = spec.model.layers, num_texts, num_tokens - 1, spec.model.width
        return {'norm_LPT': compute_norms(jax.grad(compute_loss)(jnp.zeros(shape)))}

    return jax.jit(program, **state.get_replicated_jit_options(spec, make_one_device_mesh()))


@functools.lru_cache(maxsize=16)
def jit_token_scores(spec: Spec, positions: tuple[int, ...] | None, bits: int | None) -> Callable:
    """Return the jitted function (no edits, params, ids_PT) -> loss_LPT and is_greedy_LPT, where L is 1."""
    program = make_token_loss(spec, make_one_device_mesh(), bits=bits, **make_position_kwargs(positions))

    def compute(_: tuple, params: dict, ids_PT: jax.Array) -> Arrays:
        loss_PT, is_greedy_PT = program(params, ids_PT)
        return {'loss_LPT': loss_PT[None], 'is_greedy_LPT': is_greedy_PT[None]}

    return compute


def make_hashable(position_T: np.ndarray | None) -> tuple[int, ...] | None:
    return None if position_T is None else tuple(map(int, position_T))


def make_position_kwargs(position_T: Any) -> dict[str, np.ndarray]:
    """Return the keyword arguments of a forward pass for token positions."""
    return {} if position_T is None else dict(position_BT=np.array(position_T)[None])


def find_run_tokenizer(run_dir: RunDir, step: int, spec: Spec) -> Path:
    """Find the tokenizer.json of a run.

    Raises:
        UserError: It is not the tokenizer that the checkpoint was trained with.
    """
    tokenizer_path = find_tokenizer_file(run_dir.path, spec.data, spec.model.vocabulary)
    trained_digest = (
        checkpointer.read_metadata(run_dir.checkpoint_dir / str(step)).custom_metadata['data'].get('tokenizer')
    )
    if not trained_digest or not compute_tokenizer_digest(tokenizer_path).startswith(trained_digest):
        raise UserError(
            f'{tokenizer_path} is not the tokenizer that {run_dir}@{step} was trained with; replace it by that one'
        )
    return tokenizer_path
