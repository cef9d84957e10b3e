"""Files of a Hugging Face model directory, local or of the Hub, and the model that transformers loads from them."""

import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from sinklab.errors import UserError, format_error, format_extra_command
from sinklab.parallel import device_mesh
from sinklab.run_dir import GGUF_PREFIX, HF_PREFIX
from sinklab.storage.files import TEMPORARY_SUFFIX, open_writable_folder, read_json

MODEL_FILE, INDEX_FILE, CONFIG_FILE = 'model.safetensors', 'model.safetensors.index.json', 'config.json'
ADAPTER_FILE = 'adapter_config.json'  # of peft
# Files that are fetched from the hub: weights, configs and tokenizer files; never a pickle.
FETCH_PATTERNS = ['*.safetensors', '*.json', '*.jinja', '*.txt', 'tokenizer.model']
DOWNLOAD_AGAIN = 'download it again'


class WeightIndex(TypedDict):
    """The content of INDEX_FILE: the name of the file of each array."""

    weight_map: dict[str, str]


def import_hf_library(name: str) -> Any:
    """Import a library of the extra `hf`; raise UserError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f'this needs {name.partition(".")[0]}; install it: {format_extra_command("hf")}') from error


@contextlib.contextmanager
def call_transformers(name: str) -> Iterator[Any]:
    """Yield the transformers library, without its warnings and progress bars; put its errors on one line.

    Args:
        name: The model or file, for the message.

    Raises:
        UserError: transformers is not installed, or raises an exception, which can be of many types.
    """
    transformers = import_hf_library('transformers')
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    has_progress_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    except UserError:
        raise
    except Exception as error:
        message = format_error(error, with_type=True)
        raise UserError(
            f'{name} cannot be read or run by transformers {transformers.__version__}: {message}'
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bars:
            logging.enable_progress_bar()


def load_model(
    model_dir: Path, name: str, problems: tuple[str, ...] = ('missing_keys', 'mismatched_keys'), **options: Any
) -> Any:
    """Load a causal language model of transformers, with eager attention, which can return its weights.

    Args:
        model_dir: The folder of the model.
        name: The name of the model, for messages.
        problems: Which differences between the model and its files are refused, by their names in transformers.
        **options: More arguments of `from_pretrained`.

    Raises:
        UserError: It cannot be loaded, or arrays differ.
    """
    with call_transformers(name) as transformers:
        # If trust_remote_code is not given, transformers asks on the terminal.
        options = dict(attn_implementation='eager', use_safetensors=True, trust_remote_code=False) | options
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, output_loading_info=True, **options
        )
    for problem in problems:
        if keys := sorted(map(str, loading_info[problem])):
            raise UserError(
                f'{name} does not fit its config: {len(keys)} {problem} ({keys[0]}, ...); {DOWNLOAD_AGAIN}'
            )
    return model.eval()


def find_model_dir(model_ref: str) -> Path:
    """Return the directory of hf:PATH, or fetch the files of hf:ORG/NAME, a model of the Hugging Face hub.

    A directory with an adapter is refused: whether transformers adds the adapter to the weights, silently, depends on
    whether peft is installed.

    Raises:
        UserError: The directory holds no config.json, an adapter, or weights that are not safetensors.
    """
    name = os.path.expanduser(model_ref.removeprefix(HF_PREFIX))
    model_dir = Path(name) if Path(name).is_dir() else download_model_dir(model_ref)
    if (model_dir / ADAPTER_FILE).exists():
        raise UserError(
            f'{model_dir} contains an adapter ({ADAPTER_FILE}), which is not read; merge it into its model with peft '
            '(merge_and_unload(), then save_pretrained(DIR)) and give hf:DIR, or move the adapter to another folder'
        )
    if not (model_dir / CONFIG_FILE).exists():
        raise UserError(
            f'{model_dir} has no {CONFIG_FILE}; give a transformers folder, {GGUF_PREFIX}FILE, or a run without hf:'
        )
    list_weight_files(model_dir)
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


@contextlib.contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary path for a folder, which is renamed to `folder` when it is complete.

    A folder that another process has put there in the meantime is kept.
    """
    temp_dir = folder.with_name(f'{folder.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}')
    with open_writable_folder(folder.parent):
        try:
            temp_dir.mkdir()
            yield temp_dir
            try:
                temp_dir.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(temp_dir, ignore_errors=True)


def read_json_object(path: Path) -> dict:
    try:
        return read_json(path, dict, DOWNLOAD_AGAIN)
    except FileNotFoundError as error:
        raise UserError(f'{path} is missing; give a complete Hugging Face folder') from error


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def list_weight_files(model_dir: Path) -> list[Path]:
    """List the safetensors files of a model directory; refuse pickles and names outside of the directory."""
    if (model_dir / MODEL_FILE).exists():
        return [model_dir / MODEL_FILE]
    if not (model_dir / INDEX_FILE).exists():
        raise UserError(
            f'{model_dir} has no {MODEL_FILE} and no {INDEX_FILE}; pickles such as pytorch_model.bin can execute '
            'arbitrary code and are not read: save the model again with transformers'
        )
    index = read_json(model_dir / INDEX_FILE, WeightIndex, DOWNLOAD_AGAIN)
    names = sorted(set(index['weight_map'].values()))
    if missing := set(names) - {path.name for path in model_dir.iterdir()}:
        raise UserError(f'{model_dir / INDEX_FILE} names {min(missing)}, which is not beside it; {DOWNLOAD_AGAIN}')
    return [model_dir / name for name in names]


def count_parameters(model_dir: Path) -> int:
    """Count the elements of all arrays in the safetensors files of a model directory."""
    safetensors = import_hf_library('safetensors')
    count = 0
    for path in list_weight_files(model_dir):
        try:
            with safetensors.safe_open(path, framework='np') as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f'{path} cannot be read ({format_error(error)}); {DOWNLOAD_AGAIN}') from error
    return count


def compute_identity(paths: list[Path], *versions: Any) -> str:
    """Compute a digest of the paths, sizes and modification times of files, and of what reads them."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]
    return hashlib.sha256(json.dumps([*stats, *versions]).encode()).hexdigest()[:16]
