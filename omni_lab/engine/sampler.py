"""Token sampling for a batch of rows, each with its own parameters, history and random draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_lab.core import Sampling


class Sampler:
    """Picks one token for each of the rows 0..B-1 from logits [B, vocabulary].

    The order of the filters is that of transformers' logits processors: repetition penalty over `seen` tokens,
    no stop token before `min_tokens`, then temperature, top-k, top-p. A draw is an inverse
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
        columns: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.stop_token = stop_token
        self.columns = columns
        self.samplings = [Sampling()] * rows
        self.counts = [0] * rows
        self.index = torch.arange(rows, device=device)
        self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(rows, max_tokens, columns, device=device)
        self.temperature = torch.zeros(rows, 1, device=device)
        self.top_k = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, 1, device=device)
        self.penalty = torch.ones(rows, 1, device=device)

    def assign(self, row: int, sampling: Sampling, prompt: torch.Tensor | None = None) -> None:
        """Give `row` to a new request; `prompt` are token ids that count as seen for the penalty."""
        self.samplings[row] = sampling
        self.counts[row] = 0
        if sampling.repetition_penalty != 1.0:
            self.seen[row] = False
            self.penalty[row] = sampling.repetition_penalty
            if prompt is not None:
                self.seen[row, prompt] = True
        if sampling.temperature > 0.0:
            generator = torch.Generator()
            generator.manual_seed(sampling.seed) if sampling.seed is not None else generator.seed()
            draws = torch.rand(sampling.max_tokens, self.columns, generator=generator)
            self.uniforms[row, : sampling.max_tokens] = draws.to(self.uniforms.device)
            self.temperature[row] = sampling.temperature
            self.top_k[row] = sampling.top_k
            self.top_p[row] = sampling.top_p

    def move(self, source: int, target: int) -> None:
        sampling = self.samplings[target] = self.samplings[source]
        self.counts[target] = self.counts[source]
        states = [self.seen, self.penalty] if sampling.repetition_penalty != 1.0 else []
        if sampling.temperature > 0.0:
            states += [self.uniforms, self.temperature, self.top_k, self.top_p]
        for state in states:
            state[target] = state[source]

    def pick(self, logits: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """The next token of rows first_row..first_row+B-1, [B] int64; `commit` takes it. Logits may be overwritten."""
        rows = slice(first_row, first_row + logits.shape[0])
        samplings = self.samplings[rows]
        logits = logits.float()
        penalized = [sampling.repetition_penalty != 1.0 for sampling in samplings]
        if any(penalized):
            penalty = self.penalty[rows]
            scores = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self.seen[rows] & self._where(penalized), scores, logits)
        early = [row for row, s in enumerate(samplings) if self.counts[first_row + row] < s.min_tokens]
        if early:
            rows_early = slice(None) if len(early) == len(samplings) else early
            logits[rows_early, self.stop_token] = -torch.inf
        greedy = [sampling.temperature == 0.0 for sampling in samplings]
        if all(greedy):
            return logits.argmax(-1)
        chosen = draw(logits, self.temperature[rows], self.top_k[rows], self.top_p[rows], self._uniforms(rows, 0)[:, 0])
        return torch.where(self._where(greedy)[..., 0], logits.argmax(-1), chosen) if any(greedy) else chosen

    def residual(self, rows: int, top_k: int, top_p: float) -> ResidualPick:
        """How rows 0..rows-1 pick the residual codes of the frame that starts with their last committed token."""
        greedy = [sampling.temperature == 0.0 for sampling in self.samplings[:rows]]
        if all(greedy):
            return ResidualPick(top_k, top_p)
        uniforms = self._uniforms(slice(0, rows), 1).double()
        return ResidualPick(top_k, top_p, uniforms, self._where(greedy)[:, 0] if any(greedy) else None)

    def commit(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Take `tokens` as the next tokens of `rows`: they count and are seen."""
        for row in rows:
            self.counts[row] += 1
        if any(self.samplings[row].repetition_penalty != 1.0 for row in rows):
            self.seen[self.index[rows], tokens] = True

    def _uniforms(self, rows: slice, back: int) -> torch.Tensor:
        """The uniforms [B, columns] of each row's present position, or of the position `back` before it."""
        last = self.uniforms.shape[1] - 1
        positions = [min(max(count - back, 0), last) for count in self.counts[rows]]
        return self.uniforms[self.index[rows], torch.tensor(positions, device=self.uniforms.device)]

    def _where(self, rows: list[bool]) -> torch.Tensor:
        """A mask [B, 1] of the rows for which something holds."""
        return torch.tensor(rows, device=self.seen.device)[:, None]


@dataclass(frozen=True, slots=True)
class ResidualPick:
    """Picks one residual code for each of B rows from logits [B, codes] and a column 1..15.

    Greedy rows (a mask [B], or all if there are no `uniforms`) take the likeliest; the others draw at temperature 1
    with the given filters (transformers' defaults for the code predictor: top-k 50, top-p 0.8) and their own uniform,
    float64 [B, 16].
    """

    top_k: int
    top_p: float
    uniforms: torch.Tensor | None = None
    greedy: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, column: int) -> torch.Tensor:
        if self.uniforms is None:
            return logits.argmax(-1)
        chosen = draw_residual(logits, self.top_k, self.top_p, self.uniforms[:, column : column + 1])
        return chosen if self.greedy is None else torch.where(self.greedy, logits.argmax(-1), chosen)

    def draws(self, rows: int, columns: int) -> torch.Tensor:
        """The uniforms [B, columns] with those of greedy rows below 0, as the kernel takes them."""
        if self.uniforms is None:
            return torch.full((rows, columns), -1.0, dtype=torch.float64)
        return self.uniforms if self.greedy is None else self.uniforms.masked_fill(self.greedy[:, None], -1.0)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`uniforms` and `greedy` of rows that draw, as a captured step takes them."""
        uniforms, greedy = self.uniforms, self.greedy
        return uniforms, torch.zeros_like(uniforms[:, 0], dtype=torch.bool) if greedy is None else greedy


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """One token for each row of `logits` [B, V] by inverse transform of `uniform` [B].

    `temperature` (above 0, or the row's result means nothing), `top_k` (0: off) and `top_p` (1: off) are [B, 1]. The
    kept tokens are walked from the most to the least likely.
    """
    vocabulary = logits.shape[-1]
    kept = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    scores, tokens = logits.topk(int(kept.max()), dim=-1)
    ranks = torch.arange(scores.shape[-1], device=logits.device)
    scores = (scores / temperature.clamp(min=1e-6)).masked_fill(ranks >= kept, -torch.inf)
    weights = scores.double().softmax(-1)
    before = weights.cumsum(-1) - weights
    edges = weights.masked_fill((before >= top_p) & (ranks > 0), 0.0).cumsum(-1)
    choice = torch.searchsorted(edges, uniform[:, None].double() * edges[:, -1:], right=True)
    return tokens.gather(-1, choice.clamp(max=scores.shape[-1] - 1))[:, 0]


def draw_residual(logits: torch.Tensor, top_k: int, top_p: float, uniform: torch.Tensor) -> torch.Tensor:
    """As `draw` at temperature 1 with one top-k and top-p (below 1) for all rows; `uniform` is float64 [B, 1].

    Fifteen of these are made for every frame: a handful of operators instead of two dozen.
    """
    scores, tokens = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    edges = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    kept = edges.masked_fill(edges < top_p, 1.0).amin(-1, keepdim=True)  # the first edge that reaches top-p
    choice = torch.searchsorted(edges, uniform * kept, right=True)
    return tokens.gather(-1, choice.clamp_(max=scores.shape[-1] - 1))[:, 0]
