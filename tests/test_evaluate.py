"""Command `sinklab evaluate` and the lm-evaluation-harness model, on local tasks with known results."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from lm_eval_cases import QUESTIONS, TASKS, TEXTS, score_continuation, write_tasks

pytest.importorskip('lm_eval')


from sinklab.analysis.run_model import RunModel
from sinklab.cli.main import main
from sinklab.errors import format_extra_command
from sinklab.run_dir import RunDir

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    import datasets
    import huggingface_hub.constants

    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, 'HF_HUB_OFFLINE', True)


@pytest.fixture(scope='module')
def tasks_dir(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp('tasks'))


def test_evaluate_matches_directly_computed_task_metrics(finished_run, tasks_dir, capsys):
    path, _ = finished_run
    model = RunModel(RunDir(path), 8)
    assert main(['evaluate', str(path), f'--tasks={",".join(TASKS)}', f'--include={tasks_dir}', '--json']) == 0
    result = json.loads(capsys.readouterr().out)
    is_correct = []
    for item in QUESTIONS:
        context_length = len(item['question'].rstrip())
        context, space = item['question'][:context_length], item['question'][context_length:]
        likelihoods = [score_continuation(model, context, space + choice)[0] for choice in item['choices']]
        is_correct.append(np.argmax(likelihoods) == item['answer'])
    assert result['tasks']['mine_choice']['numbers']['acc,none'] == np.mean(is_correct)
    assert result['tasks']['mine_choice']['samples'] == 4
    num_bits = -sum(score_continuation(model, '', text)[0] for text in TEXTS) / math.log(2)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    np.testing.assert_allclose(
        result['tasks']['mine_text']['numbers']['bits_per_byte,none'], num_bits / num_bytes, rtol=1e-4
    )


def test_evaluate_prints_table_for_limit_and_few_shot(finished_run, tasks_dir, capsys):
    arguments = [
        'evaluate',
        f'{finished_run[0]}@4',
        '--tasks=mine_choice',
        f'--include={tasks_dir}',
        '--limit=2',
        '--few_shot=1',
    ]
    assert main(arguments) == 0
    stdout = capsys.readouterr().out
    cells = stdout.split('\n')[1].split()
    assert [cells[column] for column in (0, 1, 4, 5)] == ['mine_choice', 'acc', '2', '1']
    assert f'{finished_run[0]}@4' in stdout


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['{run}@8', '--tasks=mine_choise', '--include={tasks}'], 'did you mean mine_choice'),
        (['{run}@8', '--tasks='], 'is empty'),
        (['{run}@8', '--tasks=mine_far', '--include={tasks}'], 'mine_far cannot be evaluated'),
        (['{run}@8', '--tasks=mine_choice', '--include={tasks}/none'], 'is not a folder'),
        (['{run}@8', '--tasks=mine_choice', '--include={tasks}', '--few_shot=-1'], '--few_shot: -1 '),
        (['{run}/none', '--tasks=mine_choice', '--include={tasks}'], 'does not exist; give the folder of a run'),
        (['hf:{run}', '--tasks=mine_choice'], 'lm_eval --model hf --model_args pretrained=DIR'),
    ],
)
def test_evaluate_rejects_invalid_arguments_with_one_line(finished_run, tasks_dir, capsys, arguments, message):
    command_arguments = [argument.format(run=finished_run[0], tasks=tasks_dir) for argument in arguments]
    assert main(['evaluate', *command_arguments]) == 1
    line = capsys.readouterr().err.strip().split('\n')[-1]
    assert line.startswith('sinklab evaluate: ')
    assert message in line


@pytest.mark.parametrize('task', ['mine_generation', 'mine_image', 'mine_code'])
def test_task_that_needs_more_than_scores_of_text_is_refused(finished_run, tasks_dir, capsys, task):
    assert main(['evaluate', str(finished_run[0]), f'--tasks={task}', f'--include={tasks_dir}']) == 1
    assert capsys.readouterr().err.strip().split('\n')[-1].startswith('sinklab evaluate: ')


def test_evaluate_names_extra_if_lm_eval_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    monkeypatch.delitem(sys.modules, 'sinklab.analysis.lm_eval')
    monkeypatch.delattr('sinklab.analysis.lm_eval')
    assert main(['evaluate', 'runs/none', '--tasks=hellaswag']) == 1
    assert capsys.readouterr().err.endswith(f'{format_extra_command("evaluate")}\n')
