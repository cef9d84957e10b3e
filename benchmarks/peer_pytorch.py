"""Steps of a LLaMA-style model in PyTorch, eager or compiled; a peer of benchmarks/peers.py."""

from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks import step_server

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


class Block(torch.nn.Module):
    """Transformer block with one product for queries, keys and values, and one for both FFN inputs."""

    def __init__(self, shape: dict):
        super().__init__()
        width, inner = shape['width'], shape['heads'] * shape['head_width']
        self.qkv_shape = 3, shape['heads'], shape['head_width']
        self.norm_1, self.norm_2 = (torch.nn.RMSNorm(width, 1e-5) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * inner, bias=False)
        self.out = torch.nn.Linear(inner, width, bias=False)
        self.gate_and_in = torch.nn.Linear(width, 2 * shape['ffn_width'], bias=False)
        self.down = torch.nn.Linear(shape['ffn_width'], width, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm_1(x_BTD)).unflatten(-1, self.qkv_shape).permute(2, 0, 3, 1, 4)
        query, key = (apply_rotary(array, cos, sin) for array in (query, key))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_in(self.norm_2(x_BTD)).chunk(2, -1)
        return x_BTD + self.down(functional.silu(gate) * up)


class Decoder(torch.nn.Module):
    def __init__(self, shape: dict):
        super().__init__()
        self.half_width = shape['head_width'] // 2
        self.embedding = torch.nn.Embedding(shape['vocabulary'], shape['width'])
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape['layers']))
        self.norm = torch.nn.RMSNorm(shape['width'], 1e-5)
        self.head = torch.nn.Linear(shape['width'], shape['vocabulary'], bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(ids_BT)
        frequency = 1e4 ** (-torch.arange(self.half_width) / self.half_width)
        angle = torch.arange(ids_BT.shape[1])[:, None] * frequency
        cos, sin = angle.cos().to(x_BTD.dtype), angle.sin().to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        return self.head(self.norm(x_BTD))


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def make_decoder_step(shape: dict, is_compiled: bool) -> Callable[[], float]:
    """Return a function that runs one step of `Decoder` and returns its loss."""
    return make_step(Decoder, functional.cross_entropy, shape, torch.compile if is_compiled else None)


def make_step(
    make_model: Callable[[dict], torch.nn.Module],
    compute_cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    shape: dict,
    compile_function: Callable[[Callable], Callable] | None = None,
) -> Callable[[], float]:
    """Return a function that runs one step and returns its loss.

    Args:
        make_model: Receives the shape, and returns a model of token ids.
        compute_cross_entropy: A function of logits_NV and ids_N.
        shape: Model and batch. bfloat16 uses autocast.
        compile_function: Compiles the loss, and its gradient with it.
    """
    torch.manual_seed(0)
    torch.set_num_threads(shape['threads'])
    model, ids_BT = make_model(shape), torch.from_numpy(step_server.make_ids(shape)).long()
    optimizer = torch.optim.AdamW(model.parameters(), 4e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    is_mixed = shape['dtype'] != 'float32'
    micro_batches = ids_BT.split(shape['micro_batch'] or shape['batch'])

    def compute_loss(part_BT: torch.Tensor) -> torch.Tensor:
        with torch.autocast('cpu', DTYPES[shape['dtype']], enabled=is_mixed):
            logits = model(part_BT[:, :-1])
        return compute_cross_entropy(logits.float().flatten(0, 1), part_BT[:, 1:].flatten())

    if compile_function:
        compute_loss = compile_function(compute_loss)

    def run_step() -> float:
        optimizer.zero_grad()
        total: float | torch.Tensor = 0.0
        for part in micro_batches:
            loss = compute_loss(part) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total.item()

    return run_step
