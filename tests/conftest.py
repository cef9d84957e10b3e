import dataclasses
import os
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import default
from sinklab.spec import PAIRS, Spec, parse

COMPILED = tempfile.TemporaryDirectory()
jax.config.update('jax_num_cpu_devices', 4)
# Most tests compile the same few programs again: let them find each other's, in this session alone.
jax.config.update('jax_compilation_cache_dir', COMPILED.name)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)

OPERATIONS = [(similarity, normalizer) for similarity, normalizers in PAIRS.items() for normalizer in normalizers]

TINY = {
    'model.layers': 2,
    'model.width': 16,
    'model.heads': 4,
    'model.head_width': 4,
    'model.ffn_width': 24,
    'model.vocabulary': 300,
    'model.dtype': 'float32',
    'optimizer.peak_learning_rate': 1e-2,
    'optimizer.warmup_steps': 2,
    'optimizer.steps': 8,
    'optimizer.batch_size': 4,
    'data.length': 16,
    'valid.every_steps': 0,
    'valid.windows': 6,
    'probe.every_steps': 0,
    'probe.sequences': 5,
    'probe.length': 12,
    'probe.keys': 3,
    'checkpoint.every_steps': 0,
    'log.every_steps': 1,
}


def tiny_config(**changes) -> ConfigDict:
    """The default at a size that compiles in a second; changes name fields with __ for the dot."""
    config = default.get_config()
    config.update_from_flattened_dict({**TINY, **{name.replace('__', '.'): value for name, value in changes.items()}})
    return config


def tiny(**changes) -> Spec:
    return parse(tiny_config(**changes).to_dict())


def operation(spec: Spec, similarity: str, normalizer: str) -> Spec:
    attention = dataclasses.replace(spec.model.attention, similarity=similarity, normalizer=normalizer)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, attention=attention))


@pytest.fixture(autouse=True)
def token_cache(tmp_path_factory, monkeypatch):
    """One cache for all tests, none of the user's."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path_factory.getbasetemp() / 'cache'))


@pytest.fixture(scope='session')
def corpus(tmp_path_factory) -> str:
    """A source of 40 small documents of made-up words."""
    folder = tmp_path_factory.mktemp('corpus')
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('abcdefghijklmnop'), rng.integers(2, 7))) for _ in range(80)]
    for number in range(40):
        text = ' '.join(rng.choice(words, 120, p=np.arange(1, 81) / 3240))
        (folder / f'{number:02}.txt').write_text(text, encoding='utf-8')
    return f'text:{folder}/*.txt'
