"""Named profiles of the compiler's flags: --flags=NAME."""

from launch.job import Refusal

VMEM = '--xla_tpu_scoped_vmem_limit_kib=98304'
GATHER = (
    '--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true '
    '--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true '
    '--xla_enable_async_all_gather=true'
)
REDUCE = '--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true'
HIDING = '--xla_gpu_enable_latency_hiding_scheduler=true'

# Name -> the variables of a run. That they are accepted is tested; what they are worth has not been measured.
PROFILES = {
    'none': {},
    'tpu': {'LIBTPU_INIT_ARGS': VMEM},
    'tpu_fsdp': {'LIBTPU_INIT_ARGS': f'{VMEM} {GATHER}'},
    'tpu_data': {'LIBTPU_INIT_ARGS': f'{VMEM} {REDUCE}'},
    'tpu_both': {'LIBTPU_INIT_ARGS': f'{VMEM} {GATHER} {REDUCE}'},
    'gpu': {'XLA_FLAGS': HIDING},
}


def profile(name: str) -> dict[str, str]:
    if name not in PROFILES:
        raise Refusal(f'--flags={name} is unknown; it is one of {", ".join(PROFILES)}')
    return PROFILES[name]
