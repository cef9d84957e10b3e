"""What measures are given: the arrays of a forward pass, and the setting that they were made in."""

import dataclasses
from typing import Any

from sinklab.spec import Spec

IMPLICIT_KEY_NORMALIZERS = ('plus_one',)  # normalizers that are softmax with a column whose key and value are zero


@dataclasses.dataclass(frozen=True)
class MetricSetting:
    """What a measure has to know of a model besides its arrays. The first token is key number `columns`."""

    length: int  # T, of the text
    columns: int  # keys left of the text, an implicit one among them
    implicit: bool  # the leftmost column is in no array of the model, and is completed below
    gain: float  # of attention
    keys: int  # J: the first tokens whose importance is reported
    prefix: int  # first tokens that all queries see; 0: causal
    window: int | None  # below the length
    reach: int  # how many queries can see the first token
    triggers: bool  # some queries are triggers of Bigram-Backcopy
    lengths: tuple[int, ...] = ()  # shorter texts that are measured, too, and at which thresholds
    thresholds: tuple[float, ...] = ()
    repeated: bool = False  # all tokens of a text are one


def make_setting(spec: Spec, length: int, columns: int, **overrides: Any) -> MetricSetting:
    """The setting of a model over so many tokens, with so many columns of its own; what is given otherwise is so."""
    mask, attention = spec.model.mask, spec.model.attention
    implicit = attention.normalizer in IMPLICIT_KEY_NORMALIZERS
    fields = dict(
        length=length,
        columns=columns + implicit,
        implicit=implicit,
        gain=attention.gain,
        keys=min(spec.probe.keys, length),
        prefix=mask.prefix or 0,
        window=mask.window if mask.window and mask.window < length else None,
        reach=min(mask.window or length, mask.block or length, length),
        triggers=spec.data.task == 'backcopy',
    )
    return MetricSetting(**fields | overrides)


def add_implicit_key(attention_TS: Any, setting: MetricSetting) -> Any:
    """With the implicit column, if there is one, left of all others: what rows lack of a sum of the gain."""
    if not setting.implicit:
        return attention_TS
    missing_mass = (setting.gain - attention_TS.sum(-1, keepdims=True)).clip(0)
    return attention_TS.__array_namespace__().concatenate([missing_mass, attention_TS], -1)


def extract_arrays(captured: Any, setting: MetricSetting) -> dict[str, Any]:
    """A Capture of L layers by names, with the implicit column."""
    arrays = {name: array for name, array in vars(captured).items() if '_B' in name and array is not None}
    return complete_arrays({name.replace('_B', '_LP'): array for name, array in arrays.items()}, setting)


def complete_arrays(arrays: dict[str, Any], setting: MetricSetting) -> dict[str, Any]:
    """Arrays with the implicit column, if there is one."""
    if setting.implicit and 'attention_LPHTS' in arrays:  # not every layer of an open model has attention
        arrays['attention_LPHTS'] = add_implicit_key(arrays['attention_LPHTS'], setting)
        for name in {'key_LPSHK', 'value_LPSHK'} & arrays.keys():
            xp = arrays[name].__array_namespace__()
            arrays[name] = xp.pad(arrays[name], ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))
    return arrays


def complete_key_mass(key_mass: Any, setting: MetricSetting) -> Any:
    """What columns and first keys have received, the implicit column as in forward_arrays."""
    if not setting.implicit:
        return key_mass
    xp = key_mass.raw_BHS.__array_namespace__()
    missing_BH1 = setting.length * (setting.gain - key_mass.mass_BH)[..., None]
    raw_BHS = xp.concatenate([missing_BH1, key_mass.raw_BHS], -1)
    return dataclasses.replace(
        key_mass,
        raw_BHS=raw_BHS,
        share_BHS=raw_BHS / setting.gain,
        mass_BH=xp.full_like(key_mass.mass_BH, setting.gain),
    )
