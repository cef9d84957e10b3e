"""Named sets of XLA flags, selected by --flags."""

from sinklab.errors import UserError

VMEM_LIMIT_FLAG = '--xla_tpu_scoped_vmem_limit_kib=98304'
ALL_REDUCE_FLAGS = (
    '--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true'
)
LATENCY_HIDING_FLAG = '--xla_gpu_enable_latency_hiding_scheduler=true'

# {name: environment variables of a run}. Tests check that the flags are accepted; their effect was not measured. No
# profile has flags for all-gathers: the train step itself defines them, and libtpu fuses them on v5e only.
PROFILES = {
    'none': {},
    'tpu': {'LIBTPU_INIT_ARGS': VMEM_LIMIT_FLAG},
    'tpu_data': {'LIBTPU_INIT_ARGS': f'{VMEM_LIMIT_FLAG} {ALL_REDUCE_FLAGS}'},
    'gpu': {'XLA_FLAGS': LATENCY_HIDING_FLAG},
}


def get_profile(name: str) -> dict[str, str]:
    if name not in PROFILES:
        raise UserError(f'--flags={name} is unknown; it is one of {", ".join(PROFILES)}')
    return PROFILES[name]
