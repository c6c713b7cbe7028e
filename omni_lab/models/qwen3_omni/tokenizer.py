"""Text to token ids and back: the checkpoint's own chat template and byte-level BPE, without transformers' classes."""

from __future__ import annotations

import codecs
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from omni_lab.core import PipelineError, RequestError

WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text into words (tokenizer.json of the published models)."""

PRIVATE_USE = range(0xE000, 0xF900)
"""Unicode code points without a meaning; one that no message contains marks special tokens in users' text."""


class ChatTokenizer:
    """Renders a chat and turns it into token ids in which only the template can write special tokens."""

    def __init__(self, directory: Path) -> None:
        self.config = _read_json(directory / "tokenizer_config.json")
        self.tokenizer = _load_tokenizer(directory, self.config)
        self.tokenizer.encode_special_tokens = True  # special tokens that are left in a text are text
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: index for index, token in added.items() if token.special}
        longest_first = sorted(self.special, key=len, reverse=True)
        self._any_special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._template = _compile_template(directory, self.config)
        self._bytes = _token_bytes(self.tokenizer, set(self.special.values()))

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a chat and the header of the answer; each media part is still one placeholder token.

        `messages` have a string or a list of `{"type": "text", "text": ...}` and `{"type": "audio" | ...}` as
        content. Where no text contains a special token the ids are those of transformers' apply_chat_template.
        Raises RequestError if the checkpoint's template refuses the chat.
        """
        mark = _unused_character(messages)
        named = {key: value for key, value in self.config.items() if key.endswith("_token") and isinstance(value, str)}
        try:
            prompt = self._template.render(
                messages=_mark(messages, self._any_special, mark),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **named,
            )
        except TemplateError as error:
            raise RequestError(f"the checkpoint's chat template refuses them: {error}", "messages") from None
        ids: list[int] = []
        for index, piece in enumerate(self._any_special.split(prompt)):
            if index % 2:
                ids.append(self.special[piece])
            elif piece:
                ids += self.tokenizer.encode(piece.replace(mark, ""), add_special_tokens=False).ids
        return ids

    def text_decoder(self) -> TextDecoder:
        return TextDecoder(self._bytes)


class TextDecoder:
    """Text of one answer as its tokens come. Bytes of an unfinished character wait for the next token.

    Special tokens are not shown; bytes that are no UTF-8 become U+FFFD, as in transformers' decode.
    """

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(b"".join(self._token_bytes.get(index, b"") for index in token_ids))

    def finish(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def _mark(messages: list[dict[str, Any]], any_special: re.Pattern[str], mark: str) -> list[dict[str, Any]]:
    """Break every special token in the texts by a mark after its first character.

    Neighbouring text parts get a mark between them too, since the template joins them and `<|im_` + `end|>` would
    become a special token.
    """

    def broken(text: str) -> str:
        return any_special.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    marked = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = broken(content)
        else:
            content = [
                {"type": "text", "text": mark + broken(part["text"]) + mark} if part["type"] == "text" else part
                for part in content
            ]
        marked.append({**message, "content": content})
    return marked


def _unused_character(messages: list[dict[str, Any]]) -> str:
    used = set(json.dumps(messages, ensure_ascii=False))
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    character = next(free, None)
    if character is None:
        raise RequestError("they contain every private-use character of Unicode; leave one out", "messages")
    return character


def _load_tokenizer(directory: Path, config: dict[str, Any]) -> Tokenizer:
    """From `tokenizer.json`, or from vocab.json, merges.txt and the added tokens where a checkpoint has only those."""
    complete = directory / "tokenizer.json"
    if complete.is_file():
        return Tokenizer.from_file(str(complete))
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        raise PipelineError(f"{directory} has no tokenizer; expected tokenizer.json, or vocab.json and merges.txt")
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = [AddedToken(token["content"], special=token["special"], normalized=False) for _, token in added]
    tokenizer.add_tokens(tokens)
    for (index, token), _ in zip(added, tokens, strict=True):
        if tokenizer.token_to_id(token["content"]) != int(index):
            raise PipelineError(f"{directory}/tokenizer_config.json: token {token['content']!r} cannot have id {index}")
    return tokenizer


def _compile_template(directory: Path, config: dict[str, Any]) -> Any:
    """The chat template, from the three places where checkpoints keep it, in the sandbox that transformers uses."""
    single, old = directory / "chat_template.jinja", directory / "chat_template.json"
    if single.is_file():
        source = single.read_text(encoding="utf-8")
    else:
        source = (_read_json(old) if old.is_file() else config).get("chat_template")
    if not isinstance(source, str):
        raise PipelineError(f"{directory} has no chat template; expected chat_template.jinja")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise PipelineError(f"the chat template of {directory} is not valid: {error}") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _token_bytes(tokenizer: Tokenizer, hidden: set[int]) -> dict[int, bytes]:
    """Bytes of every token that is shown.

    Byte-level BPE writes each byte as one printable character: the printable ones of Latin-1 as themselves, the
    others in order from U+0100 (GPT-2). A token with any other character stands for its own text.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    table = {}
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index not in hidden:
            spelled = all(character in byte_of for character in token)
            table[index] = bytes(byte_of[character] for character in token) if spelled else token.encode()
    return table


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} cannot be read: {error}") from None
