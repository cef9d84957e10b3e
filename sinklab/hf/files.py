"""Files of a Hugging Face model directory, local or of the Hub: JSON, safetensors, and tokenizer files."""

import contextlib
import errno
import hashlib
import importlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.errors import UserError, format_error, format_extra_command
from sinklab.parallel import device_mesh
from sinklab.run_ref import GGUF_PREFIX, HF_PREFIX
from sinklab.storage.files import read_json, resolve_name

MODEL_FILE, INDEX_FILE, CONFIG_FILE = 'model.safetensors', 'model.safetensors.index.json', 'config.json'
ADAPTER_FILE = 'adapter_config.json'  # of peft
PICKLE_PATTERNS = ('*.bin', '*.pt', '*.pth', '*.ckpt', '*.pkl')
# Files that are fetched from the hub: weights, configs and tokenizer files; never a pickle.
FETCH_PATTERNS = ['*.safetensors', '*.json', '*.jinja', '*.txt', 'tokenizer.model']
SUPPORTED_DTYPES = ('F32', 'F16', 'BF16')
# Files beside tokenizer.json that do not depend on the parameters.
COMPANION_FILES = (
    'tokenizer_config.json',
    'special_tokens_map.json',
    'chat_template.jinja',
    'generation_config.json',
)
MAX_FILE_BYTES = 5 * 10**9  # of arrays in a safetensors file


def import_hf_library(name: str) -> Any:
    """Import a library of the extra `hf`; raise UserError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f'this needs {name.partition(".")[0]}; install it: {format_extra_command("hf")}') from error


def fetch_model_dir(model_ref: str, extra_patterns: tuple[str, ...] = ()) -> Path:
    """Return the directory of hf:PATH, or fetch hf:ORG/NAME from the hub.

    Files that match FETCH_PATTERNS or `extra_patterns` are fetched. A directory with an adapter is refused: whether
    transformers adds the adapter to the weights, silently, depends on whether peft is installed.
    """
    name = model_ref.removeprefix(HF_PREFIX)
    model_dir = Path(name) if Path(name).is_dir() else download_model_dir(model_ref, extra_patterns)
    if (model_dir / ADAPTER_FILE).exists():
        raise UserError(
            f'{model_dir} contains an adapter ({ADAPTER_FILE}), which is not read; merge it into its model with peft '
            '(merge_and_unload(), then save_pretrained(DIR)) and give hf:DIR, or move the adapter to another folder'
        )
    return model_dir


def download_model_dir(model_ref: str, extra_patterns: tuple[str, ...]) -> Path:
    name = model_ref.removeprefix(HF_PREFIX)
    if Path(name).is_file() and name.endswith('.gguf'):
        raise UserError(f'{model_ref} is a file; give {GGUF_PREFIX}{name}')
    if not model_ref.startswith(HF_PREFIX) or not re.fullmatch(r'[\w-]+/[\w.-]+', name):
        raise UserError(
            f'{model_ref} is not a folder; give hf:PATH, a folder with {CONFIG_FILE}, or hf:ORG/NAME on the hub'
        )
    hub = import_hf_library('huggingface_hub')
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[*FETCH_PATTERNS, *extra_patterns]))
    except Exception as error:  # errors of the network, of the hub, or of access rights
        message = format_error(error, with_type=True)
        raise UserError(f'{model_ref} is not a local folder, and cannot be downloaded ({message})') from error


def check_memory(num_bytes: int, num_parameters: int, model_ref: str, dtype: str = 'float32') -> None:
    """Refuse to load a model if the available memory is less than `num_bytes`."""
    available = device_mesh.get_available_memory_bytes()
    if num_bytes > available:
        raise UserError(
            f'{model_ref} needs {num_bytes / 1e9:.1f} GB of memory for {num_parameters:,} parameters in {dtype}, and '
            f'{available / 1e9:.1f} GB are available; close other programs, or give a smaller model'
        )


def check_disk_space(root: Path, num_bytes: int, model_ref: str) -> None:
    """Refuse to write float32 weights of `num_bytes` into the cache if the disk has less space."""
    free = shutil.disk_usage(root).free
    if num_bytes > free:
        raise UserError(
            f'{model_ref} needs {num_bytes / 1e9:.1f} GB for its weights in float32, and {root} has {free / 1e9:.1f} '
            'GB free; make room, or set SINKLAB_CACHE to a folder on another disk'
        )


def move_into_cache(temp_dir: Path, final_dir: Path, is_complete: Callable[[], bool]) -> None:
    """Rename a folder to its place in the cache, unless another process has put a complete one there.

    An incomplete one, such as of an interrupted deletion, is replaced.

    Raises:
        UserError: The incomplete one cannot be replaced.
    """
    try:
        temp_dir.rename(final_dir)
    except OSError:
        if is_complete():
            return
        shutil.rmtree(final_dir, ignore_errors=True)
        try:
            temp_dir.rename(final_dir)
        except OSError as error:
            if not is_complete():
                raise UserError(
                    f'{final_dir} is incomplete and cannot be replaced ({error.strerror}); delete it'
                ) from error


def read_json_object(path: Path) -> dict:
    try:
        return read_json(path, dict, 'download it again')
    except FileNotFoundError as error:
        raise UserError(f'{path} is missing; give a complete Hugging Face folder') from error


def list_weight_files(model_dir: Path) -> list[Path]:
    """List the safetensors files of a model directory; refuse pickles and names outside of the directory."""
    if (model_dir / MODEL_FILE).exists():
        return [model_dir / MODEL_FILE]
    if not (model_dir / INDEX_FILE).exists():
        pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in model_dir.glob(pattern))
        if pickles:
            raise UserError(
                f'{model_dir} contains {pickles[0]}, a pickle, which can execute arbitrary code and is not read; '
                'save the model again with transformers, as safetensors'
            )
        raise UserError(f'{model_dir} has no {MODEL_FILE} and no {INDEX_FILE}; give a complete Hugging Face folder')
    weight_map = read_json_object(model_dir / INDEX_FILE).get('weight_map')
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f'{model_dir / INDEX_FILE} has no weight_map of names; download it again')
    names = sorted(set(weight_map.values()))
    paths = [resolve_name(model_dir, name, model_dir / INDEX_FILE) for name in names]
    for name, path in zip(names, paths, strict=True):
        if path.parent != model_dir:
            raise UserError(
                f'{model_dir / INDEX_FILE} names {name}, outside of the folder; move the file into the folder'
            )
        if not path.exists():
            raise UserError(f'{model_dir / INDEX_FILE} names {name}, which is missing; download it again')
    return paths


def copy_companion(source_dir: Path, output_dir: Path, name: str) -> None:
    """Copy a companion file of a tokenizer, if it exists."""
    if (source_dir / name).is_file():
        (output_dir / name).write_bytes((source_dir / name).read_bytes())


def compute_identity(model_dir: Path) -> str:
    """Compute a digest of the paths, sizes and modification times of the files of a model directory."""
    paths = [model_dir / CONFIG_FILE, model_dir / 'tokenizer.json', *list_weight_files(model_dir)]
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]


class SafetensorsReader:
    """A reader of the arrays of a model directory, one array at a time."""

    def __init__(self, model_dir: Path):
        self.file_of_array = {}
        for path in list_weight_files(model_dir):
            with translate_safetensors_errors(path):
                file = import_hf_library('safetensors').safe_open(path, framework='np')
            self.file_of_array |= dict.fromkeys(file.keys(), (path, file))
        self.shapes = {name: self.read_shape(name) for name in self.file_of_array}

    def read_shape(self, name: str) -> tuple[int, ...]:
        path, file = self.file_of_array[name]
        with translate_safetensors_errors(path):
            array_slice = file.get_slice(name)
        if array_slice.get_dtype() not in SUPPORTED_DTYPES:
            raise UserError(f'{path}: {name} is {array_slice.get_dtype()}; allowed: {", ".join(SUPPORTED_DTYPES)}')
        return tuple(array_slice.get_shape())

    def read_array(self, name: str) -> np.ndarray:
        path, file = self.file_of_array[name]
        with translate_safetensors_errors(path):
            return file.get_tensor(name)


def count_parameters(model_dir: Path) -> int:
    """Count the elements of all arrays in the safetensors files of a model directory."""
    total = 0
    for path in list_weight_files(model_dir):
        with (
            translate_safetensors_errors(path),
            import_hf_library('safetensors').safe_open(path, framework='np') as file,
        ):
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


@contextlib.contextmanager
def translate_safetensors_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, import_hf_library('safetensors').SafetensorError) as error:
        raise UserError(f'{path} cannot be read ({format_error(error)}); download it again') from error


def write_arrays(
    output_dir: Path, arrays: Iterable[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]], dtype: Any
) -> None:
    """Write arrays to safetensors files of at most MAX_FILE_BYTES, with an index for several files."""
    save_file, shards = import_hf_library('safetensors.numpy').save_file, [{}]
    size = total = 0
    for name, shape, array in arrays:
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + num_bytes > MAX_FILE_BYTES:
            shards, size = [*shards, {}], 0
        shards[-1][name], size, total = array, size + num_bytes, total + num_bytes
    names = [f'model-{number:05}-of-{len(shards):05}.safetensors' for number in range(1, len(shards) + 1)]
    names = names if shards[1:] else [MODEL_FILE]
    for name, shard in zip(names, shards, strict=True):
        loaded = {array_name: np.asarray(array(), dtype) for array_name, array in shard.items()}
        try:
            save_file(loaded, output_dir / name, metadata={'format': 'pt'})
        except import_hf_library('safetensors').SafetensorError as error:
            raise make_os_error(error, output_dir / name) from error
    if shards[1:]:
        weight_map = {array_name: name for name, shard in zip(names, shards, strict=True) for array_name in shard}
        write_json(output_dir / INDEX_FILE, dict(metadata=dict(total_size=total), weight_map=weight_map))


def make_os_error(error: Exception, path: Path) -> OSError:
    """Make the OSError that the message of a safetensors error names."""
    match = re.search(r'os error (\d+)', str(error))
    error_number = int(match[1]) if match else errno.EIO
    return OSError(error_number, os.strerror(error_number) if match else str(error), str(path))


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


CODE_PATTERN = '*.py'  # Python code of a model; fetched only if remote_code is given


def expand_user(path: str) -> Path:
    """Return a path whose ~ or ~USER is replaced by the home folder.

    Raises:
        UserError: There is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f'{path} begins with ~, and that user has no home folder; give the whole path') from error


def find_model_dir(path_or_id: str, remote_code: bool = False) -> Path:
    """Return the directory of a local model, or fetch the files of a model of the Hugging Face hub.

    Raises:
        UserError: The directory holds a run of sinklab, no config.json, or weights that are not safetensors.
    """
    model_dir = fetch_model_dir(f'{HF_PREFIX}{expand_user(path_or_id)}', (CODE_PATTERN,) if remote_code else ())
    if (model_dir / 'row.json').exists():
        raise UserError(f'{model_dir} contains a run of sinklab; remove hf:')
    if not (model_dir / CONFIG_FILE).exists():
        if gguf_file := min(model_dir.glob('*.gguf'), default=None):
            raise UserError(f'{model_dir} has no {CONFIG_FILE}, but a GGUF file; give {GGUF_PREFIX}{gguf_file}')
        raise UserError(
            f'{model_dir} contains no open model (no {CONFIG_FILE}); give a transformers folder, or a run'
        )
    list_weight_files(model_dir)
    return model_dir


@contextlib.contextmanager
def explain_remote_code(name: str) -> Iterator[None]:
    """Raise a UserError that names --remote-code where transformers refuses to run Python code of a model.

    Callers always give `trust_remote_code`: without it transformers asks on a terminal whether to run the code.
    """
    try:
        yield
    except Exception as error:  # transformers raises ValueError, and here that may have become a UserError
        if not any('trust_remote_code' in str(exception) for exception in (error, error.__cause__)):
            raise
        raise UserError(
            f'{name} contains Python code, which is not run; read that code, and give --remote-code to '
            'run it as this user'
        ) from error


def digest_model_dir(model_dir: Path) -> str:
    """Return a SHA-256 digest of the config, weights and Python code of a model."""
    hasher = hashlib.sha256()
    for file in (
        model_dir / CONFIG_FILE,
        *list_weight_files(model_dir),
        *sorted(model_dir.glob(CODE_PATTERN)),
    ):
        with file.open('rb') as stream:
            hasher.update(hashlib.file_digest(stream, 'sha256').digest())
    return hasher.hexdigest()
