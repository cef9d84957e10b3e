"""Pack a token store into a few compressed files, for machines that take in little data at a time.

    python -m benchmarks.packed_store pack stores/large build/packed --parts=2
    python -m benchmarks.packed_store unpack stores/half build/packed/0.tar.xz
    python -m benchmarks.packed_store unpack stores/large build/packed/*.tar.xz

Each file has the held-out shards and, in turn, one of the training shards of each domain, so that any of the files
make a store with the same validation data: prepare the store with small shards. Packing is deterministic. A damaged
file is refused: `unpack` compares all files with the SHA-256 sums of the store, and prints the digest of the result.
"""

import argparse
import hashlib
import json
import lzma
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks.argument_types import parse_count
from sinklab.data.prepare import count_domain, digest_json
from sinklab.data.store import META_FILE, PROBE_FILE, TOKENIZER_FILE, Shard, Store
from sinklab.errors import UserError


def pack_store(store_dir: Path, packed_dir: Path, num_parts: int) -> None:
    """Write PACKED/0.tar.xz and so on."""
    store = Store(store_dir)
    packed_dir.mkdir(parents=True, exist_ok=True)
    for part in range(num_parts):
        shards = [shard for shard in store.shards if shard.split == 'held_out']
        for domain in store.domains:
            shards += store.get_tokens('train', domain).shards[part::num_parts]
        names = [META_FILE, TOKENIZER_FILE, PROBE_FILE, *(name for shard in shards for name in shard.digests)]
        path = packed_dir / f'{part}.tar.xz'
        with tarfile.open(path, 'w:xz', preset=9) as archive:
            for name in names:
                info = tarfile.TarInfo(name)  # without times and owners, so that the file is always the same
                info.size = (store_dir / name).stat().st_size
                with (store_dir / name).open('rb') as file:
                    archive.addfile(info, file)
        tokens = sum(shard.tokens for shard in shards)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f'{path}: {tokens:,} tokens, {path.stat().st_size:,} bytes, SHA-256 {digest}', flush=True)


def unpack_store(paths: Iterable[Path], store_dir: Path) -> Store:
    """Unpack files of `pack_store` into the store of their shards; the folder may have the shards of other files.

    Raises:
        UserError: A file is damaged.
    """
    for path in paths:
        try:
            with tarfile.open(path, 'r:xz') as archive:
                archive.extractall(store_dir, filter='data')
        except (OSError, lzma.LZMAError, tarfile.TarError, EOFError) as error:
            raise UserError(f'{path} is missing or damaged ({error}); copy it again') from error
    meta = json.loads((store_dir / META_FILE).read_text())
    shards = msgspec.convert(meta['shards'], list[Shard])
    present = [shard for shard in shards if (store_dir / f'{shard.name}.ids').exists()]
    if len(present) < len(shards):
        meta['digest'] = digest_json([meta['digest'], [shard.name for shard in present]])[:16]
        meta['domains'] = [count_domain(domain['name'], present) for domain in meta['domains']]
        meta['shards'] = msgspec.to_builtins(present)
        (store_dir / META_FILE).write_text(json.dumps(meta, indent=1) + '\n')
    return Store(store_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    pack = commands.add_parser('pack')
    pack.add_argument('store', type=Path, help='a folder of `sinklab prepare`')
    pack.add_argument('packed', type=Path, help='folder for the files')
    pack.add_argument('--parts', type=parse_count, required=True, help='number of files')
    unpack = commands.add_parser('unpack')
    unpack.add_argument('store', type=Path, help='folder for the store')
    unpack.add_argument('files', type=Path, nargs='+', help='files of `pack`')
    args = parser.parse_args()
    try:
        if args.command == 'pack':
            pack_store(args.store, args.packed, args.parts)
        else:
            store = unpack_store(args.files, args.store)
            print(f'{store}: digest {store.digest}, {store.meta["domains"]}')
    except UserError as error:
        sys.exit(str(error))


if __name__ == '__main__':
    main()
