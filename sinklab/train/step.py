"""One update, and the loss without one, each a jitted function on plain trees."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sinklab import sharding
from sinklab.attend.choice import Choice, choose
from sinklab.measure import backcopy, table
from sinklab.measure.setting import setting_of
from sinklab.model.capture import Capture
from sinklab.model.rule import case
from sinklab.model.transformer import logits
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import state
from sinklab.train.forward import forward
from sinklab.train.loss import cross_entropy
from sinklab.train.optimizer import schedule, transformation


def check(spec: Spec, hardware: Hardware) -> None:
    """Refuses a layout that a run cannot be divided into."""
    batch, micro = spec.optimizer.batch_size, hardware.micro_batch or spec.optimizer.batch_size
    ways = hardware.data * hardware.fsdp
    if batch % micro:
        raise Refusal(f'--micro_batch={micro} does not divide config.optimizer.batch_size, which is {batch}')
    if micro % ways:
        raise Refusal(
            f'a micro-batch of {micro} sequences cannot be divided over {ways} devices '
            f'(--data={hardware.data} x --fsdp={hardware.fsdp}); use a multiple of {ways}, or fewer devices'
        )
    divided = (('width', 'fsdp'), ('heads', 'tensor'), ('ffn_width', 'tensor'), ('vocabulary', 'tensor'))
    for field, axis in divided:
        value, parts = getattr(spec.model, field), getattr(hardware, axis)
        if value % parts:
            raise Refusal(f'config.model.{field} is {value}, which --{axis}={parts} does not divide')


def check_memory(spec: Spec, hardware: Hardware, memory: int) -> None:
    """Refuses a batch of which a device could not even hold the stream between its layers."""
    model, micro = spec.model, hardware.micro_batch or spec.optimizer.batch_size
    tokens = micro * spec.data.length // (hardware.data * hardware.fsdp)
    least = tokens * model.layers * model.width * jnp.dtype(model.dtype).itemsize
    if least > memory:
        raise Refusal(
            f'a step of {micro} sequences holds at least {least / 2**30:.1f} GiB on a device of '
            f'{memory / 2**30:.1f} GiB; lower config.optimizer.batch_size, or give --micro_batch'
        )


def attention(spec: Spec, hardware: Hardware) -> Choice:
    """What will compute attention here, chosen once; raises Refusal."""
    return choose(hardware.attention, jax.default_backend(), case(spec.model, spec.data.length))


def loss_of(spec: Spec, first: int = 1, **how) -> Callable:
    """loss(params, ids_BT of T + 1) -> the mean cross-entropy of what follows the tokens first..T."""
    loss = seeing_loss(spec, first, **how)
    return lambda params, ids_BT: loss(params, ids_BT)[0]


def seeing_loss(spec: Spec, first: int = 1, **how) -> Callable:
    """loss(params, ids_BT of T + 1) -> (the mean cross-entropy of what follows the tokens first..T, Capture).

    Complements of ids, below 0, are read and not predicted; they count for the mean, with a loss of 0.
    """
    run = forward(spec, **how)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, Capture]:
        hidden_BTD, head_VD, captured = run(params, jnp.where(ids_BT < 0, ~ids_BT, ids_BT)[:, :-1])
        return cross_entropy(hidden_BTD[:, first - 1 :], head_VD, ids_BT[:, first:]), captured

    return loss


def predicted(ids_BT: jax.Array, first: int = 1) -> jax.Array:
    """The share of targets that are predicted; with none, 1, so that it can divide."""
    module = np if isinstance(ids_BT, np.ndarray) else jnp
    share = module.mean((ids_BT[:, first:] >= 0).astype(np.float32))
    return module.where(share > 0, share, 1.0)


def accumulated(loss: Callable, params: dict, ids_BT: jax.Array, parts: int) -> tuple[tuple[jax.Array, dict], dict]:
    """((loss, numbers), gradient) of the whole batch, `parts` micro-batches one after another."""
    take = jax.value_and_grad(loss, has_aux=True)
    if parts == 1:
        return take(params, ids_BT)

    micro = sharding.place(ids_BT.reshape(parts, -1, ids_BT.shape[-1]), None, 'batch', None)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(take, params, micro[0]))
    total, _ = jax.lax.scan(
        lambda total, ids_BT: (jax.tree.map(jnp.add, total, take(params, ids_BT)), None), zero, micro
    )
    return jax.tree.map(lambda x: x / parts, total)


def sinks(captured: Capture, spec: Spec) -> dict[str, jax.Array]:
    """The sinks of a training batch, over its whole length."""
    return table.context(captured.received, setting_of(spec, spec.data.length, captured.columns))


def train_step(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """step(state, ids_BT) -> (state, {train/loss, train/grad_norm, ...}); the state is donated."""
    first = spec.model.mask.prefix or 1  # a prefix is seen, not predicted
    seeing = seeing_loss(spec, first, remat=hardware.remat, backend=backend, keys=spec.probe.keys * spec.log.sinks)
    optimizer, rate = transformation(spec.optimizer), schedule(spec.optimizer)
    parts = spec.optimizer.batch_size // (hardware.micro_batch or spec.optimizer.batch_size)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, dict]:
        value, captured = seeing(params, ids_BT)
        return value, sinks(captured, spec) if spec.log.sinks else {}

    def step(state: dict, ids_BT: jax.Array) -> tuple[dict, dict]:
        (value, measured), gradient = accumulated(loss, state['params'], ids_BT, parts)
        if spec.data.loss != 'all':
            value, gradient = jax.tree.map(lambda x: x / predicted(ids_BT, first), (value, gradient))
        updates, opt_state = optimizer.update(gradient, state['opt_state'], state['params'])
        params = optax.apply_updates(state['params'], updates)
        numbers = {
            'train/loss': value,
            'train/grad_norm': optax.tree.norm(gradient),
            'train/learning_rate': rate(state['step']),
            **measured,
        }
        return dict(step=state['step'] + 1, params=params, opt_state=opt_state), numbers

    where = state.shardings(spec, mesh)
    places, options = (where, sharding.replicated(mesh)), state.rounded(spec)
    return jax.jit(step, donate_argnums=0, out_shardings=places, compiler_options=options)


def evaluation(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """valid(params, ids_NT, trigger_NT) -> {valid/loss}, over all tokens; with triggers, each kind apart as well."""
    how = dict(out_shardings=sharding.replicated(mesh), compiler_options=state.rounded(spec))
    loss = jax.jit(loss_of(spec, backend=backend), **how)
    by_token = tokenwise(spec, mesh, backend)
    most = hardware.micro_batch or spec.optimizer.batch_size

    def valid(params: dict, ids_NT: np.ndarray, trigger_NT: np.ndarray | None = None) -> dict[str, float]:
        parts = [put(part, mesh) for part in equal(ids_NT, most, sharding.ways(mesh))]
        if trigger_NT is None:
            losses = jax.device_get([loss(params, part) for part in parts])
            total = sum(len(part) * value for part, value in zip(parts, losses, strict=True))
            return {'valid/loss': float(total) / len(ids_NT) / float(predicted(ids_NT))}
        said = jax.device_get([by_token(params, part) for part in parts])
        loss_NT, right_NT = (np.concatenate(arrays)[: len(ids_NT)] for arrays in zip(*said, strict=True))
        return {'valid/loss': float(loss_NT.mean())} | backcopy.losses(loss_NT, right_NT, trigger_NT)

    return valid


def tokenwise(spec: Spec, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """by_token(params, ids_BT of T + 1) -> (loss_BT, whether the likeliest token was the next one)."""
    run = forward(spec, backend=backend)

    def by_token(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_BT = jnp.where(ids_BT < 0, ~ids_BT, ids_BT)
        hidden_BTD, head_VD, _ = run(params, ids_BT[:, :-1])
        logits_BTV = logits(hidden_BTD, head_VD)
        loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids_BT[:, 1:])
        return loss_BT, logits_BTV.argmax(-1) == ids_BT[:, 1:]

    return jax.jit(by_token, out_shardings=sharding.replicated(mesh), compiler_options=state.rounded(spec))


def equal(ids_NT: np.ndarray, most: int, ways: int) -> list[np.ndarray]:
    """The sequences in equal parts of at most so many, each a multiple of `ways`, for one program to read.

    Complements of the id 0, which are not predicted, fill up the last ones.
    """
    number = -(-len(ids_NT) // most)
    rows = -(-len(ids_NT) // (number * ways)) * ways
    filled_NT = np.pad(ids_NT, ((0, number * rows - len(ids_NT)), (0, 0)), constant_values=-1)
    return np.split(filled_NT, number)


def put(ids_BT: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """A batch on the devices that share it; every process holds the whole of it and gives its part."""
    return shared(lambda rows: ids_BT[rows.start : rows.stop], ids_BT.shape, mesh)


def shared(read: Callable[[range], np.ndarray], shape: tuple[int, int], mesh: jax.sharding.Mesh) -> jax.Array:
    """A batch on the devices that share it; every process reads the rows of its own devices, each once."""
    read = functools.cache(read)
    where = sharding.of_batch(mesh, shape)
    return jax.make_array_from_callback(shape, where, lambda index: read(range(*index[0].indices(shape[0]))))
