"""Forwards that die, that run within others, or that nobody announces; and what a cache shows."""

from contextlib import contextmanager

import torch
from transformers.masking_utils import create_causal_mask

from tests.hf.tiny import named

SIZES = {"page_size": 4, "max_tokens": 1024}
IDS = torch.tensor([[5, 6, 7]])


@contextmanager
def dying(module, error, after):
    """Within it a module's calls end by an error, raised by a hook of a user's."""

    def die(*args):
        raise error

    register = module.register_forward_hook if after else module.register_forward_pre_hook
    hook = register(die)
    yield
    hook.remove()


@contextmanager
def within(module, action):
    """Within it an action runs before each call of a module, but for those it makes itself."""
    hook = None

    def once(*args):
        nonlocal hook
        hook.remove()
        action()
        hook = module.register_forward_pre_hook(once)

    hook = module.register_forward_pre_hook(once)
    yield
    hook.remove()


def by_hand(model, ids, cache):
    """Layer by layer, without the modules around them."""
    decoder = model.model
    hidden = decoder.embed_tokens(ids)
    places = torch.arange(cache.seen, cache.seen + ids.shape[1])[None]
    told = {"config": model.config, "inputs_embeds": hidden, "attention_mask": None}
    mask = create_causal_mask(**told, **named(cache), position_ids=places)
    for layer in decoder.layers:
        hidden = layer(
            hidden,
            attention_mask=mask,
            position_ids=places,
            **named(cache),
            position_embeddings=decoder.rotary_emb(hidden, places),
        )
    return decoder.norm(hidden)


def visible(cache):
    """Everything that can be seen of a cache, which takes back first what an interrupt left."""
    stats, ahead = cache.stats(), cache.texts.ahead.tolist()
    kept = None if cache.kept is None else cache.kept.tolist()
    lengths = [cache.kv.length(row) for row in cache.rows]
    return (
        *(cache.get_seq_length(), cache.batch_size, cache.rows[:], kept, lengths, stats),
        *(cache.kv.open_step, cache.forward_layer, ahead),
    )


def stored(cache):
    layers = range(cache.kv.config.num_layers)
    return [x for row in cache.rows for i in layers for x in cache.kv.gather(row, i)]
