"""Tests that nothing foreign is executed, and that docs/guides/security.md agrees with the launchers."""

import ast
from pathlib import Path

from launch import code_bundle

ROOT = Path(__file__).parents[1]
SYNTAX_TREES = {path: ast.parse(path.read_text(encoding='utf-8')) for path in (ROOT / 'sinklab').rglob('*.py')}
PICKLE_MODULES = {'pickle', 'cloudpickle', 'dill', 'joblib', 'shelve', 'marshal'}


def test_no_data_file_is_read_by_pickle():
    """The tokenizer module may use pickle for pipes to processes that it starts."""
    file_names = set()
    for path, tree in SYNTAX_TREES.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            file_names |= {path.name for name in names if name.partition('.')[0] in PICKLE_MODULES}
    assert file_names <= {'tokenizer.py'}


def list_values(keyword):
    """Return the values that calls in sinklab/ give to a keyword."""
    nodes = (node for tree in SYNTAX_TREES.values() for node in ast.walk(tree))
    return {ast.unparse(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == keyword}


def test_no_call_allows_pickled_arrays():
    assert list_values('allow_pickle') <= {'False'}


def test_no_call_trusts_remote_code():
    assert list_values('trust_remote_code') == {'False'}


def read_template(name):
    return (ROOT / 'launch' / 'templates' / name).read_text()


def test_launchers_run_pinned_versions_as_root():
    page = (ROOT / 'docs' / 'guides' / 'security.md').read_text(encoding='utf-8')
    assert '--require-hashes' in read_template('install.sh')
    assert 'User=' not in read_template('sinklab.service'), 'a systemd service without User= runs as root'
    assert f'`python:{code_bundle.PYTHON_VERSION}-slim`' in page
    assert 'USER' not in read_template('Dockerfile')
    assert 'pip install --no-cache-dir uv\n' in read_template('Dockerfile'), 'uv is not pinned'
