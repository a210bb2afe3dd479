"""Small decoders for the layouts of this folder: layers that have every part, and parts alone.

8 query heads on 4 KV heads of odd-sized pairs, biases everywhere, norms of q and k; a vocabulary
that no mesh divides. Sizes differ, so that a swapped dim is an error.
"""

from functools import partial

from funcinfer.kvcache.paged import paged_kv_specs
from funcinfer.layers.attention import (
    attention,
    attention_specs,
    head_norm,
    head_norm_specs,
)
from funcinfer.layers.mlp import mlp, mlp_specs
from funcinfer.layers.rope import Rope
from funcinfer.models.decoder import Decoder, Layer, Sublayer, cached, pure

EMBED, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB = 20, 8, 4, 6, 24, 45


def attention_sublayer(num_heads: int = HEADS, num_kv_heads: int = KV_HEADS) -> Sublayer:
    """Attention with biases, and norms of q and k."""
    specs = attention_specs(EMBED, num_heads, num_kv_heads, HEAD_DIM, qkv_bias=True, out_bias=True)
    return cached(
        partial(attention, scale=HEAD_DIM**-0.5, qk_norm=head_norm(1e-6)),
        specs | head_norm_specs(HEAD_DIM),
        partial(paged_kv_specs, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM),
    )


def mlp_sublayer() -> Sublayer:
    """The SwiGLU MLP."""
    return pure(mlp, mlp_specs(EMBED, WIDTH))


def decoder_of(*layers: Layer, tied_head: bool = False) -> Decoder:
    """These layers between an embedding and a head."""
    return Decoder(VOCAB, EMBED, layers, 1e-6, Rope(100.0, HEAD_DIM), tied_head=tied_head)


DECODERS = {
    "attention": decoder_of(Layer(dict(attn=attention_sublayer()))),
    "mlp": decoder_of(Layer(dict(mlp=mlp_sublayer()))),
    "embedding and head": decoder_of(),
    "whole layers": decoder_of(*[Layer(dict(attn=attention_sublayer(), mlp=mlp_sublayer()))] * 2),
}
ONE_LAYER = decoder_of(Layer(dict(attn=attention_sublayer(), mlp=mlp_sublayer())))
TIED = decoder_of(Layer(dict(mlp=mlp_sublayer())), tied_head=True)
