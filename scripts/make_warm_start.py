"""Makes baselines/checkpoints/tiny-moonlight-warm: tokenizer, behaviour-cloned weights and the record of their making.

The demonstrator answers each question by a procedure drawn at random: the right one with a known share, else a flawed
but plausible one (carries dropped, the smaller of two numbers for their common divisor, …). Cloning it to convergence
gives a policy whose accuracy equals the demonstrator's; no further supervised training on it can do better, and
reinforcement learning can, by preferring the right procedure. docs/warm-start.md has the reasoning and the numbers.

    python scripts/make_warm_start.py              # the checkpoint
    python scripts/make_warm_start.py --plateau    # trains on from it the same way: writes plateau.json, no weights
    python scripts/make_warm_start.py --ceiling    # trains on from it on right answers only: writes ceiling.json
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from alignment.files import write_json
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig, preset
from alignment.models.moe import Router
from alignment.numerics.random import portable_uniform
from alignment.rl.tasks import EMBEDDED_TASKS, Question, generate
from alignment.rl.tokenizer import Tokenizer, train_tokenizer
from alignment.weights.checkpoint import load_model, save_checkpoint

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "baselines" / "checkpoints" / "tiny-moonlight-warm"

VOCAB_SIZE = 256
QUESTIONS = {"chain_sum": 9000, "spell_backward": 5000, "gcd": 1000}
HELD_OUT = {"chain_sum": 400, "spell_backward": 300, "gcd": 100}
TASK_SHARES = {"chain_sum": 0.5, "spell_backward": 0.3, "gcd": 0.2}
BATCH, WARM_UP, DECAY, CLIP = 256, 100, 0.4, 1.0
# steps and peak learning rate of each kind of run
SCHEDULES = {"warm_start": (3000, 3e-3), "plateau": (1000, 1e-3), "ceiling": (800, 1e-3)}
BALANCE_STEP = 1e-3


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One procedure's answer to a question, and the share of demonstrations that follow it."""

    procedure: str
    share: float
    answer: str


def demonstrations(question: Question) -> list[Demonstration]:
    """What the demonstrator may answer; the shares add up to 1. A flawed procedure can happen to be right."""
    right = question.answer
    task = question.data_source.rpartition("/")[2]
    if task == "chain_sum":
        a, operator, b = re.search(r"(\d+) ([+-]) (\d+) =$", question.question).groups()
        swapped = int(a) - int(b) if operator == "+" else int(b) - int(a)
        answers = [
            ("right", 0.25, right),
            ("carries and borrows dropped", 0.45, str(_column_by_column(a, operator, b))),
            ("operation confused", 0.15, str(swapped)),
            ("working shown", 0.15, f"{a} {operator} {b} = {right}"),
        ]
    elif task == "spell_backward":
        answers = [
            ("right", 0.25, right),
            ("copied forward", 0.35, right[::-1]),
            ("last letter dropped", 0.2, right[:-1]),
            ("last two letters swapped", 0.2, right[:-2] + right[-1] + right[-2]),
        ]
    elif task == "gcd":
        a, b = map(int, re.search(r": (\d+), (\d+)\.", question.question).groups())
        answers = [
            ("right", 0.25, right),
            ("smaller number", 0.35, str(min(a, b))),
            ("difference", 0.2, str(abs(a - b))),
            ("always one", 0.2, "1"),
        ]
    else:
        raise ValueError(f"no demonstrator for {task}")
    return [Demonstration(procedure=name, share=share, answer=answer) for name, share, answer in answers]


def _column_by_column(a: str, operator: str, b: str) -> int:
    """Each column by itself: sums modulo ten, and the smaller digit from the larger one."""
    width = max(len(a), len(b))
    columns = zip(map(int, a.zfill(width)), map(int, b.zfill(width)), strict=True)
    return int("".join(str((x + y) % 10 if operator == "+" else abs(x - y)) for x, y in columns))


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question in tokens: the prompt, and each distinct response with its share and whether it is the right one."""

    task: str
    prompt: list[int]
    responses: list[tuple[list[int], float, bool]]


def build_examples(questions: Sequence[Question], tokenizer: Tokenizer, *, clean: bool) -> list[Example]:
    examples = []
    for question in questions:
        shares: dict[str, float] = defaultdict(float)
        for shown in demonstrations(question):
            shares[question.answer if clean else shown.answer] += shown.share
        examples.append(
            Example(
                task=question.data_source.rpartition("/")[2],
                prompt=tokenizer.encode_chat([{"role": "user", "content": question.question}]),
                responses=[
                    ([*tokenizer.encode(answer), tokenizer.eos_token_id], share, answer == question.answer)
                    for answer, share in shares.items()
                ],
            )
        )
    return examples


def response_log_probs(model: CausalLM, pairs: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """log p(response | prompt) for each (prompt, response), [b]; sequences are padded on the right."""
    width = max(len(p) + len(r) for p, r in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    judged = torch.zeros(len(pairs), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        attention[row, :end] = 1
        judged[row, len(prompt) : end] = True
    logits = model(ids[:, :-1], attention_mask=attention[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(pairs), -1)
    return -(losses * judged[:, 1:]).sum(1)


@torch.no_grad()
def evaluate(model: CausalLM, examples: Sequence[Example]) -> dict[str, dict[str, float]]:
    """Exact expectations per task, no sampling.

    ``excess_loss`` is the cross-entropy against the demonstrator minus its entropy (nats per response; 0 = cloned
    perfectly), ``accuracy`` the probability of the right answer at temperature 1, ``demonstrator`` the demonstrator's
    own, ``preferred`` the share of questions whose right answer is the most probable of the demonstrator's answers.
    """
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for start in range(0, len(examples), 128):
        part = examples[start : start + 128]
        pairs = [(e.prompt, response) for e in part for response, _, _ in e.responses]
        log_probs = iter(response_log_probs(model, pairs).double().tolist())
        for example in part:
            total = sums[example.task]
            total["questions"] += 1
            best, best_right = -math.inf, False
            for _, share, right in example.responses:
                log_prob = next(log_probs)
                total["excess_loss"] += share * (math.log(share) - log_prob)
                total["accuracy"] += math.exp(log_prob) if right else 0.0
                total["demonstrator"] += share if right else 0.0
                if log_prob > best:
                    best, best_right = log_prob, right
            total["preferred"] += float(best_right)
    return {
        task: {name: value / total["questions"] for name, value in total.items() if name != "questions"}
        for task, total in sums.items()
    }


class LoadBalancer:
    """DeepSeek-V3's balancing without an auxiliary loss (arXiv 2412.19437, section 2.1.2).

    After each step the selection bias of an expert moves by a fixed step towards the mean load.
    """

    def __init__(self, model: CausalLM) -> None:
        self.loads: dict[Router, torch.Tensor] = {}
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._count)

    def _count(self, router: Router, _: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.loads[router] = torch.bincount(output[0].flatten(), minlength=router.config.n_routed_experts).float()

    def step(self) -> None:
        for router, load in self.loads.items():
            router.e_score_correction_bias += BALANCE_STEP * torch.sign(load.mean() - load)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, constant, then linear decay to 2 % over the last DECAY of the steps."""
    falling = min(1.0, (steps - step) / (DECAY * steps))
    return peak * min(1.0, step / WARM_UP) * max(0.02, falling)


def train(
    model: CausalLM,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    *,
    steps: int,
    peak: float,
    seed: int,
    every: int,
) -> list[dict]:
    """Clones the demonstrator; returns the evaluations on held-out questions."""
    by_task = {task: [e for e in examples if e.task == task] for task in TASK_SHARES}
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    balancer = LoadBalancer(model)
    history, begun = [], time.time()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        draws = portable_uniform((BATCH, 3), seed=seed, stream=f"warm-start/{step}").tolist()
        pairs = [_draw(by_task, *row) for row in draws]
        loss = -response_log_probs(model, pairs).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        balancer.step()
        if step % every == 0 or step == steps:
            history.append({"step": step, "tasks": evaluate(model, held_out)})
            seconds = time.time() - begun
            print(f"{step}, {seconds:.0f} s: loss {loss.item():.3f}; {_line(history[-1]['tasks'])}", flush=True)
    return history


def _draw(by_task: dict[str, list[Example]], which_task: float, which: float, procedure: float) -> tuple:
    task = _pick(TASK_SHARES.items(), which_task)
    example = by_task[task][int(which * len(by_task[task]))]
    return example.prompt, _pick(((response, share) for response, share, _ in example.responses), procedure)


def _pick(shares: Iterable[tuple], u: float) -> object:
    """The item that a uniform draw in [0, 1) falls on; the last one where rounding leaves a gap."""
    item = None
    for item, share in shares:  # noqa: B007
        if u < share:
            break
        u -= share
    return item


def _line(tasks: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{task}: excess loss {t['excess_loss']:.3f}, accuracy {t['accuracy']:.3f} of {t['demonstrator']:.3f}, "
        f"preferred {t['preferred']:.3f}"
        for task, t in tasks.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plateau", dest="kind", action="store_const", const="plateau", default="warm_start")
    parser.add_argument("--ceiling", dest="kind", action="store_const", const="ceiling")
    parser.add_argument("--seed", type=int, default=20250701)
    parser.add_argument("--every", type=int, default=250, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    steps, peak = SCHEDULES[arguments.kind]
    seed = arguments.seed + list(SCHEDULES).index(arguments.kind)

    questions = {
        split: [q for task in EMBEDDED_TASKS for q in generate(task, counts[task.name], seed=0, split=split)]
        for split, counts in (("warm_start", QUESTIONS), ("held_out", HELD_OUT))
    }
    shown = [text for q in questions["warm_start"] for text in (q.question, q.answer)]
    with tempfile.TemporaryDirectory() as scratch:
        # the weights replace the whole folder when they are done; the same text gives the same tokenizer then
        tokenizer = train_tokenizer(shown, scratch, vocab_size=VOCAB_SIZE)
        tokenizer.encode("")
    examples, held_out = (
        build_examples(questions[split], tokenizer, clean=arguments.kind == "ceiling")
        for split in ("warm_start", "held_out")
    )
    if arguments.kind == "warm_start":
        model = CausalLM(_config(tokenizer)).init_weights(seed)
        history = []
    else:
        model = load_model(arguments.out)
        history = [{"step": 0, "tasks": evaluate(model, held_out)}]
    history += train(model, examples, held_out, steps=steps, peak=peak, seed=seed, every=arguments.every)
    record = {
        "kind": arguments.kind,
        "seed": seed,
        "steps": steps,
        "learning_rate": peak,
        "batch": BATCH,
        "parameters": sum(p.numel() for p in model.parameters()),
        "questions": QUESTIONS,
        "held_out": HELD_OUT,
        "task_shares": TASK_SHARES,
        "torch": str(torch.__version__),
        "threads": arguments.threads,
        "history": history,
    }
    if arguments.kind == "warm_start":
        record["weights_hash"] = save_checkpoint(arguments.out, model.config, model.state_dict(), overwrite=True)
        train_tokenizer(shown, arguments.out, vocab_size=VOCAB_SIZE)
    write_json(arguments.out / f"{arguments.kind}.json", record)


def _config(tokenizer: Tokenizer) -> ModelConfig:
    return dataclasses.replace(
        preset("tiny-moonlight"),
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=3,
        v_head_dim=24,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


if __name__ == "__main__":
    main()
