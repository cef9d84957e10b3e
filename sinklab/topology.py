"""TPUs that are not here: their compiler is in libtpu, and needs no chip."""

import importlib.util
import os
import re
from pathlib import Path

import jax
from jax.experimental import topologies

from sinklab.chips import CHIPS
from sinklab.record import Refusal

LIBTPU = Path(__file__).parents[1] / '.venv' / 'libtpu' / 'libtpu' / 'libtpu.so'  # where `make test` puts it
# Several processes may compile at once, and none is to look for a chip.
ALONE = dict(ALLOW_MULTIPLE_LIBTPU_LOAD='1', TPU_SKIP_MDS_QUERY='1', TPU_WORKER_HOSTNAMES='localhost')


def library() -> str | None:
    """The path of libtpu: what TPU_LIBRARY_PATH says, `make test` has installed, or is installed beside jax."""
    if given := os.environ.get('TPU_LIBRARY_PATH'):
        return given
    if LIBTPU.exists():
        return str(LIBTPU)
    found = importlib.util.find_spec('libtpu')
    return str(Path(found.origin).parent / 'libtpu.so') if found else None


def version() -> str | None:
    """Of the library, as its installer has written beside it."""
    installed = Path(path).parents[1].glob('libtpu-*.dist-info') if (path := library()) else ()
    return next((folder.stem.removeprefix('libtpu-') for folder in installed), None)


def described(topology: str) -> tuple[str, list[jax.Device]]:
    """(name in CHIPS, its devices) of CHIP:SHAPE, or of SLICESxCHIP:SHAPE; raises Refusal."""
    parts = re.fullmatch(r'(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)', topology)
    if not parts or parts[2] not in CHIPS:
        raise Refusal(f'--topology={topology} is unknown; give a chip and a shape, such as v5e:16x16 or 2xv5e:8x8')
    return parts[2], devices(f'{parts[2]}:{parts[3]}', int(parts[1] or 1))


def devices(topology: str, slices: int = 1) -> list[jax.Device]:
    """Those of a topology such as v5e:2x2, to compile for; raises Refusal."""
    if (path := library()) is None:
        raise Refusal('libtpu, which has the compiler for TPUs, is not installed; pip install "sinklab[tpu]"')
    os.environ.update({name: value for name, value in ALONE.items() if name not in os.environ}, TPU_LIBRARY_PATH=path)
    try:
        more = dict(num_slices=slices) if slices > 1 else {}
        return topologies.get_topology_desc(platform='tpu', topology_name=topology, **more).devices
    except Exception as error:  # what libtpu makes of a name is its own affair
        raise Refusal(f'{topology} is no topology that libtpu knows ({str(error).splitlines()[0]})') from error
