"""The paper's 60M baseline: Sink_1 18.18 %, valid loss 3.73 (Table 1, gamma = 0.1).

    sinklab train --config=configs/default.py --workdir=runs/default

The values are the defaults of the schema, sinklab/config/spec.py; a test compares the two. The learning rate stays at
its peak after the warm-up, as in the released configs (54 of 54 set min_lr = learning_rate), although the text of the
paper says cosine. The vocabulary is that of GPT-NeoX. Its tokenizer.json and the documents (a sample of the Pile:
sail/regmix-data-sample) are not included; give them with
--config.data.source=text:'pile/*.jsonl' --config.data.tokenizer=neox/tokenizer.json
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from sinklab.configs.sizes import SIZES


def get_config(row=None, size='paper'):
    if row is not None:
        raise ValueError(f'configs/default.py has no rows, but row {row!r} is given; give only the file')
    if size not in SIZES:
        raise ValueError(f'there is no size {size!r} (sizes: {", ".join(SIZES)})')
    config = ConfigDict()
    config.model = make_model_config()
    config.optimizer = ConfigDict(
        dict(
            name='adamw',
            peak_learning_rate=4e-4,
            final_share=placeholder(float),
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
    config.data = make_data_config()
    config.valid = ConfigDict(dict(every_steps=1000, windows=800, domain=placeholder(str)))
    config.probe = ConfigDict(
        dict(
            every_steps=250,
            sequences=100,
            length=64,
            keys=10,
            inputs='natural',
            domain=placeholder(str),
            prepend='none',
        )
    )
    config.checkpoint = ConfigDict(dict(every_steps=1000, every_minutes=0.0, keep=3, keep_every_steps=0))
    config.log = ConfigDict(dict(every_steps=10, sinks=False, rows=False))
    config.seed = 0
    config.update_from_flattened_dict(SIZES[size])
    return config.lock()


def make_rotary_fields():
    return dict(
        base=10_000.0,
        scaling='none',
        factor=placeholder(float),
        slow=placeholder(float),
        fast=placeholder(float),
        length=placeholder(int),
        attention_factor=placeholder(float),
    )


def make_model_config():
    return ConfigDict(
        dict(
            layers=10,
            width=768,
            heads=8,
            kv_heads=placeholder(int),
            head_width=96,
            ffn_width=1536,
            vocabulary=50432,
            position='rotary',
            rotary=make_rotary_fields(),
            global_layers=dict(
                every=placeholder(int),
                position='rotary',
                rotary=make_rotary_fields(),
            ),
            scaled_embedding=False,
            ffn='swiglu',
            norm='pre',
            qkv_bias=False,
            qk_norm=False,
            qk_norm_joint=False,
            head_norm=False,
            combination='concatenate',
            gate='none',
            norm_epsilon=1e-5,
            tied=False,
            initialization='released',
            dtype='bfloat16',
            attention=dict(
                similarity='exp',
                normalizer='sum',
                feature_map='identity',
                gain=1.0,
                power=placeholder(float),
                offset=0.0,
            ),
            mask=dict(prefix=placeholder(int), window=placeholder(int), block=placeholder(int), document=False),
            columns=dict(
                kind='none',
                shared=False,
                key_width=placeholder(int),
                value='learned',
                value_norm=placeholder(float),
            ),
        )
    )


def make_data_config():
    return ConfigDict(
        dict(
            task='text',
            source='stdlib',
            tokenizer='train',
            end_token=0,
            fixed_token=1,
            length=2048,
            held_out=0.15,
            share=1.0,
            bos='none',
            loss='all',
            fixed_position=placeholder(int),
            fixed_held_out=True,
            random_first=placeholder(int),
            random_last=placeholder(int),
            positions='continued',
            triggers=placeholder(int),
            seed=0,
        )
    )
