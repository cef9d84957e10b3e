"""Compile the train step of MaxText for a TPU slice, without a TPU; a peer of benchmarks/step_cost.py.

It runs in the environment build/peers/maxtext, with the model, the batch of a device, `topology`, `remat_policy` and
`out` as a JSON object. It writes OUT.hlo, the text of the compiled step, and OUT.json, its bytes on a device and the
seconds to compile.
"""

import json
import os
import sys
import time
from pathlib import Path

TOPOLOGIES = {'v5e:8x8': 'v5e-64', 'v5e:16x16': 'v5e-256', 'v5p:4x4x4': 'v5p-128'}  # names of MaxText


def make_options(request: dict) -> dict:
    """Return the options of MaxText; the others are those of its base.yml.

    AdamW, its betas, its weight decay, clipping, RMSNorm, rotary positions and SwiGLU are as in base.yml.
    """
    return dict(
        base_num_decoder_layers=request['layers'],
        base_num_query_heads=request['heads'],
        base_num_kv_heads=request['heads'],
        base_emb_dim=request['width'],
        head_dim=request['head_width'],
        base_mlp_dim=request['ffn_width'],
        vocab_size=request['vocabulary'],
        max_target_length=request['length'],
        per_device_batch_size=request['batch'],
        ici_data_parallelism=1,
        ici_fsdp_parallelism=-1,
        compile_topology=TOPOLOGIES[request['topology']],
        compile_topology_num_slices=1,
        dtype=request['dtype'],
        weight_dtype='float32',
        attention='flash',
        remat_policy=request['remat_policy'],
        scan_layers=True,
        enable_dropout=False,
        learning_rate=4e-4,
        learning_rate_final_fraction=1.0,
        warmup_steps_fraction=0.0,
        layout='tpu',
        dataset_type='synthetic',
        run_name='peer',
        base_output_directory='/nowhere',
        jax_cache_dir='',
        skip_jax_distributed_system=True,
        enable_checkpointing=False,
        enable_tensorboard=False,
        log_config=False,
        compiled_trainstep_file=request['out'],
    )


def main(request: dict) -> None:
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from maxtext.trainers.pre_train import train_compile
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    out, start = Path(request['out']), time.perf_counter()

    def save_compiled(compiled, _: str) -> None:
        memory = compiled.memory_analysis()
        sizes = [
            getattr(memory, f'{name}_size_in_bytes') for name in ('argument', 'output', 'temp', 'generated_code')
        ]
        peak_bytes = sum(sizes) - memory.alias_size_in_bytes
        out.with_suffix('.hlo').write_text(compiled.as_text())
        measured = dict(peak_bytes=peak_bytes, seconds=time.perf_counter() - start)
        out.with_suffix('.json').write_text(json.dumps(measured))

    train_compile.save_compiled = save_compiled
    options = [f'{name}={value}' for name, value in make_options(request).items()]
    train_compile.main(['', f'{MAXTEXT_CONFIGS_DIR}/base.yml', *options])


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
