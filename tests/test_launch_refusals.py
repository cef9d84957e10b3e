"""Launchers: what is refused before anything runs, and what is said where a scheduler refuses."""

import re
from pathlib import Path

import pytest
from recorders import NAMES, RUN, SUBMIT, WHERE, launched, recorded, refused


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return recorded(tmp_path, monkeypatch)


# What is wrong with a command line -> the words of its refusal, of any launcher.
REFUSED = {
    'name': (['submit', "o'brien's run"], r"the name \"o'brien's run\" must begin .* e\.g\. o-brien-s-run;"),
    'long': (['submit', 'x' * 41], 'the name .* 40 at most, e.g. x{40};'),
    'verb': (['begin', 'pair'], "argument VERB: invalid choice: 'begin'"),
    'unknown': (['submit', 'pair', '--spott'], 'unrecognized arguments: --spott; see --help'),
    'workdir': (['submit', 'pair', *RUN], 'submit needs --workdir=DIR'),
    'nothing': (['submit', 'pair', '--workdir=gs://b/r'], 'after -- stands what is asked of sinklab, and nothing is'),
    'sweep': (['submit', 'pair', '--workdir=gs://b/r', '--', 'sweep'], 'and sweep is given; e.g. -- train --config'),
    'ours': (
        ['submit', 'pair', '--workdir=gs://b/r', *RUN, '--grace=9'],
        '--grace stands after --; give --grace before',
    ),
    'who': (
        ['submit', 'pair', '--workdir=gs://b/r', *RUN, '--process', '0'],
        '--process stands after --; leave it out',
    ),
    'here': (
        ['submit', 'pair', '--workdir=runs/pair', *RUN],
        '--workdir: runs/pair is not seen by the hosts of a job; gi',
    ),
    'data': (
        ['submit', 'pair', '--workdir=gs://b/r', *RUN, '--config.data.source=store:runs/store'],
        r'--config\.data\.source: runs/store is not seen',
    ),
    'compiled': (['submit', 'pair', '--workdir=gs://b/r', '--compiled=cache', *RUN], '--compiled: cache is not seen'),
    'flags': (
        ['submit', 'pair', '--workdir=gs://b/r', '--flags=fast', *RUN],
        '--flags=fast is unknown; it is one of none',
    ),
    'env': (['submit', 'pair', '--workdir=gs://b/r', '--env=1=2', *RUN], '--env=1=2 is no NAME=VALUE'),
    'restarts': (
        ['submit', 'pair', '--workdir=gs://b/r', '--restarts=-1', *RUN],
        '--restarts=-1 must be a whole number',
    ),
    'grace': (
        ['submit', 'pair', '--workdir=gs://b/r', '--save=60', '--grace=60', *RUN],
        '60 s are left to save in, and a',
    ),
    'seeds': (['submit', 'pair', '--workdir=gs://b/r', '--seeds=a', *RUN], '--seeds=a must be whole numbers'),
    'seeds alone': (['submit', 'pair', '--workdir=gs://b/r', '--seeds=0', *RUN], '--seeds are of rows; give --rows'),
    'origin': (
        ['submit', 'pair', '--workdir=gs://b/r', '--', 'train', '--from=runs/a@5', '--fsdp=256'],
        '--from: runs/a@5 is not seen',
    ),
    'rows': (['submit', 'pair', '--workdir=gs://b/r', '--rows=a', *RUN], 'names a row; give -- train --config=FILE'),
    'far': (
        ['submit', 'pair', '--workdir=gs://b/r', '--', 'train', '--config=/a/b.py', '--fsdp=256'],
        'must lie below',
    ),
    'layout': (
        ['submit', 'pair', '--workdir=gs://b/r', '--', 'train', '--config=a.py', '--fsdp=32'],
        '--data=1 x --fsdp=32 x --tensor=1 are 32 devices, and .* has 256; give e.g. --fsdp=256 after --',
    ),
}


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_is_refused_in_one_line_before_anything_runs(name, case, recorders, capsys):
    argv, words = REFUSED[case]
    for execute in ([], ['--execute']):
        assert re.search(words, refused(capsys, name, [*argv[:2], *execute, *WHERE[name], *argv[2:]]))
    assert recorders.heard() == []
    assert not Path('runs').exists()


# Options that a launcher lacks, or that do not fit -> the words of its refusal.
OWN = {
    ('queued_resources', 'project'): (
        ['--zone=z', '--accelerator=v5e-256'],
        '--project is not given; .*--project=my-pro',
    ),
    ('queued_resources', 'zone'): (
        ['--project=p', '--accelerator=v5e-256'],
        '--zone is not given; give it, e.g. --zone',
    ),
    ('queued_resources', 'chips'): ([*WHERE['queued_resources'][1:]], '--accelerator is not given; .*v5e-256'),
    ('queued_resources', 'kind'): (
        [*WHERE['queued_resources'], '--accelerator=v5e-3'],
        'is no KIND-CHIPS; there are v4-4',
    ),
    ('queued_resources', 'both'): ([*WHERE['queued_resources'], '--spot', '--reserved'], '--spot and --reserved'),
    ('queued_resources', 'spot'): (
        [*WHERE['queued_resources'], '--spot', '--grace=60'],
        '--grace=60: .* ended 30 s after',
    ),
    ('jobset', 'spot'): (
        [*WHERE['jobset'], '--spot', '--save=40'],
        '25 s are left to save in, and a save of 40 s needs 50',
    ),
    ('jobset', 'image'): (WHERE['jobset'][:2], '--image is not given'),
    ('jobset', 'project'): ([WHERE['jobset'][0], WHERE['jobset'][2]], '--project is not given'),
    ('slurm', 'time'): (['--nodes=32'], '--time is not given'),
    ('slurm', 'nodes'): ([*WHERE['slurm'], '--nodes=0'], '--nodes=0 must be a whole number of at least 1'),
    ('slurm', 'code'): (['--nodes=32', '--time=1-0'], '--code: gs://b/runs/code/pair is not seen .* begins with /$'),
}


@pytest.mark.parametrize(('name', 'case'), OWN)
def test_what_a_launcher_lacks_is_named_with_an_example(name, case, recorders, capsys, monkeypatch):
    for variable in ('CLOUDSDK_CORE_PROJECT', 'CLOUDSDK_COMPUTE_ZONE'):
        monkeypatch.delenv(variable, raising=False)
    options, words = OWN[name, case]
    given = ['submit', 'pair', '--workdir=gs://b/runs/pair', '--execute', *options, *RUN]
    assert re.search(words, refused(capsys, name, given))
    assert recorders.heard() == []


@pytest.mark.parametrize(
    ('name', 'tool'), [('queued_resources', 'gcloud'), ('jobset', 'kubectl'), ('slurm', 'sbatch'), ('slurm', 'uv')]
)
def test_where_a_program_is_missing_nothing_is_done(name, tool, recorders, capsys, tmp_path):
    (recorders.folder / tool).unlink()
    argv = [one.replace('/shared', f'{tmp_path}/shared') for one in SUBMIT[name]]
    assert refused(capsys, name, [*argv[:2], '--execute', *argv[2:]]).startswith(f'{tool} is not there; ')
    assert recorders.heard() == []
    assert not Path('runs').exists()
    assert not Path('shared').exists()


# What a scheduler says when it refuses -> what is said of it.
FAILED = {
    (
        'queued_resources',
        'queued-resources create',
        "ERROR: Quota 'TPUV5sPreemptibleLitepodPerProjectPerZone' exceeded",
    ): (
        'gcloud compute tpus queued-resources ... exits with 1 (ERROR: Quota ',
        '): ask for more at https://console.cloud.google.com/iam-admin/quotas, or take another --zone',
    ),
    ('queued_resources', 'queued-resources create', 'ERROR: ALREADY_EXISTS: Resource pair'): (
        'the verb status says',
    ),
    ('queued_resources', 'storage rsync', 'ERROR: HTTPError 403: x does not have permission'): (
        'gcloud auth list says as whom you ask; 1 more to run were not',
    ),
    ('jobset', 'kubectl', 'The connection to the server localhost:8080 was refused'): ('get-credentials',),
    ('slurm', 'sbatch', 'sbatch: error: AssocMaxSubmitJobLimit'): ('a limit of your account',),
    ('slurm', 'uv build', 'no such backend'): ('(no such backend): see above; 5 more to run were not',),
}


@pytest.mark.parametrize('case', FAILED)
def test_what_a_scheduler_refuses_is_told_with_what_to_do(case, recorders, capsys, tmp_path):
    name, part, error = case
    recorders.answer(part, ('', f'{error}\n', 1))
    argv = [one.replace('/shared', f'{tmp_path}/shared') for one in SUBMIT[name]]
    assert launched(name, [*argv[:2], '--execute', *argv[2:]]) == 1
    *_, said, line = capsys.readouterr().err.splitlines()
    assert said == error
    assert all(words in line for words in FAILED[case]), line
    assert part in ' '.join(recorders.heard()[-1])
