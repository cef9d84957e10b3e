"""Exact commands of each launcher verb."""

import shlex

import pytest
from command_recorders import (
    SITE_FLAGS,
    SUBMIT_COMMANDS,
    get_launcher_output,
    get_scheduler,
    make_recorders,
    run_launcher,
)

from launch import command_line
from launch.code_bundle import ROOT

LOCATION_FLAGS = '--project=p --zone=z'
QUEUED_RESOURCES = 'gcloud compute tpus queued-resources'
SSH = f'gcloud compute tpus tpu-vm ssh pair --quiet {LOCATION_FLAGS}'
CREATE = (
    f'{QUEUED_RESOURCES} create pair --node-id=pair --accelerator-type=v5litepod-256 '
    '--runtime-version=v2-alpha-tpuv5-lite '
    f'--metadata-from-file=startup-script=runs/launched/pair/boot.sh {LOCATION_FLAGS}'
)
DELETE = f'{QUEUED_RESOURCES} delete pair --force --quiet {LOCATION_FLAGS}'
KUBECTL = 'kubectl --namespace=default'
APPLY = f'{KUBECTL} apply --filename=runs/launched/pair/jobset.json'
FIRST_POD_SELECTOR = (
    '--selector=jobset.sigs.k8s.io/jobset-name=pair,batch.kubernetes.io/job-completion-index=0,'
    'jobset.sigs.k8s.io/job-index=0'
)


def list_code_commands(folder, pins):
    return [
        'sinklab rows --config=configs/scale.py:softmax_1b',
        f'uv build --quiet --no-create-gitignore --out-dir {folder} {ROOT}',
        f'cp {ROOT}/launch/pins/{pins}.txt {folder}/pins.txt',
        f'mkdir -p {folder}/configs',
        f'cp configs/scale.py {folder}/configs/scale.py',
    ]


EXPECTED_SUBMIT_COMMANDS = {
    'queued_resources': [
        *list_code_commands('runs/launched/pair', 'tpu'),
        'gcloud storage rsync --recursive runs/launched/pair gs://b/runs/code/pair/pair',
        CREATE,
    ],
    'jobset': [
        *list_code_commands('runs/launched/pair/image', 'tpu'),
        'gcloud builds submit --project=p --tag=r.pkg.dev/p/i:1 runs/launched/pair/image',
        APPLY,
    ],
    'slurm': [
        *list_code_commands('/shared/code', 'gpu'),
        'bash /shared/code/install.sh',
        'sbatch /shared/code/job.sh',
    ],
}
EXPECTED_COMMANDS = {
    ('queued_resources', 'keep'): ['bash runs/launched/pair/keep.sh'],
    ('queued_resources', 'resume'): [f'{DELETE} || true', 'bash runs/launched/pair/create.sh'],
    ('queued_resources', 'status'): [
        f"{QUEUED_RESOURCES} describe pair '--format=value(state.state)' {LOCATION_FLAGS}"
    ],
    ('queued_resources', 'logs'): [
        f"{SSH} --worker=0 '--command=sudo journalctl --follow --lines=50 --unit=google-startup-scripts "
        "--unit=sinklab'"
    ],
    ('queued_resources', 'preempt'): [f"{SSH} --worker=0 '--command=sudo systemctl kill --signal=TERM sinklab'"],
    ('queued_resources', 'stop'): [f"{SSH} --worker=all '--command=sudo systemctl stop sinklab' || true", DELETE],
    ('jobset', 'resume'): [
        f'{KUBECTL} delete jobset --ignore-not-found --cascade=foreground --wait=true pair',
        APPLY,
    ],
    ('jobset', 'status'): [f'{KUBECTL} get jobset --output=wide pair'],
    ('jobset', 'logs'): [f'{KUBECTL} logs --follow --tail=50 {FIRST_POD_SELECTOR}'],
    ('jobset', 'preempt'): [f'{KUBECTL} delete pod --wait=false {FIRST_POD_SELECTOR}'],
    ('jobset', 'stop'): [f'{KUBECTL} delete jobset --ignore-not-found --cascade=foreground --wait=true pair'],
    ('slurm', 'resume'): ['sbatch /shared/code/job.sh'],
    ('slurm', 'status'): ["squeue --me '--format=%i %T %r %M %l %R' --name=pair"],
    ('slurm', 'logs'): [
        """bash -c 'exec tail --follow=name --lines=50 "$1"/"$2"-*.log' logs /shared/code pair""",
    ],
    ('slurm', 'preempt'): ['scancel --me --signal=TERM --name=pair'],
    ('slurm', 'stop'): [
        'scancel --me --state=PENDING --name=pair',
        'scancel --me --signal=TERM --batch --name=pair',
        'scancel --me --signal=TERM --name=pair',
    ],
    **{(name, 'follow'): ['sinklab tail gs://b/runs/pair'] for name in SITE_FLAGS},
    **{
        (name, 'fetch'): ['mkdir -p runs/pair', 'gcloud storage rsync --recursive gs://b/runs/pair runs/pair']
        for name in SITE_FLAGS
    },
}


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return make_recorders(tmp_path, monkeypatch)


def extract_commands(script):
    """Return the lines of a script after its files."""
    lines = script.splitlines()
    return lines[max((number for number, line in enumerate(lines) if line == 'END'), default=1) + 1 :]


@pytest.mark.parametrize('name', SITE_FLAGS)
def test_submit_prints_expected_commands(name, recorders, capsys):
    assert (
        extract_commands(get_launcher_output(capsys, name, SUBMIT_COMMANDS[name])) == EXPECTED_SUBMIT_COMMANDS[name]
    )


@pytest.mark.parametrize(('name', 'verb'), EXPECTED_COMMANDS)
def test_verb_prints_expected_commands(name, verb, recorders, capsys):
    argv = [verb, 'pair', '--workdir=gs://b/runs/pair', *SITE_FLAGS[name]]
    assert extract_commands(get_launcher_output(capsys, name, argv)) == EXPECTED_COMMANDS[name, verb]


def test_every_verb_has_expected_commands():
    verbs = {(name, verb) for name in SITE_FLAGS for verb in command_line.COMMON_VERBS | get_scheduler(name).verbs}
    assert verbs == EXPECTED_COMMANDS.keys() | {(name, 'submit') for name in SITE_FLAGS}


def test_stop_shows_program_stderr_and_continues_after_optional_failure(recorders, capfd):
    recorders.add_answers('systemctl stop', ('', 'ERROR: the node pair is gone\n', 1))
    argv = ['stop', 'pair', '--execute', *SITE_FLAGS['queued_resources']]
    assert run_launcher('queued_resources', argv) == 0
    assert 'the node pair is gone' in capfd.readouterr().err
    assert [shlex.join(call) for call in recorders.pop_calls()][-1] == DELETE


def test_fetch_copies_run_folder_from_shared_disk(recorders, capsys):
    copy_command = "cp --recursive --no-target-directory '/shared/a b' runs/pair"
    argv = ['fetch', 'pair', '--workdir=/shared/a b', '--code=/shared/code']
    assert extract_commands(get_launcher_output(capsys, 'slurm', argv)) == ['mkdir -p runs/pair', copy_command]


@pytest.mark.parametrize('name', ['queued_resources', 'jobset'])
def test_submit_creates_one_job_for_several_slices(name, recorders, capsys):
    script = get_launcher_output(capsys, name, [*SUBMIT_COMMANDS[name][:2], '--slices=2', *SUBMIT_COMMANDS[name][2:]])
    expected_text = dict(queued_resources='--node-count=2 --node-prefix=pair', jobset='"replicas": 2')
    assert expected_text[name] in script


def test_stop_prints_one_command_per_job(recorders, capsys):
    argv = ['stop', 'pair', *SITE_FLAGS['jobset'], '--rows=a,b']
    assert [line.split()[-1] for line in extract_commands(get_launcher_output(capsys, 'jobset', argv))] == [
        'pair-a-0',
        'pair-b-0',
    ]
