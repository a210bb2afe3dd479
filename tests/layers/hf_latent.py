"""Attention modules of tiny `transformers` models: their parameters as ours, their results."""

from dataclasses import dataclass
from typing import Any

import torch

from funcinfer.layers import primitives as ops
from funcinfer.layers.indexer import IndexerConfig
from funcinfer.layers.mla import MLAConfig
from funcinfer.layers.rope import Rope, softmax_mscale

LENGTH = 37


@dataclass(frozen=True)
class Module:
    """Layer `index` of a model: its attention, our config of it and our parameters."""

    config: Any
    model: Any
    index: int

    @property
    def attention(self) -> Any:
        return self.model.model.layers[self.index].self_attn

    @property
    def rope(self) -> Rope:
        parameters = dict(self.config.rope_parameters)
        return Rope.from_hf({"rope_parameters": parameters}, self.config.qk_rope_head_dim)[0]

    @property
    def cfg(self) -> MLAConfig:
        c = self.config
        interleaved = getattr(c, "rope_interleave", True)
        return MLAConfig(
            embed_dim=c.hidden_size,
            num_heads=c.num_attention_heads,
            kv_lora=c.kv_lora_rank,
            nope_dim=c.qk_nope_head_dim,
            rope_dim=c.qk_rope_head_dim,
            v_dim=c.v_head_dim,
            scale=(c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * softmax_mscale(self.rope),
            q_lora=c.q_lora_rank,
            bias=c.attention_bias,
            rotate=ops.rotate_interleaved if interleaved else ops.rotate_half_split,
        )

    def index_cfg(self, rotate: Any) -> IndexerConfig:
        c = self.config
        return IndexerConfig(
            embed_dim=c.hidden_size,
            q_lora=c.q_lora_rank,
            num_heads=c.index_n_heads,
            head_dim=c.index_head_dim,
            topk=c.index_topk,
            rotate=rotate,
        )

    def params(self) -> dict[str, Any]:
        state, cfg = self.attention.state_dict(), self.cfg
        kv_b = state["kv_b_proj.weight"].unflatten(0, (cfg.num_heads, -1))
        ours = dict(
            wkv_a=state["kv_a_proj_with_mqa.weight"],
            kv_a_norm=state["kv_a_layernorm.weight"],
            w_uk=kv_b[:, : cfg.nope_dim],
            w_uv=kv_b[:, cfg.nope_dim :],
            wo=state["o_proj.weight"].unflatten(1, (cfg.num_heads, -1)),
        )
        if cfg.q_lora is None:
            ours["wq"] = state["q_proj.weight"].unflatten(0, (cfg.num_heads, -1))
        else:
            ours["wq_a"] = state["q_a_proj.weight"]
            ours["q_a_norm"] = state["q_a_layernorm.weight"]
            ours["wq_b"] = state["q_b_proj.weight"].unflatten(0, (cfg.num_heads, -1))
        if cfg.bias:
            ours |= dict(bkv_a=state["kv_a_proj_with_mqa.bias"], bo=state["o_proj.bias"])
            ours |= {} if cfg.q_lora is None else dict(bq_a=state["q_a_proj.bias"])
        if "indexer.wk.weight" in state:
            heads = self.config.index_n_heads
            ours["indexer"] = dict(
                wq=state["indexer.wq_b.weight"].unflatten(0, (heads, -1)),
                wk=state["indexer.wk.weight"],
                k_norm=state["indexer.k_norm.weight"],
                k_norm_bias=state["indexer.k_norm.bias"],
                weights=state["indexer.weights_proj.weight"],
            )
        return ours

    def inputs(self, seed: int = 3) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(LENGTH, self.config.hidden_size, generator=generator)

    @torch.no_grad()
    def run(self, x_SD: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Any]:
        """(output [S, D], whatever else the module returns) of one whole sequence."""
        length = len(x_SD)
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        outs = self.attention(
            hidden_states=x_SD[None],
            position_embeddings=self.model.model.rotary_emb(x_SD[None], positions),
            attention_mask=mask,
            **more,
        )
        return outs[0][0], outs[1:]

    @torch.no_grad()
    def selection(self, x_SD: torch.Tensor) -> list[set[int]]:
        """The visible positions that the module's indexer chooses for each token."""
        module, length = self.attention, len(x_SD)
        positions = torch.arange(length)[None]
        chosen = module.indexer(
            x_SD[None],
            module.q_a_layernorm(module.q_a_proj(x_SD))[None],
            self.model.model.rotary_emb(x_SD[None], positions),
            torch.full((length, length), -torch.inf).triu(1)[None],
            positions,
        )
        return [{s for s in row if s <= t} for t, row in enumerate(chosen[0].tolist())]
