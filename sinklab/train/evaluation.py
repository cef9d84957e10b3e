"""The loss without an update, over sequences of any number."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import optax

from sinklab import sharding
from sinklab.data.sequences.shuffled import Held
from sinklab.measure import backcopy
from sinklab.model.transformer import logits
from sinklab.spec import Hardware, Spec
from sinklab.targets import is_predicted, readable, unpredicted
from sinklab.train import state
from sinklab.train.forward import forward
from sinklab.train.objective import loss_of, over_devices, predicted_share


def evaluation(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """valid(params, ids_NT, trigger_NT) -> {valid/loss}, over all tokens; with triggers, each kind apart as well."""
    loss, by_token = mean_loss(spec, mesh, backend), tokenwise(spec, mesh, backend)
    most = hardware.sequences(spec.optimizer.batch_size)

    def valid(params: dict, ids_NT: np.ndarray, trigger_NT: np.ndarray | None = None) -> dict[str, float]:
        parts = laid_out(ids_NT, most, mesh)
        if trigger_NT is None:
            losses = jax.device_get([loss(params, part) for part in parts])
            total = sum(len(part) * value for part, value in zip(parts, losses, strict=True))
            return {'valid/loss': float(total) / len(ids_NT) / share(ids_NT, parts)}
        found = jax.device_get([by_token(params, part) for part in parts])
        loss_NT, right_NT = (np.concatenate(arrays)[: len(ids_NT)] for arrays in zip(*found, strict=True))
        return {'valid/loss': float(loss_NT.mean())} | backcopy.losses(loss_NT, right_NT, trigger_NT)

    return valid


def mean_loss(spec: Spec, mesh: jax.sharding.Mesh, backend: str) -> Callable:
    """loss(params, ids_BT of T + 1), over all that is predicted or not."""
    return jax.jit(over_devices(loss_of(spec, backend=backend), spec, mesh), **state.jit_options(spec, mesh))


def tokenwise(spec: Spec, mesh: jax.sharding.Mesh, backend: str = 'chunked', **how) -> Callable:
    """by_token(params, ids_BT of T + 1) -> (loss_BT, whether the likeliest token was the next one)."""
    run = forward(spec, backend=backend, **how)

    def by_token(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_BT = readable(ids_BT)
        hidden_BTD, head_VD, _ = run(params, ids_BT[:, :-1])
        logits_BTV = logits(hidden_BTD, head_VD)
        loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids_BT[:, 1:])
        return loss_BT, logits_BTV.argmax(-1) == ids_BT[:, 1:]

    return jax.jit(by_token, **state.jit_options(spec, mesh))


def laid_out(ids_NT: np.ndarray | Held, most: int, mesh: jax.sharding.Mesh) -> list[jax.Array]:
    """Equal parts of the sequences on the devices; every process reads those of its own devices."""
    number, rows = division(len(ids_NT), most, sharding.ways(mesh))

    def read(first: int, rows: range) -> np.ndarray:
        return filled(ids_NT[first + rows.start : first + rows.stop], len(rows))

    return [
        sharding.batch(functools.partial(read, part * rows), (rows, ids_NT.shape[1]), mesh) for part in range(number)
    ]


def share(ids_NT: np.ndarray | Held, parts: list[jax.Array]) -> float:
    """The share of targets that are predicted; of sequences that no process has all of, counted where they are."""
    if isinstance(ids_NT, np.ndarray):
        return float(predicted_share(ids_NT))
    count = sum(int(predicted(part)) for part in parts)
    return float(np.float32(count) / np.float32(len(ids_NT) * (ids_NT.shape[1] - 1))) or 1.0


@jax.jit
def predicted(ids_BT: jax.Array) -> jax.Array:
    return is_predicted(ids_BT[:, 1:]).sum()


def equal_parts(ids_NT: np.ndarray, most: int, ways: int) -> list[np.ndarray]:
    """The sequences in equal parts of at most so many, each a multiple of `ways`, for one program to read.

    What is not predicted fills up the last ones.
    """
    number, rows = division(len(ids_NT), most, ways)
    return np.split(filled(ids_NT, number * rows), number)


def division(count: int, most: int, ways: int) -> tuple[int, int]:
    """(how many parts, sequences of each)."""
    number = -(-count // most)
    return number, -(-count // (number * ways)) * ways


def filled(ids_NT: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(ids_NT, ((0, rows - len(ids_NT)), (0, 0)), constant_values=unpredicted(0))
