"""Compile the train step of MaxText for a TPU slice, without a TPU; a peer of benchmarks/step_cost.py.

It runs in the environment build/peers/maxtext, with a JSON object: topology, num_slices, shape (as of
benchmarks/peers.py), options (of MaxText) and out. It writes OUT.hlo, the text of the compiled step, and OUT.json,
its bytes on a device and the seconds to compile.
"""

import json
import os
import sys
import time
from pathlib import Path

import peer_maxtext

TOPOLOGIES = {'v5e:8x8': 'v5e-64', 'v5e:16x16': 'v5e-256', 'v5p:4x4x4': 'v5p-128'}  # names of MaxText


def make_options(request: dict) -> dict:
    shape = request['shape']
    return peer_maxtext.make_options(shape | dict(data=request['num_devices']), '/nowhere') | dict(
        compile_topology=TOPOLOGIES[request['topology']],
        compile_topology_num_slices=request['num_slices'],
        ici_data_parallelism=1,
        ici_fsdp_parallelism=-1,
        dcn_data_parallelism=request['num_slices'],
        hardware='tpu',
        attention='flash',
        scan_layers=True,
        **request['options'],
    )


def main(request: dict) -> None:
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from maxtext.trainers.pre_train import train_compile
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    out, start = Path(request['out']), time.perf_counter()

    def save_compiled(compiled, _: str) -> None:
        memory = compiled.memory_analysis()
        sizes = {name: getattr(memory, f'{name}_size_in_bytes') for name in ('argument', 'output', 'alias', 'temp')}
        sizes['code'] = memory.generated_code_size_in_bytes
        out.with_suffix('.hlo').write_text(compiled.as_text())
        out.with_suffix('.json').write_text(json.dumps(dict(bytes=sizes, seconds=time.perf_counter() - start)))

    train_compile.save_compiled = save_compiled
    options = make_options(request) | dict(compiled_trainstep_file=str(out))
    train_compile.main(
        ['', f'{MAXTEXT_CONFIGS_DIR}/base.yml', *(f'{name}={value}' for name, value in options.items())]
    )


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
