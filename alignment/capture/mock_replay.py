"""Mock inference: the responses another device recorded, in place of generation, so that the training stages can be
compared without the inference engine's own deviations.

A recording is the key data that the collector wrote with ``key_data_dump``. It stands in for
:class:`alignment.rl.mock_rollout.RecordedRollouts`, so the trainer knows no difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment.capture.collector_config import CollectorConfig
from alignment.capture.collector_steps import mock_step
from alignment.capture.readers.collector_dump import CollectorDump
from alignment.capture.readers.npy_file import read_npy
from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.data import Prompt, PromptSet, prompt_batch

NEEDED, HELPFUL = ("responses", "prompts"), ("attention_mask",)
_ENDLESS = 1 << 62

OnReplay = Callable[[int, int, Mapping[int, Batch]], None]
"""Called with step (from 0), attempt and the replayed rows by the rank that recorded them."""


class MockRollouts:
    """Recorded rollouts as the trainer asks for them.

    With ``mock_random_seed`` ``None`` a recorded step is loaded at its own step, and has to be about the prompts of
    that step; its samples may stand in any order and on any number of ranks. In the other two modes the recorded
    prompts take the place of the step's, and are looked up in the training data, so that rewards judge the right
    answers.

    Args:
        config: of the collector.
        prompts: the training data; None where steps are not made of it (distillation), which leaves one mode.
        prompt_length, response_length: widths of the batch.
        pad_token_id, eos_token_id: of this run; recorded padding is dropped.
        vocab_size: of the policy, to refuse the tokens of another.
        on_replay: told about every replay.

    Raises:
        InputError: nothing is recorded there, or a mode without its data.
    """

    def __init__(
        self,
        config: CollectorConfig,
        *,
        prompts: PromptSet | None,
        prompt_length: int,
        response_length: int,
        pad_token_id: int,
        eos_token_id: int,
        vocab_size: int | None = None,
        on_replay: OnReplay | None = None,
    ) -> None:
        self.config = config
        if prompts is None and config.mock_random_seed is not None:
            raise InputError(
                "only recorded steps at their own places can be replayed in this pipeline",
                where="precision_collector.mock_random_seed",
                expected="None",
                found=config.mock_random_seed,
            )
        self._root = Path(config.mock_data_path)
        if not self._root.is_dir():
            raise InputError(
                "there is no recording to replay", where=f"precision_collector.mock_data_path: {self._root}",
                next_step="record with key_data_dump on the benchmark device, and name its dump_path",
            )  # fmt: skip
        self._dump = CollectorDump(self._root)
        missing = [key for key in NEEDED if key not in self._dump.keys()]
        if missing:
            raise InputError(
                "the recording cannot be replayed", where=self._root, expected=", ".join(NEEDED),
                found=", ".join(self._dump.keys()) or "no key data", next_step="record with key_data_dump: True",
            )  # fmt: skip
        self._prompts = prompts
        self._widths = prompt_length, response_length
        self._pad, self._eos, self._vocabulary = pad_token_id, eos_token_id, vocab_size
        self._on_replay = on_replay
        self._known: dict[tuple[int, ...], Prompt] | None = None

    # --- what the trainer asks for -----------------------------------------------------------------------------------

    def has(self, step: int, attempt: int = 0) -> bool:
        """Whether generation round ``attempt`` of training step ``step`` (from 1) is replayed."""
        recorded = mock_step(self.config, step - 1)
        return recorded is not None and (attempt == 0 or attempt in self._attempts(recorded))

    def steps(self) -> int:
        """How many training steps from the first on are replayed: an engine is needed only beyond them."""
        if self.config.mock_random_seed is not None:
            return _ENDLESS
        return self.config.mock_step_end + 1 if self.config.mock_step_start == 0 else 0

    def save(self, step: int, attempt: int, rollout: Batch) -> None:
        """Nothing: what is generated beside a replay is dumped by the collector, where it is asked to."""

    def load(self, step: int, attempt: int, prompts: Batch) -> Batch:
        """``prompts`` with the recorded responses.

        Raises:
            InputError: the recorded step is missing, damaged, or about other prompts.
        """
        recorded = mock_step(self.config, step - 1)
        samples = self._samples(recorded, attempt)
        if self.config.mock_random_seed is None:
            order = self._paired(prompts, samples, recorded)
        else:
            prompts, order = self._replaced(prompts, samples, recorded, attempt)
        batch = self._with_responses(prompts, [samples[i] for i in order])
        if self._on_replay is not None:
            ranks: dict[int, list[int]] = defaultdict(list)
            for row, i in enumerate(order):
                ranks[samples[i].rank].append(row)
            self._on_replay(step - 1, attempt, {rank: batch[rows] for rank, rows in sorted(ranks.items())})
        return batch

    # --- the recording -----------------------------------------------------------------------------------------------

    def _attempts(self, step: int) -> set[int]:
        return {
            datum.micro_step
            for rank in self._dump.ranks(step, "data")
            for datum in self._dump.key_data(step, rank)
            if datum.key == "responses"
        }

    def _samples(self, step: int, attempt: int) -> list[_Sample]:
        ranks = self._dump.ranks(step, "data")
        samples = [s for rank in ranks for s in self._samples_of_rank(step, attempt, rank)]
        if not samples:
            raise InputError(
                "this step was not recorded", where=self._root,
                expected=f"data/responses/step{step}/…/micro_step{attempt}",
                found=f"steps {', '.join(map(str, self._dump.steps()[:8]))}",
                next_step="set mock_step_start and mock_step_end to recorded steps",
            )  # fmt: skip
        return samples

    def _samples_of_rank(self, step: int, attempt: int, rank: int) -> list[_Sample]:
        found: dict[str, list[tuple[Path, np.ndarray]]] = defaultdict(list)
        for datum in self._dump.key_data(step, rank):
            if datum.micro_step == attempt and datum.key in NEEDED + HELPFUL:
                found[datum.key].append((datum.path, read_npy(datum.path).load()))
        samples: list[_Sample] = []
        for index, (path, responses) in enumerate(found["responses"]):
            others = {}
            for key in ("prompts", "attention_mask"):
                if index < len(found[key]):
                    others[key] = found[key][index][1]
                elif key in NEEDED:
                    raise InputError("the recording lacks a part", where=path, expected=f"{key} of the same samples")
            samples += self._rows(path, responses, others["prompts"], others.get("attention_mask"), rank)
        return samples

    def _rows(
        self, path: Path, responses: np.ndarray, prompts: np.ndarray, mask: np.ndarray | None, rank: int
    ) -> list[_Sample]:
        for name, array in (("responses", responses), ("prompts", prompts)):
            if array.ndim != 2 or array.dtype.kind not in "iu":
                raise InputError("recorded tokens are integers [samples, tokens]", where=f"{path}: {name}",
                                 found=f"{array.dtype} {list(array.shape)}")  # fmt: skip
            if array.size and (array.min() < 0 or self._vocabulary is not None and array.max() >= self._vocabulary):
                raise InputError("a recorded token is not in the vocabulary", where=f"{path}: {name}",
                                 expected=f"0 … {(self._vocabulary or 0) - 1}",
                                 found=f"{array.min()} … {array.max()}")  # fmt: skip
        width = prompts.shape[1] + responses.shape[1]
        if len(prompts) != len(responses) or (mask is not None and mask.shape != (len(responses), width)):
            raise InputError(
                "recorded prompts, responses and masks do not fit each other", where=path,
                expected=f"{len(responses)} samples, masks of {width}",
                found=f"{len(prompts)} prompts, masks {None if mask is None else list(mask.shape)}",
            )  # fmt: skip
        rows = []
        for i in range(len(responses)):
            if mask is not None:
                kept = mask[i] != 0
                asked, said = prompts[i][kept[: prompts.shape[1]]], responses[i][kept[prompts.shape[1] :]]
            else:  # left padding, and everything behind the first end of the text, is padding
                real = np.flatnonzero(prompts[i] != self._pad)
                asked = prompts[i][real[0] :] if len(real) else prompts[i][:0]
                ends = np.flatnonzero(responses[i] == self._eos)
                said = responses[i][: ends[0] + 1] if len(ends) else responses[i]
            if not len(said) or not len(asked):
                raise InputError("a recorded sample has no tokens", where=f"{path}, sample {i}")
            rows.append(_Sample(tuple(asked.tolist()), tuple(said.tolist()), rank))
        return rows

    # --- pairing -----------------------------------------------------------------------------------------------------

    def _paired(self, prompts: Batch, samples: Sequence[_Sample], recorded: int) -> list[int]:
        """For every row of ``prompts`` the recorded sample; the n samples of a prompt keep their order."""
        queues: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, sample in enumerate(samples):
            queues[sample.prompt].append(i)
        order, names = [], prompts["prompt_id"]
        for row, tokens in enumerate(_tokens(prompts["prompts"], prompts["prompt_mask"])):
            if not queues.get(tokens):
                raise InputError(
                    "the recorded step is about other prompts",
                    where=f"{self._root}, step {recorded}",
                    expected=f"prompt {names[row]} ({names.count(names[row])} samples)",
                    found="a recording without it, or with fewer samples of it",
                    next_step="use data, data.seed, sizes and rollout.n of the recorded run, or mock_random_seed -1",
                )  # fmt: skip
            order.append(queues[tokens].pop(0))
        left = sum(map(len, queues.values()))
        if left:
            raise InputError(
                "the recorded step has more samples than this run asks for", where=f"{self._root}, step {recorded}",
                expected=f"{len(order)} samples", found=f"{len(samples)} samples",
                next_step="use the batch sizes and rollout.n of the recorded run",
            )  # fmt: skip
        return order

    def _replaced(
        self, prompts: Batch, samples: Sequence[_Sample], recorded: int, attempt: int
    ) -> tuple[Batch, list[int]]:
        """The recorded prompts as the batch, and the order of the samples that puts those of a prompt together."""
        n = prompts.info["n"]
        by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, sample in enumerate(samples):
            by_prompt[sample.prompt].append(i)
        if len(samples) != len(prompts) or any(len(rows) % n for rows in by_prompt.values()):
            raise InputError(
                "the recorded step does not have the shape of this run's", where=f"{self._root}, step {recorded}",
                expected=f"{len(prompts)} samples, {n} of every prompt", found=f"{len(samples)} samples",
                next_step="use the batch sizes and rollout.n of the recorded run",
            )  # fmt: skip
        chosen, order = [], []
        for tokens, rows in by_prompt.items():
            chosen += [self._prompt(tokens, recorded)] * (len(rows) // n)
            order += rows
        batch = prompt_batch(chosen, pad_token_id=self._pad, prompt_length=self._widths[0])
        uids = [f"{p}@{attempt}" + (f".{chosen[:i].count(chosen[i])}" if chosen[:i].count(chosen[i]) else "")
                for i, p in enumerate(batch["prompt_id"])]  # fmt: skip
        batch = batch.add(meta={"uid": uids}).repeat(n)
        return batch.add(meta={"sample_key": prompts["sample_key"]}, info=prompts.info), order

    def _prompt(self, tokens: tuple[int, ...], recorded: int) -> Prompt:
        if self._known is None:
            self._known = {}
            for prompt in self._prompts:
                self._known.setdefault(prompt.token_ids, prompt)
        if tokens not in self._known:
            raise InputError(
                "a recorded prompt is not in the training data, so its reward cannot be judged",
                where=f"{self._root}, step {recorded}", next_step="use the data and the tokenizer of the recorded run",
            )  # fmt: skip
        return self._known[tokens]

    # --- the batch ---------------------------------------------------------------------------------------------------

    def _with_responses(self, prompts: Batch, samples: Sequence[_Sample]) -> Batch:
        width = self._widths[1]
        longest = max(len(s.response) for s in samples)
        if longest > width:
            raise InputError(
                "a recorded response does not fit", where=self._root,
                expected=f"at most {width} tokens (data.max_response_length)", found=longest,
            )  # fmt: skip
        responses = torch.full((len(samples), width), self._pad, dtype=torch.int64)
        mask = torch.zeros((len(samples), width), dtype=torch.int64)
        for row, sample in enumerate(samples):
            responses[row, : len(sample.response)] = torch.tensor(sample.response)
            mask[row, : len(sample.response)] = 1
        attention_mask = torch.cat([prompts["prompt_mask"], mask.to(prompts["prompt_mask"].dtype)], dim=1)
        return prompts.add(
            {
                "responses": responses,
                "response_mask": mask,
                "input_ids": torch.cat([prompts["prompts"], responses], dim=1),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            }
        )


class _Sample:
    """Tokens of one recorded sample, without padding, and the rank that recorded it."""

    __slots__ = ("prompt", "response", "rank")

    def __init__(self, prompt: tuple[int, ...], response: tuple[int, ...], rank: int) -> None:
        self.prompt, self.response, self.rank = prompt, response, rank


def _tokens(ids: Tensor, mask: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row[kept != 0].tolist()) for row, kept in zip(ids, mask)]
