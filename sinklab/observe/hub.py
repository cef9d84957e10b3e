"""hf:PATH_OR_ID, an open model: its folder, here or fetched, and what is refused of one before it is loaded."""

import hashlib
import json
from pathlib import Path

from sinklab.record import Refusal

WANTED = ['*.json', '*.safetensors', '*.model', '*.txt', '*.jinja']  # never a pickle


def folder_of(given: str) -> Path:
    """A folder as it is; else the files of a model of the Hugging Face hub, fetched once."""
    path = Path(given).expanduser()
    if path.is_dir():
        return checked(path)
    if path.exists():
        raise Refusal(f'hf:{given} is a file; give the folder of a model, or its name on the hub')
    try:
        from huggingface_hub import snapshot_download

        return checked(Path(snapshot_download(given, allow_patterns=WANTED)))
    except ImportError as error:
        raise Refusal(f'hf:{given} needs {error.name}; install it: pip install "sinklab[hf]"') from error
    except (OSError, ValueError) as error:  # no such model, no network, no right to it
        said = ' '.join(str(error).split())
        raise Refusal(f'hf:{given} is no folder, and cannot be fetched ({said[:200]})') from error


def checked(folder: Path) -> Path:
    """Refuses a folder without a config, and one whose weights are not there as safetensors, all of them."""
    if (folder / 'row.json').exists():
        raise Refusal(f'{folder} holds a run of sinklab; leave hf: out')
    if not (folder / 'config.json').exists():
        raise Refusal(f'{folder} holds no open model (no config.json); give a folder of transformers, or a run')
    files = weights(folder)
    if not files:
        pickles = [*folder.glob('*.bin'), *folder.glob('*.pt'), *folder.glob('*.pth')]
        there = f'{pickles[0].name} is a pickle, which can run any program' if pickles else 'there are none'
        raise Refusal(f'{folder} has no weights as safetensors ({there}); convert them, or give another folder')
    if lost := [file.name for file in files if not file.exists()]:
        raise Refusal(f'{folder} is half a checkpoint: {lost[0]} is lacking; fetch it again')
    return folder


def weights(folder: Path) -> list[Path]:
    index = folder / 'model.safetensors.index.json'
    if not index.exists():
        return sorted(folder.glob('*.safetensors'))
    try:
        return [folder / name for name in sorted({*json.loads(index.read_text())['weight_map'].values()})]
    except (ValueError, KeyError, AttributeError) as error:
        raise Refusal(f'{index} is damaged ({error}); fetch it again') from error


def digest(folder: Path) -> str:
    """Of config and weights."""
    found = hashlib.sha256()
    for file in (folder / 'config.json', *weights(folder)):
        with file.open('rb') as opened:
            found.update(hashlib.file_digest(opened, 'sha256').digest())
    return found.hexdigest()
