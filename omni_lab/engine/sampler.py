"""Token sampling for a batch of rows, each with its own parameters, history and random draws."""

from __future__ import annotations

import torch

from omni_lab.core import Sampling


class Sampler:
    """Picks one token for each of the rows 0..B-1 from logits [B, vocabulary].

    The order of the filters is that of transformers' logits processors: repetition penalty over `seen` tokens,
    no stop token before `min_tokens`, `suppressed` tokens, then temperature, top-k, top-p. A draw is an inverse
    transform of one uniform number that belongs to (request, position, column), so a request gets the same
    tokens alone, in any batch and after any abort of a neighbour. A position has `columns` uniforms: the Talker
    uses column 0 for the codec token and columns 1..15 for the residual codes of its frame.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        stop_token: int,
        max_tokens: int,
        suppressed: torch.Tensor | None = None,
        columns: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.stop_token = stop_token
        self.stop = torch.arange(vocabulary, device=device) == stop_token
        self.suppressed = suppressed
        self.columns = columns
        self.samplings = [Sampling()] * rows
        self.index = torch.arange(rows, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(rows, max_tokens, columns, device=device)
        self.temperature = torch.zeros(rows, 1, device=device)
        self.top_k = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, 1, device=device)
        self.penalty = torch.ones(rows, 1, device=device)
        self.min_tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def assign(self, row: int, sampling: Sampling, prompt: torch.Tensor | None = None) -> None:
        """Give `row` to a new request; `prompt` are token ids that count as seen for the penalty."""
        self.samplings[row] = sampling
        self.counts[row] = 0
        self.seen[row] = False
        if prompt is not None and sampling.repetition_penalty != 1.0:
            self.seen[row, prompt] = True
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.penalty[row] = sampling.repetition_penalty
        self.min_tokens[row] = sampling.min_tokens
        if sampling.temperature > 0.0:
            generator = torch.Generator()
            generator.manual_seed(sampling.seed) if sampling.seed is not None else generator.seed()
            draws = torch.rand(sampling.max_tokens, self.columns, generator=generator)
            self.uniforms[row, : sampling.max_tokens] = draws.to(self.uniforms.device)

    def move(self, source: int, target: int) -> None:
        self.samplings[target] = self.samplings[source]
        for state in (self.counts, self.seen, self.temperature, self.top_k, self.top_p, self.penalty, self.min_tokens):
            state[target] = state[source]
        if self.samplings[source].temperature > 0.0:
            self.uniforms[target] = self.uniforms[source]

    def pick(self, logits: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """The next token of rows first_row..first_row+B-1, [B] int64. Changes nothing: see `commit`."""
        rows = slice(first_row, first_row + logits.shape[0])
        samplings = self.samplings[rows]
        logits = logits.float()
        if any(sampling.repetition_penalty != 1.0 for sampling in samplings):
            penalty = self.penalty[rows]
            penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self.seen[rows], penalized, logits)
        if self.suppressed is not None:
            logits = logits.masked_fill(self.suppressed, -torch.inf)
        if any(sampling.min_tokens for sampling in samplings):
            early = self.counts[rows] < self.min_tokens[rows]
            logits = torch.where(early[:, None] & self.stop, -torch.inf, logits)
        if all(sampling.temperature == 0.0 for sampling in samplings):
            return logits.argmax(-1)
        filters = (self.temperature[rows], self.top_k[rows], self.top_p[rows])
        return draw(logits, *filters, self.uniforms_of(rows)[:, 0])

    def pick_residual(self, logits: torch.Tensor, column: int, top_k: int, top_p: float) -> torch.Tensor:
        """A residual code of the frame that starts with the last committed token, for rows 0..B-1.

        Greedy rows stay greedy; the others draw at temperature 1 with the given filters (transformers'
        defaults for the code predictor: top-k 50, top-p 0.8).
        """
        rows = slice(0, logits.shape[0])
        if all(sampling.temperature == 0.0 for sampling in self.samplings[rows]):
            return logits.argmax(-1)
        temperature = self.temperature[rows].clamp(max=1.0).ceil()
        return draw(
            logits.float(),
            temperature,
            torch.full_like(self.top_k[rows], top_k),
            torch.full_like(self.top_p[rows], top_p),
            self.uniforms_of(rows, back=1)[:, column],
        )

    def uniforms_of(self, rows: slice, back: int = 0) -> torch.Tensor:
        """The uniforms [B, columns] of each row's present position, or of the position `back` before it."""
        position = (self.counts[rows] - back).clamp(0, self.uniforms.shape[1] - 1)
        return self.uniforms[rows].take_along_dim(position[:, None, None], 1)[:, 0]

    def commit(self, rows: slice | torch.Tensor, tokens: torch.Tensor) -> None:
        """Take `tokens` as the next tokens of `rows`: they count and are seen."""
        self.counts[rows] += 1
        self.seen[self.index[rows], tokens] = True


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """One token for each row of `logits` [B, V] by inverse transform of `uniform` [B]; temperature 0 is argmax.

    `temperature`, `top_k` (0: off) and `top_p` (1: off) are [B, 1]. The kept tokens are walked from the most
    to the least likely, so rounding can only matter where the uniform hits the edge between two of them.
    """
    vocabulary = logits.shape[-1]
    kept = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    scores, tokens = logits.topk(int(kept.max()), dim=-1)
    ranks = torch.arange(scores.shape[-1], device=logits.device)
    scores = (scores / temperature.clamp(min=1e-6)).masked_fill(ranks >= kept, -torch.inf)
    weights = scores.double().softmax(-1)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill((before >= top_p) & (ranks > 0), 0.0)
    edges = weights.cumsum(-1)
    choice = (edges <= uniform[:, None].double() * edges[:, -1:]).sum(-1, keepdim=True)
    choice = choice.clamp(max=scores.shape[-1] - 1).masked_fill(temperature == 0.0, 0)
    return tokens.gather(-1, choice)[:, 0]
