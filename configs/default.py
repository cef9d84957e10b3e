"""The paper's 60M baseline: Sink_1 18.18 %, valid loss 3.73 (Table 1, gamma = 0.1).

    sinklab train --config=configs/default.py --workdir=runs/default

The fields, with their defaults, meanings and allowed values, are in sinklab/config/spec.py. The learning rate stays
at its peak after the warm-up, as in the released configs (54 of 54 set min_lr = learning_rate), although the text of
the paper says cosine. The vocabulary is that of GPT-NeoX. Its tokenizer.json and the documents (a sample of the Pile:
sail/regmix-data-sample) are not included; give them with
--config.data.source=text:'pile/*.jsonl' --config.data.tokenizer=neox/tokenizer.json
"""

import dataclasses
from typing import get_args

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from sinklab.config.spec import Spec, get_field_types
from sinklab.configs.sizes import SIZES


def get_config(row=None, size='paper'):
    if row is not None:
        raise ValueError(f'configs/default.py has no rows, but row {row!r} is given; give only the file')
    if size not in SIZES:
        raise ValueError(f'there is no size {size!r} (sizes: {", ".join(SIZES)})')
    config = ConfigDict(dataclasses.asdict(Spec()))
    for path, field_type in get_field_types().items():
        section, _, name = path.rpartition('.')
        fields = config[section] if section else config
        if fields[name] is None:  # a placeholder has the type of the value that may replace None
            fields[name] = placeholder(get_args(get_args(field_type)[0])[0])
    config.update_from_flattened_dict(SIZES[size])
    return config.lock()
