"""Tasks of lm-evaluation-harness on a checkpoint of a run or on a Hugging Face model."""

import contextlib
import difflib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.model import LM, TemplateLM
from lm_eval.tasks import TaskManager

from sinklab.analysis.model_ref import resolve_checkpoint
from sinklab.analysis.run_model import RunModel
from sinklab.config.spec import Spec
from sinklab.errors import UserError, format_error
from sinklab.hf import gguf
from sinklab.run_dir import GGUF_PREFIX, MODEL_PREFIXES

MIN_LENGTH = 32  # shorter texts are padded to this length
BOOTSTRAP_ITERATIONS = 1000  # for the bootstrapped standard error
HF_BATCH_SIZE = 8  # texts in a batch of a Hugging Face model
NON_METRIC_KEYS = 'alias', 'name', 'sample_len', 'sample_count', ' '


class SinklabLM(TemplateLM):
    """A run as a model of lm-evaluation-harness.

    Texts are formatted as in training. A text that is longer than the training length loses its beginning.
    """

    def __init__(self, run_model: RunModel):
        super().__init__()
        check_scorable(run_model.spec, run_model.name)
        self.run_model = run_model
        self.prefix_ids = run_model.encode('')
        self.max_length = run_model.spec.data.length
        self.max_text_tokens = self.max_length - len(self.prefix_ids)

    @property
    def eot_token_id(self) -> int:
        return self.run_model.spec.data.end_token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, or the end-of-text token."""
        return [self.eot_token_id, *self.prefix_ids][-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.run_model.encode(string)
        return ids[len(self.prefix_ids) :] if add_special_tokens is False else ids

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        parts_by_request = [[*self.split_request(context, continuation)] for _, context, continuation in requests]
        scores = iter(self.score_parts([part for items in parts_by_request for part in items]))
        scores_by_request = [[next(scores) for _ in items] for items in parts_by_request]
        return [
            (sum((score for score, _ in items), 0.0), all(greedy for _, greedy in items))
            for items in scores_by_request
        ]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        scores = self._loglikelihood_tokens([(None, [self.prefix_token_id], ids) for ids in texts], disable_tqdm)
        return [score for score, _ in scores]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        raise UserError('a task generates text, and runs only score given texts; give a task with choices or a loss')

    def truncate(self, ids: list[int]) -> list[int]:
        """Drop ids after the prefix until the rest fits the training length."""
        return [*self.prefix_ids, *ids[len(self.prefix_ids) :][-self.max_text_tokens :]]

    def split_request(self, context: list[int], continuation: list[int]) -> Iterator[tuple[list[int], int]]:
        """Yield (ids, number of last ids to predict): one part, or several for a long continuation."""
        context = context or [self.prefix_token_id]  # lm_eval has moved a context of spaces into the continuation
        ids = [*context, *continuation]
        for start in range(len(context), len(ids), self.max_text_tokens):
            end = min(start + self.max_text_tokens, len(ids))
            yield [*self.truncate(ids[: end - 1]), ids[end - 1]], end - start

    def score_parts(self, parts: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return (log-probability of the predicted ids, whether greedy decoding gives them) for each part.

        Lengths are padded to powers of two, so that there are few shapes to compile. Padding follows the text, so
        that its causal attention does not see it.
        """
        scores: list[Any] = [None] * len(parts)
        indices_by_length: dict[int, list[int]] = {}
        for index, (ids, _) in enumerate(parts):
            indices_by_length.setdefault(self.choose_length(len(ids) - 1), []).append(index)
        for length, indices in indices_by_length.items():
            ids_PT = np.zeros((len(indices), length + 1), np.int32)
            for row, index in enumerate(indices):
                ids_PT[row, : len(parts[index][0])] = parts[index][0]
            arrays = self.run_model.score_tokens(ids_PT)
            for row, index in enumerate(indices):
                ids, num_predicted = parts[index]
                predicted = 0, row, slice(len(ids) - 1 - num_predicted, len(ids) - 1)
                is_greedy = bool(arrays['is_greedy_LPT'][predicted].all())
                scores[index] = -arrays['loss_LPT'][predicted].sum(dtype=float), is_greedy
        return scores

    def choose_length(self, length: int) -> int:
        """Return the padded length of a text."""
        return min(max(MIN_LENGTH, 1 << (length - 1).bit_length()), self.max_length)


def check_scorable(spec: Spec, name: str) -> None:
    """Refuse a run that cannot score texts, or that was trained on another format of texts."""
    data, prefix = spec.data, spec.model.mask.prefix
    if data.task != 'text':
        raise UserError(f'{name} was trained on {data.task}, not on text; give another run')
    if prefix:
        raise UserError(
            f'{name} does not predict the first {prefix} tokens of a text (mask.prefix); give another run'
        )
    if (data.fixed_position or 1) > 1 and data.fixed_held_out:
        raise UserError(f'{name} was trained with a fixed token inside texts (data.fixed_position); give another run')
    if data.random_first:
        raise UserError(f'{name} was trained with random tokens inside texts (data.random_first); give another run')


def load_task_manager(task_names: list[str], include_dir: str | None) -> TaskManager:
    """Return a task manager of `include_dir` alone if it has all tasks, otherwise of all tasks of lm_eval.

    Indexing the tasks of lm_eval is slow.
    """
    manager = TaskManager(include_path=include_dir, include_defaults=False)
    return manager if {*task_names} <= {*manager.all_subtasks} else TaskManager(include_path=include_dir)


def match_tasks(manager: TaskManager, task_names: list[str]) -> list[str]:
    """Return the tasks that match names or patterns; raise UserError for a name that matches none."""
    for name in task_names:
        if not manager.match_tasks([name]):
            suggestions = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f'did you mean {" or ".join(suggestions)}?' if suggestions else 'give --include=DIR for your own'
            raise UserError(f'--tasks={name} is not a task of lm-evaluation-harness; {hint}')
    return manager.match_tasks(task_names)


def load_lm(model_ref: str) -> LM:
    """Load a checkpoint of a run, or an open model by the Hugging Face loader of lm-evaluation-harness."""
    if not model_ref.startswith(MODEL_PREFIXES):
        return SinklabLM(RunModel(*resolve_checkpoint(model_ref)))
    model_dir = gguf.find_model_dir(model_ref)
    try:
        import torch
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(f"{model_ref} needs {error.name}; install it: pip install 'lm-eval[hf]'") from error
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    with contextlib.redirect_stdout(sys.stderr):
        return HFLM(pretrained=str(model_dir), device=device, batch_size=HF_BATCH_SIZE)


def evaluate_tasks(
    model_ref: str,
    task_names: list[str],
    include_dir: str | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
) -> dict[str, Any]:
    """Evaluate tasks; return the metrics of each task and group under the names of lm-evaluation-harness."""
    os.environ['DISABLE_MULTIPROC'] = '1'  # lm_eval would fork this process, which has threads
    manager = load_task_manager(task_names, include_dir)
    matched_names = match_tasks(manager, task_names)
    lm = load_lm(model_ref)  # after names are checked, since it can take minutes
    try:
        with contextlib.redirect_stdout(sys.stderr):
            results = lm_eval.simple_evaluate(
                lm,
                tasks=matched_names,
                task_manager=manager,
                limit=limit,
                num_fewshot=few_shot,
                log_samples=False,
                bootstrap_iters=BOOTSTRAP_ITERATIONS,
            )
    except UserError:
        raise
    except (OSError, ValueError) as error:  # of the hub, of data files, or of a task that needs more than text
        raise UserError(
            f'{", ".join(matched_names)} cannot be evaluated ({format_error(error, with_type=True)}); tasks read '
            'their data from the Hugging Face hub, or from the files that their YAML file names'
        ) from error
    summaries = {name: summarize_task(name, results) for name in {**results['results'], **results.get('groups', {})}}
    if isinstance(lm, SinklabLM):
        header = dict(model=lm.run_model.name, digest=lm.run_model.digest)
    else:
        header = describe_open_model(model_ref, lm)
    return dict(**header, lm_eval=version('lm_eval'), limit=limit, tasks=summaries)


def describe_open_model(model_ref: str, lm: Any) -> dict[str, Any]:
    header = dict(model=model_ref, dtype=str(lm.model.dtype).removeprefix('torch.'))
    if not model_ref.startswith(GGUF_PREFIX):
        return header
    return header | dict(remarks=gguf.read_remarks(gguf.convert_gguf(model_ref)))


def summarize_task(name: str, results: dict) -> dict[str, Any]:
    numbers = {**results['results'], **results.get('groups', {})}[name]
    return dict(
        version=results['versions'].get(name),
        few_shot=results['n-shot'].get(name),
        samples=results['n-samples'].get(name, {}).get('effective'),
        numbers={
            key: value
            for key, value in numbers.items()
            if isinstance(value, int | float) and key not in NON_METRIC_KEYS
        },
    )
