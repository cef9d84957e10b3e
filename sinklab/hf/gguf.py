"""Conversion of GGUF files (llama.cpp, Ollama, LM Studio) to transformers folders in float32."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.errors import UserError, format_error, format_unknown_name
from sinklab.hf import files
from sinklab.hf.convert import suppress_transformers_logs
from sinklab.hf.files import import_hf_library
from sinklab.run_ref import GGUF_PREFIX, HF_PREFIX
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.storage.files import TEMPORARY_SUFFIX, open_writable_folder

CONVERSION_VERSION = 2  # a file that an older version has converted is converted again
ORIGIN_FILE = 'sinklab_gguf.json'  # in a converted folder: which file it comes from, and remarks
MAGIC = b'GGUF'
SPLIT_PATTERN = re.compile(r'-\d{5}-of-(\d{5})\.gguf$')
MAX_NAME_LENGTH = 100  # characters of the file name in the name of its folder in the cache
ROPE_FACTORS = 'rope_freqs.weight'  # the tensor by which llama.cpp divides rotary frequencies
# The numbers of layers of the 27B models. Their scores are divided by sqrt(hidden_size / heads), which files do not
# say; transformers takes sqrt(256), as for all other Gemma models.
LAYERS_OF_GEMMA_27B = {'gemma2': 46, 'gemma3': 62}
# llama.cpp stores the result of the llama3 scaling, not its parameters. All LLaMA 3 models share these; the factor is
# the largest entry of the tensor.
LLAMA3_SCALING = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LINEAR_FACTORS = ('scaling.factor', 'scale_linear')  # the current and the older name
ROPE_NUMBERS = ('freq_base', 'freq_base_swa', 'dimension_count', 'dimension_count_swa')
# What does not change the rotary positions of texts without scaling, or with a linear one.
UNUSED_ROPE_FIELDS = ('scaling.original_context_length', 'scaling.finetuned', 'dimension_sections')
ROPE_FIELDS = {*ROPE_NUMBERS, *LINEAR_FACTORS, *UNUSED_ROPE_FIELDS, 'scaling.type'}
# The base of llama.cpp where a file has none, and of Gemma's layers with a window.
ROPE_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """Metadata, tensor names and sizes of a GGUF file, read before transformers loads it."""

    fields: dict[str, Any]  # values of its metadata; of arrays, only those about rotary positions
    has_tokenizer: bool
    num_parameters: int
    max_tensor_parameters: int  # of the largest tensor
    parameters_by_type: dict[str, int]  # the most frequent type first, such as {'Q4_1': 106168320, 'F32': 35136}
    rope_factors: np.ndarray | None  # the values of ROPE_FACTORS
    tensor_names: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return str(self.fields['general.architecture'])

    @property
    def rope(self) -> dict[str, Any]:
        """The fields of rotary positions, by their names after `rope.`."""
        prefix = f'{self.architecture}.rope.'
        return {name.removeprefix(prefix): value for name, value in self.fields.items() if name.startswith(prefix)}

    @property
    def memory_bytes(self) -> int:
        """The memory that the conversion needs: all parameters in float32, and a copy of the largest tensor."""
        return 4 * (self.num_parameters + self.max_tensor_parameters)


def find_model_dir(model_ref: str, remote_code: bool = False) -> Path:
    """Return the transformers folder of hf:PATH_OR_ID, or of the converted file of gguf:PATH."""
    if model_ref.startswith(GGUF_PREFIX):
        return convert_gguf(model_ref)
    return files.find_model_dir(model_ref.removeprefix(HF_PREFIX), remote_code)


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
    if (model_dir / ORIGIN_FILE).exists():
        return model_dir
    header = read_header(path, model_ref)
    with open_writable_folder(root):
        files.check_disk_space(root, 4 * header.num_parameters, model_ref)
        files.check_memory(header.memory_bytes, header.num_parameters, model_ref)
        print(f'converting {model_ref} into {model_dir}', file=sys.stderr, flush=True)
        temp_dir = root / f'{uuid.uuid4().hex}{TEMPORARY_SUFFIX}'
        try:
            temp_dir.mkdir()
            write_model(path, header, temp_dir, model_ref)
            files.move_into_cache(temp_dir, model_dir, (model_dir / ORIGIN_FILE).exists)
        finally:
            shutil.rmtree(temp_dir, ignore_errors=True)
    return model_dir


def find_gguf_file(model_ref: str) -> Path:
    """Return the path of gguf:PATH; refuse what is no GGUF file, and parts of a split one."""
    path = files.expand_user(model_ref.removeprefix(GGUF_PREFIX))
    try:
        if not path.exists():
            raise UserError(f'{model_ref} does not exist; give {GGUF_PREFIX}PATH, a .gguf file on this computer')
        if not path.is_file():
            found = min(path.glob('*.gguf'), default=None)
            raise UserError(f'{model_ref} is not a file; give {GGUF_PREFIX}{found or "PATH, a .gguf file"}')
        with path.open('rb') as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise UserError(f'{model_ref} cannot be read ({error.strerror}); give a file that can') from error
    if magic != MAGIC:
        raise UserError(f'{model_ref} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}; give another file')
    if match := SPLIT_PATTERN.search(path.name):
        raise make_split_error(model_ref, int(match[1]))
    return path


def make_split_error(model_ref: str, parts: int) -> UserError:
    return UserError(
        f'{model_ref} is one of {parts} parts of a model, which transformers does not read; join them with '
        'llama.cpp: llama-gguf-split --merge FIRST_PART OUTPUT.gguf'
    )


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


def read_header(path: Path, model_ref: str) -> GGUFHeader:
    """Read the metadata of a GGUF file and the types and sizes of its tensors.

    Raises:
        UserError: The file is damaged or one part of several, its tensors have a type that the package gguf cannot
            dequantize, or a package of the extra hf is missing.
    """
    gguf = import_hf_library('gguf')
    for library in ('accelerate', 'torch', 'transformers'):
        import_hf_library(library)
    try:
        reader = gguf.GGUFReader(path)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if field.types and (field.types[0] != gguf.GGUFValueType.ARRAY or '.rope.' in name)
        }
    except Exception as error:  # of a damaged file, numpy and gguf raise exceptions of many types
        message = format_error(error, with_type=True)
        raise UserError(f'{model_ref} is damaged or incomplete ({message}); download it again') from error
    if not isinstance(fields.get('general.architecture'), str) or not reader.tensors:
        raise UserError(f'{model_ref} has no general.architecture or no tensors: it contains no model; give another')
    if fields.get('split.count', 1) > 1:
        raise make_split_error(model_ref, fields['split.count'])
    parameters_by_type: Counter[str] = Counter()
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in parameters_by_type:
            try:
                gguf.dequantize(tensor.data[:1], tensor.tensor_type)
            except Exception as error:
                raise UserError(
                    f'{model_ref}: {tensor.name} is of type {tensor.tensor_type.name}, which the package gguf cannot '
                    f'dequantize ({format_error(error)}); give another quantization'
                ) from error
        parameters_by_type[tensor.tensor_type.name] += int(tensor.n_elements)
    rope_factors = [tensor.data for tensor in reader.tensors if tensor.name == ROPE_FACTORS]
    num_rope_factors = sum(map(len, rope_factors))
    return GGUFHeader(
        fields=fields,
        has_tokenizer='tokenizer.ggml.tokens' in reader.fields,
        num_parameters=parameters_by_type.total() - num_rope_factors,
        max_tensor_parameters=max(int(tensor.n_elements) for tensor in reader.tensors),
        parameters_by_type=dict(parameters_by_type.most_common()),
        rope_factors=np.array(rope_factors[0], np.float32) if rope_factors else None,
        tensor_names=tuple(tensor.name for tensor in reader.tensors),
    )


def write_model(path: Path, header: GGUFHeader, output_dir: Path, model_ref: str) -> None:
    """Load a GGUF file with transformers, and write the folder of the model."""
    transformers = import_hf_library('transformers')
    with (
        # transformers also reads files beside the GGUF file, which may be those of another model.
        tempfile.TemporaryDirectory() as source_dir,
        suppress_transformers_logs(transformers),
        contextlib.redirect_stderr(io.StringIO()),  # progress bars that transformers cannot turn off
    ):
        (Path(source_dir) / 'model.gguf').symlink_to(path.resolve())
        num_parameters = save_weights(source_dir, header, output_dir, model_ref)
        remarks = [*list_weight_remarks(header, num_parameters)]
        remarks += save_tokenizer(source_dir, header, output_dir)
    origin = dict(
        file=str(path.resolve()),
        name=header.fields.get('general.name'),
        architecture=header.architecture,
        parameters=num_parameters,
        parameters_by_type=header.parameters_by_type,
        remarks=remarks,
    )
    files.write_json(output_dir / ORIGIN_FILE, origin)


def save_weights(source_dir: str, header: GGUFHeader, output_dir: Path, model_ref: str) -> int:
    """Dequantize and save the weights and the config; return the number of parameters."""
    torch, transformers = import_hf_library('torch'), import_hf_library('transformers')
    try:
        config = transformers.AutoConfig.from_pretrained(source_dir, gguf_file='model.gguf')
    except Exception as error:
        raise make_architecture_error(header, model_ref, error) from error
    set_rotary_positions(config, header, model_ref)
    if config.num_hidden_layers == LAYERS_OF_GEMMA_27B.get(header.architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    try:
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            source_dir,
            config=config,
            gguf_file='model.gguf',
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except Exception as error:
        message = format_error(error, with_type=True)
        raise UserError(
            f'{model_ref} cannot be loaded by transformers {transformers.__version__}: {message}; give another model'
        ) from error
    if missing := sorted(map(str, [*loading_info['missing_keys'], *loading_info['mismatched_keys']])):
        raise UserError(f'{model_ref} is incomplete: {len(missing)} of its arrays are missing ({missing[0]}, ...)')
    if unused := find_unused_tensors(model, header, loading_info['unexpected_keys']):
        raise UserError(
            f'{model_ref} has tensors that transformers {transformers.__version__} does not use '
            f'({", ".join(unused)}); give its safetensors folder as hf:PATH'
        )
    check_rotary_frequencies(model, header, model_ref)
    if hasattr(model.config, 'quantization_config'):
        del model.config.quantization_config
    model.save_pretrained(output_dir)
    return sum(parameter.numel() for parameter in model.parameters())


def make_architecture_error(header: GGUFHeader, model_ref: str, error: Exception) -> UserError:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    # The list also has two groups of metadata.
    allowed = sorted({*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {'general', 'tokenizer'})
    version = import_hf_library('transformers').__version__
    if header.architecture in allowed:
        message = format_error(error, with_type=True)
        return UserError(f'{model_ref} cannot be loaded by transformers {version}: {message}; give another model')
    subject = f'{model_ref}: architecture {header.architecture!r}'
    return UserError(
        format_unknown_name(subject, header.architecture, allowed, f'read from GGUF by transformers {version}')
    )


def find_unused_tensors(model: Any, header: GGUFHeader, unexpected_keys: Iterable[str]) -> list[str]:
    """List the tensors of a file that transformers has not put into the model.

    Args:
        model: The loaded model.
        header: The header of the file.
        unexpected_keys: What the loader reports. For most architectures, transformers drops tensors that it has no
            names for before that.
    """
    from transformers.integrations.gguf import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    unused = set(unexpected_keys)
    if not is_gguf_arch_supported(header.architecture):
        processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config={})
        used = get_gguf_hf_weights_map(model, processor)  # experts are listed without `.weight`
        unused |= {name for name in header.tensor_names if not {name, name.removesuffix('.weight')} & used.keys()}
    return sorted(unused - {ROPE_FACTORS})  # of which check_rotary_frequencies takes care


def set_rotary_positions(config: Any, header: GGUFHeader, model_ref: str) -> None:
    """Set base, dimensions and scaling of rotary positions; transformers reads some, of some architectures.

    Raises:
        UserError: The file has fields of rotary positions that are unknown, invalid or incomplete.
    """
    scaling = parse_rope_scaling(header, model_ref)
    for name in ROPE_NUMBERS:
        if not isinstance(value := header.rope.get(name, 1), int | float) or not 0 < value < np.inf:
            raise UserError(
                f'{model_ref}: {header.architecture}.rope.{name} is {value!r}, which must be a number above 0; '
                'give another file'
            )
    if not (rope := getattr(config, 'rope_parameters', None)):
        return
    scaling |= dict(rope_theta=header.rope.get('freq_base', ROPE_BASE))
    if 'full_attention' in rope:  # of Gemma 3, whose other layers have a base of their own and no scaling
        local_rope = rope['sliding_attention'] | dict(rope_theta=header.rope.get('freq_base_swa', ROPE_BASE))
        config.rope_parameters = dict(full_attention=rope['full_attention'] | scaling, sliding_attention=local_rope)
        return
    fraction = get_dimension_count(config, header) / get_head_width(config)
    if fraction < 1 or 'partial_rotary_factor' in rope:
        scaling |= dict(partial_rotary_factor=min(fraction, 1.0))
    config.rope_parameters = rope | scaling


def get_head_width(config: Any) -> int:
    return getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads


def get_dimension_count(config: Any, header: GGUFHeader) -> float:
    return header.rope['dimension_count'] if 'dimension_count' in header.rope else get_head_width(config)


def parse_rope_scaling(header: GGUFHeader, model_ref: str) -> dict[str, Any]:
    """Parse the scaling of rotary positions; empty if there is none. As in llama.cpp, the default type is linear."""
    factor = next((header.rope[name] for name in LINEAR_FACTORS if name in header.rope), None)
    scaling_type = header.rope.get('scaling.type', 'none' if factor is None else 'linear')
    allowed_types = ('none', 'linear') if header.rope_factors is None else ('none',)
    unknown = sorted(header.rope.keys() - ROPE_FIELDS)
    fields = [f'{header.architecture}.rope.{name}={header.rope[name]}' for name in unknown]
    if scaling_type not in allowed_types:
        fields += [f'{header.architecture}.rope.scaling.type={scaling_type}']
        fields += [ROPE_FACTORS] * (header.rope_factors is not None)
    if fields:
        raise UserError(
            f'{model_ref} has rotary positions with {", ".join(fields)}, which transformers does not read from GGUF '
            'files; give its safetensors folder as hf:PATH'
        )
    if header.rope_factors is not None:
        return dict(rope_type='llama3', factor=float(header.rope_factors.max()), **LLAMA3_SCALING)
    if scaling_type == 'none':
        return {}
    if not isinstance(factor, int | float) or factor <= 0:
        raise UserError(
            f'{model_ref}: {header.architecture}.rope.scaling.factor is {factor!r}, and the linear scaling of rotary '
            'positions needs a number above 0; give another file'
        )
    return dict(rope_type='linear', factor=float(factor))


def check_rotary_frequencies(model: Any, header: GGUFHeader, model_ref: str) -> None:
    """Refuse a model whose rotary frequencies are not those that llama.cpp computes from the header of its file."""
    all_frequencies = [
        (name.rpartition('.')[2], buffer.numpy())
        for name, buffer in model.named_buffers()
        if name.endswith('inv_freq') and not name.endswith('original_inv_freq')
    ]
    is_equal = bool(all_frequencies) or not header.rope
    divisor = header.rope_factors
    if divisor is None:
        divisor = parse_rope_scaling(header, model_ref).get('factor', 1.0)
    for name, frequencies in all_frequencies:
        is_common = name == 'inv_freq'  # of layers with a window and of those without
        base = header.rope.get('freq_base', ROPE_BASE)
        dimensions = get_dimension_count(model.config, header)
        if name != 'sliding_attention_inv_freq':
            is_equal &= has_frequencies(frequencies, base, dimensions, divisor)
        if name != 'full_attention_inv_freq':
            base = header.rope.get('freq_base_swa', base if is_common else ROPE_BASE)
            dimensions = header.rope.get('dimension_count_swa', dimensions)
            is_equal &= has_frequencies(frequencies, base, dimensions, divisor if is_common else 1.0)
    if not is_equal:
        fields = [f'{header.architecture}.rope.{name}={value}' for name, value in header.rope.items()]
        fields += [ROPE_FACTORS] * (header.rope_factors is not None)
        raise UserError(
            f'{model_ref} has rotary positions with {", ".join(fields) or "the defaults of llama.cpp"}, which '
            f'transformers {import_hf_library("transformers").__version__} does not compute for its architecture; '
            'give its safetensors folder as hf:PATH'
        )


def has_frequencies(frequencies: np.ndarray, base: float, dimensions: float, divisor: Any) -> bool:
    """Return whether rotary frequencies have a base and a number of dimensions, and are divided by factors."""
    expected = base ** -(2 * np.arange(len(frequencies)) / dimensions)
    has_shape = len(frequencies) == (dimensions + 1) // 2 and np.size(divisor) in (1, len(frequencies))
    return has_shape and np.allclose(frequencies, expected / divisor, rtol=1e-5, atol=0)


def list_weight_remarks(header: GGUFHeader, num_parameters: int) -> Iterator[str]:
    yield f'weights come from GGUF ({", ".join(header.parameters_by_type)}), dequantized to float32'
    if num_parameters != header.num_parameters:
        yield (
            f'the GGUF file has {header.num_parameters:,} parameters, the model of transformers {num_parameters:,}'
        )


def save_tokenizer(source_dir: str, header: GGUFHeader, output_dir: Path) -> Iterator[str]:
    """Save the tokenizer, if transformers can read it; yield remarks on it."""
    if not header.has_tokenizer:
        yield 'the GGUF file has no tokenizer'
        return
    try:
        tokenizer = import_hf_library('transformers').AutoTokenizer.from_pretrained(
            source_dir, gguf_file='model.gguf'
        )
        tokenizer.save_pretrained(output_dir)
    except Exception as error:  # transformers raises exceptions of many types here
        yield f'transformers cannot read the tokenizer of the GGUF file ({format_error(error, with_type=True)})'
        return
    adds_bos = tokenizer.bos_token_id is not None and tokenizer('a')['input_ids'][:1] == [tokenizer.bos_token_id]
    if header.fields.get('tokenizer.ggml.add_bos_token', adds_bos) != adds_bos:
        verbs = ('adds', 'does not add') if adds_bos else ('does not add', 'adds')
        yield f'the tokenizer of transformers {verbs[0]} BOS to texts, llama.cpp {verbs[1]} it; measure takes --bos'


def read_remarks(model_dir: Path) -> list[str]:
    """Return the remarks on the conversion of a GGUF file; none for another folder."""
    if not (model_dir / ORIGIN_FILE).exists():
        return []
    return [str(remark) for remark in files.read_json_object(model_dir / ORIGIN_FILE).get('remarks', ())]
