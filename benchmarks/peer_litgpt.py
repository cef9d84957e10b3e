"""Steps of a model of litgpt, compiled as `litgpt pretrain` compiles it; a peer of benchmarks/peers.py."""

from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy

from benchmarks import peer_pytorch, step_server


def make_model(shape: dict) -> torch.nn.Module:
    """Make a compiled model of litgpt, with the options of its LLaMA configs."""
    config = Config(
        block_size=shape['length'],
        n_layer=shape['layers'],
        n_head=shape['heads'],
        n_embd=shape['width'],
        head_size=shape['head_width'],
        vocab_size=shape['vocabulary'],
        padded_vocab_size=shape['vocabulary'],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name='RMSNorm',
        mlp_class_name='LLaMAMLP',
        intermediate_size=shape['ffn_width'],
    )
    model: Any = torch.compile(GPT(config))  # a module, which the types of PyTorch call a function
    return model


if __name__ == '__main__':
    step_server.serve(lambda shape: peer_pytorch.make_step(make_model, chunked_cross_entropy, shape))
