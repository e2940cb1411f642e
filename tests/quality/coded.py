"""A format as it is without pages: what groups of tokens and exact newest pages are good for."""

from pagedkv.batch.packed import PackedModel
from pagedkv.batch.packed_cache import PackedCache
from pagedkv.kernels.formats import INT4_TOKEN
from pagedkv.kernels.torch.codes import decode, encode


class CodedCache(PackedCache):
    """Codes every token by itself on its way into dense pages, its own attention included."""

    def update(self, k, v, layer, *args, **kwargs):
        coded = (decode(*encode(x, INT4_TOKEN, None), INT4_TOKEN, x.dtype) for x in (k, v))
        return super().update(*coded, layer, *args, **kwargs)


class CodedModel(PackedModel):
    """Computes packed rows with four bits a token."""

    def __init__(self, model, cache):
        super().__init__(model, cache=cache)
        self.carrier = CodedCache(model, cache)
