"""Parsing of --config=FILE:ROW, --size=SIZE and --config.PATH=VALUE into a spec."""

import argparse
import dataclasses
import inspect
import traceback
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from sinklab.config.differences import flatten_dict
from sinklab.config.spec import (
    NORMALIZERS_BY_SIMILARITY,
    REGISTERED,
    SIMILARITIES_BY_NAME,
    FiniteFloat,
    Spec,
    get_field_types,
    is_changeable,
)
from sinklab.config.validate import parse_config, parse_value
from sinklab.configs import default
from sinklab.configs.table import find_closest_name
from sinklab.errors import UserError, format_error, format_unknown_name, raise_errors
from sinklab.run_dir import RunDir, read_spec
from sinklab.storage.files import hash_file

EXAMPLES = {'get_config': 'configs/quickstart.py', 'CLAIMS': 'configs/claims.py'}  # of what a config file defines
OPERATION_FIELD = 'model.attention'  # --config.model.attention=NAME sets similarity and normalizer
SIZE_HELP = 'paper, quickstart (minutes on two cores), small (minutes on a GPU) or smoke (seconds; learns nothing)'


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A row of ROWS in a config file."""

    diff: dict[str, Any]
    published: dict[str, Any] = {}
    source: str = ''
    note: str = ''


def add_size_argument(parser: argparse.ArgumentParser, default: str = 'that of FILE') -> None:
    parser.add_argument('--size', metavar='SIZE', help=f'{SIZE_HELP} (default: {default})')


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
    file, row = split_config_path(config_path)
    module = module or load_config_module(file)
    config = build_config(module, config_path, size)
    row_info = get_row_info(module, file, row, flatten_dict(config.to_dict()))
    overrides = apply_overrides(config, override_args)
    return parse_config(config.to_dict()), row_info | dict(size=size or get_default_size(module), overrides=overrides)


def describe_changes(module: Any, spec: Spec, size: str | None) -> str | None:
    """Format the fields in which a spec differs from its table without a row, in one line without the two seeds.

    Args:
        module: The module of the config file.
        spec: The spec that is trained, with all overrides.
        size: The size of the spec.

    Returns:
        The line; None if the config file has no table.
    """
    baseline = get_baseline(module, size)
    if baseline is None:
        return None
    old_values = baseline | {'model.kv_heads': baseline['model.kv_heads'] or baseline['model.heads']}
    new_values = flatten_dict(dataclasses.asdict(spec))
    shown_values = new_values | {'model.kv_heads': spec.model.num_kv_heads}
    changes = {
        path: f'{path} {format_value(old_values.get(path))} -> {format_value(shown_values[path])}'
        for path, value in new_values.items()
        if path not in ('seed', 'data.seed') and baseline.get(path) != value
    }
    similarity, normalizer = 'model.attention.similarity', 'model.attention.normalizer'
    if similarity in changes and normalizer not in changes:
        changes[similarity] += f', {normalizer} stays {baseline[normalizer]}'
    if (offset := 'model.attention.offset') in changes:
        changes[offset] += ' (times log T)'
    return f'at size {size}: {"; ".join(changes.values()) or "equal to the baseline"}'


def format_value(value: Any) -> str:
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def get_baseline(module: Any, size: str | None) -> dict[str, Any] | None:
    """Return the flattened config of a table without a row, at a size; None if the file does not use table()."""
    make_baseline = getattr(module.get_config, 'baseline', None)
    return flatten_dict(make_baseline(size or get_default_size(module)).to_dict()) if make_baseline else None


def get_default_size(module: Any) -> str | None:
    """Return the default size of get_config of a config file; None if it has no sizes."""
    parameter = inspect.signature(module.get_config).parameters.get('size')
    return parameter.default if parameter else None


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
    config = default.get_config()
    row = dict(config='', row='', size=None, overrides={}) | run_dir.read_json('row')
    config.update_from_flattened_dict(flatten_dict(dataclasses.asdict(read_spec(run_dir))))
    overrides = apply_overrides(config, override_args)
    if 'optimizer_defaults' in row and not row.get('from'):  # an imported model, not a training run
        set_dependent_defaults(config, overrides)
    else:
        row.pop('optimizer_defaults', None)
    cleared_fields = {} if all(is_changeable(path) for path in overrides) else dict(published={}, source='')
    return parse_config(config.to_dict()), row | cleared_fields | dict(row=run_name, overrides=overrides)


def set_dependent_defaults(config: Any, overrides: dict[str, str]) -> None:
    """Set the fine-tuning defaults that depend on other fields, except those that are overridden."""
    optimizer, probe, length = config.optimizer, config.probe, config.data.length
    defaults = {'optimizer.warmup_steps': optimizer.steps // 10, 'probe.length': max(2, min(probe.length, length))}
    defaults['probe.keys'] = min(probe['keys'], defaults['probe.length'])  # probe.keys is a method
    if optimizer.schedule == 'constant':
        defaults['optimizer.final_share'] = None
    config.update_from_flattened_dict({path: value for path, value in defaults.items() if path not in overrides})


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """Parse arguments --config.PATH=VALUE into {PATH: VALUE}.

    --config.model.attention=NAME stands for the similarity of an operation and its first normalizer in
    `NORMALIZERS_BY_SIMILARITY`, such as `sigmoid` and `none`.
    """
    overrides: dict[str, str] = {}
    for path, value in map(parse_override, arguments):
        if path != OPERATION_FIELD:
            overrides[path] = value
        elif similarity := SIMILARITIES_BY_NAME.get(value):
            overrides['model.attention.similarity'] = similarity
            overrides['model.attention.normalizer'] = NORMALIZERS_BY_SIMILARITY[similarity][0]
        else:
            raise UserError(
                format_unknown_name(f'--config.model.attention={value}', value, SIMILARITIES_BY_NAME, 'operations')
            )
    return overrides


def parse_override(argument: str) -> tuple[str, str]:
    """Parse --config.PATH=VALUE into (PATH, VALUE)."""
    name, separator, value = argument.partition('=')
    if not name.startswith('--config.') or not separator:
        raise UserError(
            f'{argument} is unknown; write overrides as --config.optimizer.steps=100; for other options see --help'
        )
    return name.removeprefix('--config.'), value


def apply_overrides(config: Any, override_args: list[str]) -> dict[str, str]:
    """Apply arguments --config.PATH=VALUE to a ConfigDict in place; return {PATH: VALUE}, with values as text.

    ml_collections.config_flags cannot set probe.keys, which is also a method of ConfigDict, nor a number to None.

    Raises:
        UserError: Overrides are invalid; the message lists all of them.
    """
    overrides = parse_overrides(override_args)
    field_types = get_field_types()
    errors = []
    for path, text in overrides.items():
        try:
            if path not in field_types:
                closest = find_closest_name(path, [*field_types, OPERATION_FIELD])
                suggestion = closest and f'config.{closest}'
                raise UserError(format_unknown_name(f'config.{path}', path, field_types, suggestion=suggestion))
            value = parse_value(f'config.{path}', text, field_types[path], from_text=True)
            config.update_from_flattened_dict({path: value})
        except UserError as error:
            errors.append(str(error))
    raise_errors(errors)
    return overrides


def build_config(module: Any, config_path: str, size: str | None) -> Any:
    """Build the ConfigDict of --config=FILE[:ROW] with get_config of the module of FILE.

    Raises:
        UserError: get_config takes no size, or it raised an exception.
    """
    if size is not None and get_default_size(module) is None:
        raise UserError(f'--size={size}: get_config of --config={config_path} takes no size; remove --size')
    _, row = split_config_path(config_path)
    try:
        return module.get_config(row or None, **({} if size is None else dict(size=size)))
    except Exception as error:  # the config file is a user's program, which may raise anything
        flags = f'--config={config_path}{f" --size={size}" if size else ""}'
        raise UserError(f'{flags}: {format_config_error(error, module.__file__)}') from error


def get_row_info(module: Any, file: str, row: str, values: dict[str, Any]) -> dict:
    """Return the file of a row, its name, its diff, its published numbers and their source.

    Args:
        module: The module of the config file.
        file: The path of the config file.
        row: The name of the row.
        values: The flattened config of the row, whose values the diff then has; values that it lacks are text.
    """
    info = dict(config=file, row=row, diff={}, published={}, source='') | getattr(module, 'ROWS', {}).get(row, {})
    return info | dict(diff={path: values.get(path, str(value)) for path, value in info['diff'].items()})


def load_config_module(file: str, required_name: str = 'get_config') -> Any:
    """Load the module of a config file by running it.

    Args:
        file: A path relative to the working directory, or else the path of a file installed with sinklab.
        required_name: What the module must define: a key of EXAMPLES.

    Raises:
        UserError: There is no such file, it raised an exception, or it lacks `required_name`.
    """
    from sinklab import configs

    installed_path = Path(configs.__file__).parents[1] / file
    path = next((path for path in (Path(file), installed_path) if path.is_file() and path.suffix == '.py'), None)
    if path is None:
        raise UserError(
            format_unknown_name(f'--config={file}', file, list_config_files(), 'give your own .py file, or one of')
        )
    module = run_file(f'--config={file}', path)
    if not hasattr(module, required_name):
        raise UserError(f'--config={file} defines no {required_name}; for an example see {EXAMPLES[required_name]}')
    check_tables(module, file)
    return module


def run_file(flag: str, path: Path) -> types.ModuleType:
    """Run a Python file that a flag names; return its module."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), path, 'exec'), module.__dict__)  # not imported: no bytecode of an older text
    except Exception as error:
        raise UserError(f'{flag} does not run: {format_config_error(error, path)}') from error
    return module


def load_metric_file(file: str) -> None:
    """Run the file of --metric, which registers metrics or FFN activations.

    Raises:
        UserError: There is no such file, it raised an exception, or nothing has been registered.
    """
    if not Path(file).is_file():
        raise UserError(f'--metric={file} is no file; give a Python file that calls register_metric')
    run_file(f'--metric={file}', Path(file))
    if not REGISTERED:
        raise UserError(f'--metric={file} registers nothing; call register_metric or register_ffn_activation in it')


def format_metric_option(args: argparse.Namespace) -> list[str]:
    """Return --metric=FILE for another command: the file of --metric, or the config file if it registers."""
    file = args.metric or (REGISTERED and split_config_path(args.config or '')[0])
    return [f'--metric={file}'] if file else []


def hash_registering_files(args: argparse.Namespace) -> dict[str, str]:
    """Return {option and file name: SHA-256} of the files of --metric and --config, if names are registered."""
    files = {'--metric': args.metric, '--config': split_config_path(args.config or '')[0]} if REGISTERED else {}
    paths = {option: Path(file) for option, file in files.items() if file and Path(file).is_file()}
    return {f'{option} {path.name}': hash_file(path) for option, path in paths.items()}


def check_tables(module: Any, file: str) -> None:
    """Raise UserError if ROWS of a config file does not have the expected form."""
    rows = getattr(module, 'ROWS', {})
    place = 'ROWS'
    try:
        msgspec.convert(rows, dict[str, Any])
        for row, row_info in rows.items():
            place = f'row {row}'
            if ',' in row:
                raise UserError(f'{file}: {place}: a comma separates rows in --rows; rename it')
            for name, value in msgspec.convert(row_info, Row).published.items():
                if value is not True:  # as in fails=True
                    parse_value(f'{file}: {place}: published {name}', value, FiniteFloat)
    except msgspec.ValidationError as error:
        raise UserError(f'{file}: {place}: {error}; see configs/quickstart.py') from error


def format_config_error(error: Exception, file: str | Path) -> str:
    """Format an exception of a config file, with the line of the file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f'{file}:{frames[-1].lineno}: ' if frames else ''
    return place + format_error(error, with_type=type(error) is not ValueError, max_length=None)


def list_config_files() -> list[str]:
    """List the config files that are installed with sinklab, as values of --config."""
    from sinklab import configs

    files = Path(configs.__file__).parent.glob('*.py')
    names = [path.name for path in files if 'get_config' in path.read_text(encoding='utf-8') and path.stem != 'table']
    return [f'configs/{name}' for name in sorted(names)]
