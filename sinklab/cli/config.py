"""--config=FILE:ROW, --size=SIZE and --config.PATH=VALUE, read into a spec."""

import ast
import dataclasses
import importlib.util
import inspect
import math
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sinklab.folder import FREE, Folder, flat
from sinklab.named import spec_of
from sinklab.parse import parse
from sinklab.record import Refusal, refuse_all, unknown
from sinklab.spec import Spec

KINDS = {'get_config': 'get_config(row); see configs/quickstart.py', 'CLAIMS': 'CLAIMS; see configs/claims.py'}


Expected = tuple[dict[str, str], str]  # {row: its Sink_1 in words}, and where that comes from


def load(given: str, rest: list[str], size: str | None = None, module: Any = None) -> tuple[Spec, dict]:
    """(spec, what row.json holds) for --config=`given` at a size, with the overrides in `rest` applied.

    Args:
        module: of the config file, where that has been run already; otherwise it is run.
    """
    spec, about, *_ = load_and_describe(given, rest, size, module)
    return spec, about


def load_and_describe(
    given: str, rest: list[str], size: str | None = None, module: Any = None
) -> tuple[Spec, dict, str | None, Expected | None]:
    """Return what load() returns, what the row comes to, and what is expected of the rows of its file.

    The config file, a user's program, is run once. For the arguments see load().
    """
    file, _, row = given.partition(':')
    module = module or module_of(file)
    config, size = config_and_size(module, given, row or None, size)
    told = about(module, file, row, config)
    overrides = overridden(config, rest)
    try:
        spec = parse(config.to_dict())
    except Refusal as refusal:
        raise Refusal(f'{refusal}{name_sizes_that_fit(module, given, size, rest)}') from refusal
    recorded = {**told, 'size': size, 'overrides': overrides}
    return spec, recorded, describe_row(module, row, size, spec), expected_of(module, size, overrides)


def name_sizes_that_fit(module: Any, given: str, size: str | None, rest: list[str]) -> str:
    """Return at which other sizes a row can be trained whose own values are refused at this one; '' if at none.

    A value of the row is at fault if the row can be trained with the value of the baseline in its place.
    """
    row, baseline = given.partition(':')[2], baseline_of(module, size)
    overridden_paths = {path for path, _ in map(override, rest)}
    own = [path for path in diff_of(module, row) if path not in overridden_paths]
    if not own or not baseline:
        return ''

    def is_accepted(size: str | None, *reset: str) -> bool:
        try:
            config, _ = config_and_size(module, given, row, size)
            config.update_from_flattened_dict({path: flat(baseline.to_dict())[path] for path in reset})
            overridden(config, rest)
            parse(config.to_dict())
        except Refusal:
            return False
        return True

    at_fault = [path for path in own if is_accepted(size, path)] or (own if is_accepted(size, *own) else [])
    fit = [other for other in module.get_config.sizes if is_accepted(other)] if at_fault else []
    return (
        f'; row {row} changes {", ".join(at_fault)}, and can be trained at --size={" or ".join(fit)}' if fit else ''
    )


def diff_of(module: Any, row: str) -> dict[str, Any]:
    """Return the diff of a row as it is written; nothing where the file has no such row."""
    return getattr(module, 'ROWS', {}).get(key_of(module, row), {}).get('diff', {})


def describe_row(module: Any, row: str, size: str | None, spec: Spec) -> str | None:
    """Return the fields in which a row differs from the baseline of its table at a size, in one line.

    Args:
        module: of the config file.
        row: its name; '' where none was given.
        spec: what is trained, with all overrides. Its two seeds are left out.

    Returns:
        None where the file has no baseline, as a file without table() of configs/table.py.
    """
    if not row or not (baseline := baseline_of(module, size)):
        return None
    before, now = flat(baseline.to_dict()), flat(dataclasses.asdict(spec))
    changes = [
        f'{path} {short_text(before.get(path))} -> {short_text(now[path])}'
        for path in now
        if path not in ('seed', 'data.seed') and before.get(path) != now[path]
    ]
    return f'at size {size}: {"; ".join(changes) or unchanged(module, row, before)}'


def unchanged(module: Any, row: str, baseline: dict[str, Any]) -> str:
    """Say of a row that trains the baseline which of its values the baseline has, too."""
    diff = diff_of(module, row)
    if not diff:
        return 'the baseline'
    same = ', '.join(f'{path} is {short_text(baseline.get(path))}' for path in diff)
    return f'equal to the baseline, where {same}, too'


def short_text(value: Any) -> str:
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def equals_baseline(module: Any, given: str, size: str | None) -> bool:
    """Return whether a row, FILE:ROW, is at a size the config that its table has without any row."""
    row, baseline = given.partition(':')[2], baseline_of(module, size)
    return bool(baseline) and config_and_size(module, given, row, size)[0].to_dict() == baseline.to_dict()


def baseline_of(module: Any, size: str | None) -> Any:
    """Return the config of a table without any of its rows, at a size; None where it has none."""
    make = getattr(module.get_config, 'baseline', None)
    if not make:
        return None
    return make() if size is None else make(size)


def of_run(folder: Folder, name: str, rest: list[str]) -> tuple[Spec, dict]:
    """The same of a run's own config under a new name, with the overrides in `rest` applied to it.

    What was published of the run's row is of that alone, as long as nothing that touches a number is overridden.
    """
    from configs import default

    config, row = default.get_config(), dict(config='', row='', size=None, overrides={}) | folder.read('row')
    config.update_from_flattened_dict(flat(dataclasses.asdict(spec_of(folder))))
    overrides = overridden(config, rest)
    if is_imported(row):
        follow_overrides(config, overrides)
    else:
        row.pop('optimizer_defaults', None)
    another = {} if all(f'{path}.'.startswith(FREE) for path in overrides) else dict(published={}, source='')
    return parse(config.to_dict()), row | another | dict(row=name, overrides=overrides)


def is_imported(row: dict) -> bool:
    """Return whether the row.json is of a model of Hugging Face that has been imported, not of a run that trained."""
    return 'optimizer_defaults' in row and not row.get('from')


def follow_overrides(config: Any, overrides: dict[str, str]) -> None:
    """Set the defaults of fine-tuning that depend on fields which are overridden, unless they are overridden, too."""
    optimizer, probe, length = config.optimizer, config.probe, config.data.length
    follows = {'optimizer.warmup_steps': optimizer.steps // 10, 'probe.length': max(2, min(probe.length, length))}
    follows['probe.keys'] = min(probe['keys'], follows['probe.length'])  # probe.keys is a method
    if optimizer.schedule == 'constant':
        follows['optimizer.final_share'] = None
    config.update_from_flattened_dict({path: value for path, value in follows.items() if path not in overrides})


def describe_origin(row: dict, spec: Spec) -> str:
    """Return in one line whose optimizer a run has that begins with the parameters of another."""
    optimizer = spec.optimizer
    first = ', the first step at a rate of 0' if optimizer.warmup_steps else ''
    settings = (
        f'peak learning rate {optimizer.peak_learning_rate:g}, {optimizer.schedule}, warm-up of '
        f'{optimizer.warmup_steps} of {optimizer.steps} steps{first}, batch of {optimizer.batch_size}, weight decay '
        f'{optimizer.weight_decay:g}'
    )
    if 'optimizer_defaults' in row:
        return f'fine-tuning defaults of {row["optimizer_defaults"]} but for what is overridden: {settings}'
    return f'optimizer of the run that it comes from but for what is overridden: {settings}'


def overridden(config: Any, rest: list[str]) -> dict[str, str]:
    """Applies --config.PATH=VALUE to a ConfigDict; {PATH: VALUE}."""
    overrides, faults = [override(argument) for argument in rest], []
    for path, text in overrides:
        try:
            assign(config, path, text)
        except Refusal as refusal:
            faults.append(str(refusal))
    refuse_all(faults)
    return dict(overrides)


def config_and_size(module: Any, given: str, row: str | None, size: str | None) -> tuple[Any, str | None]:
    """A row's ConfigDict, and the size that it has: the one given, or else what get_config takes by itself."""
    parameter = inspect.signature(module.get_config).parameters.get('size')
    if size is not None and parameter is None:
        raise Refusal(
            f'--size={size}: get_config of --config={given} takes no size; leave --size out, or make it with table() '
            'of configs/table.py'
        )
    asked = {} if size is None else dict(size=size)
    try:
        return module.get_config(key_of(module, row), **asked), size or (parameter and parameter.default)
    except Exception as error:  # a config file is its author's program: what it raises is what there is to say
        asked = f'--config={given}{f" --size={size}" if size else ""}'
        raise Refusal(f'{asked}: {one_line(error, module.__file__)}') from error


def about(module: Any, file: str, row: str, config: Any = None) -> dict:
    """Return where a row is, its diff, its published numbers and their source.

    Args:
        config: the row's config, of which the diff then has the values; otherwise it has those that are written.
    """
    told = getattr(module, 'ROWS', {}).get(key_of(module, row), {})
    whole = isinstance(told, dict) and all(isinstance(told.get(name, {}), dict) for name in ('diff', 'published'))
    if not whole:
        raise Refusal(f'{file}: row {row} is {told!r}; it must be dict(diff={{...}}, published={{...}}, source=...)')
    for name, value in told.get('published', {}).items():
        if not isinstance(value, int | float):
            raise Refusal(
                f'{file}: row {row} has {value!r} as published {name}; give a number, such as 18.2, or True for '
                "'fails'; words belong into note"
            )
        if not math.isfinite(value):
            raise Refusal(f'{file}: row {row} has {value} as published {name}; give a finite number, or leave it out')
    told = dict(config=file, row=row, diff={}, published={}, source='') | told
    return told | dict(diff={path: of_diff(path, value, config) for path, value in told['diff'].items()})


def of_diff(path: str, written: Any, config: Any) -> Any:
    """Return the value that a row has in a config, or without one that which is written, as JSON can say it."""
    from configs import table

    if config is not None and path in table.flat(config):  # a get_config without table() may have a diff of others
        return table.reading(config, path)
    if isinstance(written, table.Multiple):
        return f'{written.factor} x {written.of or path}'
    return written.value if isinstance(written, table.Scaled) else written


def about_row(given: str) -> dict:
    """What one row, FILE:ROW, is about."""
    file, _, row = given.rpartition(':')
    return about(module_of(file), file, row)


def rows(file: str, size: str | None = None, module: Any = None) -> dict[str, dict]:
    """Describe the rows of a config file, at a size or the file's own; return nothing where it has no table.

    Args:
        module: of the config file, where that has been run already; otherwise it is run.
    """
    module = module or module_of(file)
    keys = getattr(module, 'ROWS', {})
    if '' in keys:
        raise Refusal(f'{file} has a row without a name, which --config={file}:ROW cannot say; name it')
    if len(set(map(str, keys))) < len(keys):
        raise Refusal(f'{file} has two rows whose names are written alike, as 1 and "1" are; rename one of them')
    return {str(key): about(module, file, str(key), config_at(module, f'{file}:{key}', size)) for key in keys}


def config_at(module: Any, given: str, size: str | None) -> Any:
    """Return a row's config at a size; None where the row, or the size, is refused."""
    try:
        return config_and_size(module, given, given.rpartition(':')[2], size)[0]
    except Refusal:
        return None


def key_of(module: Any, row: str | None) -> Any:
    """Return the key of a row as the file has it, such as 5 where 5 is given as text."""
    return next((key for key in getattr(module, 'ROWS', {}) if str(key) == row), row)


def module_of(file: str, holding: str = 'get_config') -> Any:
    """The module of a config file: a path from here, or else one of those installed with sinklab."""
    import configs

    installed = Path(configs.__file__).parents[1] / file
    path = next((path for path in (Path(file), installed) if path.is_file()), None)
    if path is None or path.suffix != '.py':
        raise Refusal(f'--config={file} is no config file; there are {", ".join(config_files())}')
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    try:
        # Without bytecode: Python takes that of the version before where an edit keeps the second and the size.
        exec(compile(path.read_bytes(), str(path), 'exec'), module.__dict__)
    except Exception as error:
        raise Refusal(f'--config={file} does not run: {one_line(error, path)}') from error
    if not hasattr(module, holding):
        raise Refusal(f'--config={file} has no {KINDS[holding]} for one')
    if holding == 'get_config':
        check_tables(module, file)
    return module


def check_tables(module: Any, file: str) -> None:
    """Refuse ROWS and EXPECTED of a config file that are not of the form in which they are read."""
    keys, given = getattr(module, 'ROWS', {}), getattr(module, 'EXPECTED', None)
    if not isinstance(keys, Mapping):
        raise Refusal(f'{file}: ROWS is {keys!r}; it must be a dict of rows: {{NAME: dict(diff={{...}}, ...)}}')
    if not given:
        return
    whole = isinstance(given, Mapping) and given.keys() == {'rows', 'source'} and isinstance(given['rows'], Mapping)
    if not whole or not all(isinstance(text, str) for text in (given['source'], *given['rows'].values())):
        raise Refusal(
            f"{file}: EXPECTED is {given!r}; it must be {{'rows': {{ROW: TEXT}}, 'source': TEXT}}, such as "
            "{'rows': {'softmax': '17 %'}, 'source': 'a paper, Table 1'}; correct it, or leave it out"
        )


def one_line(error: Exception, file: str | Path) -> str:
    """What a config file has raised, and where in it; what it says itself, by raise ValueError, is said alone."""
    file = Path(file).absolute()
    steps = [step for step in traceback.extract_tb(error.__traceback__) if Path(step.filename).absolute() == file]
    kind = '' if type(error) is ValueError else f'{type(error).__name__}: '
    said = kind + ' '.join(str(error).split())
    if not steps or steps[-1].line.startswith('raise ValueError'):
        return said
    return f'{said} ({file.name}, line {steps[-1].lineno})'


def config_files() -> list[str]:
    """The config files that came with sinklab, as --config takes them."""
    import configs

    files = Path(configs.__file__).parent.glob('*.py')
    found = [path.name for path in files if 'get_config' in path.read_text(encoding='utf-8') and path.stem != 'table']
    return [f'configs/{name}' for name in sorted(found)]


def override(argument: str) -> tuple[str, str]:
    """--config.a.b=value -> (a.b, value)."""
    name, equals, value = argument.partition('=')
    if not name.startswith('--config.') or not equals:
        raise Refusal(f'{argument} is unknown; overrides read --config.optimizer.steps=100, for the rest see --help')
    return name.removeprefix('--config.'), value


def assign(config: Any, path: str, text: str) -> None:
    """Sets one value of a ConfigDict, in the type that it has there."""
    *parents, last = path.split('.')
    at, whole = 'config', config
    for name in parents:
        config, at = child(config, name, at, path, whole), f'{at}.{name}'
    if hasattr(child(config, last, at, path, whole), 'keys'):
        raise Refusal(f'{at}.{last} holds fields ({", ".join(config[last].keys())}); give one of them')
    kind = config.get_type(last)
    try:
        config[last] = value(text, kind)
    except (TypeError, ValueError, SyntaxError) as error:
        raise Refusal(f'{at}.{last}={text} is no {kind.__name__}; its value here is {config[last]!r}') from error


def child(config: Any, name: str, at: str, path: str, whole: Any) -> Any:
    """Return a part of a config; a refusal names the field of the whole config that `path` is most like."""
    if not hasattr(config, 'keys'):
        raise Refusal(f'{at} holds a value, so there is no {at}.{name}')
    if name not in config:
        from configs.table import closest

        near = closest(path, list(flat(whole.to_dict())))
        beside = near and f'config.{near}'.rpartition('.')[0] == at
        named = near.rpartition('.')[2] if beside else near and f'config.{near}'
        raise Refusal(unknown(f'{at}.{name}', name, config.keys(), near=named))
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


def expected(file: str, size: str | None, overrides: Collection[str]) -> Expected | None:
    """Return what expected_of() returns, of a config file; None where that is gone or is refused."""
    try:
        return expected_of(module_of(file), size, overrides)
    except Refusal:
        return None


def expected_of(module: Any, size: str | None, overrides: Collection[str]) -> Expected | None:
    """Return {row: its Sink_1 in words} and where that comes from, by EXPECTED of a config file.

    Args:
        overrides: of fields.

    Returns:
        None where the file has none, or where the runs are of another size than its own, or overridden.
    """
    given = getattr(module, 'EXPECTED', None)
    parameter = inspect.signature(module.get_config).parameters.get('size')
    if not given or overrides or size != (parameter and parameter.default):
        return None
    return {str(row): text for row, text in given['rows'].items()}, given['source']
