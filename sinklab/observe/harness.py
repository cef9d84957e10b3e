"""A step of a run as a model of lm-evaluation-harness: --model sinklab --model_args run=RUN@STEP."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from sinklab import sharding
from sinklab.model.transformer import compute_logits
from sinklab.observe.opening import open_model
from sinklab.observe.own import RunModel
from sinklab.observe.writing import GeneratedText, parse_generation_options
from sinklab.record import UserError
from sinklab.spec import Spec
from sinklab.train import state
from sinklab.train.evaluation import make_token_loss
from sinklab.train.forward import make_forward

MAX_LOGITS_BYTES = 1 << 29  # bytes of logits in float32
MIN_LENGTH = 32  # shorter texts are read as texts of so many tokens


@register_model('sinklab')
class SinklabLM(TemplateLM):
    """Texts as training shaped them; of one that is too long, what the training length has room for at its end."""

    def __init__(self, run: str | RunModel, batch_size: int | str = 'auto', **_: Any):  # a device is for jax to choose
        super().__init__()
        self.run_model = run if isinstance(run, RunModel) else open_model(str(run))
        if not isinstance(self.run_model, RunModel):
            raise UserError(f'run={run} is an open model; give lm-evaluation-harness --model hf for it')
        check_scorable(self.run_model.spec, self.run_model.name)
        self.prefix_ids, self.max_length = self.run_model.encode(''), self.run_model.spec.data.length
        self.max_text_tokens = self.max_length - len(self.prefix_ids)
        self.max_batch_size = None if batch_size in ('auto', None) else int(batch_size)
        self.rng = np.random.default_rng(0)

    @property
    def eot_token_id(self) -> int:
        return self.run_model.spec.data.end_token

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context comes after: BOS, or the end of another text."""
        return [self.eot_token_id, *self.prefix_ids][-1]

    def get_model_info(self) -> dict[str, str]:
        return dict(model=self.run_model.name, model_sha=self.run_model.digest)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.run_model.encode(string)
        return ids[len(self.prefix_ids) :] if add_special_tokens is False else ids

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        parts_by_request = [[*self.split_request(context, continuation)] for _, context, continuation in requests]
        scores = iter(self.score_parts([part for items in parts_by_request for part in items], disable_tqdm))
        scores_by_request = [[next(scores) for _ in items] for items in parts_by_request]
        return [
            (sum((score for score, _ in items), 0.0), all(greedy for _, greedy in items)) for items in scores_by_request
        ]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        scores = self._loglikelihood_tokens([(None, [self.prefix_token_id], ids) for ids in texts], disable_tqdm)
        return [score for score, _ in scores]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Every token by a pass over all before it; texts that are finished make room for others."""
        arguments = [request.args for request in requests]
        texts = [GeneratedText(self.tok_encode(context) or [self.prefix_token_id], parse_generation_options(options)) for context, options in arguments]
        batch_size = self.choose_batch_size(self.max_length, len(texts))
        with tqdm(total=len(texts), disable=disable_tqdm, desc='texts written') as progress_bar:
            while unfinished := [text for text in texts if not text.is_done]:
                self.generate_next_tokens(unfinished[:batch_size], batch_size)
                progress_bar.update(sum(text.is_done for text in unfinished))
        return [text.text for text in texts]

    def truncate(self, ids: list[int]) -> list[int]:
        """What is read of ids that begin as every text does."""
        return [*self.prefix_ids, *ids[len(self.prefix_ids) :][-self.max_text_tokens :]]

    def split_request(self, context: list[int], continuation: list[int]) -> Iterator[tuple[list[int], int]]:
        """(ids, how many of the last are predicted): one, or more of a continuation that is too long for one."""
        context = context or [self.prefix_token_id]  # it was of spaces alone, which the library moves
        ids = [*context, *continuation]
        for start in range(len(context), len(ids), self.max_text_tokens):
            end = min(start + self.max_text_tokens, len(ids))
            yield [*self.truncate(ids[: end - 1]), ids[end - 1]], end - start

    def score_parts(self, parts: list[tuple[list[int], int]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """(log-probability of what is predicted, whether each of it is the likeliest), of each part."""
        scores: list[Any] = [None] * len(parts)
        with tqdm(total=len(parts), disable=disable_tqdm, desc='texts read') as progress_bar, jax.set_mesh(self.run_model.mesh):
            for part_indices, batch_size, length in self.make_batches([len(ids) - 1 for ids, _ in parts]):
                ids_BT = pad_texts([parts[part_index][0] for part_index in part_indices], batch_size, length + 1)
                loss_BT, is_greedy_BT = self.run_program(self.token_loss_program, ids_BT)
                for row, part_index in enumerate(part_indices):
                    ids, num_predicted = parts[part_index]
                    predicted = row, slice(len(ids) - 1 - num_predicted, len(ids) - 1)
                    scores[part_index] = -loss_BT[predicted].sum(dtype=float), bool(is_greedy_BT[predicted].all())
                progress_bar.update(len(part_indices))
        return scores

    def generate_next_tokens(self, texts: list[GeneratedText], batch_size: int) -> None:
        """Adds a token to each."""
        inputs = [self.truncate(text.ids) for text in texts]
        ids_BT = pad_texts(inputs, batch_size, self.choose_length(max(map(len, inputs))))
        last_B = np.array([len(ids) - 1 for ids in inputs] + [0] * (batch_size - len(inputs)))
        with jax.set_mesh(self.run_model.mesh):
            logits_BV = self.run_program(self.next_logits_program, ids_BT, last_B)
        for text, logits_V in zip(texts, logits_BV, strict=False):
            text.append_token(logits_V, self.rng, self.eot_token_id, self.run_model.tokenizer)

    def make_batches(self, lengths: list[int]) -> Iterator[tuple[list[int], int, int]]:
        """(which texts, rows, length) of each batch, the longest first, in few shapes."""
        by_length: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            by_length.setdefault(self.choose_length(length), []).append(index)
        for length, indices in sorted(by_length.items(), reverse=True):
            batch_size = self.choose_batch_size(length, len(indices))
            yield from ((indices[start : start + batch_size], batch_size, length) for start in range(0, len(indices), batch_size))

    def choose_length(self, length: int) -> int:
        """What is read for a text of so many tokens: what follows it is without effect."""
        return min(max(MIN_LENGTH, round_up_to_power_of_two(length)), self.max_length)

    def choose_batch_size(self, length: int, num_texts: int) -> int:
        max_rows = self.max_batch_size or max(1, MAX_LOGITS_BYTES // (4 * self.run_model.vocabulary * length))
        return min(max_rows, round_up_to_power_of_two(num_texts))

    def run_program(self, program: Callable, ids_BT: np.ndarray, *arguments: np.ndarray) -> Any:
        return jax.device_get(program(self.run_model.params, sharding.put_batch(ids_BT, self.run_model.mesh), *arguments))

    @functools.cached_property
    def token_loss_program(self) -> Callable:
        return make_token_loss(self.run_model.spec, self.run_model.mesh)

    @functools.cached_property
    def next_logits_program(self) -> Callable:
        """following(params, ids_BT, last_B) -> logits_BV of what comes after the last token of each text."""
        forward_fn = make_forward(self.run_model.spec)

        def compute_next_logits(params: dict, ids_BT: jax.Array, last_B: jax.Array) -> jax.Array:
            hidden_BTD, head_VD, _ = forward_fn(params, ids_BT)
            return compute_logits(jnp.take_along_axis(hidden_BTD, last_B[:, None, None], 1), head_VD)[:, 0]

        return jax.jit(compute_next_logits, **state.get_jit_options(self.run_model.spec, self.run_model.mesh))


def check_scorable(spec: Spec, name: str) -> None:
    """Refuses what has no likelihood of a text, or none that its training was of."""
    data, prefix = spec.data, spec.model.mask.prefix
    if data.task != 'text':
        raise UserError(f'{name} was trained on {data.task}, not on text; give another run')
    if prefix:
        raise UserError(
            f'{name} shows the first {prefix} tokens to all of a text (mask.prefix), and predicts none of them'
        )
    if (data.fixed_position or 1) > 1 and data.fixed_held_out:
        raise UserError(f'{name} was trained with a fixed token inside of each text (data.fixed_position)')
    if data.random_first:
        raise UserError(f'{name} was trained with random tokens inside of each text (data.random_first)')


def pad_texts(texts: Iterable[list[int]], num_rows: int, length: int) -> np.ndarray:
    """ids_BT of texts, whose end no query of theirs sees."""
    ids_BT = np.zeros((num_rows, length), np.int32)
    for ids_T, ids in zip(ids_BT, texts, strict=False):
        ids_T[: len(ids)] = ids
    return ids_BT


def round_up_to_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


if __name__ == '__main__':  # lm_eval's own command line, which looks for models in itself alone
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
