"""Test claims of the paper by training runs, and give a verdict on each.

A claim compares two numbers of two rows. All claims share their runs, and each run is trained once; the same command,
given again, trains those that are missing. Verdicts are computed from the differences between runs of the same seed;
docs/guides/sweeps_and_claims.md says how. --config.PATH=VALUE sets a field of all runs.

example:
  sinklab claims --seeds=8 --jobs=2 --workdir=runs/claims
  sinklab claims sigmoid decay_more --workdir=runs/claims
  sinklab claims --results=docs/results/claims.json
  sinklab claims --list
"""

import argparse
import json
from collections.abc import Mapping

from sinklab.cli import config, hardware, programs, sweep
from sinklab.cli.train import size_argument
from sinklab.files.place import place
from sinklab.folder import Folder
from sinklab.install import format_extra_command
from sinklab.lease import lease
from sinklab.record import Refusal, unknown
from sinklab.seeds import parse_seeds
from sinklab.spec import Spec
from sinklab.sweep import plan
from sinklab.sweep.run import shares

SIZE = 'quickstart'
SEEDS = 5
ASK = 'To test one of them: sinklab claims NAME --workdir=DIR'
ALSO = {'valid/loss', 'mass/row', 'entropy/row', 'emergence/step'}  # kept beside what claims read


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        'names', nargs='*', metavar='NAME', help='claims to test, such as sigmoid (default: all of them)'
    )
    verb.add_argument(
        '--config', default='configs/claims.py', metavar='FILE', help='file with CLAIMS (default: %(default)s)'
    )
    verb.add_argument('--list', action='store_true', help='list all claims in words, and train nothing')
    sweep.seeds_argument(verb, str(SEEDS))
    verb.add_argument(
        '--workdir',
        metavar='DIR',
        help='folder for the run folders (TABLE.ROW-SEED) and claims.json, such as runs/claims',
    )
    verb.add_argument(
        '--results', metavar='FILE', help='judge what an earlier claims.json has measured, and train nothing'
    )
    size_argument(verb)
    sweep.jobs_argument(verb)
    hardware.arguments(verb)
    programs.argument(verb)
    verb.add_argument(
        '--png', metavar='FILE', help='also draw all differences in percent, with their intervals, into a PNG file'
    )
    shown = verb.add_mutually_exclusive_group()
    shown.add_argument('--json', action='store_true', help='print the verdicts as JSON')
    shown.add_argument('--markdown', action='store_true', help='print the verdicts as a Markdown table')
    verb.usage = '%(prog)s [NAME ...] (--workdir DIR | --results FILE | --list) [--config.PATH=VALUE ...] [options]'


def run(given: argparse.Namespace, rest: list[str]) -> int:
    claims = known(given, rest)
    if (given.workdir is not None) + (given.results is not None) + given.list != 1:
        raise Refusal(
            'give --workdir=DIR to train what claims want, --results=FILE to judge what was measured, or --list'
        )
    drawable(given.png)
    if given.list:
        said = [[name, claims[name].words, claims[name].source] for name in given.names or claims]
        sweep.show(['claim', 'words', 'source'], said, ASK)
        return 0
    if given.results is not None:
        untrained(given)
        show(given, claims, judged(given.results))
        return 0
    return trained(given, rest, claims)


def untrained(given: argparse.Namespace) -> None:
    for name in ('seeds', 'size', 'compiled'):
        if (value := getattr(given, name)) is not None:
            raise Refusal(
                f'--{name}={value} is for training, and --results={given.results} trains nothing; leave it out'
            )


def judged(file: str) -> dict:
    """What a claims.json has; says which rows are others by now."""
    from sinklab.sweep import results

    found = results.read(place(file))
    tell(file, changed(found))
    return found


def changed(found: dict) -> dict[str, str]:
    """{row: how it differs from what was measured}, of those that do."""
    from sinklab.sweep import results

    overrides = [f'--config.{path}={value}' for path, value in found['overrides'].items()]
    options = [*overrides, *sweep.seed_options(0)]
    return results.changed(found, {row: spec(row, options, found['size']) for row in found['configs']})


def spec(row: str, options: list[str], size: str) -> Spec | None:
    """None of a row that is gone."""
    try:
        return config.load(file_of(row), options, size)[0]
    except Refusal:
        return None


def tell(file: str, changed: dict[str, str]) -> None:
    if changed:
        sweep.say(f'rows that are others by now than those of {file}: {in_words(changed)}')


def in_words(changed: dict[str, str]) -> str:
    """Each change once, with all rows that have it."""
    rows = {how: [row for row in changed if changed[row] == how] for how in changed.values()}
    return '; '.join(f'{", ".join(names)} ({how})' for how, names in rows.items())


def drawable(path: str | None) -> None:
    """Refuses before anything is trained what could not be drawn after it."""
    if path is None:
        return
    try:
        from sinklab.report import forest  # noqa: F401
    except ImportError as error:
        raise Refusal(f'--png={path} needs matplotlib; install it: {format_extra_command("report")}') from error
    if not place(path).parent.is_dir():
        raise Refusal(f'--png={path}: there is no folder {place(path).parent}; make it, or give another one')


def known(given: argparse.Namespace, rest: list[str]) -> dict:
    """All claims of the file, among which the named ones are."""
    from sinklab.report.claims import claims

    if strange := [argument for argument in rest if not argument.startswith('--config.') or given.results]:
        raise Refusal(f'{strange[0]} has no meaning here; see sinklab claims --help')
    found = config.module_of(given.config, 'CLAIMS').CLAIMS
    for name in given.names:
        if name not in found:
            raise Refusal(unknown(f'claim {name!r}', name, found, 'claims'))
    return claims(found)


def trained(given: argparse.Namespace, rest: list[str], claims: dict) -> int:
    """Trains what is missing of all that the named claims read."""
    from sinklab.sweep import results

    layout, size = hardware.hardware(given), given.size or SIZE
    seeds = parse_seeds(str(SEEDS) if given.seeds is None else given.seeds)
    shares(given.jobs)
    sweep.refuse_seeds(rest)

    def load(row: str, seed: int) -> tuple[Spec, dict]:
        return config.load(file_of(row), [*rest, *sweep.seed_options(seed)], size)

    named = [claims[name] for name in given.names or claims]
    options = [*hardware.options(layout), f'--size={size}', *rest]
    options += [f'--compiled={given.compiled}'] if given.compiled else []
    with lease(Folder(given.workdir).path) as held:
        before = results.kept(given.workdir, dict(size=size, overrides=dict(map(config.override, rest))))
        wanted = {reading.row: load(reading.row, 0)[0] for claim in named for reading in claim.readings}
        others = changed(before)
        if mine := {row: how for row, how in others.items() if row in wanted and row in before['runs']}:
            raise Refusal(f'{given.workdir} has runs of other rows: {in_words(mine)}; give another --workdir')
        tell(f'{given.workdir}/{results.NAME}', others)
        specs = {row: load(row, 0)[0] for row in before['runs'] if row not in others} | wanted
        same = first_alike(specs)
        firsts = dict.fromkeys(same[row] for row in wanted)
        runs = plan.runs(firsts, seeds, given.workdir, load, layout)
        stopped = sweep.trained(runs, lambda run: sweep.command(file_of(run.row), run, options), held, given.jobs)
        held.check()
        now = results.add(
            before, specs, same, runs, ALSO | {one.number for claim in claims.values() for one in claim.readings}
        )
        results.write(given.workdir, results.NAME, now)
        results.write(given.workdir, results.VERDICTS, entries_of(claims, now))
    show(given, claims, now)
    return sweep.ended('claims', runs, stopped)


def file_of(row: str) -> str:
    """TABLE:ROW as --config takes it: of a file of configs/, or of a path."""
    table, _, name = row.partition(':')
    return row if table.endswith('.py') else f'configs/{table}.py:{name}'


def first_alike(specs: Mapping[str, Spec]) -> dict[str, str]:
    """{row: the first row that is the same run}, so that each run is trained once."""
    first = {}
    return {row: first.setdefault(spec, row) for row, spec in specs.items()}


def published_by_row(claims: dict) -> dict[str, dict]:
    """{row: its published numbers} of all that the claims read."""
    rows = {reading.row for claim in claims.values() for reading in claim.readings}
    return {row: config.about_row(file_of(row))['published'] for row in rows}


def entries_of(claims: dict, found: dict) -> list[dict]:
    """Return the verdict of each claim."""
    from sinklab.report import claims as report
    from sinklab.sweep import results

    return report.table(claims, results.by_row(found), published_by_row(claims))


def show(given: argparse.Namespace, claims: dict, found: dict) -> None:
    from sinklab.report import claims as report

    entries = [entry for entry in entries_of(claims, found) if entry['claim'] in (given.names or claims)]
    if given.png:
        from sinklab.report import forest

        forest.write(place(given.png), entries, '%')
    if given.json:
        print(json.dumps(entries, indent=2, allow_nan=False))
    elif given.markdown:
        print(report.markdown(entries), end='')
    else:
        run = [entry for entry in entries if entry['verdict'] not in ('not run', 'not testable here')]
        cells = [report.brief_cells(entry, claims[entry['claim']]) for entry in run]
        if cells:
            sweep.show(list(report.BRIEF), cells, f'{report.LEGEND}; all at size {found["size"]}.')
        for verdict in ('not testable here', 'not run'):
            for line in report.list_names(entries, verdict):
                sweep.print_words(line)
        sweep.print_words(f'{report.counts(entries)} {report.in_words(entries)}')
