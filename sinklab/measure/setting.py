"""What measures are given: the arrays of a forward pass, and the setting that they were made in."""

import dataclasses
from typing import Any

from sinklab.spec import Spec

IMPLICIT = ('plus_one',)  # normalizers that are softmax with a column whose key and value are zero


@dataclasses.dataclass(frozen=True)
class Setting:
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


def setting_of(spec: Spec, length: int, columns: int, **more: Any) -> Setting:
    """The setting of a model over so many tokens, with so many columns of its own; what is given otherwise is so."""
    mask, attention = spec.model.mask, spec.model.attention
    implicit = attention.normalizer in IMPLICIT
    found = dict(
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
    return Setting(**found | more)


def with_implicit(attention_TS: Any, setting: Setting) -> Any:
    """With the implicit column, if there is one, left of all others: what rows lack of a sum of the gain."""
    if not setting.implicit:
        return attention_TS
    lacked = (setting.gain - attention_TS.sum(-1, keepdims=True)).clip(0)
    return attention_TS.__array_namespace__().concatenate([lacked, attention_TS], -1)


def forward_arrays(captured: Any, setting: Setting) -> dict[str, Any]:
    """A Capture of L layers by names, with the implicit column."""
    given = {name: array for name, array in vars(captured).items() if '_B' in name and array is not None}
    return completed({name.replace('_B', '_LP'): array for name, array in given.items()}, setting)


def completed(found: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Arrays with the implicit column, if there is one."""
    if setting.implicit and 'attention_LPHTS' in found:  # not every layer of an open model has attention
        found['attention_LPHTS'] = with_implicit(found['attention_LPHTS'], setting)
        for name in {'key_LPSHK', 'value_LPSHK'} & found.keys():
            xp = found[name].__array_namespace__()
            found[name] = xp.pad(found[name], ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))
    return found


def received_sums(received: Any, setting: Setting) -> Any:
    """What columns and first keys have received, the implicit column as in forward_arrays."""
    if not setting.implicit:
        return received
    xp = received.raw_BHS.__array_namespace__()
    lacked_BH1 = setting.length * (setting.gain - received.mass_BH)[..., None]
    raw_BHS = xp.concatenate([lacked_BH1, received.raw_BHS], -1)
    return dataclasses.replace(
        received,
        raw_BHS=raw_BHS,
        share_BHS=raw_BHS / setting.gain,
        mass_BH=xp.full_like(received.mass_BH, setting.gain),
    )
