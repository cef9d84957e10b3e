"""Specs of tiny models for tests, and choices of cases."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from sinklab.config.spec import NORMALIZERS_BY_SIMILARITY, AttentionConfig, Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.configs.sizes import SMOKE
from sinklab.train import state

OPERATIONS = [
    (similarity, normalizer)
    for similarity, normalizers in NORMALIZERS_BY_SIMILARITY.items()
    for normalizer in normalizers
]
# A subset in which every similarity and every normalizer occurs.
COVERING_OPERATIONS = [
    *(('exp', 'sum'), ('exp', 'plus_one'), ('softpick', 'sum'), ('sigmoid', 'none'), ('elu1', 'p_norm')),
    *(('relu', 'count'), ('identity', 'clamped')),
]


def choose_covering_cases(cases: Iterable[Hashable], get_parts: Callable[[Hashable], Iterable[Hashable]]) -> set:
    """Return a few of the cases in which every part of any case occurs, chosen greedily."""
    parts_by_case = {case: set(get_parts(case)) for case in cases}
    missing, chosen = set().union(*parts_by_case.values()), set()
    while missing:
        best = max(parts_by_case, key=lambda case: len(parts_by_case[case] & missing))
        chosen.add(best)
        missing -= parts_by_case[best]
    return chosen


def make_case_params(cases: Iterable, chosen: Iterable) -> list:
    """Return parameters for all cases, and mark those that are not chosen as exhaustive."""
    chosen = list(chosen)
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.exhaustive) for case in cases]


TINY_FIELDS = {
    **SMOKE,
    'optimizer.peak_learning_rate': 1e-2,
    'optimizer.warmup_steps': 2,
    'optimizer.steps': 8,
    'probe.keys': 3,
}


def make_tiny_config(**changes) -> ConfigDict:
    """Return the default config at a size that compiles in a second, with changes: __ stands for the dot."""
    config = default.get_config()
    config.update_from_flattened_dict(
        {**TINY_FIELDS, **{name.replace('__', '.'): value for name, value in changes.items()}}
    )
    return config


def make_tiny_spec(**changes) -> Spec:
    return parse_config(make_tiny_config(**changes).to_dict())


def make_attention_config(similarity: str, normalizer: str, power: float = 2.0) -> AttentionConfig:
    """Return the config of an operation, with the feature map and the power that it requires."""
    feature_map = 'elu1' if (similarity, normalizer) == ('identity', 'sum') else 'identity'
    power = power if normalizer == 'p_norm' else None
    return AttentionConfig(similarity, normalizer, feature_map, gain=1.0, power=power, offset=0.0)


def replace_operation(spec: Spec, similarity: str, normalizer: str) -> Spec:
    return dataclasses.replace(
        spec, model=dataclasses.replace(spec.model, attention=make_attention_config(similarity, normalizer))
    )


def draw_params(spec: Spec, deviation: float = 0.4) -> dict:
    """Draw parameters that give every part of a model an effect: scores far from 0, gains that are not 1."""
    rng = np.random.default_rng(0)

    def draw_leaf(path, abstract):
        gain = path[-1].key in ('gain_D', 'gain_HK')
        return np.float32(gain + (0.3 if gain else deviation) * rng.normal(size=abstract.shape))

    return jax.tree_util.tree_map_with_path(draw_leaf, nnx.to_pure_dict(state.make_abstract_model(spec)[1]))
