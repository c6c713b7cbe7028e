"""The tokenizer of `nano`: a byte-level BPE of 1,000 ordinary tokens, trained on the text below at build time."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from omni_lab.models.qwen3_omni.tokenizer import WORD_PATTERN
from omni_lab.zoo.nano_config import CHAT_TEMPLATE, ORDINARY_TOKENS, ROLE_TOKENS, SPECIAL_TOKENS, TEXT_VOCAB

CORPUS = """\
You are a helpful voice assistant. Please answer the question of the user in one or two short sentences.
Please read this sentence aloud: the quick brown fox jumps over the lazy dog while seven small birds look on.
What do you hear in this recording, and what do you see in this picture? Describe the video, then say it again.
A request is a small stream of data that walks through three rooms. The first one reads and thinks and writes down
what should be said, word by word. The second one turns every word into a row of numbers, twelve and a half rows for
each second of speech. The third one turns the numbers into sound, so that somebody far away can listen to it.
Every room has the same furniture: a place where work comes in, a list of what to do next, and a door through which
the result leaves. When many guests come at the same time, the host must not let one of them wait for all the others.
It is better to serve everybody a little at a time, and to start the next dish before the last plate is washed.
Good morning. How are you today? The weather is fine, the coffee is hot, and the train should arrive before noon.
Thank you very much for your help; I would like to speak with the doctor tomorrow at nine o'clock, if that's possible.
We've looked at the numbers once more, and they don't agree. There were 1024 of them yesterday, but only 960 are left.
My brother lives near the river. He works in a library, where he repairs old books, and he plays the violin at night.
Could you tell me which way leads to the market? Turn left after the bridge, then walk straight on for five minutes.
She'll open the window when the rain has stopped. The garden smells of wet grass, and the children run outside again.
If it were easy, everyone would have done it long ago. What matters is to measure twice, cut once, and write it down.
def mean(values): return sum(values) / len(values) if values else None  # an empty list has no mean
for name, row in table.items(): print(f"{name}: {row['first']:.2f} ms, {row['last']:.2f} ms")
Les enfants chantent dans la rue. Wo ist der Bahnhof, bitte? El perro duerme debajo de la mesa. Il sole splende.
Names of things: apple, bread, chair, door, engine, flower, glass, house, island, journey, kitchen, lamp, mountain,
needle, orange, paper, question, ribbon, street, table, umbrella, village, water, year, zebra. Colours: red, green,
blue, yellow, black, white, grey. Numbers: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve.
Once upon a time there was a clockmaker who built a machine that could talk. At first it only knew three words, and it
said them all day long. Then people began to bring it stories, and the machine learned to tell them in its own voice.
"""


def train() -> Tokenizer:
    """Learn the merges from `CORPUS` and lay the tokens out at the ids that the configuration states."""
    word_split = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.Sequence([word_split, byte_level])
    roles = [f"{role}\n" for role in ("system", "user", "assistant")] * 100  # role names must become whole words
    trainer = trainers.BpeTrainer(
        vocab_size=ORDINARY_TOKENS + len(ROLE_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator([*roles, *CORPUS.splitlines(keepends=True)], trainer)
    learned = json.loads(learner.to_str())["model"]

    fixed = {("Ċ" if role == "\n" else role): token_id for role, token_id in ROLE_TOKENS.items()}  # Ċ: byte 10
    ordinary = [token for token in sorted(learned["vocab"], key=learned["vocab"].get) if token not in fixed]
    if len(ordinary) != ORDINARY_TOKENS or not fixed.keys() <= learned["vocab"].keys():
        raise RuntimeError(f"nano's corpus gave {len(ordinary)} ordinary tokens, expected {ORDINARY_TOKENS}")
    vocab = {token: index for index, token in enumerate(ordinary)} | fixed | SPECIAL_TOKENS
    vocab |= {f"<|extra_{index}|>": index for index in range(len(vocab), TEXT_VOCAB)}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge) for merge in learned["merges"]]))
    tokenizer.normalizer = learner.normalizer
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a tokenizer, its configuration and the chat template as transformers' AutoTokenizer expects them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.model.save(str(directory))  # vocab.json and merges.txt
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "padding_side": "left",
        "model_max_length": 4096,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "audio_token": "<|audio_pad|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
