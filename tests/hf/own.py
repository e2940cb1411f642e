"""A model of somebody's own, written against transformers' interfaces, with one habit at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pagedkv.hf.release import CACHE
from tests.hf.tiny import VOCAB, WINDOW, named

HEADS, GROUPS, DIM = 4, 2, 8


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, habit: str = "", **fields: Any) -> None:
        self.habit = habit
        self.vocab_size, self.hidden_size, self.num_hidden_layers = VOCAB, HEADS * DIM, 4
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = HEADS, GROUPS, DIM
        self.max_position_embeddings = 256
        super().__init__(**fields)


def own_eager(module, query, key, value, mask, scaling, s_aux=None, **_):
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if s_aux is not None:  # a bias of the first key, where others have a score without a value
        scores[..., :1] = scores[..., :1] + s_aux.view(1, -1, 1, 1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class OwnAttention(nn.Module):
    def __init__(self, config: OwnConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.num_key_value_groups = HEADS // GROUPS
        self.q, self.k, self.v = (nn.Linear(HEADS * DIM, n * DIM) for n in (HEADS, GROUPS, GROUPS))
        self.o = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.bias = nn.Parameter(torch.ones(HEADS))

    def forward(self, x: Tensor, masks: dict[str, Tensor], cache: Any, others: list[Any]) -> Tensor:
        habit, (batch, new, _) = self.config.habit, x.shape
        q, k, v = (f(x).view(batch, new, -1, DIM).transpose(1, 2) for f in (self.q, self.k, self.v))
        past, places = 0, torch.arange(new)
        if habit == "gives K as V":
            v = k
        if habit == "counts by the layer's length" and cache is not None:
            past = cache.get_seq_length(self.layer_idx)
        if habit == "counts by the cache's length" and cache is not None:
            past = cache.get_seq_length()
        if habit == "remembers by itself" and self.layer_idx == 1:
            v, self.last = v + getattr(self, "last", 0 * v[:1, :, -1:]), v[:1, :, -1:]
        if habit.startswith("keeps its last input") and cache is not None:
            holder = cache.layers[-1] if habit.endswith("layer of the cache") else cache
            before = getattr(holder, f"last_{self.layer_idx}", 0 * x[:, :1])
            setattr(holder, f"last_{self.layer_idx}", x[:, -1:])
            q = q + self.q(torch.cat([before, x[:, :-1]], 1)).view_as(q.transpose(1, 2)).transpose(
                1, 2
            )
        if habit == "shares K and V" and self.layer_idx == 1:
            k, v = others
        elif cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if habit == "counts by the shape of K":
            past = k.shape[-2] - new
        if habit.startswith("counts"):
            q = q * (1 + torch.log1p((places + past).float() / 8)).view(1, 1, -1, 1)
        if habit == "moves K and V":
            k, v = (x.to(q.device, q.dtype).contiguous() for x in (k, v))
        if habit == "changes K":
            k = k * 1.3
        if habit == "changes V":
            v = torch.tanh(v)
        if habit == "repeats K and V":
            k, v = (x.repeat_interleave(self.num_key_value_groups, 1) for x in (k, v))
        if habit == "draws at random":  # so little that it passes for a rounding
            q = q + 0.01 * torch.randn_like(q)
        if habit == "wants long texts" and new == 1:
            raise ZeroDivisionError
        slides = habit == "slides" or (habit == "slides in turn" and self.layer_idx % 2 == 0)
        mask = masks["slides" if slides else "sees all"]
        if habit == "biases its mask" and mask is not None:
            mask = mask + 0.5 * torch.arange(mask.shape[-1])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, own_eager)
        others[:] = k, v
        more = {"s_aux": self.bias} if habit == "biases its scores" else {}
        out, _ = attend(self, q, k, v, mask, scaling=DIM**-0.5, **more)
        if habit == "uses V outside":
            out = out + v.mean(2, keepdim=True).repeat_interleave(2, 1).transpose(1, 2)
        return self.o(out.reshape(batch, new, -1))


class OwnModel(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(config.max_position_embeddings, width)
        self.layers = nn.ModuleList(map(OwnAttention, [config] * 4, range(4)))
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0, 0.3)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> Any:
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        x = self.tokens(input_ids)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(x.shape[1]) + past)[None]
        x = x + self.places(position_ids)
        told = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask}
        told |= {**named(cache), "position_ids": position_ids}
        masks = {"sees all": create_causal_mask(**told)}
        if self.config.habit.startswith("slides"):
            masks["slides"] = create_sliding_window_causal_mask(**told)
        others: list[Any] = []
        for layer in self.layers:
            x = x + layer(nn.functional.layer_norm(x, x.shape[-1:]), masks, cache, others)
        return CausalLMOutputWithPast(logits=self.head(x), **{CACHE: cache})


def own_model(habit: str = "", **fields: Any) -> OwnModel:
    """A random model with a habit; one that slides has a window of 8."""
    if habit.startswith("slides"):
        fields = {"sliding_window": WINDOW, **fields}
    if habit == "biases its scores":
        fields = {"attn_implementation": "eager", **fields}
    model = OwnModel(OwnConfig(habit, **fields)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@torch.no_grad()
def truth(model: PreTrainedModel, prompt: Tensor, new: int) -> list[int]:
    """Greedy tokens of a model that computes the whole text for each of them, without a cache."""
    ids = prompt[None]
    for _ in range(new):
        logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()
