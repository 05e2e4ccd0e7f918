"""The distillation trainer: the driver of a GKD run, readable from top to bottom in the order of a step.

One generation feeds ``steps_per_generation`` training steps, all of one data source. It is on-policy with probability
λ: the student gets its latest weights into the inference engine and answers the prompts. Otherwise the responses are
the data set's; nothing is generated and nothing is synced. (ms-swift's ``GKDTrainer`` on Ray.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.numerics.curve_run import CurveStep
from alignment.numerics.random import portable_key
from alignment.rl.batch import Batch
from alignment.rl.config import DEVICE_ONLY_FIELDS
from alignment.rl.contracts import check, check_untouched
from alignment.rl.data import Prompt, PromptSampler, prompt_batch
from alignment.rl.driver import Driver, Progress
from alignment.rl.executor import WorkerGroup
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_data import Encoder, GkdSample, OnPolicySchedule, SampleSet, collate, numbered, resample
from alignment.rl.gkd_record import GkdBatchRecorder
from alignment.rl.gkd_stages import StudentUpdate, count
from alignment.rl.mock_rollout import RecordedRollouts
from alignment.rl.multi_turn import Conversation, Messages, make_scheduler, run_turns
from alignment.rl.observers import DriverObserver
from alignment.rl.teacher_replicas import TeacherReplicas
from alignment.rl.tokenizer import Tokenizer
from alignment.rl.trainer import FREE_ON_RESUME, one_update

COMPLETIONS = "completions.jsonl"


@dataclass
class Generation:
    """The samples of one generation and how many of its chunks are used up."""

    samples: list[GkdSample]
    on_policy: bool
    chunk: int = 0

    def next_chunk(self, steps: int) -> list[GkdSample]:
        """The next of ``steps`` equal consecutive chunks."""
        size = len(self.samples) // steps
        start, self.chunk = self.chunk * size, self.chunk + 1
        return self.samples[start : start + size]

    def to_json(self) -> dict[str, Any]:
        """Plain values, the student's responses included: they cannot be made again once the weights have moved."""
        return {**dataclasses.asdict(self), "samples": [s.to_json() for s in self.samples]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Generation:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "samples": [GkdSample.from_json(s) for s in data["samples"]]})


class GkdTrainer(Driver):
    """Distils a teacher into a student.

    Args:
        config: the configuration.
        groups: worker group of each role.
        samples: what it trains on.
        tokenizer: of the student.
        checkpoints: directory of checkpoints.
        replicas: the teacher, where it is not on the workers.
        recorded: recorded rollouts to replay or to write, or None.
        completions: file for on-policy completions, or None.
        generates: whether the workers have an inference engine.
        fingerprint: what a checkpoint has to agree with when it is resumed, flat.
        progress: told about stages and steps.
        observers: told about the stages that run here.
        batches: keeps what every step trained on, or None.
    """

    def __init__(
        self,
        config: GkdConfig,
        *,
        groups: Mapping[str, WorkerGroup],
        samples: SampleSet,
        tokenizer: Tokenizer,
        checkpoints: Path,
        replicas: TeacherReplicas | None = None,
        recorded: RecordedRollouts | None = None,
        completions: Path | None = None,
        generates: bool = True,
        fingerprint: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        observers: Sequence[DriverObserver] = (),
        batches: GkdBatchRecorder | None = None,
    ) -> None:
        super().__init__(
            config,
            groups=groups,
            total_steps=total_steps(config, samples),
            checkpoints=checkpoints,
            fingerprint=resume_fingerprint(config) if fingerprint is None else fingerprint,
            generates=generates,
            progress=progress,
        )
        gkd, data = config.gkd, config.data
        self.tokenizer, self.replicas, self.recorded, self.completions = tokenizer, replicas, recorded, completions
        self.encoder = Encoder(max_length=gkd.max_length, truncation_strategy=gkd.truncation_strategy)
        self.schedule = OnPolicySchedule(lmbda=gkd.lmbda, seed=gkd.seed)
        size = config.generation_size
        # Both walks are cyclic and leave out what does not fill a last batch.
        self.sampler = PromptSampler(samples, batch_size=size, seed=data.seed, shuffle=data.shuffle)
        self.spare = PromptSampler(samples, batch_size=size, seed=portable_key("resample", gkd.seed, data.seed))
        self.scheduler = (
            make_scheduler(gkd.multi_turn_scheduler, max_turns=gkd.max_turns) if gkd.multi_turn_scheduler else None
        )
        self.observers, self.batches = observers, batches
        self.generation: Generation | None = None
        self._resampled = 0

    # --- one step ----------------------------------------------------------------------------------------------------

    def _train_step(self) -> tuple[dict[str, float], dict[str, Any]]:
        self._resampled = 0
        if self.generation is None or self.generation.chunk == self.config.gkd.steps_per_generation:
            self.generation = self._next_generation()
        on_policy = self.generation.on_policy
        chunk = self.generation.next_chunk(self.config.gkd.steps_per_generation)
        batch = self._encode(chunk)
        batch = self._ask_teacher(batch)
        if self.batches is not None:
            self.batches.keep(self.step, batch)
        metrics, per_sample = self._update(batch)
        metrics |= {
            "student/on_policy": float(on_policy),
            "data/resampled": float(self._resampled),
            "response_length/mean": sum(s["tokens"] for s in per_sample.values()) / len(per_sample),
        }
        return metrics, step_statistics(self.step, batch, per_sample, metrics)

    def _next_generation(self) -> Generation:
        samples = self._next_samples()
        on_policy = self.schedule.draw()
        if not on_policy:
            return Generation(samples=samples, on_policy=False)
        self._sync_weights()
        samples = self._generate(samples)
        self._log_completions(samples)
        return Generation(samples=samples, on_policy=True)

    def _next_samples(self) -> list[GkdSample]:
        samples = list(self.sampler.next_batch())
        if self.config.gkd.truncation_strategy != "delete":
            return samples
        kept, self._resampled = resample(
            samples,
            fits=self.encoder.fits,
            more=self.spare.next_batch,
            max_resample_times=self.config.gkd.max_resample_times,
        )
        return kept

    def _encode(self, samples: Sequence[GkdSample]) -> Batch:
        """The training batch; only here a sample may be longer than ``max_length``, by a completion."""
        batch = collate(
            samples,
            self.encoder.extended(self.config.data.max_response_length),
            dp_size=self.config.dp_size,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return batch.add(info={"step": self.step})

    def _ask_teacher(self, batch: Batch) -> Batch:
        if self.replicas is None:
            return self._stage("actor", "teacher_log_prob", batch)
        check("teacher_log_prob", batch, moment="before")
        with self._timed("teacher_log_prob"):
            answer = self.replicas.score(batch)
        check_untouched("teacher_log_prob", batch, answer)
        check("teacher_log_prob", answer)
        for observer in self.observers:
            observer.fields(self.step, "teacher_log_prob", batch, answer)
        return answer

    def _update(self, batch: Batch) -> tuple[dict[str, float], dict[str, Mapping[str, float]]]:
        check("update_student", batch, moment="before")
        counts = count(batch)
        with self._timed("update_student"):
            by_rank: list[StudentUpdate] = self.groups["actor"].call("update_student", batch, counts=counts)
        reports = [answer.report for answer in by_rank]
        self._note_workloads("update_student", reports)
        metrics = one_update("student", reports)
        per_sample = {uid: sums for answer in by_rank for uid, sums in answer.samples.items()}
        return {**metrics, "student/tokens": float(counts.tokens)}, per_sample

    # --- on-policy generation ----------------------------------------------------------------------------------------

    def _generate(self, samples: Sequence[GkdSample]) -> list[GkdSample]:
        """One completion per prompt; the data set's response is taken off before."""
        # A prompt that is cut is cut for good: student and teacher train on what was answered.
        asked = [
            dataclasses.replace(
                sample.stripped(), prompt_ids=tuple(self.encoder.truncated(sample.prompt_ids, where=sample.sample_id))
            )
            for sample in samples
        ]
        names = numbered([s.sample_id for s in asked])
        conversations = [
            Conversation(
                sample_id=name,
                prompt_ids=sample.prompt_ids,
                metadata={n: getattr(sample, n) for n in ("data_source", "ground_truth", "metadata")},
            )
            for name, sample in zip(names, asked, strict=True)
        ]
        run_turns(
            conversations,
            scheduler=self.scheduler,
            generate=self._complete,
            encode=self._said,
            max_tokens=self.config.encoded_length,
        )
        return [s.answered(c.token_ids, c.loss_mask) for s, c in zip(asked, conversations, strict=True)]

    def _complete(self, conversations: Sequence[Conversation], turn: int) -> list[tuple[list[int], str, bool]]:
        """One turn: the stage ``rollout`` on the conversations so far."""
        ranks = self.groups["rollout"].world_size
        # Conversations end at different turns, ranks want equal shares: the last ones are answered twice.
        asked = [*conversations, *([conversations[-1]] * (-len(conversations) % ranks))]
        names = numbered([c.sample_id for c in asked])
        prompts = [
            Prompt(
                prompt_id=name,
                token_ids=(*c.prompt_ids, *c.token_ids),
                data_source=c.metadata.get("data_source", ""),
                ground_truth=c.metadata.get("ground_truth", ""),
            )
            for name, c in zip(names, asked, strict=True)
        ]
        facts = {
            "n": 1,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "step": self.step,
        }
        keys = [portable_key(self.step, turn, p.prompt_id, 0) for p in prompts]
        batch = prompt_batch(prompts, pad_token_id=self.tokenizer.pad_token_id)
        batch = batch.add(meta={"sample_key": keys}, info=facts)
        if self.recorded is not None and self.recorded.has(self.step, turn):
            batch = self.recorded.load(self.step, turn, batch)
            check("rollout", batch)
        else:
            batch = self._stage("rollout", "rollout", batch)
            if self.recorded is not None:
                self.recorded.save(self.step, turn, batch)
        answers = []
        limit = self.config.data.max_response_length
        for row, length in zip(batch["responses"].tolist(), batch["response_mask"].sum(1).tolist()):
            ids = row[:length]
            cut_off = length == limit and ids[-1] != self.tokenizer.eos_token_id
            answers.append((ids, self.tokenizer.decode_response(ids), cut_off))
        return answers[: len(conversations)]

    def _said(self, messages: Messages) -> list[int]:
        """Tokens of messages in the middle of a conversation, up to the start of the next completion.

        Raises:
            InputError: the template opens a conversation otherwise than with its beginning-of-text token, so that a
                later turn cannot be told from it.
        """
        ids = self.tokenizer.encode_chat(messages)
        if ids[:1] != [self.tokenizer.bos_token_id]:
            raise InputError(
                "the chat template cannot be continued turn by turn",
                where=self.tokenizer.folder,
                expected="a text that begins with bos_token",
                found=self.tokenizer.decode(ids[:1], skip_special_tokens=False),
            )
        return ids[1:]

    def _log_completions(self, samples: Sequence[GkdSample]) -> None:
        if self.completions is None:
            return
        with open(self.completions, "a", encoding="utf-8") as file:
            for sample in samples:
                line = {
                    "step": self.step,
                    "sample_id": sample.sample_id,
                    "prompt": self.tokenizer.decode(sample.prompt_ids, skip_special_tokens=False),
                    "completion": self.tokenizer.decode(sample.response_ids, skip_special_tokens=False),
                }
                file.write(json.dumps(line, sort_keys=True) + "\n")

    # --- state -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "data": self.sampler.state_dict(),
            "spare": self.spare.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generation": None if self.generation is None else self.generation.to_json(),
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["data"])
        self.spare.load_state_dict(state["spare"])
        self.schedule.load_state_dict(state["schedule"])
        self.generation = None if state["generation"] is None else Generation.from_json(state["generation"])


def step_statistics(
    step: int, batch: Batch, per_sample: Mapping[str, Mapping[str, float]], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """The line of a step in ``groups.jsonl``.

    There is one completion per prompt, so the group whose spread says how well a mean is known is the whole batch: its
    name is a hash of its prompts, and two runs can be paired when they saw the same ones.
    """
    name = hashlib.sha256("\n".join(sorted(batch["prompt_id"])).encode()).hexdigest()[:16]
    samples = [per_sample[uid] for uid in batch["uid"]]
    tokens = [max(s["tokens"], 1) for s in samples]
    curve = CurveStep.from_samples(
        step=step,
        prompt_ids=[name] * len(samples),
        scalars={n: metrics[n] for n in ("student/loss", "student/agreement", "student/on_policy")},
        values={
            "divergence": [s["divergence"] / n for s, n in zip(samples, tokens)],
            "agreement": [s["agreement"] / n for s, n in zip(samples, tokens)],
            "response_length": [float(s["tokens"]) for s in samples],
        },
    )
    return dataclasses.asdict(curve)


def total_steps(config: GkdConfig, samples: SampleSet) -> int:
    """Training steps of the run: as configured, else all of ``total_epochs``."""
    generations = len(samples) // config.generation_size
    return config.trainer.total_training_steps or config.trainer.total_epochs * (
        generations * config.gkd.steps_per_generation
    )


def resume_fingerprint(config: GkdConfig) -> dict[str, Any]:
    """Everything that has to be equal for a run to be continued, flat."""
    free = (
        FREE_ON_RESUME if config.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant" else DEVICE_ONLY_FIELDS
    )
    return {k: v for k, v in config.deciding_fields().items() if k not in free}
