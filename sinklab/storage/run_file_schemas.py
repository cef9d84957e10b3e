"""Schemas and checked reads of the files of a run directory.

A file that does not match its schema raises DamagedFileError, with a message of one line: which file, what is wrong
with it, what to do. A line of metrics.jsonl that does not match is left out and returned as a LineFault, with the
valid lines.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from sinklab.config.spec import WarmStartTakes
from sinklab.errors import format_error
from sinklab.storage import untrusted_files
from sinklab.storage.untrusted_files import DamagedFileError

if TYPE_CHECKING:
    import numpy as np

MAX_JSON_FILE_BYTES = 64 << 20  # bytes of a JSON file
MAX_LINE_BYTES = 1 << 20  # bytes of a line of metrics.jsonl
MAX_NESTING = 32  # objects and lists inside each other
MODEL_DIMENSIONS = 'LH'  # letters of dimensions that have the same size in all arrays of a model
RESTORE_REMEDY = 'restore it from a copy, or use another folder'
LINE_REMEDY = 'restore it from a copy, or remove the line while no job uses the folder'

Step = Annotated[int, Meta(ge=0, lt=2**31)]  # as in spec.py: steps in arrays are int32
Count = Annotated[int, Meta(ge=0, lt=2**31)]
# Training records finite float32 numbers: it ends at a number that is not finite.
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)] | Annotated[float, Meta(ge=-3.5e38, le=3.5e38)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[int, Meta(ge=0, le=10**12)] | Annotated[float, Meta(ge=0, le=1e12)]
RunId = Annotated[str, Meta(min_length=1, max_length=200)]


class Lineage(Struct):
    """The origin of a fork, as in row.json."""

    run: str
    step: Step
    row: str = ''
    config: list[str] = []
    new: list[str] = []
    dropped: list[str] = []
    data: list[str] = []
    seal: str = ''
    commit: str | None = None
    takes: WarmStartTakes = ''
    start: Step = 0


class Row(Struct):
    """row.json.

    The author of a config file may give a row other fields. They are not checked.
    """

    config: str = ''
    row: str | None = None
    diff: dict[str, Any] = {}
    published: dict[str, bool | Number | str | None] = {}
    source: Any = None
    size: str | None = None
    overrides: dict[str, str] = {}
    remarks: list[str] = []  # on the parameters of an imported model
    lineage: Lineage | None = msgspec.field(name='from', default=None)


class Outcome(Struct):
    """outcome.json."""

    kind: Literal['done', 'refused', 'diverged', 'stopped', 'lost', 'crashed']
    step: Step = 0
    checkpoint: Step | None = None
    message: str = ''
    exit_code: Annotated[int, Meta(ge=0, le=255)] = 0


class Attempt(Struct):
    step: Step
    attention: str
    changes: list[str] = []


class Environment(Struct):
    """The fields of environment.json that are read again."""

    commit: str | None = None
    attempts: list[Attempt] = []
    devices: list[str] = []
    versions: dict[str, str | None] = {}


class ConfigOptimizer(Struct):
    steps: Step = 0


class ConfigModel(Struct):
    vocabulary: Count = 0


class Config(Struct):
    """The fields of config.json that are read from a run of any version.

    sinklab.config.validate checks the others.
    """

    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    model: ConfigModel = msgspec.field(default_factory=ConfigModel)
    optimizer: ConfigOptimizer = msgspec.field(default_factory=ConfigOptimizer)
    data: dict[str, Any] = {}


class SweepRow(Struct):
    row: str
    seeds: dict[Annotated[str, Meta(pattern=r'\A[0-9]{1,10}\Z')], str]
    config: str = ''  # config file of the row; empty in files of older versions


class RunMeasurement(Struct):
    outcome: str
    start: dict[str, Number]
    end: dict[str, Number]
    device: str = ''  # kind of the devices of the last attempt; empty for runs of older versions
    jax: str = ''  # version in the last attempt


class Claims(Struct):
    """claims.json."""

    size: str | None
    overrides: dict[str, str]
    same: dict[str, str]
    configs: dict[str, dict[str, Any]]
    runs: dict[str, dict[Annotated[str, Meta(pattern=r'\A[0-9]{1,10}\Z')], RunMeasurement]]


class LeaseOwner(Struct):
    """lease.json.

    `pid` becomes a part of a path in /proc, and therefore has to be a whole number.
    """

    token: str = ''
    host: str = ''
    pid: Count = 0
    machine: str = ''
    born: str = ''
    job: str = ''
    attempt: Count = 0
    beat: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    state: Literal['running', 'stopping'] = 'running'


class ClaimEntry(Struct):
    """An entry of verdicts.json: the verdict on a claim, as `report.claims.make_claim_entry` makes it."""

    claim: str
    statement: str
    source: str
    comparison: str
    relation: Literal['>', '<', '='] | None  # None if the claim cannot be tested
    unit: str
    published: Number | None
    can_have_either_sign: bool
    min_difference: Number | None
    differences: dict[str, Number]
    mean: Number | None
    interval: tuple[Number, Number] | None
    diverged: Count
    failing_rows: list[str]
    verdict: str
    seeds_needed: Count | None
    untestable_reason: str


class RunIdentity(Struct):
    """run.json: the id that the checkpoints of this run carry, unlike those of other runs."""

    id: RunId


class ProcessDigests(Struct):
    """digests/STEP/PROCESS.json: the files of a checkpoint that one process has written.

    `files` is {name: (bytes, digest)}.
    """

    step: Step
    process: Annotated[int, Meta(ge=0, lt=2**20)]
    processes: Annotated[int, Meta(ge=1, lt=2**20)]
    written: Annotated[str, Meta(min_length=1, max_length=100)]
    seconds: Seconds
    files: dict[Annotated[str, Meta(max_length=4096)], tuple[Bytes, Annotated[str, Meta(max_length=1000)]]]
    run_id: RunId | None = None


SCHEMAS: dict[str, Any] = {
    'run': RunIdentity,
    'digests': ProcessDigests,
    'row': Row,
    'outcome': Outcome,
    'environment': Environment,
    'config': Config,
    'sweep': list[SweepRow],
    'claims': Claims,
    'verdicts': list[ClaimEntry],
    'lease': LeaseOwner,
}
METRICS_LINE_DECODER = msgspec.json.Decoder(dict[str, Number])
MeasuredNumbers = dict[str, float]

PRINTED_WARNINGS: set[tuple[str, str]] = set()  # (file, message)


def warn_once(file: Path, message: str) -> None:
    """Print on stderr, once per process, what is wrong with a file that is skipped."""
    if (warning := (str(file), message)) not in PRINTED_WARNINGS:
        PRINTED_WARNINGS.add(warning)
        print(f'sinklab: {message}', file=sys.stderr, flush=True)


# JSON files


def read_run_file(file: Path, kind: str, remedy: str = RESTORE_REMEDY) -> Any:
    """Read a JSON file, checked against its schema.

    Args:
        file: The path.
        kind: A key of SCHEMAS.
        remedy: What to do if the file is damaged, for the message.

    Raises:
        DamagedFileError: The file does not match the schema.
        FileNotFoundError: The file does not exist.
    """
    return decode_run_file(untrusted_files.read_regular_file(file, max_bytes=MAX_JSON_FILE_BYTES), kind, file, remedy)


def decode_run_file(content: bytes | str, kind: str, file: Path | str, remedy: str = RESTORE_REMEDY) -> Any:
    """Decode the content of a JSON file as plain objects, checked against its schema.

    Args:
        content: The content.
        kind: A key of SCHEMAS.
        file: The path, for the message.
        remedy: What to do if the file is damaged, for the message.

    Raises:
        DamagedFileError: The content does not match the schema.
    """
    try:
        decoded = parse_finite_json(content)
        msgspec.convert(decoded, SCHEMAS[kind])
    except (ValueError, msgspec.MsgspecError) as error:
        raise DamagedFileError(f'{file} is damaged ({format_decode_error(error)}); {remedy}') from error
    return decoded


def parse_finite_json(content: bytes | str) -> Any:
    """Parse JSON whose numbers are finite and whose nesting is at most MAX_NESTING levels deep.

    Raises:
        ValueError: The content is not such JSON.
    """
    return untrusted_files.decode_json(content, MAX_NESTING, finite=True)


def format_decode_error(error: Exception) -> str:
    """Format an error of msgspec, or of this module, without the backticks of msgspec."""
    return format_error(error).replace('`', '')


# metrics.jsonl


class LineFault(NamedTuple):
    """A line of metrics.jsonl that cannot be used."""

    line: int  # from 1
    reason: str


def decode_metrics(content: bytes, first_number: int = 1) -> tuple[list[dict[str, Any]], list[LineFault]]:
    """Decode lines of metrics.jsonl.

    A crash can truncate a line (see `is_truncated`). The next attempt resumes from a checkpoint that is older than
    that line, and records the steps before it, and then its step, again. That attempt may also crash or be stopped
    before it comes to that step. Therefore a truncated line is no fault if one of these holds:

    - another line records its step, or the line is too short to show its step;
    - no line after it has a greater step;
    - the next line has no greater step than the last complete line before it: a new attempt has begun there. That
      attempt may record other steps, since `log.every_steps` may be changed.

    Otherwise the run has passed that step without recording it, and the line counts as damaged.

    Args:
        content: Complete lines. The last line may be incomplete, since the run may be writing it.
        first_number: The number of the first line, for faults.

    Returns:
        The valid records, and the faults of the other lines.
    """
    lines = content.split(b'\n')
    if not lines[-1]:
        lines.pop()
    records, faults, truncated = [], [], []
    for number, line in enumerate(lines, first_number):
        try:
            records.append(decode_record(line))
        except ValueError as error:
            if is_truncated(line):
                truncated.append((number, line, format_decode_error(error), len(records)))
            else:
                faults.append(LineFault(number, format_decode_error(error)))
    steps = [record['step'] for record in records]
    recorded_steps, max_step_from_end = set(steps), [*itertools.accumulate(reversed(steps), max)]
    for number, line, reason, num_before in truncated:
        step, num_after = re.match(rb'\{"step": (\d{1,10}),', line), len(steps) - num_before
        if not step or not num_after or int(step[1]) in recorded_steps:
            continue
        has_resumed = num_before and steps[num_before] <= steps[num_before - 1]
        if max_step_from_end[num_after - 1] > int(step[1]) and not has_resumed:
            faults.append(LineFault(number, f'cut off: {reason}'))
    return records, sorted(faults)


def decode_record(line: bytes) -> dict[str, Any]:
    """Decode one line of metrics.jsonl.

    Raises:
        ValueError: The line is invalid. The message says why.
    """
    if not line.strip():
        raise ValueError('it is empty')
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f'{len(line):,} bytes; at most {MAX_LINE_BYTES:,} are allowed')
    try:
        record = METRICS_LINE_DECODER.decode(line)
    except RecursionError:
        raise ValueError('nested objects') from None
    except msgspec.MsgspecError as error:
        raise ValueError(str(error).removesuffix(' - at `$[...]`')) from error
    if 'step' not in record:
        raise ValueError('it has no step')
    step = record['step']
    if type(step) is not int or not 0 <= step < 2**31:
        raise ValueError(f'its step is {step}; it must be a whole number from 0 to 2^31 - 1')
    return record


def is_truncated(line: bytes) -> bool:
    """Return whether a line can be a record that a crash truncated: the beginning of a record."""
    prefix = b'{"step": '
    return bool(line) and not line.endswith(b'}') and line[: len(prefix)] == prefix[: len(line)]


def format_faults(file: Path, faults: list[LineFault], is_skipped: bool = True) -> str:
    """Describe all faults of a metrics.jsonl in one line."""
    line, reason = faults[0]
    others = f' (and {"one line" if len(faults) == 2 else f"{len(faults) - 1} lines"} more)' if faults[1:] else ''
    action = ' and is skipped' if is_skipped else ''
    return f'{file}, line {line}, is damaged ({reason}){action}{others}; {LINE_REMEDY}'


# Arrays


def read_arrays(
    file: Path, names: Collection[str] | None = None, remedy: str = RESTORE_REMEDY
) -> dict[str, 'np.ndarray']:
    """Read arrays of a file that np.savez wrote.

    The size of each array is bounded by the size of the file.

    Args:
        file: The path.
        names: The names of the arrays to read; those that do not exist are left out. None: all arrays.
        remedy: What to do if the file is damaged, for the message.

    Raises:
        DamagedFileError: The file or one of these arrays is not as NumPy writes it, or would have to be unpickled.
        FileNotFoundError: The file does not exist.
    """
    return untrusted_files.load_npz(file, remedy=remedy, names=names, max_bytes=math.inf)


def list_arrays(file: Path, remedy: str = RESTORE_REMEDY) -> list[str]:
    """Return the names of the arrays of a file that np.savez wrote; `read_arrays` describes arguments and errors."""
    return untrusted_files.list_npz_arrays(file, remedy)


def check_dimensions(file: Path, arrays: dict[str, 'np.ndarray'], remedy: str = RESTORE_REMEDY) -> dict[str, int]:
    """Check arrays against the letters that end their names.

    alpha_LPHJ has four dimensions: L, P, H and J. A digit stands for a dimension of that size.

    Returns:
        The numbers of layers (L) and heads (H), as far as they occur.

    Raises:
        DamagedFileError: An array has other dimensions, two arrays disagree, or an array is empty, has no numbers,
            has infinities, or is nan throughout.
    """
    import numpy as np

    sizes: dict[str, tuple[int, str]] = {}
    for name, array in arrays.items():
        letters = name.rpartition('_')[2]
        if array.ndim != len(letters) or 0 in array.shape:
            raise DamagedFileError(f'{file} is damaged ({name} has the shape {array.shape}); {remedy}')
        if array.dtype.kind not in 'fiub' or np.isinf(array).any() or np.isnan(array).all():
            raise DamagedFileError(f'{file} is damaged ({name}, of {array.dtype}, has no finite numbers); {remedy}')
        for letter, size in zip(letters, array.shape, strict=True):
            if letter not in MODEL_DIMENSIONS and not letter.isdigit():
                continue
            own_size = (int(letter), 'its name') if letter.isdigit() else (size, name)
            expected_size, size_source = sizes.setdefault(letter, own_size)
            if expected_size != size:
                raise DamagedFileError(
                    f'{file} is damaged ({name} has {size} of {letter}, '
                    f'but {size_source} has {expected_size}); {remedy}'
                )
    return {letter: size for letter, (size, _) in sizes.items() if letter in MODEL_DIMENSIONS}


def decode_numbers(text: str, file: Path) -> dict[str, float]:
    """Decode the numbers of a cached result of `measure`, which may be nan.

    Raises:
        DamagedFileError: The text is not a JSON object of numbers.
    """
    try:
        return msgspec.convert(json.loads(text), MeasuredNumbers)
    except (RecursionError, ValueError, msgspec.MsgspecError) as error:
        raise DamagedFileError(f'{file} is damaged ({format_decode_error(error)}); remove it') from error


def parse_probe_step(file: Path) -> int | None:
    """Return the step in the name STEP.npz of a probe file; None if the name has no step."""
    name = file.stem
    return int(name) if re.fullmatch(r'[0-9]{1,10}', name) and int(name) < 2**31 else None
