"""Run a tutorial: its files, commands and notebook cells, in a new folder, in the order of the page.

    python docs/run_tutorial.py [--quick | --update] docs/tutorials/first_run.md

- ```python with a first line `# NAME.py` is a file; any other ```python is a cell of a notebook.
- ```sh is commands for bash; the exported variables of earlier blocks stay set. ```console is not run.
- ```text after a comment `<!-- output: all -->`, `first N`, `last N` or `lines A B` (Python's [A:B]) is the output
  of the block before it, which --update writes into the page. `all, as in ...` is not compared by tests.

A page that takes minutes begins with a line `export ...`, and names another line in "To try this page in seconds:
`export ...`". --quick runs the second line in place of the first.
"""

import argparse
import ast
import contextlib
import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK_PATTERN = re.compile(r'(?:^<!-- output: ([^\n]*) -->\n+)?^```(\w+)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
QUICK_PATTERN = re.compile(r'To\stry\sthis\spage\sin\sseconds:\s`(export [^`]*)`')
TERMINAL_COLUMNS = '120'  # wide enough that no table of a tutorial wraps


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str  # the language after the fence
    text: str
    lines: str | None  # the lines of an output that the page shows, such as `first 3`; None if it is no output
    span: tuple[int, int]  # start and end of the text in the page

    @property
    def file(self) -> str | None:
        """The name of the file that the block contains; None if the block is not a file."""
        match = re.match(r'# (\S+\.py)\n', self.text)
        return match[1] if self.kind == 'python' and match else None


def read_blocks(page: str) -> list[Block]:
    """Return the blocks of a page in their order."""
    return [Block(match[2], match[3], match[1], match.span(3)) for match in BLOCK_PATTERN.finditer(page)]


def make_quick(page: str) -> str:
    """Return a page that runs at its small size; a page that names no small size is returned unchanged."""
    if not (quick := QUICK_PATTERN.search(page)):
        return page
    quick_page = re.sub(r'(?<=^```sh\n)export .*$', lambda _: quick[1], page, count=1, flags=re.MULTILINE)
    if quick_page == page:
        raise SystemExit(f'the page names `{quick[1]}`, and its first commands do not begin with export')
    return quick_page


def select_lines(output: str, lines: str) -> list[str]:
    """Return the lines of an output that a page shows."""
    all_lines = [line.rstrip() for line in output.rstrip().splitlines()]
    match lines.partition(',')[0].split():
        case ['first', count]:
            return all_lines[: int(count)]
        case ['last', count]:
            return all_lines[-int(count) :]
        case ['lines', start, end]:
            return all_lines[int(start) : int(end)]
        case ['all']:
            return all_lines
    raise SystemExit(f'<!-- output: {lines} --> must be all, first N, last N or lines A B')


class TutorialRunner:
    """Runner of the blocks of a page in a folder, with environment variables in addition to those of this process."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None):
        self.folder = folder
        self.namespace: dict[str, Any] = {}
        self.last_output = ''
        self.variables = {**os.environ, 'COLUMNS': TERMINAL_COLUMNS, **(environment or {})}

    def run_block(self, block: Block) -> None:
        """Write the file, run the commands or execute the cell of a block, and store the output."""
        if block.file:
            (self.folder / block.file).write_text(block.text, encoding='utf-8')
        elif block.kind == 'sh':
            self.last_output = self.run(block.text)
        elif block.kind == 'python':
            self.last_output = self.execute(block.text)

    def run(self, commands: str) -> str:
        """Run commands with bash and return their output; keep the variables that they export."""
        script = f'set -e\n{commands}\nenv -0 > {shlex.quote(str(self.folder / ".environment"))}\n'
        process = subprocess.run(
            ['bash', '-c', script], cwd=self.folder, env=self.variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if process.returncode:
            raise SystemExit(f'{commands}exits with {process.returncode}:\n{process.stdout}')
        exported = (self.folder / '.environment').read_text(encoding='utf-8')
        pairs = (pair.partition('=') for pair in exported.split('\0') if '=' in pair)
        self.variables.update((name, value) for name, _, value in pairs)
        return process.stdout

    def execute(self, cell: str) -> str:
        """Execute a notebook cell and return its output, including the value of a last expression."""
        *body, last = ast.parse(cell).body
        is_expression = isinstance(last, ast.Expr)
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.chdir(self.folder):
            exec(compile(ast.Module(body if is_expression else [*body, last], []), '<cell>', 'exec'), self.namespace)
            if is_expression:
                value = eval(compile(ast.Expression(last.value), '<cell>', 'eval'), self.namespace)
                if value is not None:
                    print(repr(value))
        return output.getvalue()


def run_page(page: str, runner: TutorialRunner) -> list[tuple[Block, list[str]]]:
    """Run all blocks of a page, and return each output block with all lines that were printed."""
    outputs = []
    for block in read_blocks(page):
        if block.lines is None:
            runner.run_block(block)
        else:
            outputs.append((block, runner.last_output.rstrip().splitlines()))
    return outputs


def update_outputs(page: str, outputs: list[tuple[Block, list[str]]]) -> str:
    """Return a page with its outputs replaced by the printed lines."""
    for block, printed in reversed(outputs):
        start, end = block.span
        page = page[:start] + '\n'.join(select_lines('\n'.join(printed), block.lines)) + '\n' + page[end:]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('pages', nargs='+', type=Path)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument('--quick', action='store_true', help='run the small size that a page names')
    mode.add_argument('--update', action='store_true', help='write what was printed into the page')
    args = parser.parse_args()
    path_variable = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    for path in args.pages:
        page = path.read_text(encoding='utf-8')
        with tempfile.TemporaryDirectory() as folder:
            runner = TutorialRunner(Path(folder), dict(PATH=path_variable))
            outputs = run_page(make_quick(page) if args.quick else page, runner)
        for block, printed in outputs:
            print('\n'.join(select_lines('\n'.join(printed), block.lines)))
        if args.update:
            path.write_text(update_outputs(page, outputs), encoding='utf-8')


if __name__ == '__main__':
    main()
