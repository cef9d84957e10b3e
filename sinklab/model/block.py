import dataclasses

import jax
from flax import nnx

from sinklab import spec
from sinklab.model.attention import SelfAttention, AttentionContext
from sinklab.model.capture import Intermediates
from sinklab.model.ffn import FFN
from sinklab.model.norm import BranchNorms
from jax.ad_checkpoint import checkpoint_name
from sinklab.sharding import constrain_sharding


class Block(nnx.Module):
    """Attention, then the FFN, each a branch of the residual stream."""

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        self.attention_norms = BranchNorms(model)
        self.attention = SelfAttention(model, rngs)
        self.ffn_norms = BranchNorms(model)
        self.ffn = FFN(model, rngs)

    def __call__(self, x_BTD: jax.Array, context: AttentionContext) -> tuple[jax.Array, Intermediates]:
        norms = self.attention_norms
        normed_BTD = norms.before(x_BTD)
        attended_BTD, intermediates = self.attention(normed_BTD, context)
        x_BTD = checkpoint_name(norms.joined(constrain_sharding(x_BTD + norms.after(attended_BTD), 'batch', None, None)), 'middle')
        norms = self.ffn_norms
        sum_BTD = constrain_sharding(x_BTD + norms.after(self.ffn(norms.before(x_BTD))), 'batch', None, None)
        if context.capture:
            intermediates = dataclasses.replace(intermediates, normed_BTD=normed_BTD, residual_BTD=sum_BTD)
        return norms.joined(sum_BTD), intermediates
