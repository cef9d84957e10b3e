"""Named profiles of the compiler's flags: --flags=NAME."""

from launch.job import Refusal

VMEM = '--xla_tpu_scoped_vmem_limit_kib=98304'
REDUCE = '--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true'
HIDING = '--xla_gpu_enable_latency_hiding_scheduler=true'

# Name -> the variables of a run. That they are accepted is tested; what they are worth has not been measured.
# No profile is about gathers: the step says itself how they are made, and libtpu fuses them for v5e alone.
PROFILES = {
    'none': {},
    'tpu': {'LIBTPU_INIT_ARGS': VMEM},
    'tpu_data': {'LIBTPU_INIT_ARGS': f'{VMEM} {REDUCE}'},
    'gpu': {'XLA_FLAGS': HIDING},
}


def profile(name: str) -> dict[str, str]:
    if name not in PROFILES:
        raise Refusal(f'--flags={name} is unknown; it is one of {", ".join(PROFILES)}')
    return PROFILES[name]
