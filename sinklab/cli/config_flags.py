"""Parsing of --config=FILE:ROW, --size=SIZE and --config.PATH=VALUE into a spec."""

import ast
import dataclasses
import difflib
import importlib.util
import inspect
import math
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sinklab.config.differences import flatten_dict
from sinklab.config.spec import Spec, is_changeable
from sinklab.config.validate import parse_config
from sinklab.errors import UserError, format_error
from sinklab.run_dir import RunDir
from sinklab.run_ref import read_spec
from sinklab.schema import format_unknown_name, raise_errors

CONFIG_FILE_FORMS = {
    'get_config': 'get_config(row); see configs/quickstart.py',
    'CLAIMS': 'CLAIMS; see configs/claims.py',
}


ROW_KEYS = 'diff', 'published', 'source', 'note'
ExpectedSinks = tuple[dict[str, str], str]  # ({row: expected Sink_1 as text}, source of these numbers)


def split_config_path(config_path: str) -> tuple[str, str]:
    """Split --config=FILE[:ROW] at the first colon; the row is '' if none is given, and may contain colons."""
    file, _, row = config_path.partition(':')
    return file, row


def load_spec(
    config_path: str, override_args: list[str], size: str | None = None, module: Any = None
) -> tuple[Spec, dict]:
    """Load the spec of --config=FILE[:ROW] at a size, with overrides applied.

    Args:
        config_path: The value of --config.
        override_args: Arguments --config.PATH=VALUE.
        size: The size; None: the default size of the config file.
        module: The module of the config file, if it has been loaded already; None: load it.

    Returns:
        The spec, and the content of row.json.

    Raises:
        UserError: The config file, the row, the size, an override or the resulting config is invalid.
    """
    spec, row_info, *_ = load_and_describe(config_path, override_args, size, module)
    return spec, row_info


def load_and_describe(
    config_path: str, override_args: list[str], size: str | None = None, module: Any = None
) -> tuple[Spec, dict, str | None, ExpectedSinks | None]:
    """Load a spec as `load_spec` does, describe its row, and return the expected sinks of its config file.

    The config file is a program of the user, which this function runs only once. `load_spec` describes the arguments.

    Returns:
        The spec, the content of row.json, the result of `describe_row`, and the result of `get_expected_sinks`.
    """
    file, row = split_config_path(config_path)
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
    """Format the sizes at which an invalid row is valid, for an error message; '' if there are none.

    A field of the row is at fault if the row is valid with the value of the baseline in its place.
    """
    row, baseline = split_config_path(config_path)[1], get_baseline(module, size)
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
    """Return the diff of a row as the file has it; {} if the file has no such row."""
    return getattr(module, 'ROWS', {}).get(find_row_key(module, row), {}).get('diff', {})


def describe_row(module: Any, row: str, size: str | None, spec: Spec) -> str | None:
    """Format the fields in which a row differs from the baseline of its table, in one line.

    Args:
        module: The module of the config file.
        row: The name of the row; '' if none was given.
        size: The size of the baseline; None: the default size of the config file.
        spec: The spec that is trained, with all overrides. Its two seeds are left out.

    Returns:
        The line; None if no row was given, or if the file has no baseline, because it does not use table() of
        configs/table.py.
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
    """Format the values of a row that is equal to the baseline."""
    diff = get_row_diff(module, row)
    if not diff:
        return 'the baseline'
    equal_values = ', '.join(f'{path} is {format_value(baseline.get(path))}' for path in diff)
    return f'equal to the baseline, where {equal_values}'


def format_value(value: Any) -> str:
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def is_baseline(module: Any, config_path: str, size: str | None) -> bool:
    """Return whether a row, FILE:ROW, has the same config as the baseline of its table at a size."""
    row, baseline = split_config_path(config_path)[1], get_baseline(module, size)
    return bool(baseline) and build_config(module, config_path, row, size)[0].to_dict() == baseline.to_dict()


def get_baseline(module: Any, size: str | None) -> Any:
    """Return the baseline config of a table, the one without a row, at a size; None if it has no baseline."""
    make_baseline = getattr(module.get_config, 'baseline', None)
    if not make_baseline:
        return None
    return make_baseline() if size is None else make_baseline(size)


def load_run_config(run_dir: RunDir, run_name: str, override_args: list[str]) -> tuple[Spec, dict]:
    """Load the spec of an existing run under a new name, with overrides applied.

    The published numbers of the row hold for its own config only. They are removed if an override changes a field
    outside of CHANGEABLE_FIELDS, on which the parameters depend.

    Args:
        run_dir: The existing run.
        run_name: The name of the new run.
        override_args: Arguments --config.PATH=VALUE.

    Returns:
        The spec, and the content of row.json of the new run.
    """
    from sinklab.configs import default

    config, row = default.get_config(), dict(config='', row='', size=None, overrides={}) | run_dir.read_json('row')
    config.update_from_flattened_dict(flatten_dict(dataclasses.asdict(read_spec(run_dir))))
    overrides = apply_overrides(config, override_args)
    if is_imported(row):
        set_dependent_defaults(config, overrides)
    else:
        row.pop('optimizer_defaults', None)
    cleared_fields = {} if all(is_changeable(path) for path in overrides) else dict(published={}, source='')
    return parse_config(config.to_dict()), row | cleared_fields | dict(row=run_name, overrides=overrides)


def is_imported(row: dict) -> bool:
    """Return whether a row.json is that of an imported Hugging Face model, not of a training run."""
    return 'optimizer_defaults' in row and not row.get('from')


def set_dependent_defaults(config: Any, overrides: dict[str, str]) -> None:
    """Set the fine-tuning defaults that depend on other fields, except those that are overridden."""
    optimizer, probe, length = config.optimizer, config.probe, config.data.length
    defaults = {'optimizer.warmup_steps': optimizer.steps // 10, 'probe.length': max(2, min(probe.length, length))}
    defaults['probe.keys'] = min(probe['keys'], defaults['probe.length'])  # probe.keys is a method
    if optimizer.schedule == 'constant':
        defaults['optimizer.final_share'] = None
    config.update_from_flattened_dict({path: value for path, value in defaults.items() if path not in overrides})


def describe_optimizer_source(row: dict, spec: Spec) -> str:
    """Format the optimizer settings of a warm-started run in one line, with their origin."""
    optimizer = spec.optimizer
    warmup_note = ', the first step at a rate of 0' if optimizer.warmup_steps else ''
    settings = (
        f'peak learning rate {optimizer.peak_learning_rate:g}, {optimizer.schedule}, warm-up of '
        f'{optimizer.warmup_steps} of {optimizer.steps} '
        f'steps{warmup_note}, batch of {optimizer.batch_size}, weight decay '
        f'{optimizer.weight_decay:g}'
    )
    if 'optimizer_defaults' in row:
        return f'fine-tuning defaults of {row["optimizer_defaults"]}, except for overrides: {settings}'
    return f'optimizer of the parent run, except for overrides: {settings}'


def apply_overrides(config: Any, override_args: list[str]) -> dict[str, str]:
    """Apply arguments --config.PATH=VALUE to a ConfigDict in place.

    Returns:
        {PATH: VALUE}, with values as text.

    Raises:
        UserError: Overrides are invalid; the message lists all of them.
    """
    overrides, errors = [parse_override(argument) for argument in override_args], []
    for path, text in overrides:
        try:
            assign_value(config, path, text)
        except UserError as error:
            errors.append(str(error))
    raise_errors(errors)
    return dict(overrides)


def build_config(module: Any, config_path: str, row: str | None, size: str | None) -> tuple[Any, str | None]:
    """Build the ConfigDict of a row with get_config of its config file.

    Args:
        module: The module of the config file.
        config_path: The value of --config, for error messages.
        row: The name of the row; None: none was given.
        size: The size; None: the default of get_config.

    Returns:
        The ConfigDict, and its size; the size is None if get_config has no sizes.

    Raises:
        UserError: get_config takes no size, or it raised an exception.
    """
    size_parameter = inspect.signature(module.get_config).parameters.get('size')
    if size is not None and size_parameter is None:
        raise UserError(
            f'--size={size}: get_config of --config={config_path} '
            'takes no size; remove --size, or make get_config with table() '
            'of configs/table.py'
        )
    flags = {} if size is None else dict(size=size)
    try:
        return module.get_config(find_row_key(module, row), **flags), size or (
            size_parameter and size_parameter.default
        )
    except Exception as error:  # the config file is a user's program, which may raise anything
        flags = f'--config={config_path}{f" --size={size}" if size else ""}'
        raise UserError(f'{flags}: {format_config_error(error, module.__file__)}') from error


def get_row_info(module: Any, file: str, row: str, config: Any = None) -> dict:
    """Return the file of a row, its name, its diff, its published numbers and their source.

    Args:
        module: The module of the config file.
        file: The path of the config file.
        row: The name of the row.
        config: The ConfigDict of the row; the diff then has its values. None: the diff has the values in the file.

    Raises:
        UserError: The row in the file does not have the expected form.
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
                "'fails'; put words into note"
            )
        if not math.isfinite(value):
            raise UserError(f'{file}: row {row} has {value} as published {name}; give a finite number, or remove it')
    row_info = dict(config=file, row=row, diff={}, published={}, source='') | row_info
    return row_info | dict(
        diff={path: get_diff_value(path, value, config) for path, value in row_info['diff'].items()}
    )


def get_diff_value(path: str, raw_value: Any, config: Any) -> Any:
    """Return the value of a field in a config, or without a config the value in the file, as a JSON value."""
    from sinklab.configs import table

    if config is not None and path in table.list_fields(
        config
    ):  # without table(), a diff may name other things than fields
        return table.get_field(config, path)
    if isinstance(raw_value, table.FactorOfSize):
        return f'{raw_value.factor} x {raw_value.of or path}'
    return raw_value.value if isinstance(raw_value, table.SizeScaledValue) else raw_value


def load_row_info(config_path: str) -> dict:
    """Load the file, name, diff, published numbers and source of one row, FILE:ROW."""
    file, row = split_config_path(config_path)
    return get_row_info(load_config_module(file), file, row)


def load_rows(file: str, size: str | None = None, module: Any = None) -> dict[str, dict]:
    """Load the rows of a config file: {name: the result of `get_row_info`}; {} if the file has no table.

    Args:
        file: The path of the config file.
        size: The size at which diffs have their values; None: the default size of the file.
        module: The module of the config file, if it has been loaded already; None: load it.
    """
    module = module or load_config_module(file)
    row_table = getattr(module, 'ROWS', {})
    if '' in row_table:
        raise UserError(f'{file} has a row without a name, which --config={file}:ROW cannot select; name it')
    if len(set(map(str, row_table))) < len(row_table):
        raise UserError(f'{file} has two rows with the same name as text, such as 1 and "1"; rename one of them')
    return {
        str(key): get_row_info(module, file, str(key), try_build_config(module, f'{file}:{key}', size))
        for key in row_table
    }


def try_build_config(module: Any, config_path: str, size: str | None) -> Any:
    """Build the ConfigDict of a row at a size; return None if the row or the size is invalid."""
    try:
        return build_config(module, config_path, split_config_path(config_path)[1], size)[0]
    except UserError:
        return None


def find_row_key(module: Any, row: str | None) -> Any:
    """Find the key of a row as the file has it, such as the number 5 for the text '5'."""
    return next((key for key in getattr(module, 'ROWS', {}) if str(key) == row), row)


def load_config_module(file: str, required_name: str = 'get_config') -> Any:
    """Load the module of a config file by running it.

    Args:
        file: A path relative to the working directory, or else the path of a file installed with sinklab.
        required_name: What the module must define: a key of CONFIG_FILE_FORMS.

    Raises:
        UserError: There is no such file, it raised an exception, or it lacks `required_name`.
    """
    from sinklab import configs

    installed_path = Path(configs.__file__).parents[1] / file
    path = next((path for path in (Path(file), installed_path) if path.is_file()), None)
    if path is None or path.suffix != '.py':
        problem = 'is not a .py file' if path else 'does not exist'
        files = list_config_files()
        suggestion = next(iter(difflib.get_close_matches(file, files, 1)), None)
        question = f' (did you mean {suggestion}?)' if suggestion else ''
        raise UserError(f'--config={file} {problem}{question}; give a file of your own, or one of {", ".join(files)}')
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        # Without cached bytecode: Python would use that of the previous version if an edit keeps the size of the file
        # and its modification time in seconds.
        exec(compile(path.read_bytes(), str(path), 'exec'), module.__dict__)
    except Exception as error:
        raise UserError(f'--config={file} does not run: {format_config_error(error, path)}') from error
    if not hasattr(module, required_name):
        raise UserError(f'--config={file} defines no {CONFIG_FILE_FORMS[required_name]} for an example')
    if required_name == 'get_config':
        check_tables(module, file)
    return module


def check_tables(module: Any, file: str) -> None:
    """Raise UserError if ROWS or EXPECTED of a config file does not have the expected form."""
    row_table, expected_sinks = getattr(module, 'ROWS', {}), getattr(module, 'EXPECTED', None)
    if not isinstance(row_table, Mapping):
        raise UserError(
            f'{file}: ROWS is {row_table!r}; it must be a dict of rows: {{NAME: dict(diff={{...}}, ...)}}'
        )
    for row, row_info in row_table.items():
        for key in row_info if isinstance(row_info, Mapping) else ():
            if key not in ROW_KEYS:
                raise UserError(f'{file}: row {row}: {format_unknown_name(str(key), str(key), ROW_KEYS, "allowed")}')
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
            "{'rows': {'softmax': '17 %'}, 'source': 'a paper, Table 1'}; correct it, or remove it"
        )


def format_config_error(error: Exception, file: str | Path) -> str:
    """Format an exception of a config file, with its type and the line in the file.

    A ValueError that the file itself raises is meant for the user: only its message is shown.
    """
    file = Path(file).absolute()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).absolute() == file]
    message = format_error(error, with_type=type(error) is not ValueError, max_length=None)
    if not frames or frames[-1].line.startswith('raise ValueError'):
        return message
    return f'{message} ({file.name}, line {frames[-1].lineno})'


def list_config_files() -> list[str]:
    """List the config files that are installed with sinklab, as values of --config."""
    from sinklab import configs

    files = Path(configs.__file__).parent.glob('*.py')
    names = [path.name for path in files if 'get_config' in path.read_text(encoding='utf-8') and path.stem != 'table']
    return [f'configs/{name}' for name in sorted(names)]


def parse_override(argument: str) -> tuple[str, str]:
    """Parse --config.PATH=VALUE into (PATH, VALUE)."""
    name, separator, value = argument.partition('=')
    if not name.startswith('--config.') or not separator:
        raise UserError(
            f'{argument} is unknown; write overrides as --config.optimizer.steps=100; for other options see --help'
        )
    return name.removeprefix('--config.'), value


TYPE_DESCRIPTIONS = {bool: 'True or False', int: 'a whole number', float: 'a number'}


def assign_value(config: Any, path: str, text: str) -> None:
    """Set one field of a ConfigDict to a value given as text, converted to the type of the field."""
    *parents, field_name = path.split('.')
    prefix, root_config = 'config', config
    for name in parents:
        config, prefix = get_child(config, name, prefix, path, root_config), f'{prefix}.{name}'
    if hasattr(get_child(config, field_name, prefix, path, root_config), 'keys'):
        raise UserError(
            f'{prefix}.{field_name} contains fields ({", ".join(config[field_name].keys())}); set one of them'
        )
    value_type = config.get_type(field_name)
    try:
        config[field_name] = parse_value(text, value_type)
    except (TypeError, ValueError, SyntaxError) as error:
        raise UserError(
            f'{prefix}.{field_name}={text} is not of type {value_type.__name__}; '
            f'give {TYPE_DESCRIPTIONS.get(value_type, "another value")} (its value here is {config[field_name]!r})'
        ) from error


def get_child(config: Any, name: str, prefix: str, path: str, root_config: Any) -> Any:
    """Return an entry of a config or of a part of it.

    Args:
        config: The part of the config.
        name: The name of the entry.
        prefix: The dotted name of `config`, for error messages.
        path: The dotted name of the whole override; the error message suggests the most similar field.
        root_config: The whole config.

    Raises:
        UserError: There is no such entry.
    """
    if not hasattr(config, 'keys'):
        raise UserError(f'{prefix} is a value, so {prefix}.{name} does not exist')
    if name not in config:
        from sinklab.configs.table import find_closest_name

        closest_path = find_closest_name(path, list(flatten_dict(root_config.to_dict())))
        is_sibling = closest_path and f'config.{closest_path}'.rpartition('.')[0] == prefix
        suggestion = closest_path.rpartition('.')[2] if is_sibling else closest_path and f'config.{closest_path}'
        raise UserError(format_unknown_name(f'{prefix}.{name}', name, config.keys(), suggestion=suggestion))
    return config[name]


def parse_value(text: str, value_type: type) -> Any:
    """Parse a text of the command line as a value of a type; 'None' is parsed as None for every type.

    Raises:
        TypeError, ValueError, SyntaxError: The text is no such value.
    """
    if value_type is str or text == 'None':
        return None if text == 'None' else text
    parsed = ast.literal_eval(text)
    if value_type is float and type(parsed) is int:
        return float(parsed)
    if type(parsed) is not value_type:
        raise TypeError
    return parsed


def load_expected_sinks(file: str, size: str | None, overrides: Collection[str]) -> ExpectedSinks | None:
    """Load a config file and call `get_expected_sinks`; return None if the file is missing or invalid."""
    try:
        return get_expected_sinks(load_config_module(file), size, overrides)
    except UserError:
        return None


def get_expected_sinks(module: Any, size: str | None, overrides: Collection[str]) -> ExpectedSinks | None:
    """Return the expected Sink_1 of rows, as text, and the source, from EXPECTED of a config file.

    Args:
        module: The module of the config file.
        size: The size of the runs.
        overrides: The overrides of the runs.

    Returns:
        None if the file has no EXPECTED, or if EXPECTED does not hold for these runs, because they have overrides or
        another size than the default of the file.
    """
    expected_sinks = getattr(module, 'EXPECTED', None)
    size_parameter = inspect.signature(module.get_config).parameters.get('size')
    if not expected_sinks or overrides or size != (size_parameter and size_parameter.default):
        return None
    return {str(row): text for row, text in expected_sinks['rows'].items()}, expected_sinks['source']
