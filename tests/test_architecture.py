"""Tests that docs/architecture.md agrees with the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'architecture.md').read_text(encoding='utf-8')
ROWS = re.findall(r'^\| (\d+) \| `(\w+)(\.py|/)` \|', PAGE, re.MULTILINE)
LEVELS = {name: int(level) for level, name, _ in ROWS}
TABLE = PAGE.partition('| package | does not import |')[2].partition('\n\n')[0]
INDEPENDENT = {
    name: set(re.findall(r'`(\w+)/`', packages))
    for name, packages in re.findall(r'^\| `(\w+)/` \| (.*) \|', TABLE, re.M)
}
assert INDEPENDENT.keys() == {'model', 'data', 'metrics', 'report'}
FILES = sorted((ROOT / 'sinklab').rglob('*.py'))


def test_page_lists_each_module_once_in_descending_levels():
    assert [int(level) for level, *_ in ROWS] == sorted(LEVELS.values(), reverse=True)
    assert set(LEVELS.values()) == set(range(max(LEVELS.values()) + 1))
    assert len(ROWS) == len(LEVELS)
    for _, name, suffix in ROWS:
        assert (ROOT / 'sinklab' / f'{name}{suffix}').exists(), f'docs/architecture.md has a level for {name}{suffix}'


def list_imports(path):
    """Yield the name of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def find_level_name(module_name):
    parts = module_name.split('.')
    return parts[1] if parts[0] == 'sinklab' and len(parts) > 1 and parts[1] in LEVELS else None


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_module_imports_only_own_package_and_lower_levels(path):
    level_name = find_level_name('.'.join(path.relative_to(ROOT).with_suffix('').parts))
    if path.stem in ('__init__', '__main__') and path.parent.name == 'sinklab':
        return
    assert level_name, f'{path} has no level in docs/architecture.md'
    for name in list_imports(path):
        imported_level_name = find_level_name(name)
        if imported_level_name and imported_level_name != level_name:
            assert LEVELS[imported_level_name] < LEVELS[level_name], f'{path} imports {name}'
            assert imported_level_name not in INDEPENDENT.get(level_name, ()), f'{path} imports {name}'


def map_imports():
    """Return {module: modules of sinklab that it imports}, including lazy imports."""
    paths_by_module = {'.'.join(path.relative_to(ROOT).with_suffix('').parts): path for path in FILES}
    return {
        module: {
            imported_module
            for name in list_imports(path)
            for imported_module in (name, name.rpartition('.')[0])
            if imported_module in paths_by_module and imported_module != module
        }
        for module, path in paths_by_module.items()
    }


def test_modules_have_no_import_cycles():
    """Remove modules whose imports are all removed, until none is left.

    The remaining modules are in a cycle.
    """
    remaining = map_imports()
    while removable := [
        name for name, imported_modules in remaining.items() if not imported_modules & remaining.keys()
    ]:
        for name in removable:
            del remaining[name]
    assert not remaining, f'in a circle: {", ".join(sorted(remaining))}'


ALLOWED_IN_CONFIGS = 'ml_collections', 'sinklab.configs', 'sinklab.config.spec', 'dataclasses', 'difflib', 'typing'


def test_configs_import_only_the_schema_ml_collections_and_siblings():
    for path in (ROOT / 'configs').glob('*.py'):
        for name in list_imports(path):
            assert name.startswith(ALLOWED_IN_CONFIGS), f'{path} imports {name}'


def list_names(path):
    """Yield the top-level names of a file and the methods of its classes."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.ClassDef():
                yield from (node.name, *(f'{node.name}.{part.name}' for part in node.body if hasattr(part, 'name')))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


REFERENCES = sorted(set(re.findall(r'`([\w/]+\.py(?::[\w.]+)?)`', PAGE)))


@pytest.mark.parametrize('reference', REFERENCES)
def test_page_names_existing_files_and_objects(reference):
    file_name, _, name = reference.partition(':')
    path = next((folder / file_name for folder in (ROOT / 'sinklab', ROOT) if (folder / file_name).exists()), None)
    assert path, f'docs/architecture.md names {file_name}'
    assert not name or name in set(list_names(path)), f'docs/architecture.md names {name} of {file_name}'
