"""The paper's 60M baseline: Sink_1 18.18 %, valid loss 3.73 (Table 1, gamma = 0.1).

    sinklab train --config=configs/default.py --workdir=runs/default

The only place where a default value is written. The learning rate stays at its peak after the warm-up, as in
the released configs (54 of 54 set min_lr = learning_rate), although the text says cosine. The vocabulary is
GPT-NeoX's; its tokenizer.json and the documents (a sample of the Pile: sail/regmix-data-sample) are yours to
bring: --config.data.source=text:'pile/*.jsonl' --config.data.tokenizer=neox/tokenizer.json
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(row=None):
    if row is not None:
        raise ValueError(f'configs/default.py has no rows, so no row {row!r}: give the file alone')
    config = ConfigDict()
    config.model = ConfigDict(
        dict(
            layers=10,
            width=768,
            heads=8,
            head_width=96,
            ffn_width=1536,
            vocabulary=50432,
            position='rotary',
            norm_epsilon=1e-5,
            initialization='released',
            dtype='bfloat16',
            attention=dict(similarity='exp', normalizer='sum'),
        )
    )
    config.optimizer = ConfigDict(
        dict(
            name='adamw',
            peak_learning_rate=4e-4,
            final_learning_rate=placeholder(float),
            schedule='constant',
            warmup_steps=100,
            steps=20_000,
            batch_size=512,
            weight_decay=0.1,
            clip_norm=1.0,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-8,
        )
    )
    config.data = ConfigDict(
        dict(
            source='stdlib',
            tokenizer='train',
            length=2048,
            held_out=0.15,
            fixed_position=placeholder(int),
            seed=0,
        )
    )
    config.valid = ConfigDict(dict(every_steps=1000, windows=800))
    config.probe = ConfigDict(dict(every_steps=250, sequences=100, length=64, keys=10))
    config.checkpoint = ConfigDict(dict(every_steps=1000, keep=3))
    config.log = ConfigDict(dict(every_steps=10))
    config.seed = 0
    return config.lock()
