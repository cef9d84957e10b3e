"""Files of a Hugging Face model directory, local or of the Hub: JSON, safetensors, and tokenizer files."""

import contextlib
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.errors import UserError, format_error, format_extra_command
from sinklab.parallel import device_mesh
from sinklab.run_dir import GGUF_PREFIX, HF_PREFIX
from sinklab.storage.files import read_json, resolve_name

MODEL_FILE, INDEX_FILE, CONFIG_FILE = 'model.safetensors', 'model.safetensors.index.json', 'config.json'
ADAPTER_FILE = 'adapter_config.json'  # of peft
PICKLE_PATTERNS = ('*.bin', '*.pt', '*.pth', '*.ckpt', '*.pkl')
# Files that are fetched from the hub: weights, configs and tokenizer files; never a pickle.
FETCH_PATTERNS = ['*.safetensors', '*.json', '*.jinja', '*.txt', 'tokenizer.model']
# Files beside tokenizer.json that do not depend on the parameters.
COMPANION_FILES = (
    'tokenizer_config.json',
    'special_tokens_map.json',
    'chat_template.jinja',
    'generation_config.json',
)


def import_hf_library(name: str) -> Any:
    """Import a library of the extra `hf`; raise UserError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f'this needs {name.partition(".")[0]}; install it: {format_extra_command("hf")}') from error


@contextlib.contextmanager
def suppress_transformers_logs(transformers: Any) -> Iterator[None]:
    """Turn off progress bars and warnings of transformers."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    has_progress_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bars:
            logging.enable_progress_bar()


def fetch_model_dir(model_ref: str) -> Path:
    """Return the directory of hf:PATH, or fetch hf:ORG/NAME from the hub.

    A directory with an adapter is refused: whether transformers adds the adapter to the weights, silently, depends on
    whether peft is installed.
    """
    name = os.path.expanduser(model_ref.removeprefix(HF_PREFIX))
    model_dir = Path(name) if Path(name).is_dir() else download_model_dir(model_ref)
    if (model_dir / ADAPTER_FILE).exists():
        raise UserError(
            f'{model_dir} contains an adapter ({ADAPTER_FILE}), which is not read; merge it into its model with peft '
            '(merge_and_unload(), then save_pretrained(DIR)) and give hf:DIR, or move the adapter to another folder'
        )
    return model_dir


def download_model_dir(model_ref: str) -> Path:
    name = model_ref.removeprefix(HF_PREFIX)
    if not model_ref.startswith(HF_PREFIX) or not re.fullmatch(r'[\w-]+/[\w.-]+', name) or Path(name).is_file():
        raise UserError(
            f'{model_ref} is not a folder; give hf:PATH, a folder with {CONFIG_FILE}, hf:ORG/NAME on the hub, or '
            f'{GGUF_PREFIX}FILE'
        )
    hub = import_hf_library('huggingface_hub')
    try:
        return Path(hub.snapshot_download(name, allow_patterns=FETCH_PATTERNS))
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


def move_into_cache(temp_dir: Path, final_dir: Path) -> None:
    """Rename a folder to its place in the cache, unless another process has put one there."""
    try:
        temp_dir.rename(final_dir)
    except OSError:
        if not final_dir.exists():
            raise


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
    if missing := [path.name for path in paths if not path.exists()]:
        raise UserError(f'{model_dir / INDEX_FILE} names {missing[0]}, which is missing; download it again')
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
        self.file_of_array: dict[str, tuple[Path, Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in list_weight_files(model_dir):
            with translate_safetensors_errors(path):
                file = import_hf_library('safetensors').safe_open(path, framework='np')
                self.file_of_array |= dict.fromkeys(file.keys(), (path, file))
                self.shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def read_array(self, name: str) -> np.ndarray:
        path, file = self.file_of_array[name]
        with translate_safetensors_errors(path):
            return file.get_tensor(name)


def count_parameters(model_dir: Path) -> int:
    """Count the elements of all arrays in the safetensors files of a model directory."""
    return sum(map(math.prod, SafetensorsReader(model_dir).shapes.values()))


@contextlib.contextmanager
def translate_safetensors_errors(
    path: Path, problem: str = 'cannot be read', remedy: str = 'download it again'
) -> Iterator[None]:
    try:
        yield
    except (OSError, import_hf_library('safetensors').SafetensorError) as error:
        raise UserError(f'{path} {problem} ({format_error(error)}); {remedy}') from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a safetensors file."""
    with translate_safetensors_errors(path, 'cannot be written', 'make room or access there, or give another folder'):
        import_hf_library('safetensors.numpy').save_file(arrays, path, metadata={'format': 'pt'})


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def find_model_dir(model_ref: str) -> Path:
    """Return the directory of hf:PATH, or fetch the files of hf:ORG/NAME, a model of the Hugging Face hub.

    Raises:
        UserError: The directory holds no config.json, or weights that are not safetensors.
    """
    model_dir = fetch_model_dir(model_ref)
    if not (model_dir / CONFIG_FILE).exists():
        raise UserError(
            f'{model_dir} has no {CONFIG_FILE}; give a transformers folder, {GGUF_PREFIX}FILE, or a run without hf:'
        )
    list_weight_files(model_dir)
    return model_dir


def digest_model_dir(model_dir: Path) -> str:
    """Return a SHA-256 digest of the config and the weights of a model."""
    hasher = hashlib.sha256()
    for file in (model_dir / CONFIG_FILE, *list_weight_files(model_dir)):
        with file.open('rb') as stream:
            hasher.update(hashlib.file_digest(stream, 'sha256').digest())
    return hasher.hexdigest()
