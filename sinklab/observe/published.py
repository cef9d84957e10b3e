"""Sink_1 of open models as published (T = 64, eps = 0.3): paper (v1) Table 5, (ICLR) Tables 1 and appendix C.3."""

from pathlib import PurePath

PUBLISHED_SINK_RATES: dict[str, dict[str, float]] = {
    'gpt2-xl': {'natural': 77.00, 'random': 70.29, 'repeated': 62.28},
    'Mistral-7B-v0.1': {'natural': 97.49, 'random': 75.21, 'repeated': 0.00},
    'Mistral-7B-Instruct-v0.1': {'natural': 88.34},
    'Llama-2-7b-hf': {'natural': 92.47, 'random': 90.13, 'repeated': 0.00},
    'Llama-2-7b-chat-hf': {'natural': 92.88},
    'Llama-2-13b-hf': {'natural': 91.69},
    'Llama-2-13b-chat-hf': {'natural': 90.94},
    'Meta-Llama-3-8B': {'natural': 99.02, 'random': 91.23, 'repeated': 0.00},
    'Meta-Llama-3-8B-Instruct': {'natural': 98.85},
    'Jamba-v0.1': {'natural': 88.48},
    'AI21-Jamba-1.5-Mini': {'natural': 87.88},
}


PUBLISHED_LENGTH = 64


def find_published(model_name: str, length: int) -> dict[str, float]:
    """By inputs, of a model whose folder or name on the hub ends as the published one's does; of LENGTH alone."""
    base_name = PurePath(model_name.removeprefix('hf:')).name.lower()
    return (
        {} if length != PUBLISHED_LENGTH else next((numbers for name, numbers in PUBLISHED_SINK_RATES.items() if name.lower() == base_name), {})
    )
