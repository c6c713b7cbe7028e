"""The voice's tokenizer: byte-level BPE of short pieces, so that text comes at about the rate of the Talker's frames.

Short pieces spell: the same letters give the same pieces in every word, also in words never seen.
"""

from __future__ import annotations

import json

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from omni_lab.models.qwen3_omni.tokenizer import WORD_PATTERN
from omni_lab.zoo.nano_config import ORDINARY_TOKENS, ROLE_TOKENS, TEXT_VOCAB
from omni_lab.zoo.training.network import TEXT_WIDTH, VOICE_TOKENS

LONGEST = 4
"""Bytes of a piece as the byte-level alphabet writes them: four letters, or a space and two letters."""
NEWLINE = "Ċ"  # byte 10 in the byte-level alphabet
ROOM_FOR_ROLES = 30


def train(texts: list[str]) -> Tokenizer:
    """Learn the pieces from texts and lay them out at the ids that the configuration states."""
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ORDINARY_TOKENS - ROOM_FOR_ROLES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    pieces, merges = _with_roles(tokenizer)
    fixed = {(NEWLINE if role == "\n" else role): index for role, index in ROLE_TOKENS.items()}
    ordinary = [piece for piece in pieces if piece not in fixed]
    ordinary += [f"<|unused_{index}|>" for index in range(len(ordinary), ORDINARY_TOKENS)]
    if len(ordinary) != ORDINARY_TOKENS:
        raise RuntimeError(f"the texts gave {len(ordinary)} pieces, expected at most {ORDINARY_TOKENS}")
    vocab = {piece: index for index, piece in enumerate(ordinary)} | fixed | VOICE_TOKENS
    vocab |= {f"<|extra_{index}|>": index for index in range(len(vocab), TEXT_VOCAB)}
    tokenizer.model = models.BPE(vocab=vocab, merges=merges)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VOICE_TOKENS])
    return tokenizer


def _with_roles(tokenizer: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """All pieces and merges, with the merges that put the names of the roles together as the last ones."""
    learned = json.loads(tokenizer.to_str())["model"]
    pieces = dict.fromkeys(sorted(learned["vocab"], key=learned["vocab"].get))
    merges = [tuple(merge) for merge in learned["merges"]]
    for role in ROLE_TOKENS:
        first, *rest = tokenizer.encode(role).tokens
        for piece in rest:
            if (first, piece) not in merges:
                merges.append((first, piece))
            first += piece
            pieces[first] = None
    return list(pieces), merges


def embeddings(tokenizer: Tokenizer) -> torch.Tensor:
    """A table that spells, [TEXT_VOCAB, TEXT_WIDTH]: one vector for each letter of a piece, side by side.

    It is not trained: Thinker and Talker share it, and each learns by itself. Longer pieces and special tokens get
    vectors of their own.
    """
    chance = torch.Generator().manual_seed(5)
    letters = torch.randn(256, LONGEST, TEXT_WIDTH // LONGEST, generator=chance)
    table = torch.randn(TEXT_VOCAB, TEXT_WIDTH, generator=chance)
    index = {letter: position for position, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    nothing = torch.randn(LONGEST, TEXT_WIDTH // LONGEST, generator=chance)
    for piece, row in tokenizer.get_vocab().items():
        if row >= ORDINARY_TOKENS or len(piece) > LONGEST:
            continue
        for place in range(LONGEST):
            letter = letters[index[piece[place]], place] if place < len(piece) else nothing[place]
            table[row, place * (TEXT_WIDTH // LONGEST) :][: TEXT_WIDTH // LONGEST] = letter
    return table
