"""Cases and rounding bounds for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from alignment.rl.batch import Batch
from alignment.rl.distill_loss import active_positions, shift_labels
from alignment.rl.gkd_data import Encoder, GkdSample, collate

EOS, PAD, VOCAB = 1, 0, 23


def philox(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def build_batch(
    lengths: Sequence[int] = (3, 5, 1, 4),
    *,
    prompt_lengths: Sequence[int] = (2, 4),
    n: int = 2,
    p: int = 4,
    r: int = 5,
    seed: int = 0,
) -> Batch:
    """Groups of n responses to each prompt; a response shorter than r ends in EOS."""
    rng = philox(seed)
    b = len(lengths)
    assert b == n * len(prompt_lengths)
    prompts = torch.full((b, p), PAD)
    prompt_mask = torch.zeros((b, p), dtype=torch.int64)
    for g, length in enumerate(prompt_lengths):
        prompts[g * n : (g + 1) * n, p - length :] = torch.from_numpy(rng.integers(2, VOCAB, length))
        prompt_mask[g * n : (g + 1) * n, p - length :] = 1
    responses = torch.full((b, r), PAD)
    response_mask = torch.zeros((b, r), dtype=torch.int64)
    for i, length in enumerate(lengths):
        responses[i, :length] = torch.from_numpy(rng.integers(2, VOCAB, length))
        if length < r:
            responses[i, length - 1] = EOS
        response_mask[i, :length] = 1
    attention_mask = torch.cat([prompt_mask, response_mask], 1)
    mask = response_mask.double()

    def random(low: float, high: float) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(low, high, (b, r))) * mask

    score = [float(i % 2) for i in range(b)]
    scores = torch.zeros((b, r), dtype=torch.float64)
    scores[torch.arange(b), torch.tensor(lengths) - 1] = torch.tensor(score, dtype=torch.float64)
    log_probs = random(-3.0, -0.01)
    uid = [f"u{g}" for g in range(len(prompt_lengths)) for _ in range(n)]
    return Batch(
        {
            "prompts": prompts,
            "prompt_mask": prompt_mask,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "rollout_log_probs": log_probs + random(-0.01, 0.0),
            "old_log_probs": log_probs,
            "entropys": random(0.0, 2.0),
            "ref_log_prob": random(-3.0, -0.01),
            "values": random(-1.0, 1.0),
            "token_level_scores": scores,
            "token_level_rewards": scores.clone(),
            "advantages": random(-2.0, 2.0),
            "returns": random(-2.0, 2.0),
        },
        {
            "uid": uid,
            "prompt_id": uid,
            "data_source": ["toy"] * b,
            "ground_truth": ["1"] * b,
            "score": score,
            "acc": score,
        },
        {"n": n, "eos_token_id": EOS, "pad_token_id": PAD},
    )


def build_distill_batch(*, k: int = 3, opsd: bool = False, seed: int = 0) -> Batch:
    """Two samples as the stages of distillation see them, the first with a longer response; under OPSD the teacher's
    prompts are one token longer.
    """
    rng = philox(seed)
    samples = [
        GkdSample(
            sample_id=f"u{i}",
            prompt_ids=tuple(rng.integers(2, VOCAB, p).tolist()),
            response_ids=(*rng.integers(2, VOCAB, r - 1).tolist(), EOS),
            response_mask=(True,) * r,
            teacher_prompt_ids=tuple(rng.integers(2, VOCAB, p + 1).tolist()) if opsd else None,
        )
        for i, (p, r) in enumerate([(2, 4), (3, 2)])
    ]
    batch = collate(samples, Encoder(max_length=16), dp_size=1, pad_token_id=PAD)
    active = active_positions(batch["labels"])
    logits = torch.from_numpy(rng.standard_normal((*active.shape, VOCAB)))
    log_probs = torch.log_softmax(logits, -1)
    values, indices = log_probs.topk(k)
    labels = shift_labels(batch["labels"]).clamp(min=0).unsqueeze(-1)
    return batch.add(
        {
            "teacher_token_log_probs": log_probs.gather(-1, labels).squeeze(-1) * active,
            "teacher_topk_log_probs": values.masked_fill(~active.unsqueeze(-1), float("-inf")),
            "teacher_topk_indices": indices * active.unsqueeze(-1),
        }
    )


def rounding(dtype: torch.dtype, terms: int, magnitude: float) -> float:
    """Bound on the rounding error of a sum of `terms` numbers whose absolute values add up to `magnitude`.

    Higham, *Accuracy and stability of numerical algorithms*, section 4.2: at most (terms − 1) · u · Σ|x|; each side of
    a comparison has that error, and u is half of eps, so terms · eps · Σ|x| holds both, with a few operations per term
    to spare.
    """
    return terms * torch.finfo(dtype).eps * magnitude


def random_masked(b: int, r: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [b,r] float64 matrix of standard normal numbers and a response mask with lengths 1 … r."""
    rng = philox(seed)
    values = torch.from_numpy(rng.standard_normal((b, r)))
    lengths = torch.from_numpy(rng.integers(1, r + 1, b))
    return values, (torch.arange(r) < lengths.unsqueeze(1)).long()


def random_cut(b: int, seed: int) -> list[list[int]]:
    """The numbers 0 … b − 1 in random order, cut into random pieces: how micro batches may hold a batch."""
    rng = philox(seed)
    order = rng.permutation(b)
    cuts = np.flatnonzero(rng.integers(0, 2, b - 1)) + 1
    return [piece.tolist() for piece in np.split(order, cuts)]
