"""Steps of a model of MaxText, with its own config, setup and train step; a peer of benchmarks/peers.py."""

import os
import tempfile
from collections.abc import Callable

import numpy as np
import step_server


def make_options(shape: dict, directory: str) -> dict:
    """Return the options of `python -m maxtext.trainers.pre_train.train`; the others are those of its base.yml.

    AdamW, its betas, its weight decay, clipping, RMSNorm, rotary positions and SwiGLU are as in base.yml.
    """
    num_devices = shape['data']
    return dict(
        base_num_decoder_layers=shape['layers'],
        base_num_query_heads=shape['heads'],
        base_num_kv_heads=shape['heads'],
        base_emb_dim=shape['width'],
        head_dim=shape['head_width'],
        base_mlp_dim=shape['ffn_width'],
        vocab_size=shape['vocabulary'],
        max_target_length=shape['length'],
        per_device_batch_size=shape['batch'] / num_devices,
        ici_data_parallelism=num_devices,
        dtype=shape['dtype'],
        weight_dtype='float32',
        attention='dot_product',
        remat_policy='none',
        scan_layers=False,
        enable_dropout=False,
        learning_rate=4e-4,
        learning_rate_final_fraction=1.0,
        warmup_steps_fraction=0.0,
        hardware='cpu',
        dataset_type='synthetic',
        run_name='peer',
        base_output_directory=directory,
        jax_cache_dir='',
        skip_jax_distributed_system=True,
        enable_checkpointing=False,
        enable_tensorboard=False,
        log_config=False,
    )


def make_step(shape: dict) -> Callable[[], float]:
    """Return a function that runs one step, or one forward pass, and returns its loss."""
    os.environ['JAX_PLATFORMS'] = 'cpu'
    # Imported here: MaxText prints while it is imported, and step_server has redirected standard output by now.
    import jax
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train
    from maxtext.utils import sharding, train_utils
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    jax.config.update('jax_num_cpu_devices', shape['data'])
    with tempfile.TemporaryDirectory() as directory:
        options = [f'{name}={value}' for name, value in make_options(shape, directory).items()]
        config, recorder = train.initialize(['', f'{MAXTEXT_CONFIGS_DIR}/base.yml', *options])
        _, _, shardings, _, mesh, *_, train_state = train_utils.setup_train_loop(config, recorder)
    graph, state = nnx.split(train_state)
    params_shardings, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    train_step, eval_step = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train.train_step, train.eval_step, True, params_shardings
    )
    batch = jax.device_put(make_batch(shape), sharding.get_input_data_sharding(config, mesh))

    def run_step() -> float:
        nonlocal state
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            if shape['is_forward']:
                return float(eval_step(state, batch)['scalar']['evaluation/loss'])
            state, metrics = train_step(state, batch)
            return float(metrics['scalar']['learning/loss'])

    return run_step


def make_batch(shape: dict) -> dict[str, np.ndarray]:
    """Make a batch as MaxText's data pipelines do, of random tokens, with one document per row."""
    ids_BT = step_server.make_ids(shape)
    batch = {'inputs': ids_BT[:, :-1], 'targets': ids_BT[:, 1:]}
    for name in ('inputs', 'targets'):
        batch[f'{name}_position'] = np.tile(np.arange(shape['length'], dtype=np.int32), (shape['batch'], 1))
        batch[f'{name}_segmentation'] = np.ones((shape['batch'], shape['length']), np.int32)
    return batch


if __name__ == '__main__':
    step_server.serve(make_step)
