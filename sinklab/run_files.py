"""The JSON files of run and sweep folders: the fields that are read again, with their types."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from sinklab.config.spec import WarmStartTakes

Step = Annotated[int, Meta(ge=0, lt=2**31)]  # steps in arrays are int32
Number = int | float
SeedText = Annotated[str, Meta(pattern=r'\A[0-9]{1,10}\Z')]


class Parent(Struct):
    """The parent of a warm start, in row.json."""

    run: str
    step: Step
    row: str = ''
    config: list[str] = []
    new: list[str] = []
    dropped: list[str] = []
    data: list[str] = []
    commit: str | None = None
    takes: WarmStartTakes = ''
    start: Step = 0


class Row(Struct):
    """row.json; a row of a user's config file may have other fields, too."""

    row: str | None = None
    config: str = ''
    diff: dict[str, Any] = {}
    published: dict[str, bool | Number] = {}
    source: Any = None
    size: str | None = None
    overrides: dict[str, str] = {}
    remarks: list[str] = []  # on the parameters of an imported model
    parent: Parent | None = field(name='from', default=None)


class Outcome(Struct):
    """outcome.json."""

    kind: Literal['done', 'refused', 'diverged', 'stopped', 'lost', 'crashed']
    step: Step = 0
    checkpoint: Step | None = None
    message: str = ''
    exit_code: Annotated[int, Meta(ge=0, le=255)] = 0


class Attempt(Struct):
    """A start of a run, or of its continuation."""

    step: Step
    attention: str
    changes: list[str] = []


class Environment(Struct):
    """environment.json."""

    attempts: list[Attempt]
    commit: str | None = None
    devices: list[str] = []
    versions: dict[str, str | None] = {}


class FileDigests(Struct):
    """digests_PROCESS.json of a checkpoint: the files that one process has saved, {name: (bytes, digest)}."""

    processes: Annotated[int, Meta(ge=1, lt=2**20)]
    files: dict[str, tuple[int, str]]


class SweepRow(Struct):
    """An entry of sweep.json: a row, and the outcome of each seed."""

    row: str
    seeds: dict[SeedText, str]
    config: str = ''


class RunMeasurement(Struct):
    """The metrics of a run in claims.json, at its start and its end."""

    outcome: str
    start: dict[str, Number]
    end: dict[str, Number]
    device: str = ''
    jax: str = ''


class Claims(Struct):
    """claims.json."""

    size: str | None
    overrides: dict[str, str]
    configs: dict[str, dict[str, Any]]
    runs: dict[str, dict[SeedText, RunMeasurement]]


SCHEMAS: dict[str, Any] = {
    'config': dict,  # sinklab.config.validate checks it
    'row': Row,
    'outcome': Outcome,
    'environment': Environment,
    'sweep': list[SweepRow],
    'claims': Claims,
}
