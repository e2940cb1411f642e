"""A tokenizer of one letter for each id, and what is drawn with it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria

from tests.hf.tiny import VOCAB

LETTERS = [chr(ord("a") + i) if i < 26 else chr(0x4E00 + i) for i in range(VOCAB)]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}z"


def letters(words: list[str] = LETTERS) -> PreTrainedTokenizerFast:
    """A tokenizer of one letter for each id."""
    tokenizer = Tokenizer(models.WordLevel({x: i for i, x in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT)


def text(ids) -> str:
    return "".join(LETTERS[i] for i in ids)


def tokens(results) -> list[list[int]]:
    return [result.tokens for result in results]


class EndsOn(StoppingCriteria):
    """Stops where the ids add up to a multiple of three."""

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1
        return input_ids.sum(1) % 3 == 0


class Scalar(bytearray):
    """As pyarrow's: numpy reads its bytes, `as_py` says what it is."""

    def as_py(self) -> str:
        return self.decode()
