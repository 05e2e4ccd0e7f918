"""A Hugging Face ``tokenizer.json`` with its special tokens and chat template, and how the embedded one is made.

Encoding needs the ``tokenizers`` package. Decoding the embedded tokenizer does not: its pieces are the text itself, so
a response is the concatenation of its pieces, and a machine that only replays token ids can score them.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.errors import InputError, UnavailableError
from alignment.files import read_json, write_atomically, write_json

if TYPE_CHECKING:
    import jinja2
    import tokenizers

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Digits stand alone, and so do the letters of a word that ends the text (spell_backward's operand, and its answer).
# Everything else may merge across spaces, so a task's fixed sentence becomes one token.
_ALONE = r"\d|[a-z](?=[a-z]*$)"


class Tokenizer:
    """A tokenizer read from a checkpoint folder.

    Args:
        folder: holds ``tokenizer.json`` and ``tokenizer_config.json`` (``pad_token``, ``bos_token``, ``eos_token``,
            ``chat_template``).

    Raises:
        InputError: a file is missing or broken, or a special token is not in the vocabulary.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / "tokenizer.json"
        definition = read_json(self._path)
        self._config = read_json(self.folder / "tokenizer_config.json")
        try:
            vocabulary: dict[str, int] = dict(definition["model"]["vocab"])
            added = definition.get("added_tokens") or []
            vocabulary.update({token["content"]: token["id"] for token in added})
            self._special = {token["id"] for token in added if token.get("special")}
            self._concatenates = (definition.get("decoder") or {}).get("type") == "Fuse"
            if not all(type(number) is int and number >= 0 for number in vocabulary.values()):
                raise ValueError("a token without a number")
            self._config = dict(self._config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"not a tokenizers file ({error!r})", where=self._path) from None
        self._ids = vocabulary
        self.vocab_size = max(vocabulary.values()) + 1
        self.pad_token_id = self._special_id("pad_token")
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of ``tokenizer.json``."""
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        Raises:
            InputError: the text has characters that the vocabulary cannot express.
            UnavailableError: ``tokenizers`` is not installed.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # half a character, which JSON can spell
            raise InputError("the text is none", where=self._path, found=ascii(text)[:80]) from None
        if self._concatenates and (back := self.decode(ids, skip_special_tokens=False)) != text:
            lost = "".join(sorted(set(text) - set(back)))
            raise InputError(
                "the text has characters that the tokenizer's alphabet lacks",
                where=self._path,
                found=repr(lost or text),
            )
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to and including the start of the assistant's turn, by the chat template."""
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text the chat template makes of a conversation, ending where the assistant's answer begins.

        Raises:
            InputError: the tokenizer has no chat template, or the template refuses the messages.
        """
        import jinja2

        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self._token("bos_token"),
                eos_token=self._token("eos_token"),
            )
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses the messages ({error})", where=self.folder) from None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Raises:
            InputError: an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if i not in self._pieces:
                raise InputError(
                    "the token id is not in the vocabulary",
                    where=self._path,
                    expected=f"0 … {self.vocab_size - 1}",
                    found=i,
                )
        if not self._concatenates:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return "".join(self._pieces[i] for i in ids if not (skip_special_tokens and i in self._special))

    def decode_response(self, ids: Iterable[int]) -> str:
        """The text of a response: everything before the first end-of-sequence token, without special tokens."""
        kept = []
        for i in ids:
            if int(i) == self.eos_token_id:
                break
            kept.append(int(i))
        return self.decode(kept)

    def check_model(self, vocab_size: int, *, where: object = "config.json") -> None:
        """The model's vocabulary must be the tokenizer's, so that every logit is a token and every token has a logit.

        Raises:
            InputError: the sizes differ.
        """
        if vocab_size != self.vocab_size:
            raise InputError(
                "the model's vocab_size is not the tokenizer's",
                where=where,
                expected=f"{self.vocab_size} (tokenizer {self._path})",
                found=vocab_size,
                next_step="use the tokenizer that was saved with the checkpoint",
            )

    @cached_property
    def _template(self) -> jinja2.Template:
        template = self._config.get("chat_template")
        if not isinstance(template, str):
            raise InputError("the tokenizer has no chat template", where=self.folder / "tokenizer_config.json")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(template)

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {i: piece for piece, i in self._ids.items()}

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise UnavailableError(
                f"tokenizers is needed to encode text ({error})", where=self._path, next_step="pip install tokenizers"
            ) from None
        try:
            return Backend.from_file(str(self._path))
        except Exception as error:  # the package raises nothing narrower
            raise InputError(f"not a tokenizers file ({error})", where=self._path) from None

    def _token(self, name: str) -> str:
        token = self._config.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def _special_id(self, name: str) -> int:
        token = self._token(name)
        if not isinstance(token, str) or token not in self._ids:
            raise InputError(
                f"{name} is not in the vocabulary",
                where=self.folder / "tokenizer_config.json",
                expected="a token of tokenizer.json",
                found=repr(token),
            )
        return self._ids[token]


def train_tokenizer(texts: Iterable[str], folder: str | Path, *, vocab_size: int) -> Tokenizer:
    """Trains the embedded byte-pair encoding on task text and writes it as a Hugging Face tokenizer.

    Digits and the letters of a final word are single tokens; fixed sentences merge whole. The alphabet is printable
    ASCII and newline. The vocabulary has exactly ``vocab_size`` entries.

    Raises:
        InputError: the texts do not give that many merges, or hold characters outside the alphabet.
        UnavailableError: ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise UnavailableError(
            f"tokenizers is needed to train a tokenizer ({error})", next_step="pip install tokenizers"
        ) from None
    alphabet = sorted(set(string.printable) - set(string.whitespace) | {" ", "\n"})
    texts = list(texts)
    foreign = sorted(set("".join(texts)) - set(alphabet))
    if foreign:
        raise InputError("the texts hold characters outside the alphabet", where="tokenizer", found=foreign)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_ALONE), "isolated")
    backend.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    size = backend.get_vocab_size()
    if size != vocab_size:
        raise InputError(
            "the texts do not fill the vocabulary exactly",
            where="tokenizer",
            expected=f"{vocab_size} tokens",
            found=f"{size} after all merges",
            next_step="choose another vocab_size or give more text",
        )
    folder = Path(folder)
    write_atomically(folder / "tokenizer.json", lambda beside: beside.write_text(backend.to_str(pretty=True), "utf-8"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        },
    )
    return Tokenizer(folder)
