"""Rows of all config files."""

import importlib
from pathlib import Path

from sinklab import configs
from sinklab.configs import quickstart

ROW_MODULES = [
    module
    for path in sorted(Path(configs.__file__).parent.glob('*.py'))
    if hasattr(module := importlib.import_module(f'sinklab.configs.{path.stem}'), 'ROWS')
]
ROWS = [(module, row) for module in ROW_MODULES for row in module.ROWS]
PAPER_MODULES = [module for module in ROW_MODULES if module is not quickstart]


def get_name(value):
    return value if isinstance(value, str) else value.__name__.removeprefix('sinklab.configs.')
