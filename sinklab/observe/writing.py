"""Texts that a model goes on with, as a task of lm-evaluation-harness asks for them."""

import dataclasses
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sinklab.record import UserError

LIMIT_KEYS = 'max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens'  # one, by several names
DEFAULT_MAX_TOKENS = 256  # tokens, where a task names none
SUPPORTED_KEYS = 'until', 'do_sample', 'temperature', *LIMIT_KEYS
TRUNCATION_KEYS = 'top_k', 'top_p', 'min_p'  # of what is drawn from: without effect on the likeliest
NEUTRAL_OPTIONS = ('num_beams', 1), ('top_p', 1), ('top_k', 0), ('repetition_penalty', 1)


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    until: tuple[str, ...]
    max_new_tokens: int  # tokens
    temperature: float  # 0: the likeliest token


def parse_generation_options(options: dict[str, Any]) -> GenerationConfig:
    """What a task wants of a text; what would change it and is not known here is refused."""
    until = options.get('until') or ()
    sampled = options.get('do_sample')
    temperature = float(options.get('temperature', 1.0 if sampled else 0.0)) if sampled is not False else 0.0
    for name, value in options.items():
        if not (name in SUPPORTED_KEYS or (name, value) in NEUTRAL_OPTIONS or (name in TRUNCATION_KEYS and not temperature)):
            raise UserError(f'a task asks for {name}={value}, which sinklab cannot do; it knows {", ".join(SUPPORTED_KEYS)}')
    max_new_tokens = next((int(options[name]) for name in LIMIT_KEYS if options.get(name) is not None), DEFAULT_MAX_TOKENS)
    return GenerationConfig((until,) if isinstance(until, str) else tuple(until), max_new_tokens, temperature)


class GeneratedText:
    """One that is being written, from its context on."""

    def __init__(self, context: list[int], config: GenerationConfig):
        self.ids, self.context_length, self.config = list(context), len(context), config
        self.text, self.is_done = '', config.max_new_tokens < 1

    def append_token(self, logits_V: np.ndarray, rng: np.random.Generator, end_token: int, tokenizer: Tokenizer) -> None:
        token = sample_token(logits_V, self.config.temperature, rng)
        if token == end_token:
            self.is_done = True
            return
        self.ids.append(token)
        text = tokenizer.decode(self.ids[self.context_length :], skip_special_tokens=False)
        stop_positions = [text.find(stop) for stop in self.config.until if stop and stop in text]
        self.text = text[: min(stop_positions, default=len(text))]
        self.is_done = bool(stop_positions) or len(self.ids) - self.context_length >= self.config.max_new_tokens


def sample_token(logits_V: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """argmax, or v with probability softmax(logits / temperature)_v."""
    if not temperature:
        return int(logits_V.argmax())
    score_V = np.float64(logits_V) / temperature
    weight_V = np.exp(score_V - score_V.max())
    return int(rng.choice(len(weight_V), p=weight_V / weight_V.sum()))
