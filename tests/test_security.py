"""Tests that docs/guides/security.md agrees with the code."""

import ast
import re
from pathlib import Path

from launch import code_bundle, jobset, queued_resources

ROOT = Path(__file__).parents[1]
GUIDES_DIR = ROOT / 'docs' / 'guides'
PAGE = ' '.join((GUIDES_DIR / 'security.md').read_text(encoding='utf-8').split())
SYNTAX_TREES = {path: ast.parse(path.read_text(encoding='utf-8')) for path in (ROOT / 'sinklab').rglob('*.py')}
PICKLE_MODULES = {'pickle', 'cloudpickle', 'dill', 'joblib', 'shelve', 'marshal'}


def test_pickle_is_imported_only_by_tokenizer_module():
    file_names = set()
    for path, tree in SYNTAX_TREES.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            file_names |= {path.name for name in names if name.partition('.')[0] in PICKLE_MODULES}
    assert file_names == {'tokenizer.py'}
    assert 'The one pickle is a pipe' in PAGE


def test_no_call_allows_pickled_arrays():
    settings = {settings['allow_pickle'] for path in SYNTAX_TREES for settings in find_keywords(path, 'allow_pickle')}
    assert settings <= {'False'}


def test_trust_remote_code_is_set_only_by_remote_code_option():
    settings = [
        settings['trust_remote_code']
        for path in SYNTAX_TREES
        for settings in find_keywords(path, 'trust_remote_code')
    ]
    assert settings
    assert set(settings) <= {'remote_code', 'self.remote_code', 'False'}
    assert '`sinklab measure --remote-code` alone' in PAGE


def find_keywords(path, name):
    for node in ast.walk(SYNTAX_TREES[path]):
        if isinstance(node, ast.keyword) and node.arg == name:
            yield {name: ast.unparse(node.value)}


def test_security_page_names_existing_files_and_options():
    page_names = re.findall(r'\(([\w/]+\.md)\)', PAGE)
    assert page_names
    for name in page_names:
        assert (GUIDES_DIR / name).exists(), name
    code = ' '.join(path.read_text() for folder in ('sinklab', 'launch') for path in (ROOT / folder).rglob('*.py'))
    options = set(re.findall(r'`(--[a-z-]+)', PAGE)) - {'--require-hashes'}
    assert options
    for option in options:
        assert f"'{option}'" in code, option
    assert '--require-hashes' in code_bundle.INSTALL_SCRIPT
    assert '(docs/guides/security.md)' in (ROOT / 'README.md').read_text(encoding='utf-8')


def test_security_page_matches_launchers():
    assert 'export HOME=/root' in queued_resources.BOOT_SCRIPT
    assert 'User=' not in queued_resources.SERVICE_UNIT, 'a systemd service without User= runs as root'
    assert f'`python:{code_bundle.PYTHON_VERSION}-slim`' in PAGE
    assert 'USER' not in jobset.DOCKERFILE
    assert "'privileged': True" in Path(jobset.__file__).read_text()
    assert 'pip install --no-cache-dir uv\n' in jobset.DOCKERFILE, 'uv is not pinned'
