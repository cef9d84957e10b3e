"""The house is as docs/house.md says: imports only go down, and there are no cycles."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = (ROOT / 'docs' / 'house.md').read_text(encoding='utf-8')
FLOORS = {
    room.removesuffix('.py'): int(floor)
    for floor, rooms in re.findall(r'^\| (\d) \| (.*?) \|', HOUSE, re.MULTILINE)
    for room in re.findall(r'`(\w+(?:\.py|(?=/`)))', rooms)
}
BLIND = {
    'model': {'data'},
    'data': {'model'},
    'measure': {'model', 'data'},
    'report': {'model', 'data', 'train'},
}
FOLDERS = ('sinklab', 'configs', 'launch', 'tests', 'benchmarks')
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob('*.py'))


def test_the_floors_of_the_page_go_down_and_the_lowest_have_a_row_each():
    floors = [int(floor) for floor in re.findall(r'^\| (\d) \|', HOUSE, re.MULTILINE)]
    assert floors == sorted(floors, reverse=True)
    assert floors[-3:] == [2, 1, 0]


def imports(path):
    """(name, whether at the top of the file) of everything that a file imports."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in tree.body) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from ((f'{node.module}.{alias.name}', node in tree.body) for alias in node.names)


def room(dotted):
    parts = dotted.split('.')
    return parts[1] if parts[0] == 'sinklab' and len(parts) > 1 and parts[1] in FLOORS else None


@pytest.mark.parametrize('path', [p for p in FILES if p.is_relative_to(ROOT / 'sinklab')], ids=lambda p: p.name)
def test_a_file_imports_from_its_own_room_and_from_lower_floors_only(path):
    here = room('.'.join(path.relative_to(ROOT).with_suffix('').parts))
    if path.stem in ('__init__', '__main__') and path.parent.name == 'sinklab':
        return
    assert here, f'{path} stands on no floor of docs/house.md'
    for name, _ in imports(path):
        there = room(name)
        if there and there != here:
            assert FLOORS[there] < FLOORS[here], f'{path} imports {name}'
            assert there not in BLIND.get(here, ()), f'{path} imports {name}'


def names(path):
    """What stands at the top of a file, and the methods of its classes."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.ClassDef():
                yield from (node.name, *(f'{node.name}.{part.name}' for part in node.body if hasattr(part, 'name')))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


@pytest.mark.parametrize('named', sorted(set(re.findall(r'`([\w/]+\.py(?::[\w.]+)?)`', HOUSE))))
def test_what_the_page_of_the_house_names_is_there(named):
    file, _, name = named.partition(':')
    path = next((folder / file for folder in (ROOT / 'sinklab', ROOT) if (folder / file).exists()), None)
    assert path, f'docs/house.md names {file}'
    assert not name or name in set(names(path)), f'docs/house.md names {name} of {file}'


@pytest.mark.slow
def test_no_test_imports_a_test():
    files = [path for path in FILES if path.is_relative_to(ROOT / 'tests')]
    assert [path.name for path in files if any(name.startswith('test_') for name, _ in imports(path))] == []


def modules():
    """What each file of sinklab imports of the others, lazily or not: {dotted name: dotted names}."""
    names = {
        '.'.join(path.relative_to(ROOT).with_suffix('').parts): path
        for path in FILES
        if path.is_relative_to(ROOT / 'sinklab')
    }
    return {
        here: {
            there
            for name, _ in imports(path)
            for there in (name, name.rpartition('.')[0])
            if there in names and there != here
        }
        for here, path in names.items()
    }


def test_no_file_imports_itself_by_way_of_others():
    """Between rooms and inside them: files are taken away whose imports are all gone, until none is left."""
    left = modules()
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f'in a circle: {", ".join(sorted(left))}'


STAGES = {
    'data': ['documents', 'tokens', 'store', 'sequences', 'prepare', 'corpus', 'batches'],
    'attend': [
        *('similarity', 'normalizer', 'operation', 'mask', 'bias', 'rule', 'dense', 'chunked', 'received'),
        *('kernels', 'epilogue', 'cudnn', 'backends', 'verification', 'choice', 'examples'),
    ],
}


@pytest.mark.parametrize('house', STAGES)
def test_a_stage_of_a_room_imports_from_those_before_it_only(house):
    stages, folder = STAGES[house], ROOT / 'sinklab' / house
    assert {path.stem for path in folder.iterdir() if path.stem[0] != '_'} == set(stages)
    for path in folder.rglob('*.py'):
        here = path.relative_to(folder).parts[0].removesuffix('.py')
        there = {name.split('.')[2] for name, _ in imports(path) if name.startswith(f'sinklab.{house}.')}
        assert here not in stages or all(stages.index(stage) <= stages.index(here) for stage in there), path


def test_configs_import_ml_collections_and_their_siblings_only():
    for path in (ROOT / 'configs').glob('*.py'):
        for name, _ in imports(path):
            assert name.split('.')[0] in ('ml_collections', 'configs', 'difflib'), f'{path} imports {name}'


def test_the_command_line_imports_nothing_heavy_before_a_verb_is_chosen():
    for path in (ROOT / 'sinklab' / 'cli').glob('*.py'):
        if path.stem in ('progress', 'terminal'):  # themselves imported by a verb
            continue
        for name, top in imports(path):
            assert not (top and name.split('.')[0] in ('jax', 'flax', 'orbax', 'grain', 'rich', 'ml_collections')), (
                name
            )
