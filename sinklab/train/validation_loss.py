"""Validation loss over held-out sequences."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import optax

from sinklab.config.spec import Layout, Spec
from sinklab.loss_mask import exclude_from_loss, strip_loss_mask
from sinklab.metrics import bigram_backcopy
from sinklab.model.transformer import compute_logits
from sinklab.parallel import collectives, sharding
from sinklab.train import state
from sinklab.train.step import compute_predicted_fraction, make_hidden_states_fn, make_loss


def make_validation_fn(spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """Make a function (params, ids_NT, trigger_NT) -> {'valid/loss': loss, ...}.

    With `trigger_NT`, the losses of each kind of token are added.
    """
    loss_fn = make_mean_loss(spec, mesh, backend)
    token_loss_fn = make_token_loss(spec, mesh, backend)
    micro_batch = layout.get_micro_batch_size(spec.optimizer.batch_size)

    def evaluate(params: dict, ids_NT: np.ndarray, trigger_NT: np.ndarray | None = None) -> dict[str, float]:
        parts = load_eval_batches(ids_NT, micro_batch, mesh)
        if trigger_NT is None:
            total = sum(len(part) * jax.device_get(loss_fn(params, part)) for part in parts)
            return {'valid/loss': float(total) / len(ids_NT) / float(compute_predicted_fraction(ids_NT))}
        token_results = [jax.device_get(token_loss_fn(params, part)) for part in parts]
        loss_NT, is_correct_NT = (
            np.concatenate(arrays)[: len(ids_NT)] for arrays in zip(*token_results, strict=True)
        )
        return {'valid/loss': float(loss_NT.mean())} | bigram_backcopy.compute_trigger_losses(
            loss_NT, is_correct_NT, trigger_NT
        )

    return evaluate


def make_mean_loss(spec: Spec, mesh: jax.sharding.Mesh, backend: str) -> Callable:
    """Make a function (params, ids_BT of T + 1) -> mean loss over all targets; each device has its own sequences."""
    loss = make_loss(spec, backend=backend)

    def average_loss(params: dict, ids_BT: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss(params, ids_BT), sharding.BATCH_AXES)

    if is_sharded := sharding.count_batch_shards(mesh) > 1:
        param_shardings = state.get_state_shardings(spec, mesh)['params']
        average_loss = collectives.shard_map_over_batch(average_loss, mesh, param_shardings)
    return jax.jit(average_loss if is_sharded else loss, **state.get_replicated_jit_options(spec, mesh))


def make_token_loss(spec: Spec, mesh: jax.sharding.Mesh, backend: str = 'chunked', **model_options) -> Callable:
    """Make a function (params, ids_BT of T + 1) -> (loss_BT, is_correct_BT)."""
    apply_model = make_hidden_states_fn(spec, backend=backend, **model_options)

    def by_token(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_BT = strip_loss_mask(ids_BT)
        hidden_BTD, head_VD, _ = apply_model(params, ids_BT[:, :-1])
        logits_BTV = compute_logits(hidden_BTD, head_VD)
        loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids_BT[:, 1:])
        return loss_BT, logits_BTV.argmax(-1) == ids_BT[:, 1:]

    return jax.jit(by_token, **state.get_replicated_jit_options(spec, mesh))


def load_eval_batches(ids_NT: np.ndarray, max_rows: int, mesh: jax.sharding.Mesh) -> list[jax.Array]:
    """Load sequences onto devices in equal parts; each process reads the sequences of its own devices."""
    num_parts, part_rows = choose_eval_batch_sizes(len(ids_NT), max_rows, sharding.count_batch_shards(mesh))

    def read_rows(first_row: int, part_rows: range) -> np.ndarray:
        return pad_rows(ids_NT[first_row + part_rows.start : first_row + part_rows.stop], len(part_rows))

    return [
        sharding.load_batch(functools.partial(read_rows, part * part_rows), (part_rows, ids_NT.shape[1]), mesh)
        for part in range(num_parts)
    ]


def choose_eval_batch_sizes(num_sequences: int, max_rows: int, num_shards: int) -> tuple[int, int]:
    """Return (number of parts, sequences of each): at most `max_rows`, and a multiple of `num_shards`."""
    num_parts = -(-num_sequences // max_rows)
    return num_parts, -(-num_sequences // (num_parts * num_shards)) * num_shards


def pad_rows(ids_NT: np.ndarray, num_rows: int) -> np.ndarray:
    """Append sequences of ids that are excluded from the loss."""
    return np.pad(ids_NT, ((0, num_rows - len(ids_NT)), (0, 0)), constant_values=exclude_from_loss(0))
