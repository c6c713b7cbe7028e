"""Thinker, Talker and code predictor against transformers' modules on the nano checkpoint, token by token."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_lab.engine.kv_cache import KVCache, row_bytes, rows_within
from omni_lab.models.qwen3_omni.config import DecoderConfig, OmniConfig, parse_config
from omni_lab.models.qwen3_omni.decoder import Decoder
from omni_lab.models.qwen3_omni.mlp import dense, experts, grouped, one_token
from omni_lab.models.qwen3_omni.spans import PiecewiseSpans
from omni_lab.models.qwen3_omni.talker import Talker
from omni_lab.models.qwen3_omni.thinker import Thinker
from omni_lab.models.qwen3_omni.weights import load_weights, read_config

TOLERANCE = 5e-5
"""Logits have a standard deviation of 4; rounding in another order gives up to 2e-5."""
LENGTHS = (7, 13, 1, 20)


@pytest.fixture(scope="module")
def reference(nano: Path) -> Any:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(nano, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def config(nano: Path) -> OmniConfig:
    return parse_config(read_config(nano))


def load_thinker(nano: Path, config: OmniConfig, dtype: torch.dtype) -> Thinker:
    network = Thinker(config.thinker.text, dtype)
    load_weights(nano, network.slots(), ("thinker.model.", "thinker.lm_head"))
    network.prepare()
    return network


@pytest.fixture(scope="module")
def thinker(nano: Path, config: OmniConfig) -> Thinker:
    return load_thinker(nano, config, torch.float32)


@pytest.fixture(scope="module")
def talker(nano: Path, config: OmniConfig) -> Talker:
    text = config.thinker.text
    network = Talker(config.talker, text.hidden_size, text.vocab_size, torch.float32)
    load_weights(nano, network.slots(), ("talker.",))
    network.prepare()
    return network


def new_cache(config: DecoderConfig, rows: int, dtype: torch.dtype = torch.float32, max_length: int = 64) -> KVCache:
    return KVCache(config.layers, rows, config.kv_heads, max_length, config.head_dim, dtype)


class Prompts:
    """Ragged prompts with different positions on the three axes, packed."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = [torch.randint(0, 1000, (length,), generator=draw) for length in LENGTHS]
        self.positions = [torch.randint(0, 50, (3, length), generator=draw) for length in LENGTHS]
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        self.spans = [(row, end - length, end) for row, (length, end) in enumerate(zip(LENGTHS, ends, strict=True))]

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(self.ids), torch.cat(self.positions, 1)


@torch.no_grad()
def reference_logits(
    reference: Any, ids: torch.Tensor, positions: torch.Tensor, **extra: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """transformers' logits and hidden states of one whole sequence."""
    axes = torch.cat((torch.arange(len(ids))[None], positions)).unsqueeze(1)
    result = reference.thinker.model.language_model(
        input_ids=ids[None], position_ids=axes, output_hidden_states=True, **extra
    )
    return reference.thinker.lm_head(result.last_hidden_state)[0], result.hidden_states


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("capture", [0, 1, 2, 4])
def test_thinker_prefill_captures_hidden_states(thinker: Thinker, reference: Any, capture: int) -> None:
    prompts = Prompts()
    ids, positions = prompts.packed()
    logits, captured = thinker.prefill(
        thinker.embed(ids), positions, PiecewiseSpans(prompts.spans), new_cache(thinker.config, 4), capture
    )
    for row, start, stop in prompts.spans:
        expected, states = reference_logits(reference, prompts.ids[row], prompts.positions[row])
        close(logits[row], expected[-1])
        close(captured[start:stop], states[capture][0])


def test_thinker_adds_deepstack_vectors_after_the_first_layers(thinker: Thinker, reference: Any) -> None:
    prompts = Prompts()
    ids, positions = prompts.packed()
    spots = torch.tensor([2, 3, 9, 10, 11, 30])
    vectors = list(torch.randn(3, len(spots), thinker.config.hidden_size, generator=torch.Generator().manual_seed(1)))
    logits, captured = thinker.prefill(
        thinker.embed(ids), positions, PiecewiseSpans(prompts.spans), new_cache(thinker.config, 4), 2, (spots, vectors)
    )
    for row, start, stop in prompts.spans:
        inside = (spots >= start) & (spots < stop)
        extra = {}
        if inside.any():
            mask = torch.zeros(1, stop - start, dtype=torch.bool)
            mask[0, spots[inside] - start] = True
            extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": [vector[inside] for vector in vectors]}
        expected, states = reference_logits(reference, prompts.ids[row], prompts.positions[row], **extra)
        close(logits[row], expected[-1])
        close(captured[start:stop], states[2][0])


@pytest.mark.parametrize("slack", [0, 9])
def test_thinker_decodes_ragged_rows(thinker: Thinker, reference: Any, slack: int) -> None:
    prompts = Prompts()
    ids, positions = prompts.packed()
    cache = new_cache(thinker.config, 6)
    thinker.prefill(thinker.embed(ids), positions, PiecewiseSpans(prompts.spans), cache)
    tokens = torch.randint(0, 1000, (4, 3), generator=torch.Generator().manual_seed(2))
    first = torch.tensor([60, 61, 62, 63])
    steps = [
        thinker.decode(
            tokens[:, step], first + step, torch.tensor(LENGTHS) + step, cache, max(LENGTHS) + step + 1 + slack
        )
        for step in range(3)
    ]
    for row in range(4):
        whole = torch.cat((prompts.ids[row], tokens[row]))
        axes = torch.cat((prompts.positions[row], (first[row] + torch.arange(3)).expand(3, -1)), 1)
        expected, _ = reference_logits(reference, whole, axes)
        close(torch.stack([step[row] for step in steps]), expected[-3:])


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_row_decodes_alike_in_any_batch(thinker: Thinker, reference: Any, rows: int) -> None:
    """Batches of 1, 2 and 9 take the three ways through the experts."""
    prompt = torch.arange(100, 110)
    axes = torch.arange(11).expand(3, -1)
    expected, _ = reference_logits(reference, torch.cat((prompt, torch.tensor([7]))), axes)
    cache = new_cache(thinker.config, rows)
    spans = [(row, 10 * row, 10 * row + 10) for row in range(rows)]
    thinker.prefill(thinker.embed(prompt.repeat(rows)), axes[:, :10].repeat(1, rows), PiecewiseSpans(spans), cache)
    tens = torch.full((rows,), 10)
    logits = thinker.decode(torch.full((rows,), 7), tens, tens, cache, 11)
    close(logits, expected[-1].expand(rows, -1))


def test_a_moved_row_goes_on(thinker: Thinker) -> None:
    prompts = Prompts()
    ids, positions = prompts.packed()
    cache = new_cache(thinker.config, 4)
    thinker.prefill(thinker.embed(ids), positions, PiecewiseSpans(prompts.spans), cache)
    step = torch.tensor([5]), torch.tensor([70])
    cache.move(1, 0, LENGTHS[1])
    moved = thinker.decode(*step, torch.tensor(LENGTHS[1:2]), cache, 14)
    fresh = new_cache(thinker.config, 1)
    thinker.prefill(thinker.embed(prompts.ids[1]), prompts.positions[1], PiecewiseSpans([(0, 0, LENGTHS[1])]), fresh)
    close(moved, thinker.decode(*step, torch.tensor(LENGTHS[1:2]), fresh, 14))


def test_bfloat16_follows_float32(nano: Path, config: OmniConfig, thinker: Thinker) -> None:
    half = load_thinker(nano, config, torch.bfloat16)
    prompts = Prompts()
    ids, positions = prompts.packed()
    lengths = torch.tensor(LENGTHS)
    results = []
    for network, dtype in ((thinker, torch.float32), (half, torch.bfloat16)):
        cache = new_cache(network.config, 4, dtype)
        first, _ = network.prefill(network.embed(ids), positions, PiecewiseSpans(prompts.spans), cache)
        second = network.decode(torch.arange(4), lengths + 40, lengths, cache, 21)
        assert first.dtype == second.dtype == dtype
        results.append(torch.cat((first, second)).float())
    assert torch.nn.functional.cosine_similarity(*results).min() > 0.9
    assert torch.nn.functional.cosine_similarity(*results).mean() > 0.98


def test_dense_layers_and_routing_without_renormalisation() -> None:
    """What the real checkpoint does not use but config.json can ask for."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    other = Qwen3OmniMoeThinkerTextModel(
        Qwen3OmniMoeTextConfig(
            vocab_size=50, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=1, head_dim=16, num_experts=6, num_experts_per_tok=3,
            norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3], rope_parameters=rope,
        )
    ).eval()  # fmt: skip
    draw = torch.Generator().manual_seed(3)
    for parameter in other.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5
    stack = DecoderConfig(
        vocab_size=50, hidden_size=48, intermediate_size=64, layers=4, heads=4, kv_heads=1, head_dim=16,
        rms_norm_eps=1e-6, rope_theta=1e4, mrope_section=(4, 2, 2), experts=6, experts_per_token=3, expert_size=24,
        norm_topk=False, dense_layers=frozenset({0, 2, 3}),
    )  # fmt: skip
    decoder = Decoder(stack, torch.float32, "cpu")
    values = unpack_experts(dict(other.state_dict()))
    for name, slot in decoder.slots("").items():
        slot.copy_(values[name])
    decoder.prepare()
    x, axes = torch.randn(9, 48, generator=draw), torch.randint(0, 30, (3, 9), generator=draw)
    with torch.no_grad():
        expected = other(
            inputs_embeds=x[None], position_ids=torch.cat((torch.arange(9)[None], axes)).unsqueeze(1)
        ).last_hidden_state[0]
        actual, _ = decoder.prefill(x, axes, PiecewiseSpans([(0, 0, 9)]), KVCache(4, 1, 1, 9, 16))
    close(actual[0], expected[-1])


def unpack_experts(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' packed expert tensors under the names of a checkpoint."""
    for name in [name for name in values if name.endswith("gate_up_proj")]:
        base = name.removesuffix("gate_up_proj")
        for index, (gate_up, down) in enumerate(zip(values[name], values[f"{base}down_proj"], strict=True)):
            gate, up = gate_up.chunk(2)
            values |= {
                f"{base}{index}.gate_proj.weight": gate,
                f"{base}{index}.up_proj.weight": up,
                f"{base}{index}.down_proj.weight": down,
            }
    return values


@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 8, 2), (5, 8, 2), (40, 8, 3), (3, 128, 8), (50, 128, 8)])
def test_all_ways_through_the_experts_agree(tokens: int, count: int, top_k: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    x, residual = torch.randn(2, tokens, 32, generator=draw)
    gate_up = torch.randn(count, 32, 48, generator=draw) / 6
    down = torch.randn(count, 24, 32, generator=draw) / 5
    weights, chosen = torch.randn(tokens, count, generator=draw).softmax(-1).topk(top_k)
    expected = residual.clone()
    for token in range(tokens):
        for weight, index in zip(weights[token], chosen[token], strict=True):
            gate, up = (x[token] @ gate_up[index]).chunk(2)
            expected[token] += weight * ((torch.nn.functional.silu(gate) * up) @ down[index])
    results = [one_token(x, residual, weights, chosen, list(zip(gate_up, down, strict=True)))] * (tokens == 1)
    for way in (dense, grouped, experts):
        results.append(way(x, residual, weights, chosen, gate_up, down))
    for result in results:
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
def test_talker_frames_equal_generate(talker: Talker, reference: Any) -> None:
    """Greedy with repetition penalty and suppressed codes, three rows of different lengths and text together."""
    frames, penalty, rows = 24, 1.05, 3
    draw = torch.Generator().manual_seed(5)
    lengths = torch.tensor([12, 20, 15])
    prompts = [torch.randn(int(length), talker.config.text.hidden_size, generator=draw) for length in lengths]
    texts = [torch.randn(length, talker.config.text.hidden_size, generator=draw) for length in (10, 3, 30)]
    expected = [generate_codes(reference, talker, *pair, frames, penalty) for pair in zip(prompts, texts, strict=True)]

    cache = new_cache(talker.config.text, rows)
    ends = lengths.cumsum(0).tolist()
    spans = [(row, ends[row] - int(lengths[row]), ends[row]) for row in range(rows)]
    positions = torch.cat([torch.arange(int(length)) for length in lengths]).expand(3, -1)
    hidden, logits = talker.prefill(torch.cat(prompts), positions, PiecewiseSpans(spans), cache)
    seen = torch.zeros(rows, len(talker.speakable), dtype=torch.bool)
    actual = []
    for frame in range(frames):
        scores = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        codes0 = scores.argmax(-1)
        seen[torch.arange(rows), codes0] = True
        text = torch.stack([rest[frame] if frame < len(rest) else talker.tts_pad for rest in texts])
        at = lengths + frame
        codes, hidden, logits = talker.frame(hidden, codes0, text, at, at, cache, int(at.max()) + 1, greedy)
        actual.append(codes)
    for row in range(rows):
        codes = torch.stack(actual, 1)[row, : len(expected[row])]
        assert len(codes) > 5
        assert torch.equal(codes, expected[row])


def greedy(logits: torch.Tensor, group: int) -> torch.Tensor:
    return logits.argmax(-1)


def generate_codes(
    reference: Any, talker: Talker, prompt: torch.Tensor, text: torch.Tensor, frames: int, penalty: float
) -> torch.Tensor:
    """The codes [F, 16] that transformers' talker generates for one prompt, up to its end code."""
    result = reference.talker.generate(
        inputs_embeds=prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        talker_input_ids=torch.zeros(1, len(prompt), dtype=torch.int64),
        trailing_text_hidden=text[None],
        tts_pad_embed=talker.tts_pad[None, None],
        max_new_tokens=frames + 1,
        do_sample=False,
        repetition_penalty=penalty,
        suppress_tokens=sorted(set(range(talker.config.text.vocab_size)) - set(talker.speakable.tolist())),
        eos_token_id=talker.config.codec_eos,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    return torch.cat([state[-1] for state in result.hidden_states if state[-1] is not None])


@torch.no_grad()
def test_code_predictor_equals_generate_in_any_batch(talker: Talker, reference: Any) -> None:
    draw = torch.Generator().manual_seed(6)
    hidden, embeds = torch.randn(2, 5, talker.config.text.hidden_size, generator=draw)
    expected = torch.cat(
        [
            reference.talker.code_predictor.generate(
                inputs_embeds=torch.stack(pair)[None], max_new_tokens=15, do_sample=False
            )
            for pair in zip(hidden, embeds, strict=True)
        ]
    )
    tables = reference.talker.code_predictor.get_input_embeddings()
    for rows in (2, 5, 1):
        codes, total = talker.predictor.predict(hidden[:rows], embeds[:rows], greedy)
        assert torch.equal(codes, expected[:rows])
        sums = embeds[:rows] + sum(table(codes[:, group]) for group, table in enumerate(tables))
        close(total, sums)


def test_pick_decides_the_residual_codes(talker: Talker) -> None:
    hidden, embeds = torch.randn(2, 3, talker.config.text.hidden_size, generator=torch.Generator().manual_seed(7))
    groups = []

    def pick(logits: torch.Tensor, group: int) -> torch.Tensor:
        assert logits.shape == (3, talker.config.predictor.vocab_size)
        groups.append(group)
        return torch.tensor([group, 2 * group, 3 * group])

    codes, _ = talker.predictor.predict(hidden, embeds, pick)
    assert groups == list(range(1, 16))
    assert codes.tolist() == [[row * group for group in range(1, 16)] for row in (1, 2, 3)]


@torch.no_grad()
def test_projections_and_assistant_rows(talker: Talker, reference: Any) -> None:
    config, model = talker.config, reference.talker
    embed = reference.thinker.get_input_embeddings()

    def text(*ids: int) -> torch.Tensor:
        return model.text_projection(embed(torch.tensor(ids)))

    ids = (5, 900, 17)
    close(talker.project_text(torch.tensor(ids)), text(*ids))
    states = torch.randn(4, config.thinker_hidden_size, generator=torch.Generator().manual_seed(8))
    close(talker.project_hidden(states), model.hidden_projection(states))
    speaker = config.speakers["ethan"]
    pads = [config.tts_pad] * 4
    expected = text(config.im_start, config.assistant, config.newline, *pads, config.tts_bos, 321)
    codes = [config.codec_nothink, config.codec_think_bos, config.codec_think_eos, speaker]
    codes += [config.codec_pad, config.codec_bos]
    expected[3:] += model.get_input_embeddings()(torch.tensor(codes))
    close(talker.assistant_rows(321, speaker), expected)
    close(torch.stack((talker.tts_pad, talker.tts_eos)), text(config.tts_pad, config.tts_eos))


def test_speakable_codes(talker: Talker) -> None:
    vocabulary, end = talker.config.text.vocab_size, talker.config.codec_eos
    assert talker.speakable.tolist() == [*range(vocabulary - 1024), end]
    assert talker.stop_code == vocabulary - 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_of_the_cache_cost_nothing_until_they_are_written() -> None:
    """Not even where a page is huge: a row's first position must not clear megabytes."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = KVCache(4, 32, 2, 8192, 32)
    for row in range(32):
        for layer in range(4):
            for part in cache.row(layer, row):
                part[:, :4] = 1.0
    assert sum(lines.nbytes for lines in cache.lines) > 1 << 29 and resident() - before < 1 << 24


def test_cache_budget() -> None:
    shape = (4, 2, 100, 32, torch.bfloat16)
    assert row_bytes(*shape) == 102400
    allocated = sum(lines.nbytes for lines in KVCache(4, 3, 2, 100, 32, torch.bfloat16).lines)
    assert allocated == (3 + 1) * row_bytes(4, 2, 100 + 1, 32, torch.bfloat16)  # room that tracing wants, never used
    assert rows_within(3 * 102400 + 102399, *shape) == 3
    assert rows_within(102399, *shape) == 0


BATCHES = (1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 31)


def test_a_decoded_row_is_the_same_to_the_bit_in_any_batch(thinker: Thinker, talker: Talker) -> None:
    """Whatever is beside it, and however many positions the longest neighbour has."""
    most = max(BATCHES) + 1
    draw = torch.Generator().manual_seed(9)
    ids = torch.randint(0, 900, (most,), generator=draw)
    hidden, text = torch.randn(2, most, talker.config.text.hidden_size, generator=draw)
    codes = torch.randint(0, 256, (most,), generator=draw)

    def steps(rows: int, end: int) -> list[torch.Tensor]:
        text_cache, codec_cache = (
            new_cache(config, most, max_length=128) for config in (thinker.config, talker.config.text)
        )
        tokens, states, firsts, outputs = ids[:rows], hidden[:rows], codes[:rows], []
        for step in range(5):
            where = torch.full((rows,), float(step)), torch.full((rows,), step)
            logits = thinker.decode(tokens, *where, text_cache, end)
            frame, states, codec_logits = talker.frame(
                states, firsts, text[:rows], *where, codec_cache, end, lambda scores, group: scores.argmax(-1)
            )
            tokens, firsts = logits.argmax(-1), codec_logits.argmax(-1) % 256
            outputs += [logits, frame, states, codec_logits]
        return outputs

    together = steps(most, 100)
    for rows in BATCHES:
        for alone, among in zip(steps(rows, 5 + rows), together, strict=True):
            assert torch.equal(alone, among[:rows]), rows


def test_a_prompt_is_read_the_same_to_the_bit_beside_any_other(thinker: Thinker) -> None:
    draw = torch.Generator().manual_seed(10)
    prompts = [torch.randint(0, 900, (length,), generator=draw) for length in (9, 33, 64, 7, 250, 500)]

    def logits(chosen: list[int]) -> torch.Tensor:
        lengths = [len(prompts[index]) for index in chosen]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        spans = [(row, end - length, end) for row, (end, length) in enumerate(zip(ends, lengths, strict=True))]
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1)
        embeds = thinker.embed(torch.cat([prompts[index] for index in chosen]))
        return thinker.prefill(embeds, positions, PiecewiseSpans(spans), new_cache(thinker.config, 6, max_length=512))[
            0
        ]

    together = logits(list(range(6)))
    for index in range(6):
        assert torch.equal(logits([index])[0], together[index]), index
    assert torch.equal(logits([3, 0, 4]), together[[3, 0, 4]])
