"""Conversion of GGUF files (llama.cpp, Ollama, LM Studio) to transformers folders in float32."""

import contextlib
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinklab.errors import UserError, format_error
from sinklab.hf import files
from sinklab.hf.files import import_hf_library
from sinklab.run_dir import GGUF_PREFIX
from sinklab.storage.paths import get_cache_dir

CONVERSION_VERSION = 5  # a file that an older version has converted is converted again
ORIGIN_FILE = 'sinklab_gguf.json'  # in a converted folder: remarks on its conversion
ROPE_BASE = 10_000.0  # of llama.cpp where a file has none, and of Gemma's layers with a window
# Tensors that scale rotary frequencies, of LLaMA 3 and of Phi 3.
ROPE_TENSORS = ('rope_freqs', 'rope_factors_')
# The numbers of layers of the 27B models. Their scores are divided by sqrt(hidden_size / heads), which files do not
# say; transformers takes sqrt(256), as for all other Gemma models.
LAYERS_OF_GEMMA_27B = {'gemma2': 46, 'gemma3': 62}


def find_model_dir(model_ref: str) -> Path:
    """Return the transformers folder of hf:PATH_OR_ID, or of the converted file of gguf:PATH."""
    return convert_gguf(model_ref) if model_ref.startswith(GGUF_PREFIX) else files.find_model_dir(model_ref)


def convert_gguf(model_ref: str) -> Path:
    """Convert the file of gguf:PATH to a transformers folder in the cache, unless the cache has it.

    Returns:
        The folder: float32 weights as safetensors, config.json, the tokenizer if the file has one, and ORIGIN_FILE.

    Raises:
        UserError: The file is missing, damaged, or cannot be read by transformers; a package or memory is missing.
    """
    path = find_gguf_file(model_ref)
    model_dir = get_cache_dir().resolve() / 'gguf' / f'{path.name}-{compute_identity(model_ref)}'
    if model_dir.exists():
        return model_dir
    for library in ('accelerate', 'gguf', 'torch', 'transformers'):
        import_hf_library(library)
    reader = read_gguf(path, model_ref)
    num_parameters = sum(count_parameters_by_type(reader).values())
    files.check_memory(4 * num_parameters, num_parameters, model_ref)
    with files.write_folder(model_dir) as temp_dir:
        print(f'converting {model_ref} into {model_dir}', file=sys.stderr, flush=True)
        write_model(path, reader, temp_dir, model_ref)
    return model_dir


def find_gguf_file(model_ref: str) -> Path:
    path = Path(os.path.expanduser(model_ref.removeprefix(GGUF_PREFIX)))
    if not path.is_file():
        raise UserError(f'{model_ref} is not a file; give {GGUF_PREFIX}PATH, a .gguf file on this computer')
    return path


def compute_identity(model_ref: str) -> str:
    """Compute a digest of the files of hf:PATH_OR_ID or gguf:PATH, and of what converts a GGUF file."""
    if model_ref.startswith(GGUF_PREFIX):
        version = import_hf_library('transformers').__version__
        return files.compute_identity([find_gguf_file(model_ref)], CONVERSION_VERSION, version)
    model_dir = files.find_model_dir(model_ref)
    paths = [model_dir / name for name in (files.CONFIG_FILE, 'tokenizer.json')]
    return files.compute_identity([*paths, *files.list_weight_files(model_dir)])


def read_gguf(path: Path, model_ref: str) -> Any:
    """Return a `gguf.GGUFReader` of a file; raise UserError if the file is damaged."""
    try:
        return import_hf_library('gguf').GGUFReader(path)
    except Exception as error:  # of a damaged file, numpy and gguf raise exceptions of many types
        message = format_error(error, with_type=True)
        raise UserError(f'{model_ref} is damaged or incomplete ({message}); download it again') from error


def get_field(reader: Any, name: str, default: Any = None) -> Any:
    return reader.fields[name].contents() if name in reader.fields else default


def count_parameters_by_type(reader: Any) -> dict[str, int]:
    """Count the parameters of each quantization type, the most frequent type first."""
    counts: Counter[str] = Counter()
    for tensor in reader.tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    return dict(counts.most_common())


def write_model(path: Path, reader: Any, output_dir: Path, model_ref: str) -> None:
    """Load and dequantize a GGUF file with transformers, and write the folder of the model."""
    with (
        # transformers also reads files beside the GGUF file, which may be those of another model.
        tempfile.TemporaryDirectory() as source_dir,
        contextlib.redirect_stderr(io.StringIO()),  # progress bars that transformers cannot turn off
        files.call_transformers(model_ref) as transformers,
    ):
        (Path(source_dir) / 'model.gguf').symlink_to(path.resolve())
        config = transformers.AutoConfig.from_pretrained(source_dir, gguf_file='model.gguf')
        set_rotary_positions(config, reader, model_ref)
        if config.num_hidden_layers == LAYERS_OF_GEMMA_27B.get(get_field(reader, 'general.architecture')):
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
        model = files.load_model(
            source_dir,
            model_ref,
            config=config,
            gguf_file='model.gguf',
            dtype=import_hf_library('torch').float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        if hasattr(model.config, 'quantization_config'):
            del model.config.quantization_config
        model.save_pretrained(output_dir)
        remarks = [*list_weight_remarks(reader, model), *save_tokenizer(source_dir, reader, output_dir)]
    files.write_json(output_dir / ORIGIN_FILE, dict(remarks=remarks))


def set_rotary_positions(config: Any, reader: Any, model_ref: str) -> None:
    """Set base, dimensions and linear scaling of rotary positions; transformers reads some, of some architectures.

    Raises:
        UserError: The file has another scaling.
    """
    if not (rope := getattr(config, 'rope_parameters', None)):
        return
    prefix = f'{get_field(reader, "general.architecture")}.rope.'
    fields = {name.removeprefix(prefix): get_field(reader, name) for name in reader.fields if name.startswith(prefix)}
    factor = fields.get('scaling.factor', fields.get('scale_linear'))  # the current and the older name
    scaling_type = fields.get('scaling.type', 'none' if factor is None else 'linear')
    has_tensors = any(tensor.name.startswith(ROPE_TENSORS) for tensor in reader.tensors)
    if has_tensors or scaling_type not in ('none', 'linear') or (scaling_type == 'linear' and factor is None):
        raise UserError(
            f'{model_ref} scales rotary positions (type {scaling_type}, or by tensors) as transformers does not read '
            'it from GGUF files; give its safetensors folder as hf:PATH'
        )
    changes = dict(rope_theta=fields.get('freq_base', ROPE_BASE))
    if scaling_type == 'linear':
        changes |= dict(rope_type='linear', factor=float(factor))
    if 'full_attention' in rope:  # of Gemma 3, whose other layers have a base of their own and no scaling
        local_rope = rope['sliding_attention'] | dict(rope_theta=fields.get('freq_base_swa', ROPE_BASE))
        config.rope_parameters = dict(full_attention=rope['full_attention'] | changes, sliding_attention=local_rope)
        return
    head_width = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
    fraction = fields.get('dimension_count', head_width) / head_width
    if fraction < 1 or 'partial_rotary_factor' in rope:
        changes |= dict(partial_rotary_factor=min(fraction, 1.0))
    config.rope_parameters = rope | changes


def list_weight_remarks(reader: Any, model: Any) -> Iterator[str]:
    """Yield where the weights come from, and whether transformers has others than the file."""
    counts = count_parameters_by_type(reader)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
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
