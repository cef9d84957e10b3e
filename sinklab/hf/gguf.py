"""Conversion of GGUF files (llama.cpp, Ollama, LM Studio) to transformers folders in float32."""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.errors import UserError, format_error
from sinklab.hf import files
from sinklab.hf.convert import suppress_transformers_logs
from sinklab.hf.files import import_hf_library
from sinklab.run_ref import GGUF_PREFIX, HF_PREFIX
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.storage.files import TEMPORARY_SUFFIX, open_writable_folder

CONVERSION_VERSION = 4  # a file that an older version has converted is converted again
ORIGIN_FILE = 'sinklab_gguf.json'  # in a converted folder: remarks on its conversion
MAX_NAME_LENGTH = 100  # characters of the file name in the name of its folder in the cache
ROPE_FACTORS = 'rope_freqs.weight'  # the tensor by which llama.cpp divides rotary frequencies
ROPE_BASE = 10_000.0  # of llama.cpp where a file has none, and of Gemma's layers with a window
# llama.cpp stores the result of the llama3 scaling, not its parameters. All LLaMA 3 models share these; the factor is
# the largest entry of the tensor.
LLAMA3_SCALING = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# The numbers of layers of the 27B models. Their scores are divided by sqrt(hidden_size / heads), which files do not
# say; transformers takes sqrt(256), as for all other Gemma models.
LAYERS_OF_GEMMA_27B = {'gemma2': 46, 'gemma3': 62}


def find_model_dir(model_ref: str) -> Path:
    """Return the transformers folder of hf:PATH_OR_ID, or of the converted file of gguf:PATH."""
    if model_ref.startswith(GGUF_PREFIX):
        return convert_gguf(model_ref)
    return files.find_model_dir(model_ref.removeprefix(HF_PREFIX))


def convert_gguf(model_ref: str) -> Path:
    """Convert the file of gguf:PATH to a transformers folder in the cache, unless the cache has it.

    Returns:
        The folder: float32 weights as safetensors, config.json, the tokenizer if the file has one, and ORIGIN_FILE.

    Raises:
        UserError: The file is missing, damaged, or cannot be read by transformers; a package, memory or disk space
            is missing.
    """
    path = find_gguf_file(model_ref)
    root = get_cache_dir().resolve() / 'gguf'
    model_dir = root / f'{path.name[:MAX_NAME_LENGTH]}-{compute_identity(path)}'
    if model_dir.exists():
        return model_dir
    for library in ('accelerate', 'gguf', 'torch', 'transformers'):
        import_hf_library(library)
    reader = read_gguf(path, model_ref)
    num_parameters = sum(count_parameters_by_type(reader).values())
    with open_writable_folder(root):
        files.check_disk_space(root, 4 * num_parameters, model_ref)
        files.check_memory(4 * num_parameters, num_parameters, model_ref)
        print(f'converting {model_ref} into {model_dir}', file=sys.stderr, flush=True)
        temp_dir = root / f'{uuid.uuid4().hex}{TEMPORARY_SUFFIX}'
        try:
            temp_dir.mkdir()
            write_model(path, reader, temp_dir, model_ref)
            files.move_into_cache(temp_dir, model_dir)
        finally:
            shutil.rmtree(temp_dir, ignore_errors=True)
    return model_dir


def find_gguf_file(model_ref: str) -> Path:
    path = files.expand_user(model_ref.removeprefix(GGUF_PREFIX))
    if not path.is_file():
        raise UserError(f'{model_ref} is not a file; give {GGUF_PREFIX}PATH, a .gguf file on this computer')
    return path


def compute_identity(path: Path) -> str:
    """Compute a digest of a GGUF file's path, size and modification time, and of what converts it.

    That is CONVERSION_VERSION and the versions of transformers and gguf.
    """
    stat = path.stat()
    versions = [find_version(library) for library in ('transformers', 'gguf')]
    identity = str(path.resolve()), stat.st_size, stat.st_mtime_ns, CONVERSION_VERSION, *versions
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def find_version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_gguf(path: Path, model_ref: str) -> Any:
    """Return a `gguf.GGUFReader` of a file.

    Raises:
        UserError: The file is damaged, or one part of several.
    """
    try:
        reader = import_hf_library('gguf').GGUFReader(path)
    except Exception as error:  # of a damaged file, numpy and gguf raise exceptions of many types
        message = format_error(error, with_type=True)
        raise UserError(f'{model_ref} is damaged or incomplete ({message}); download it again') from error
    if (parts := get_field(reader, 'split.count', 1)) > 1:
        raise UserError(
            f'{model_ref} is one of {parts} parts of a model, which transformers does not read; join them with '
            'llama.cpp: llama-gguf-split --merge FIRST_PART OUTPUT.gguf'
        )
    return reader


def get_field(reader: Any, name: str, default: Any = None) -> Any:
    return reader.fields[name].contents() if name in reader.fields else default


def get_rope_fields(reader: Any) -> dict[str, Any]:
    """Return the metadata of rotary positions, by their names after `rope.`."""
    prefix = f'{get_field(reader, "general.architecture")}.rope.'
    names = [name for name in reader.fields if name.startswith(prefix)]
    return {name.removeprefix(prefix): get_field(reader, name) for name in names}


def count_parameters_by_type(reader: Any) -> dict[str, int]:
    """Count the parameters of each quantization type, the most frequent type first."""
    counts: Counter[str] = Counter()
    for tensor in reader.tensors:
        if tensor.name != ROPE_FACTORS:
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
    return dict(counts.most_common())


def write_model(path: Path, reader: Any, output_dir: Path, model_ref: str) -> None:
    """Load a GGUF file with transformers, and write the folder of the model."""
    transformers = import_hf_library('transformers')
    with (
        # transformers also reads files beside the GGUF file, which may be those of another model.
        tempfile.TemporaryDirectory() as source_dir,
        suppress_transformers_logs(transformers),
        contextlib.redirect_stderr(io.StringIO()),  # progress bars that transformers cannot turn off
    ):
        (Path(source_dir) / 'model.gguf').symlink_to(path.resolve())
        num_parameters = save_weights(source_dir, reader, output_dir, model_ref)
        remarks = [*list_weight_remarks(reader, num_parameters), *save_tokenizer(source_dir, reader, output_dir)]
    files.write_json(output_dir / ORIGIN_FILE, dict(remarks=remarks))


def save_weights(source_dir: str, reader: Any, output_dir: Path, model_ref: str) -> int:
    """Dequantize and save the weights and the config; return the number of parameters."""
    torch, transformers = import_hf_library('torch'), import_hf_library('transformers')
    try:
        config = transformers.AutoConfig.from_pretrained(source_dir, gguf_file='model.gguf')
        set_rotary_positions(config, reader, model_ref)
        if config.num_hidden_layers == LAYERS_OF_GEMMA_27B.get(get_field(reader, 'general.architecture')):
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            source_dir,
            config=config,
            gguf_file='model.gguf',
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except UserError:
        raise
    except Exception as error:
        message = format_error(error, with_type=True)
        raise UserError(
            f'{model_ref} cannot be loaded by transformers {transformers.__version__}: {message}; give another model'
        ) from error
    if missing := sorted(map(str, [*loading_info['missing_keys'], *loading_info['mismatched_keys']])):
        raise UserError(f'{model_ref} is incomplete: {len(missing)} of its arrays are missing ({missing[0]}, ...)')
    if hasattr(model.config, 'quantization_config'):
        del model.config.quantization_config
    model.save_pretrained(output_dir)
    return sum(parameter.numel() for parameter in model.parameters())


def set_rotary_positions(config: Any, reader: Any, model_ref: str) -> None:
    """Set base, dimensions and scaling of rotary positions; transformers reads some, of some architectures."""
    if not (rope := getattr(config, 'rope_parameters', None)):
        return
    fields = get_rope_fields(reader)
    head_width = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
    scaling = parse_rope_scaling(reader, head_width, model_ref)
    scaling |= dict(rope_theta=fields.get('freq_base', ROPE_BASE))
    if 'full_attention' in rope:  # of Gemma 3, whose other layers have a base of their own and no scaling
        local_rope = rope['sliding_attention'] | dict(rope_theta=fields.get('freq_base_swa', ROPE_BASE))
        config.rope_parameters = dict(full_attention=rope['full_attention'] | scaling, sliding_attention=local_rope)
        return
    fraction = fields.get('dimension_count', head_width) / head_width
    if fraction < 1 or 'partial_rotary_factor' in rope:
        scaling |= dict(partial_rotary_factor=min(fraction, 1.0))
    config.rope_parameters = rope | scaling


def parse_rope_scaling(reader: Any, head_width: int, model_ref: str) -> dict[str, Any]:
    """Parse the scaling of rotary positions; empty if there is none. As in llama.cpp, the default type is linear."""
    fields = get_rope_fields(reader)
    factor = fields.get('scaling.factor', fields.get('scale_linear'))  # the current and the older name
    scaling_type = fields.get('scaling.type', 'none' if factor is None else 'linear')
    factors = [tensor.data for tensor in reader.tensors if tensor.name == ROPE_FACTORS]
    if any(tensor.name.startswith('rope_factors_') for tensor in reader.tensors):
        scaling_type = 'longrope'  # Phi 3 does not name it
    if scaling_type == 'none' and not factors:
        return {}
    if scaling_type == 'none':
        base, dimensions = fields.get('freq_base', ROPE_BASE), fields.get('dimension_count', head_width)
        llama3_factor = float(np.max(factors))
        expected = compute_llama3_factors(base, dimensions, llama3_factor)
        if np.shape(factors[0]) == expected.shape and np.allclose(factors[0], expected, rtol=1e-3, atol=0):
            return dict(rope_type='llama3', factor=llama3_factor, **LLAMA3_SCALING)
        scaling_type = f'{ROPE_FACTORS} (not that of LLaMA 3)'
    if scaling_type != 'linear' or factor is None or factors:
        raise UserError(
            f'{model_ref} has rotary positions of type {scaling_type}, which transformers does not read from GGUF '
            'files; give its safetensors folder as hf:PATH'
        )
    return dict(rope_type='linear', factor=float(factor))


def compute_llama3_factors(base: float, dimensions: int, factor: float) -> np.ndarray:
    """Compute the divisors of rotary frequencies of LLaMA 3: `factor` for low ones, 1 for high ones."""
    frequency_K = base ** (-np.arange(0, dimensions, 2) / dimensions)
    turns_K = LLAMA3_SCALING['original_max_position_embeddings'] * frequency_K / (2 * np.pi)
    slow, fast = LLAMA3_SCALING['low_freq_factor'], LLAMA3_SCALING['high_freq_factor']
    unscaled_share_K = np.clip((turns_K - slow) / (fast - slow), 0, 1)
    return 1 / ((1 - unscaled_share_K) / factor + unscaled_share_K)


def list_weight_remarks(reader: Any, num_parameters: int) -> Iterator[str]:
    """Yield where the weights come from, and whether transformers has others than the file."""
    counts = count_parameters_by_type(reader)
    yield f'weights come from GGUF ({", ".join(counts)}), dequantized to float32'
    if num_parameters != sum(counts.values()):
        yield (
            f'the GGUF file has {sum(counts.values()):,} parameters, the model of transformers {num_parameters:,}; '
            'they may not be the same model'
        )


def save_tokenizer(source_dir: str, reader: Any, output_dir: Path) -> Iterator[str]:
    """Save the tokenizer, if transformers can read it; yield remarks on it."""
    try:
        tokenizer = import_hf_library('transformers').AutoTokenizer.from_pretrained(
            source_dir, gguf_file='model.gguf'
        )
        tokenizer.save_pretrained(output_dir)
    except Exception as error:  # transformers raises exceptions of many types here
        yield f'transformers cannot read the tokenizer of the GGUF file ({format_error(error, with_type=True)})'
        return
    adds_bos = tokenizer.bos_token_id is not None and tokenizer('a')['input_ids'][:1] == [tokenizer.bos_token_id]
    if get_field(reader, 'tokenizer.ggml.add_bos_token', adds_bos) != adds_bos:
        verbs = ('adds', 'does not add') if adds_bos else ('does not add', 'adds')
        yield f'the tokenizer of transformers {verbs[0]} BOS to texts, llama.cpp {verbs[1]} it; measure takes --bos'


def read_remarks(model_dir: Path) -> list[str]:
    """Return the remarks on the conversion of a GGUF file; none for another folder."""
    if not (model_dir / ORIGIN_FILE).exists():
        return []
    return [str(remark) for remark in files.read_json_object(model_dir / ORIGIN_FILE).get('remarks', ())]
