"""A run, or one step of it, as something to be measured: its parameters and its config, without its corpus."""

import copy
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab import devices, sharding
from sinklab.checkpoint import digests, restore
from sinklab.data.batches import PREPENDED
from sinklab.data.corpus import corpus, tokenizer_file
from sinklab.data.sequences.interventions import with_fixed_token
from sinklab.data.sequences.prompts import shaped
from sinklab.data.tokens.tokenizer import Tokenizer, load
from sinklab.data.tokens.tokenizer import digest as digest_of
from sinklab.folder import Folder
from sinklab.measure.measure import Arrays
from sinklab.measure.setting import Setting, forward_arrays, setting_of
from sinklab.model.columns import COLUMNS, count
from sinklab.named import spec_of
from sinklab.observe.subject import Keep, Watch, check_length, in_parts, unwatched
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.targets import is_predicted, readable
from sinklab.train import probe, state
from sinklab.train.evaluation import tokenwise
from sinklab.train.forward import forward

AT_ONCE = 1 << 30  # bytes of what is captured, or of logits, at once
SOFTMAX = 'identity', 'exp', 'sum'
QUERIES = 'query_DHK', 'query_bias'
READS = 'attention_LPHTS', 'query_LPTHK', 'key_LPSHK', 'value_LPSHK', 'head_LPTHK', 'normed_LPTD', 'residual_LPTD'


# What begins a text: as the run's own probes have it, nothing, or BOS. (changes of probe, changes of data)
BOS: dict[str, tuple[dict, dict]] = {
    'auto': ({}, {}),
    'none': (dict(prepend='none'), dict(fixed_held_out=False)),
    'force': (dict(prepend='bos'), {}),
}


class Own:
    """A step of a run; nothing is written to its folder."""

    def __init__(self, folder: Folder, step: int, bos: str = 'auto'):
        self.folder, self.step, self.bos, self.spec = folder, step, bos, beginning(spec_of(folder), bos)
        self.name = f'{folder}@{step}'
        self.vocabulary = self.spec.model.vocabulary
        self.array_layers, self.heads, self.remarks = {}, (), ()  # all layers are alike, and show everything
        self.reads = (*READS, *(('sink_LPCD',) if COLUMNS[self.spec.model.columns.kind].token.count else ()))

    @functools.cached_property
    def digest(self) -> str:
        config = json.dumps([dataclasses.asdict(part) for part in (self.spec.model, self.spec.data)], sort_keys=True)
        return f'{digests.seal(self.folder, self.step)} {hashlib.sha256(config.encode()).hexdigest()[:16]}'

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return one_device()

    @functools.cached_property
    def params(self) -> dict:
        """The verified parameters, on the first device."""
        abstract = state.abstract(self.spec, self.mesh)['params']
        return restore.parameters(self.folder.path, self.step, abstract=abstract)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's own; one that is older than tokenizer.json in its folder has it from its corpus."""
        if self.spec.data.task != 'text':
            raise Refusal(f'{self.folder} was trained on {self.spec.data.task}, which has no tokenizer; give ids')
        return load(tokenizer_of(self.folder, self.step, self.spec))

    def encode(self, text: str) -> list[int]:
        """As the run's probes begin, where these put something before a text, else as training showed a beginning."""
        ids_T = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        before = PREPENDED[self.spec.probe.prepend](self.spec.data)
        if before or self.bos == 'none':
            return [*before, *ids_T.tolist()]
        return readable(shaped(ids_T, self.spec.data)).tolist()

    @property
    def position(self) -> str:
        return self.spec.model.position

    @property
    def longest(self) -> int:
        return self.spec.data.length

    def columns(self) -> list[str]:
        """Their names, left of the text, an implicit one first."""
        implicit = self.setting(2).implicit
        return ['(+1)'] * implicit + [f'({self.spec.model.columns.kind})'] * count(self.spec.model)

    def is_plain(self, length: int) -> bool:
        rule, setting = self.spec.model.attention, self.setting(length)
        whole = setting.reach == length and not setting.prefix and not setting.columns
        whole = whole and not self.spec.model.mask.document and self.spec.data.positions != 'reset'
        return whole and (rule.feature_map, rule.similarity, rule.normalizer) == SOFTMAX

    def triggers(self, ids_PT: np.ndarray) -> np.ndarray:
        return ids_PT < self.spec.data.triggers

    def words(self, ids_T: np.ndarray) -> list[str]:
        return [self.word(int(one)) for one in readable(np.asarray(ids_T))]

    def word(self, token: int) -> str:
        """Return the text of a token; of a special token that training put into sequences, what it is for."""
        data = self.spec.data
        if token == data.fixed_token and not self.tokenizer.decode([token], skip_special_tokens=True):
            if data.fixed_position is not None:
                return '(fixed token)'
            if data.bos == 'documents' or self.spec.probe.prepend == 'bos':
                return '(BOS)'
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def shaped(self, ids_PT: np.ndarray) -> np.ndarray:
        return with_fixed_token(ids_PT, self.spec.data) if self.spec.data.fixed_held_out else ids_PT

    def model(self) -> nnx.Module:
        return nnx.merge(state.architecture(self.spec)[0], self.params)

    def domains(self) -> list[str]:
        """Those of the run's store."""
        return corpus(self.spec.data, self.vocabulary).domains

    def setting(self, length: int, **more: Any) -> Setting:
        return setting_of(self.spec, length, count(self.spec.model), **more)

    def observe(
        self, ids_PT: np.ndarray, keep: Keep, position_T: np.ndarray | None = None, watch: Watch = unwatched
    ) -> dict[str, np.ndarray]:
        program, rows = kept_of(self.spec, keep, hashed(position_T)), self.rows(check_length(self, ids_PT))
        with jax.set_mesh(self.mesh):
            return in_parts(functools.partial(self.on_device, program), ids_PT, rows, watch)

    def loss(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        program = loss_of(self.spec, hashed(None if position_T is None else position_T[:-1]))
        rows = max(1, AT_ONCE // (4 * check_length(self, ids_PT) * self.vocabulary))
        with jax.set_mesh(self.mesh):
            found = in_parts(functools.partial(self.on_device, program), ids_PT, rows)
        return np.where(is_predicted(ids_PT[:, 1:]), found['loss_LPT'][0], np.nan)

    def without_queries(self, layer: int) -> 'Own':
        """The same with scores of 0 in one layer, but for what positions and columns add to them."""
        other, attention = copy.copy(self), self.params['blocks']['attention']
        queries = {name: attention[name] for name in QUERIES if name in attention}
        silent = jax.tree.map(lambda leaf: jnp.asarray(leaf).at[layer].set(0), queries)
        other.params = self.params | dict(blocks=self.params['blocks'] | dict(attention=attention | silent))
        return other

    def on_device(self, program: Callable, ids_PT: np.ndarray) -> Arrays:
        return jax.device_get(program(self.params, sharding.put(readable(ids_PT), self.mesh)))

    def rows(self, length: int) -> int:
        """How many sequences are captured at once."""
        return max(1, AT_ONCE // probe.captured_bytes(self.spec.model, length))


@functools.cache
def one_device() -> jax.sharding.Mesh:
    return devices.mesh(Hardware(), devices.found()[:1])


@functools.lru_cache(maxsize=16)  # what is asked of another step, or again, is not compiled again
def kept_of(spec: Spec, keep: Keep, position: tuple[int, ...] | None) -> Callable:
    """program(params, ids_PT) -> what is kept of all layers."""
    run = forward(spec, capture=True, **placed(position))

    def program(params: dict, ids_PT: jax.Array) -> Arrays:
        _, _, captured = run(params, ids_PT)
        return keep(forward_arrays(captured, setting_of(spec, ids_PT.shape[1], count(spec.model))))

    return jax.jit(program, **state.jit_options(spec, one_device()))


@functools.lru_cache(maxsize=16)
def loss_of(spec: Spec, position: tuple[int, ...] | None) -> Callable:
    """program(params, ids_PT) -> loss_LPT, of one L."""
    program = tokenwise(spec, one_device(), **placed(position))
    return lambda params, ids_PT: {'loss_LPT': program(params, ids_PT)[0][None]}


def hashed(position_T: np.ndarray | None) -> tuple[int, ...] | None:
    return None if position_T is None else tuple(map(int, position_T))


def placed(position_T: Any) -> dict[str, np.ndarray]:
    """What a forward pass is told of where tokens stand."""
    return {} if position_T is None else dict(position_BT=np.array(position_T)[None])


def beginning(spec: Spec, bos: str) -> Spec:
    """The spec of a run whose texts begin so."""
    if bos != 'auto' and spec.data.task != 'text':
        raise Refusal(f'--bos={bos} is of texts, and the run was trained on {spec.data.task}; leave it out')
    of_probe, of_data = BOS[bos]
    return dataclasses.replace(
        spec, probe=dataclasses.replace(spec.probe, **of_probe), data=dataclasses.replace(spec.data, **of_data)
    )


def tokenizer_of(run: Folder, step: int, spec: Spec, given: str | None = None) -> Path:
    """The tokenizer.json of a run; raises Refusal where it is not the one that the checkpoint was trained with."""
    file = tokenizer_file(run.path, spec.data, spec.model.vocabulary, given)
    trained = restore.metadata(run.checkpoints / str(step)).custom_metadata['data'].get('tokenizer')
    if not trained or not digest_of(file).startswith(trained):
        remedy = 'give the one of its token store' if given else 'give --tokenizer=FILE, its tokenizer.json'
        raise Refusal(f'{file} is another tokenizer than {run}@{step} was trained with; {remedy}')
    return file
