"""Tests that Python code of a model or tokenizer runs only with --remote-code."""

import json
import subprocess
import sys
from pathlib import Path

import open_models
import pytest

pytest.importorskip('torch', reason='open models need torch, which has no wheel here')
pytest.importorskip('transformers', reason='open models need transformers')

from sinklab.cli.main import main
from sinklab.hf import convert

pytestmark = pytest.mark.slow

RUNS = "import os\nopen(os.environ['SINKLAB_TEST_RAN'], 'w').close()\n"
TOKENIZER = RUNS + 'from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n'
MODEL = RUNS + (
    'from transformers import LlamaConfig, LlamaForCausalLM\n'
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    'class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n'
)


def change(file, **fields):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | fields))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a LLaMA folder without tokenizer class; remote code of the tests creates the sibling file `ran`."""
    monkeypatch.setenv('SINKLAB_TEST_RAN', str(tmp_path / 'ran'))
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setenv('HF_MODULES_CACHE', str(tmp_path / 'modules'))
    (tmp_path / 'theirs').mkdir()
    open_models.save_model(
        open_models.make_configs()['llama'], tmp_path / 'theirs', open_models.make_tokenizer_json()
    )
    return tmp_path / 'theirs'


def with_tokenizer_code(folder):
    (folder / 'tokenization_own.py').write_text(TOKENIZER)
    own = dict(AutoTokenizer=[None, 'tokenization_own.Own'])
    change(folder / 'tokenizer_config.json', tokenizer_class='Own', auto_map=own)


def with_model_code(folder):
    (folder / 'modeling_own.py').write_text(MODEL)
    own = dict(AutoConfig='modeling_own.OwnConfig', AutoModelForCausalLM='modeling_own.OwnModel')
    change(folder / 'config.json', model_type='own', auto_map=own)


def asked(folder, *more):
    (folder.parent / 'text.txt').write_text(open_models.SAMPLE_TEXT)
    text = f'--source=text:{folder.parent}/text.txt'
    return ['measure', f'hf:{folder}', text, '--sequences=1', '--length=16', *more]


@pytest.mark.parametrize('add', [with_tokenizer_code, with_model_code])
def test_remote_code_does_not_run_without_flag_despite_confirmed_prompt(add, folder, capsys, monkeypatch):
    """Answer yes to any prompt of transformers."""
    add(folder)
    monkeypatch.setattr('builtins.input', lambda *_: 'y')
    capsys.readouterr()
    code = main(asked(folder))
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1
    assert '--remote-code' in line
    assert not (folder.parent / 'ran').exists()


def test_remote_code_of_tokenizer_runs_with_flag(folder):
    with_tokenizer_code(folder)
    assert main(asked(folder, '--remote-code')) == 0
    assert (folder.parent / 'ran').exists()


def test_remote_code_does_not_run_after_yes_on_standard_input(folder):
    with_tokenizer_code(folder)
    command = [sys.executable, '-m', 'sinklab', *asked(folder)]
    done = subprocess.run(command, input='y\n' * 5, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 1
    assert '--remote-code' in done.stderr
    assert 'Do you wish' not in done.stdout + done.stderr
    assert not (folder.parent / 'ran').exists()


def test_remote_code_does_not_run_in_tokenizer_parity_check(folder, monkeypatch):
    with_tokenizer_code(folder)
    monkeypatch.setattr('builtins.input', lambda *_: 'y')
    with pytest.raises(Exception, match='trust_remote_code'):
        convert.check_tokenizer_parity(folder)
    assert not (folder.parent / 'ran').exists()
