"""Layout of a run on a CPU where the user gives none, by the speeds in docs/results/speed.md."""

import dataclasses

from sinklab.config.spec import Hardware, Spec
from sinklab.machine import count_cores
from sinklab.model import flops
from sinklab.parallel import device_mesh

MAX_DEVICES = 8  # more were not measured
MIN_STEP_FLOPS = 1e8  # a smaller step takes a few milliseconds with any layout
SMALL_MODEL_FLOPS = 3e7  # per token of a forward pass, about twice the number of parameters
NARROW_WIDTH = 512  # of a model whose products take less time than its activations cost in memory


def choose_cpu_layout(spec: Spec, hardware: Hardware, is_remat_given: bool) -> Hardware:
    """Choose the devices that a CPU is split into and the saved activations, where the user has not.

    Each device of a CPU computes with one core and waits for the others once a step, whereas the threads of one
    device wait for each other in each operation. Each device updates all parameters, so that large models use one
    device.

    Args:
        spec: The config of the run.
        hardware: The layout that the user gives.
        is_remat_given: Whether `hardware.remat` is a choice of the user.
    """
    tokens = spec.optimizer.batch_size * spec.data.length
    token_flops = flops.count_forward_flops(spec.model, spec.data.length).total
    if flops.TRAINING_FLOPS_FACTOR * token_flops * tokens < MIN_STEP_FLOPS:
        return hardware
    if not is_remat_given:
        saved = 'attention,ffn' if spec.model.width < NARROW_WIDTH else 'attention,qkv,middle,ffn'
        hardware = dataclasses.replace(hardware, remat=saved)
    is_layout_given = hardware.data or hardware.fsdp or hardware.tensor > 1 or device_mesh.is_device_count_given()
    if token_flops < SMALL_MODEL_FLOPS and not is_layout_given:
        micro_batch = hardware.get_micro_batch_size(spec.optimizer.batch_size)
        num_devices = max(
            count for count in range(1, min(MAX_DEVICES, count_cores()) + 1) if micro_batch % count == 0
        )
        hardware = dataclasses.replace(hardware, data=num_devices, fsdp=1)
    return hardware
