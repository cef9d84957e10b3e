"""Tests that Python code of a model or tokenizer does not run."""

import json

import open_models
import pytest
from commands import get_error_line

pytest.importorskip('torch', reason='open models need torch, which has no wheel here')
pytest.importorskip('transformers', reason='open models need transformers')

pytestmark = pytest.mark.slow

MARKER_CODE = "import os\nopen(os.environ['SINKLAB_TEST_RAN'], 'w').close()\n"
TOKENIZER_CODE = (
    MARKER_CODE + 'from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n'
)
MODEL_CODE = MARKER_CODE + (
    'from transformers import LlamaConfig, LlamaForCausalLM\n'
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    'class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n'
)


def update_json(file, **fields):
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


def add_tokenizer_code(folder):
    (folder / 'tokenization_own.py').write_text(TOKENIZER_CODE)
    auto_map = dict(AutoTokenizer=[None, 'tokenization_own.Own'])
    update_json(folder / 'tokenizer_config.json', tokenizer_class='Own', auto_map=auto_map)


def add_model_code(folder):
    (folder / 'modeling_own.py').write_text(MODEL_CODE)
    auto_map = dict(AutoConfig='modeling_own.OwnConfig', AutoModelForCausalLM='modeling_own.OwnModel')
    update_json(folder / 'config.json', model_type='own', auto_map=auto_map)


def make_arguments(folder):
    (folder.parent / 'text.txt').write_text(open_models.SAMPLE_TEXT)
    source_option = f'--source=text:{folder.parent}/text.txt'
    return ['measure', f'hf:{folder}', source_option, '--sequences=1', '--length=16']


@pytest.mark.parametrize('add_code', [add_tokenizer_code, add_model_code])
def test_remote_code_does_not_run_despite_confirmed_prompt(add_code, folder, capsys, monkeypatch):
    """Answer yes to any prompt of transformers."""
    add_code(folder)
    monkeypatch.setattr('builtins.input', lambda *_: 'y')
    capsys.readouterr()
    assert str(folder) in get_error_line(capsys, *make_arguments(folder))
    assert not (folder.parent / 'ran').exists()
