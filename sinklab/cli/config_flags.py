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

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.run_dir import CHANGEABLE_PREFIXES, RunDir, flatten_dict
from sinklab.run_ref import read_spec
from sinklab.schema import UserError, format_unknown_name, raise_errors

CONFIG_FILE_FORMS = {
    'get_config': 'get_config(row); see configs/quickstart.py',
    'CLAIMS': 'CLAIMS; see configs/claims.py',
}


ExpectedSinks = tuple[dict[str, str], str]  # {row: its Sink_1 in words}, and where that comes from


def load_spec(
    config_path: str, override_args: list[str], size: str | None = None, module: Any = None
) -> tuple[Spec, dict]:
    """(spec, what row.json holds) for --config=`given` at a size, with the overrides in `rest` applied.

    Args:
        module: of the config file, where that has been run already; otherwise it is run.
    """
    spec, row_info, *_ = load_and_describe(config_path, override_args, size, module)
    return spec, row_info


def load_and_describe(
    config_path: str, override_args: list[str], size: str | None = None, module: Any = None
) -> tuple[Spec, dict, str | None, ExpectedSinks | None]:
    """Return what load() returns, what the row comes to, and what is expected of the rows of its file.

    The config file, a user's program, is run once. For the arguments see load().
    """
    file, _, row = config_path.partition(':')
    module = module or load_config_module(file)
    config, size = build_config(module, config_path, row or None, size)
    row_info = get_row_info(module, file, row, config)
    overrides = apply_overrides(config, override_args)
    try:
        spec = parse_config(config.to_dict())
    except UserError as error:
        raise UserError(f'{error}{format_fitting_sizes(module, config_path, size, override_args)}') from error
    row_record = {**row_info, 'size': size, 'overrides': overrides}
    return spec, row_record, describe_row(module, row, size, spec), get_expected_sinks(module, size, overrides)


def format_fitting_sizes(module: Any, config_path: str, size: str | None, override_args: list[str]) -> str:
    """Return at which other sizes a row can be trained whose own values are refused at this one; '' if at none.

    A value of the row is at fault if the row can be trained with the value of the baseline in its place.
    """
    row, baseline = config_path.partition(':')[2], get_baseline(module, size)
    overridden_paths = {path for path, _ in map(parse_override, override_args)}
    row_paths = [path for path in get_row_diff(module, row) if path not in overridden_paths]
    if not row_paths or not baseline:
        return ''

    def is_accepted(size: str | None, *reset: str) -> bool:
        try:
            config, _ = build_config(module, config_path, row, size)
            config.update_from_flattened_dict({path: flatten_dict(baseline.to_dict())[path] for path in reset})
            apply_overrides(config, override_args)
            parse_config(config.to_dict())
        except UserError:
            return False
        return True

    faulty_paths = [path for path in row_paths if is_accepted(size, path)] or (
        row_paths if is_accepted(size, *row_paths) else []
    )
    fitting_sizes = (
        [other_size for other_size in module.get_config.sizes if is_accepted(other_size)] if faulty_paths else []
    )
    return (
        f'; row {row} changes {", ".join(faulty_paths)}, and can be trained at --size={" or ".join(fitting_sizes)}'
        if fitting_sizes
        else ''
    )


def get_row_diff(module: Any, row: str) -> dict[str, Any]:
    """Return the diff of a row as it is written; nothing where the file has no such row."""
    return getattr(module, 'ROWS', {}).get(find_row_key(module, row), {}).get('diff', {})


def describe_row(module: Any, row: str, size: str | None, spec: Spec) -> str | None:
    """Return the fields in which a row differs from the baseline of its table at a size, in one line.

    Args:
        module: of the config file.
        row: its name; '' where none was given.
        spec: what is trained, with all overrides. Its two seeds are left out.

    Returns:
        None where the file has no baseline, as a file without table() of configs/table.py.
    """
    if not row or not (baseline := get_baseline(module, size)):
        return None
    baseline_values, values = flatten_dict(baseline.to_dict()), flatten_dict(dataclasses.asdict(spec))
    changes = [
        f'{path} {format_value(baseline_values.get(path))} -> {format_value(values[path])}'
        for path in values
        if path not in ('seed', 'data.seed') and baseline_values.get(path) != values[path]
    ]
    return f'at size {size}: {"; ".join(changes) or format_unchanged_row(module, row, baseline_values)}'


def format_unchanged_row(module: Any, row: str, baseline: dict[str, Any]) -> str:
    """Say of a row that trains the baseline which of its values the baseline has, too."""
    diff = get_row_diff(module, row)
    if not diff:
        return 'the baseline'
    equal_values = ', '.join(f'{path} is {format_value(baseline.get(path))}' for path in diff)
    return f'equal to the baseline, where {equal_values}, too'


def format_value(value: Any) -> str:
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def is_baseline(module: Any, config_path: str, size: str | None) -> bool:
    """Return whether a row, FILE:ROW, is at a size the config that its table has without any row."""
    row, baseline = config_path.partition(':')[2], get_baseline(module, size)
    return bool(baseline) and build_config(module, config_path, row, size)[0].to_dict() == baseline.to_dict()


def get_baseline(module: Any, size: str | None) -> Any:
    """Return the config of a table without any of its rows, at a size; None where it has none."""
    make_baseline = getattr(module.get_config, 'baseline', None)
    if not make_baseline:
        return None
    return make_baseline() if size is None else make_baseline(size)


def load_run_config(run_dir: RunDir, run_name: str, override_args: list[str]) -> tuple[Spec, dict]:
    """The same of a run's own config under a new name, with the overrides in `rest` applied to it.

    What was published of the run's row is of that alone, as long as nothing that touches a number is overridden.
    """
    from configs import default

    config, row = default.get_config(), dict(config='', row='', size=None, overrides={}) | run_dir.read_json('row')
    config.update_from_flattened_dict(flatten_dict(dataclasses.asdict(read_spec(run_dir))))
    overrides = apply_overrides(config, override_args)
    if is_imported(row):
        set_dependent_defaults(config, overrides)
    else:
        row.pop('optimizer_defaults', None)
    cleared_fields = (
        {} if all(f'{path}.'.startswith(CHANGEABLE_PREFIXES) for path in overrides) else dict(published={}, source='')
    )
    return parse_config(config.to_dict()), row | cleared_fields | dict(row=run_name, overrides=overrides)


def is_imported(row: dict) -> bool:
    """Return whether the row.json is of a model of Hugging Face that has been imported, not of a run that trained."""
    return 'optimizer_defaults' in row and not row.get('from')


def set_dependent_defaults(config: Any, overrides: dict[str, str]) -> None:
    """Set the defaults of fine-tuning that depend on fields which are overridden, unless they are overridden, too."""
    optimizer, probe, length = config.optimizer, config.probe, config.data.length
    defaults = {'optimizer.warmup_steps': optimizer.steps // 10, 'probe.length': max(2, min(probe.length, length))}
    defaults['probe.keys'] = min(probe['keys'], defaults['probe.length'])  # probe.keys is a method
    if optimizer.schedule == 'constant':
        defaults['optimizer.final_share'] = None
    config.update_from_flattened_dict({path: value for path, value in defaults.items() if path not in overrides})


def describe_optimizer_source(row: dict, spec: Spec) -> str:
    """Return in one line whose optimizer a run has that begins with the parameters of another."""
    optimizer = spec.optimizer
    warmup_note = ', the first step at a rate of 0' if optimizer.warmup_steps else ''
    settings = (
        f'peak learning rate {optimizer.peak_learning_rate:g}, {optimizer.schedule}, warm-up of '
        f'{optimizer.warmup_steps} of {optimizer.steps} '
        f'steps{warmup_note}, batch of {optimizer.batch_size}, weight decay '
        f'{optimizer.weight_decay:g}'
    )
    if 'optimizer_defaults' in row:
        return f'fine-tuning defaults of {row["optimizer_defaults"]} but for what is overridden: {settings}'
    return f'optimizer of the run that it comes from but for what is overridden: {settings}'


def apply_overrides(config: Any, override_args: list[str]) -> dict[str, str]:
    """Applies --config.PATH=VALUE to a ConfigDict; {PATH: VALUE}."""
    overrides, errors = [parse_override(argument) for argument in override_args], []
    for path, text in overrides:
        try:
            assign_value(config, path, text)
        except UserError as error:
            errors.append(str(error))
    raise_errors(errors)
    return dict(overrides)


def build_config(module: Any, config_path: str, row: str | None, size: str | None) -> tuple[Any, str | None]:
    """A row's ConfigDict, and the size that it has: the one given, or else what get_config takes by itself."""
    size_parameter = inspect.signature(module.get_config).parameters.get('size')
    if size is not None and size_parameter is None:
        raise UserError(
            f'--size={size}: get_config of --config={config_path} '
            'takes no size; leave --size out, or make it with table() '
            'of configs/table.py'
        )
    flags = {} if size is None else dict(size=size)
    try:
        return module.get_config(find_row_key(module, row), **flags), size or (
            size_parameter and size_parameter.default
        )
    except Exception as error:  # a config file is its author's program: what it raises is what there is to say
        flags = f'--config={config_path}{f" --size={size}" if size else ""}'
        raise UserError(f'{flags}: {format_config_error(error, module.__file__)}') from error


def get_row_info(module: Any, file: str, row: str, config: Any = None) -> dict:
    """Return where a row is, its diff, its published numbers and their source.

    Args:
        config: the row's config, of which the diff then has the values; otherwise it has those that are written.
    """
    row_info = getattr(module, 'ROWS', {}).get(find_row_key(module, row), {})
    is_well_formed = isinstance(row_info, dict) and all(
        isinstance(row_info.get(name, {}), dict) for name in ('diff', 'published')
    )
    if not is_well_formed:
        raise UserError(
            f'{file}: row {row} is {row_info!r}; it must be dict(diff={{...}}, published={{...}}, source=...)'
        )
    for name, value in row_info.get('published', {}).items():
        if not isinstance(value, int | float):
            raise UserError(
                f'{file}: row {row} has {value!r} as published {name}; give a number, such as 18.2, or True for '
                "'fails'; words belong into note"
            )
        if not math.isfinite(value):
            raise UserError(
                f'{file}: row {row} has {value} as published {name}; give a finite number, or leave it out'
            )
    row_info = dict(config=file, row=row, diff={}, published={}, source='') | row_info
    return row_info | dict(
        diff={path: get_diff_value(path, value, config) for path, value in row_info['diff'].items()}
    )


def get_diff_value(path: str, raw_value: Any, config: Any) -> Any:
    """Return the value that a row has in a config, or without one that which is written, as JSON can say it."""
    from configs import table

    if config is not None and path in table.list_fields(
        config
    ):  # a get_config without table() may have a diff of others
        return table.get_field(config, path)
    if isinstance(raw_value, table.FactorOfSize):
        return f'{raw_value.factor} x {raw_value.of or path}'
    return raw_value.value if isinstance(raw_value, table.SizeScaledValue) else raw_value


def load_row_info(config_path: str) -> dict:
    """What one row, FILE:ROW, is about."""
    file, _, row = config_path.rpartition(':')
    return get_row_info(load_config_module(file), file, row)


def load_rows(file: str, size: str | None = None, module: Any = None) -> dict[str, dict]:
    """Describe the rows of a config file, at a size or the file's own; return nothing where it has no table.

    Args:
        module: of the config file, where that has been run already; otherwise it is run.
    """
    module = module or load_config_module(file)
    row_table = getattr(module, 'ROWS', {})
    if '' in row_table:
        raise UserError(f'{file} has a row without a name, which --config={file}:ROW cannot say; name it')
    if len(set(map(str, row_table))) < len(row_table):
        raise UserError(f'{file} has two rows whose names are written alike, as 1 and "1" are; rename one of them')
    return {
        str(key): get_row_info(module, file, str(key), try_build_config(module, f'{file}:{key}', size))
        for key in row_table
    }


def try_build_config(module: Any, config_path: str, size: str | None) -> Any:
    """Return a row's config at a size; None where the row, or the size, is refused."""
    try:
        return build_config(module, config_path, config_path.rpartition(':')[2], size)[0]
    except UserError:
        return None


def find_row_key(module: Any, row: str | None) -> Any:
    """Return the key of a row as the file has it, such as 5 where 5 is given as text."""
    return next((key for key in getattr(module, 'ROWS', {}) if str(key) == row), row)


def load_config_module(file: str, required_name: str = 'get_config') -> Any:
    """The module of a config file: a path from here, or else one of those installed with sinklab."""
    import configs

    installed_path = Path(configs.__file__).parents[1] / file
    path = next((path for path in (Path(file), installed_path) if path.is_file()), None)
    if path is None or path.suffix != '.py':
        raise UserError(f'--config={file} is no config file; there are {", ".join(list_config_files())}')
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        # Without bytecode: Python takes that of the version before where an edit keeps the second and the size.
        exec(compile(path.read_bytes(), str(path), 'exec'), module.__dict__)
    except Exception as error:
        raise UserError(f'--config={file} does not run: {format_config_error(error, path)}') from error
    if not hasattr(module, required_name):
        raise UserError(f'--config={file} has no {CONFIG_FILE_FORMS[required_name]} for one')
    if required_name == 'get_config':
        check_tables(module, file)
    return module


def check_tables(module: Any, file: str) -> None:
    """Refuse ROWS and EXPECTED of a config file that are not of the form in which they are read."""
    row_table, expected_sinks = getattr(module, 'ROWS', {}), getattr(module, 'EXPECTED', None)
    if not isinstance(row_table, Mapping):
        raise UserError(
            f'{file}: ROWS is {row_table!r}; it must be a dict of rows: {{NAME: dict(diff={{...}}, ...)}}'
        )
    if not expected_sinks:
        return
    is_well_formed = (
        isinstance(expected_sinks, Mapping)
        and expected_sinks.keys() == {'rows', 'source'}
        and isinstance(expected_sinks['rows'], Mapping)
    )
    if not is_well_formed or not all(
        isinstance(text, str) for text in (expected_sinks['source'], *expected_sinks['rows'].values())
    ):
        raise UserError(
            f"{file}: EXPECTED is {expected_sinks!r}; it must be {{'rows': {{ROW: TEXT}}, 'source': TEXT}}, such as "
            "{'rows': {'softmax': '17 %'}, 'source': 'a paper, Table 1'}; correct it, or leave it out"
        )


def format_config_error(error: Exception, file: str | Path) -> str:
    """What a config file has raised, and where in it; what it says itself, by raise ValueError, is said alone."""
    file = Path(file).absolute()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).absolute() == file]
    prefix = '' if type(error) is ValueError else f'{type(error).__name__}: '
    message = prefix + ' '.join(str(error).split())
    if not frames or frames[-1].line.startswith('raise ValueError'):
        return message
    return f'{message} ({file.name}, line {frames[-1].lineno})'


def list_config_files() -> list[str]:
    """The config files that came with sinklab, as --config takes them."""
    import configs

    files = Path(configs.__file__).parent.glob('*.py')
    names = [path.name for path in files if 'get_config' in path.read_text(encoding='utf-8') and path.stem != 'table']
    return [f'configs/{name}' for name in sorted(names)]


def parse_override(argument: str) -> tuple[str, str]:
    """--config.a.b=value -> (a.b, value)."""
    name, separator, value = argument.partition('=')
    if not name.startswith('--config.') or not separator:
        raise UserError(
            f'{argument} is unknown; overrides read --config.optimizer.steps=100, for the rest see --help'
        )
    return name.removeprefix('--config.'), value


def assign_value(config: Any, path: str, text: str) -> None:
    """Sets one value of a ConfigDict, in the type that it has there."""
    *parents, field_name = path.split('.')
    prefix, root_config = 'config', config
    for name in parents:
        config, prefix = get_child(config, name, prefix, path, root_config), f'{prefix}.{name}'
    if hasattr(get_child(config, field_name, prefix, path, root_config), 'keys'):
        raise UserError(
            f'{prefix}.{field_name} holds fields ({", ".join(config[field_name].keys())}); give one of them'
        )
    value_type = config.get_type(field_name)
    try:
        config[field_name] = parse_value(text, value_type)
    except (TypeError, ValueError, SyntaxError) as error:
        raise UserError(
            f'{prefix}.{field_name}={text} is no {value_type.__name__}; its value here is {config[field_name]!r}'
        ) from error


def get_child(config: Any, name: str, prefix: str, path: str, root_config: Any) -> Any:
    """Return a part of a config; a refusal names the field of the whole config that `path` is most like."""
    if not hasattr(config, 'keys'):
        raise UserError(f'{prefix} holds a value, so there is no {prefix}.{name}')
    if name not in config:
        from configs.table import find_closest_name

        closest_path = find_closest_name(path, list(flatten_dict(root_config.to_dict())))
        is_sibling = closest_path and f'config.{closest_path}'.rpartition('.')[0] == prefix
        suggestion = closest_path.rpartition('.')[2] if is_sibling else closest_path and f'config.{closest_path}'
        raise UserError(format_unknown_name(f'{prefix}.{name}', name, config.keys(), suggestion=suggestion))
    return config[name]


def parse_value(text: str, value_type: type) -> Any:
    """A command line's text as a value of `kind`; None empties a field that may be empty."""
    if value_type is str or text == 'None':
        return None if text == 'None' else text
    parsed = ast.literal_eval(text)
    if value_type is float and type(parsed) is int:
        return float(parsed)
    if type(parsed) is not value_type:
        raise TypeError
    return parsed


def load_expected_sinks(file: str, size: str | None, overrides: Collection[str]) -> ExpectedSinks | None:
    """Return what expected_of() returns, of a config file; None where that is gone or is refused."""
    try:
        return get_expected_sinks(load_config_module(file), size, overrides)
    except UserError:
        return None


def get_expected_sinks(module: Any, size: str | None, overrides: Collection[str]) -> ExpectedSinks | None:
    """Return {row: its Sink_1 in words} and where that comes from, by EXPECTED of a config file.

    Args:
        overrides: of fields.

    Returns:
        None where the file has none, or where the runs are of another size than its own, or overridden.
    """
    expected_sinks = getattr(module, 'EXPECTED', None)
    size_parameter = inspect.signature(module.get_config).parameters.get('size')
    if not expected_sinks or overrides or size != (size_parameter and size_parameter.default):
        return None
    return {str(row): text for row, text in expected_sinks['rows'].items()}, expected_sinks['source']
