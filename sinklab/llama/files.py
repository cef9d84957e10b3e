"""A folder of Hugging Face: config.json, arrays in safetensors, and what its tokenizer is made of."""

import contextlib
import errno
import hashlib
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.files import validation
from sinklab.install import format_extra_command
from sinklab.llama import PREFIX
from sinklab.record import Refusal

MODEL, INDEX, CONFIG = 'model.safetensors', 'model.safetensors.index.json', 'config.json'
PICKLES = ('*.bin', '*.pt', '*.pth', '*.ckpt', '*.pkl')
# Of the hub: arrays, what is told of them, and all that a tokenizer may be made of; never a pickle.
WANTED = ['*.safetensors', '*.json', '*.jinja', '*.txt', 'tokenizer.model']
KINDS = ('F32', 'F16', 'BF16')
# What goes along with a tokenizer.json, and says nothing of parameters.
BESIDE = ('tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja', 'generation_config.json')
LARGEST = 5 * 10**9  # bytes of arrays in a file


def library(name: str) -> Any:
    """A library of the extra hf."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Refusal(f'this needs {name.partition(".")[0]}; install it: {format_extra_command("hf")}') from error


def opened(given: str, more: tuple[str, ...] = ()) -> Path:
    """The folder of hf:PATH, or of hf:ORG/NAME as the hub has it, of which WANTED is fetched, and more patterns."""
    name = given.removeprefix(PREFIX)
    if Path(name).is_dir():
        return Path(name)
    if not given.startswith(PREFIX) or not re.fullmatch(r'[\w-]+/[\w.-]+', name):
        raise Refusal(f'{given} is no folder; give hf:PATH, a folder with {CONFIG}, or hf:ORG/NAME of the hub')
    hub = library('huggingface_hub')
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[*WANTED, *more]))
    except Exception as error:  # of any kind: of the network, of the hub, of who may read what
        said = ' '.join(str(error).split())[:160]
        raise Refusal(f'{given} is no folder here, and cannot be fetched ({type(error).__name__}: {said})') from error


def read_json(file: Path) -> dict:
    try:
        found = validation.read_json(file, object)
    except FileNotFoundError as error:
        raise Refusal(f'{file} is missing; give a folder of Hugging Face that is whole') from error
    if not isinstance(found, dict):
        raise Refusal(f'{file} holds no fields; get it again')
    return found


def parts(folder: Path) -> list[Path]:
    """The files of a folder that hold its arrays."""
    if (folder / MODEL).exists():
        return [folder / MODEL]
    if not (folder / INDEX).exists():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise Refusal(
                f'{folder} holds {pickles[0]}, a pickle, which may run anything and is not read; have transformers '
                'write the model anew, which makes safetensors'
            )
        raise Refusal(f'{folder} has no {MODEL} and no {INDEX}; give a folder of Hugging Face that is whole')
    named = read_json(folder / INDEX).get('weight_map')
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise Refusal(f'{folder / INDEX} has no weight_map of names; get it again')
    names = sorted(set(named.values()))
    found = [validation.resolve_name(folder, name, folder / INDEX) for name in names]
    for name, path in zip(names, found, strict=True):
        if path.parent != folder:
            raise Refusal(f'{folder / INDEX} names {name}; files must lie in the folder itself: put it there')
        if not path.exists():
            raise Refusal(f'{folder / INDEX} names {name}, which is not there; get it again')
    return found


def copy_beside(source: Path, out: Path, name: str) -> None:
    """Copy a file that goes along with a tokenizer, if it is there; a link that leads out of its folder is skipped.

    Who made the folder chose where its links lead: a copy of what they name could carry a private file away.
    """
    path = source / name
    if validation.leads_out(path, source) or (path.exists() and not path.is_file()):
        print(
            f'sinklab: {path} is not copied: it is no regular file of that folder; put a copy there', file=sys.stderr
        )
    elif path.exists():
        (out / name).write_bytes(validation.read_bounded(path, validation.JSON_BYTES))


def identity(folder: Path) -> str:
    """What tells a folder from what it was before: where its files lie, how long they are and since when."""
    found = [folder / CONFIG, folder / 'tokenizer.json', *parts(folder)]
    known = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in found if file.exists()]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


class Arrays:
    """The arrays of a folder, read one at a time."""

    def __init__(self, folder: Path):
        self.files = {}
        for path in parts(folder):
            with one_line(path):
                file = library('safetensors').safe_open(path, framework='np')
            self.files |= dict.fromkeys(file.keys(), (path, file))
        self.shapes = {name: self.shape(name) for name in self.files}

    def shape(self, name: str) -> tuple[int, ...]:
        path, file = self.files[name]
        with one_line(path):
            found = file.get_slice(name)
        if found.get_dtype() not in KINDS:
            raise Refusal(f'{path}: {name} is in {found.get_dtype()}; read are {", ".join(KINDS)}')
        return tuple(found.get_shape())

    def read(self, name: str) -> np.ndarray:
        path, file = self.files[name]
        with one_line(path):
            return file.get_tensor(name)


@contextlib.contextmanager
def one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, library('safetensors').SafetensorError) as error:
        raise Refusal(f'{path} cannot be read ({" ".join(str(error).split())}); get it again') from error


def write(folder: Path, arrays: Iterable[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]], dtype: Any) -> None:
    """Arrays in files of at most LARGEST bytes, and where there are several, which of them lies where."""
    save, files = library('safetensors.numpy').save_file, [{}]
    size = total = 0
    for name, shape, array in arrays:
        bytes = math.prod(shape) * dtype.itemsize
        if files[-1] and size + bytes > LARGEST:
            files, size = [*files, {}], 0
        files[-1][name], size, total = array, size + bytes, total + bytes
    names = [f'model-{number:05}-of-{len(files):05}.safetensors' for number in range(1, len(files) + 1)]
    names = names if files[1:] else [MODEL]
    for name, held in zip(names, files, strict=True):
        given = {one: np.asarray(array(), dtype) for one, array in held.items()}
        try:
            save(given, folder / name, metadata={'format': 'pt'})
        except library('safetensors').SafetensorError as error:
            raise as_system_error(error, folder / name) from error
    if files[1:]:
        where = {one: name for name, held in zip(names, files, strict=True) for one in held}
        write_json(folder / INDEX, dict(metadata=dict(total_size=total), weight_map=where))


def as_system_error(error: Exception, path: Path) -> OSError:
    """Return the OSError that safetensors has met while it wrote a file, and names in its text."""
    found = re.search(r'os error (\d+)', str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error), str(path))


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
