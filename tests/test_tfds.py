"""Tests of TensorFlow Datasets as a source, without TensorFlow and without a network."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sinklab.data.sources import open_source
from sinklab.errors import UserError

ROOT = Path(__file__).parents[1]
TEXTS = [f'text number {number}: ' + 'wörd ' * (number % 7) for number in range(50)]
BUILDER_SCRIPT = """
    import numpy as np
    import tensorflow_datasets as tfds

    class Builder(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version('1.0.0')

        def _info(self):
            strings = dict(story=tfds.features.Text(), kind=tfds.features.Tensor(shape=(), dtype=np.object_))
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(strings))

        def _split_generators(self, dl_manager):
            return {'train': self._generate_examples(0), 'test': self._generate_examples(40)}

        def _generate_examples(self, first):
            for number, text in list(enumerate(TEXTS))[first:]:
                yield number, dict(story=text, kind='even' if number % 2 == 0 else 'odd')

    builder = Builder(data_dir=FOLDER, file_format='array_record')
    builder.download_and_prepare()
    print(builder.data_dir)
"""
READER_SCRIPT = """
    import json, sys
    from sinklab.data.sources import open_source
    found = [(d.name, d.text, d.domain) for d in open_source(sys.argv[1]).read_documents()]
    assert 'tensorflow' not in sys.modules
    print(json.dumps(found))
"""


def run_offline(program, *arguments):
    """Run a program in a subprocess without a network; return the last line of its output."""
    environment = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'http_proxy': 'http://localhost:9',
        'https_proxy': 'http://localhost:9',
    }
    command = [sys.executable, '-c', textwrap.dedent(program), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout.strip().splitlines()[-1]


@pytest.fixture(scope='module')
def dataset_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tfds')
    (folder / 'stories').mkdir()
    (folder / 'stories' / '__init__.py').touch()
    program = f'TEXTS = {TEXTS!r}\nFOLDER = {str(folder / "data")!r}\n' + textwrap.dedent(BUILDER_SCRIPT)
    (folder / 'stories' / 'stories_dataset_builder.py').write_text(program)
    return run_offline(f'import sys; sys.path.insert(0, {str(folder)!r}); import stories.stories_dataset_builder')


@pytest.mark.slow
def test_tfds_examples_are_documents_without_tensorflow(dataset_folder):
    documents = json.loads(run_offline(READER_SCRIPT, f'tfds:{dataset_folder}:train#field=story,domain=kind'))
    assert sorted((text, domain) for _, text, domain in documents) == sorted(
        (text, 'even' if number % 2 == 0 else 'odd') for number, text in enumerate(TEXTS)
    )
    assert len({name for name, *_ in documents}) == len(TEXTS)


@pytest.mark.slow
def test_tfds_splits_and_slices_are_read(dataset_folder):
    def read_texts(suffix):
        return [
            document.text for document in open_source(f'tfds:{dataset_folder}{suffix}#field=story').read_documents()
        ]

    texts = read_texts('')
    assert read_texts(':train[:50%]') == texts[:25]
    assert read_texts(':train[10:20]') == texts[10:20]
    assert sorted(read_texts(':test')) == sorted(TEXTS[40:])


@pytest.mark.slow
def test_tfds_file_format_that_needs_tensorflow_is_rejected(dataset_folder, tmp_path):
    shutil.copytree(dataset_folder, tmp_path / 'other')
    info = tmp_path / 'other' / 'dataset_info.json'
    info.write_text(info.read_text().replace('array_record', 'tfrecord'))
    with pytest.raises(UserError, match='tfds build'):
        open_source(f'tfds:{tmp_path}/other')


def test_tfds_dataset_that_cannot_be_prepared_is_rejected_with_remedy(tmp_path, monkeypatch):
    tfds = pytest.importorskip('tensorflow_datasets')

    def raise_connection_error(_):
        raise ConnectionError('no\nroute')

    monkeypatch.setattr(tfds.core.DatasetBuilder, 'download_and_prepare', raise_connection_error)
    monkeypatch.setattr(tfds.core.DatasetBuilder, 'is_prepared', lambda _: False)
    with pytest.raises(UserError, match='tfds build tiny_shakespeare'):
        open_source('tfds:tiny_shakespeare')


@pytest.mark.parametrize(('suffix', 'word'), [(':valid', 'valid'), ('#field=body', 'body'), (':train[', 'train[')])
def test_tfds_unknown_split_or_field_is_rejected_with_one_line(dataset_folder, suffix, word):
    with pytest.raises(UserError) as error:
        list(open_source(f'tfds:{dataset_folder}{suffix}').read_documents())
    assert '\n' not in str(error.value)
    assert word in str(error.value)
