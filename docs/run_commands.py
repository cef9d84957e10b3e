"""Run every command in the ```sh blocks of a document.

    python docs/run_commands.py README.md [--skip='make test']

Commands that need a pod or a download are in ```console blocks, which this script skips.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def list_commands(text: str) -> list[str]:
    blocks = re.findall(r'^```sh\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('documents', nargs='+', type=Path)
    parser.add_argument('--skip', action='append', default=[], help='a command that is not run')
    args = parser.parse_args()
    for document in args.documents:
        for command in list_commands(document.read_text(encoding='utf-8')):
            if command in args.skip:
                continue
            print(f'$ {command}', flush=True)
            if code := subprocess.run(command, shell=True, cwd=ROOT).returncode:
                print(f'{document}: this command exits with {code}: {command}', file=sys.stderr)
                return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
