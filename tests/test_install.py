"""The page of dependencies."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def read_requirements(monkeypatch):
    """Return {extra, or None for the core: its requirements} of setup.py."""
    setuptools = pytest.importorskip('setuptools')
    setup_options = {}
    monkeypatch.setattr(setuptools, 'setup', lambda **options: setup_options.update(options))
    runpy.run_path(str(ROOT / 'setup.py'))
    return {None: setup_options['install_requires'], **setup_options['extras_require']}


def test_page_of_dependencies_has_row_for_every_requirement_with_its_bounds(monkeypatch):
    page = (ROOT / 'docs' / 'reference' / 'dependencies.md').read_text(encoding='utf-8')
    tables = re.findall(r'^##+ (?:Core|`(\w+)`)\n(.*?)(?=^##|\Z)', page, re.MULTILINE | re.DOTALL)
    actual = {extra or None: re.findall(r'^\| `(.*?)` \| .+ \|$', rows, re.MULTILINE) for extra, rows in tables}
    expected = read_requirements(monkeypatch)
    del expected['test']
    assert actual == expected
