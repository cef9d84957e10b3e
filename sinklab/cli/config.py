"""--config=FILE:ROW, --size=SIZE and --config.PATH=VALUE, read into a spec."""

import ast
import dataclasses
import importlib.util
import inspect
import math
import operator
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sinklab.folder import FREE, Folder, flat
from sinklab.named import spec_of
from sinklab.parse import parse
from sinklab.record import Refusal, refuse_all, unknown
from sinklab.spec import Spec

KINDS = {'get_config': 'get_config(row); see configs/quickstart.py', 'CLAIMS': 'CLAIMS; see configs/claims.py'}


def load(given: str, rest: list[str], size: str | None = None) -> tuple[Spec, dict]:
    """(spec, what row.json holds) for --config=`given` at a size, with the overrides in `rest` applied."""
    return load_and_describe(given, rest, size)[:2]


def load_and_describe(given: str, rest: list[str], size: str | None = None) -> tuple[Spec, dict, str | None]:
    """Return what load() returns, and the fields that the row changes; a user's config file is executed once."""
    file, _, row = given.partition(':')
    module = module_of(file)
    config, size = config_and_size(module, given, row or None, size)
    told = about(module, file, row, config)
    overrides = overridden(config, rest)
    try:
        spec = parse(config.to_dict())
    except Refusal as refusal:
        raise Refusal(f'{refusal}{name_sizes_that_fit(module, given, size, rest, str(refusal))}') from refusal
    return spec, {**told, 'size': size, 'overrides': overrides}, describe(module, row, size, spec)


def name_sizes_that_fit(module: Any, given: str, size: str | None, rest: list[str], refusal: str) -> str:
    """Return at which other sizes a row can be trained whose own value is refused at this one; '' if at none."""
    row = given.partition(':')[2]
    diff = getattr(module, 'ROWS', {}).get(key_of(module, row), {}).get('diff', {})
    overridden_paths = {path for path, _ in map(override, rest)}
    ours = [path for path in diff if f'config.{path}' in refusal and path not in overridden_paths]
    fit = []
    for other in getattr(module.get_config, 'sizes', ()) if ours else ():
        try:
            config, _ = config_and_size(module, given, row, other)
            overridden(config, rest)
            parse(config.to_dict())
            fit.append(other)
        except Refusal:
            pass
    return f'; row {row} changes {", ".join(ours)}, and can be trained at --size={" or ".join(fit)}' if fit else ''


def describe_row(given: str, size: str | None, spec: Spec) -> str | None:
    """Return the fields in which a row differs from the baseline of its table at a size, in one line.

    Args:
        given: FILE:ROW.
        spec: what is trained, with all overrides. Its two seeds are left out.

    Returns:
        None where the file has no baseline, as a file without table() of configs/table.py.
    """
    file, _, row = given.partition(':')
    return describe(module_of(file), row, size, spec)


def describe(module: Any, row: str, size: str | None, spec: Spec) -> str | None:
    """Return what describe_row() returns, of a row of a module."""
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
    diff = getattr(module, 'ROWS', {}).get(key_of(module, row), {}).get('diff', {})
    if not diff:
        return 'the baseline'
    same = ', '.join(f'{path} is {short_text(baseline.get(path))}' for path in diff)
    return f'equal to the baseline, where {same}, too'


def short_text(value: Any) -> str:
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def equals_baseline(given: str, size: str | None) -> bool:
    """Return whether a row, FILE:ROW, is at a size the config that its table has without any row."""
    file, _, row = given.partition(':')
    module = module_of(file)
    baseline = baseline_of(module, size)
    return bool(baseline) and config_and_size(module, given, row, size)[0].to_dict() == baseline.to_dict()


def baseline_of(module: Any, size: str | None) -> Any:
    """Return the config of a table without any of its rows, at a size; None where it has none."""
    make = getattr(module.get_config, 'baseline', None)
    return make() if make and size is None else make and make(size)


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
    """Where a row is, its diff, its published numbers and their source.

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
    from configs.table import Multiple, Scaled

    try:
        if config is not None:
            return operator.attrgetter(path)(config)
    except AttributeError:  # a row of get_config of its own, whose diff names no field
        pass
    if isinstance(written, Multiple):
        return f'{written.factor} x {written.of or path}'
    return written.value if isinstance(written, Scaled) else written


def about_row(given: str) -> dict:
    """What one row, FILE:ROW, is about."""
    file, _, row = given.rpartition(':')
    return about(module_of(file), file, row)


def rows(file: str, size: str | None = None) -> dict[str, dict]:
    """What the rows of a config file are about, at a size or the file's own; none where it has no table."""
    module = module_of(file)
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
        specification.loader.exec_module(module)
    except Exception as error:
        raise Refusal(f'--config={file} does not run: {one_line(error, path)}') from error
    if not hasattr(module, holding):
        raise Refusal(f'--config={file} has no {KINDS[holding]} for one')
    return module


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


def expected(file: str, size: str | None, overrides: Collection[str]) -> tuple[dict[str, str], str] | None:
    """Return {row: its Sink_1 in words} and where that comes from, by EXPECTED of a config file.

    Args:
        overrides: of fields.

    Returns:
        None where the file has none or is gone, or where the runs are of another size than its own, or overridden.
    """
    try:
        module = module_of(file)
    except Refusal:
        return None
    given = getattr(module, 'EXPECTED', None)
    parameter = inspect.signature(module.get_config).parameters.get('size')
    if not given or overrides or size != (parameter and parameter.default):
        return None
    return given['rows'], given['source']
