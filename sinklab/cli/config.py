"""--config=FILE:ROW and --config.PATH=VALUE, read into a spec."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

from sinklab.spec import Refusal, Spec, parse, unknown


def load(given: str, rest: list[str]) -> tuple[Spec, dict]:
    """(spec, what row.json holds) for --config=`given`, with the overrides in `rest` applied."""
    file, _, row = given.partition(':')
    module = imported(file)
    try:
        config = module.get_config(row or None)
    except Exception as error:  # a config file is its author's program: what it raises is what there is to say
        raise Refusal(f'--config={given}: {one_line(error)}') from error
    overrides = [override(argument) for argument in rest]
    for path, text in overrides:
        assign(config, path, text)
    about = getattr(module, 'ROWS', {}).get(row, dict(diff={}, published={}, source=''))
    return parse(config.to_dict()), dict(config=file, row=row, overrides=dict(overrides), **about)


def imported(file: str) -> Any:
    """The module of a config file: a path from here, or else one of those installed with sinklab."""
    import configs

    installed = Path(configs.__file__).parents[1] / file
    path = next((path for path in (Path(file), installed) if path.is_file()), None)
    if path is None or path.suffix != '.py':
        there = ', '.join(sorted(f'configs/{path.name}' for path in installed_configs()))
        raise Refusal(f'--config={file} is no config file; there are {there}')
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise Refusal(f'--config={file} does not run: {one_line(error)}') from error
    if not hasattr(module, 'get_config'):
        raise Refusal(f'--config={file} has no get_config(row); see configs/quickstart.py for one')
    return module


def one_line(error: Exception) -> str:
    kind = '' if type(error) is ValueError else f'{type(error).__name__}: '
    return kind + ' '.join(str(error).split())


def installed_configs() -> list[Path]:
    import configs

    files = Path(configs.__file__).parent.glob('*.py')
    return [path for path in files if 'get_config' in path.read_text(encoding='utf-8') and path.stem != 'table']


def override(argument: str) -> tuple[str, str]:
    """--config.a.b=value -> (a.b, value)."""
    name, equals, value = argument.partition('=')
    if not name.startswith('--config.') or not equals:
        raise Refusal(f'{argument} is unknown; overrides read --config.optimizer.steps=100, for the rest see --help')
    return name.removeprefix('--config.'), value


def assign(config: Any, path: str, text: str) -> None:
    """Sets one value of a ConfigDict, in the type that it has there."""
    *parents, last = path.split('.')
    at = 'config'
    for name in parents:
        config, at = child(config, name, at), f'{at}.{name}'
    if hasattr(child(config, last, at), 'keys'):
        raise Refusal(f'{at}.{last} holds fields ({", ".join(config[last].keys())}); give one of them')
    kind = config.get_type(last)
    try:
        config[last] = value(text, kind)
    except (TypeError, ValueError, SyntaxError) as error:
        raise Refusal(f'{at}.{last}={text} is no {kind.__name__}; its value here is {config[last]!r}') from error


def child(config: Any, name: str, at: str) -> Any:
    if not hasattr(config, 'keys'):
        raise Refusal(f'{at} holds a value, so there is no {at}.{name}')
    if name not in config:
        raise Refusal(unknown(f'{at}.{name}', name, config.keys()))
    return config[name]


def value(text: str, kind: type) -> Any:
    """A command line's text as a value of `kind`; None empties a field that may be empty."""
    if kind is str or text == 'None':
        return None if text == 'None' else text
    parsed = ast.literal_eval(text)
    if kind is float and type(parsed) is int:
        return float(parsed)
    if type(parsed) is not kind:
        raise TypeError
    return parsed
