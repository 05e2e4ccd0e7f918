"""Dynamic sampling: which groups are worth training on, and how many more prompts a step has to generate.

A group whose samples all earn the same has no advantage (DAPO, arXiv 2503.14476, section 3.2). What is filtered is
decided by the outcome, so curves are compared on the rewards *before* filtering: :func:`group_statistics` reports them
per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from alignment.errors import InputError
from alignment.rl.batch import Batch

if TYPE_CHECKING:
    from alignment.rl.config import FilterGroupsConfig


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """The rewards of the samples of one prompt, before filtering.

    ``mean`` and ``variance`` (unbiased, 0 for a group of one) are of the samples' ``score``; ``acc`` is the mean
    correctness where it is known; ``response_length`` is the mean in tokens; ``kept`` says whether the group qualifies.
    """

    uid: Hashable
    prompt_id: Hashable
    size: int
    mean: float
    variance: float
    acc: float | None
    response_length: float
    kept: bool


def metric_values(batch: Batch, metric: str) -> list[float]:
    """The filter's metric of every sample.

    ``acc`` and ``score`` are the lists of that name; ``seq_reward`` sums ``token_level_scores`` (overlong shaping
    included); ``seq_final_reward`` sums ``token_level_rewards``, or the scores before the advantage stage.

    Raises:
        InputError: unknown metric, or the batch lacks it.
    """
    if metric in ("acc", "score"):
        return [float(x) for x in batch[metric]]
    if metric not in ("seq_reward", "seq_final_reward"):
        raise InputError(
            "unknown filter metric",
            where="algorithm.filter_groups.metric",
            expected="acc | score | seq_reward | seq_final_reward",
            found=metric,
        )
    final = metric == "seq_final_reward" and "token_level_rewards" in batch
    return batch["token_level_rewards" if final else "token_level_scores"].double().sum(-1).tolist()


def group_statistics(batch: Batch, metric: str = "acc") -> list[GroupStatistics]:
    """One entry per group, in the order in which the groups first appear.

    A group is kept when its metric takes more than one value, or when it has one sample only (as in verl). verl tests
    ``np.std > 0``, which rounding makes true for some groups of equal values; here they are compared.
    """
    rows: dict[Hashable, list[int]] = {}
    for i, uid in enumerate(batch["uid"]):
        rows.setdefault(uid, []).append(i)
    values, scores = metric_values(batch, metric), [float(x) for x in batch["score"]]
    acc = [float(x) for x in batch["acc"]] if "acc" in batch else None
    names = batch["prompt_id"] if "prompt_id" in batch else batch["uid"]
    lengths = (batch["response_mask"] != 0).sum(-1).tolist()
    result = []
    for uid, members in rows.items():
        n = len(members)
        mean = math.fsum(scores[i] for i in members) / n
        spread = math.fsum((scores[i] - mean) ** 2 for i in members)
        result.append(
            GroupStatistics(
                uid=uid,
                prompt_id=names[members[0]],
                size=n,
                mean=mean,
                variance=spread / (n - 1) if n > 1 else 0.0,
                acc=None if acc is None else math.fsum(acc[i] for i in members) / n,
                response_length=sum(lengths[i] for i in members) / n,
                kept=n == 1 or len({values[i] for i in members}) > 1,
            )
        )
    return result


class DynamicSampling:
    """Collects scored rollouts of one step until enough groups qualify, or no further round is allowed.

    The driver's loop, with any configuration (without filtering it ends after one round)::

        sampling = DynamicSampling(config.algorithm.filter_groups, train_batch_size=…, gen_batch_size=…)
        while (count := sampling.prompts_wanted()):
            sampling.offer(score(generate(next_prompts(count))))
        batch = sampling.take()

    ``mode=regenerate`` asks for ``gen_batch_size`` further prompts each round, at most ``max_num_gen_batches`` rounds
    in all. ``mode=reserve`` starts with ``train_batch_size`` prompts and may ask once more, for the step's
    ``reserve_size`` spare ones. Groups that did not qualify fill a batch that is still too small: their GRPO advantage
    is 0, so they only count in the denominators. (verl's trainer stops with an error there.)

    Args:
        config: ``algorithm.filter_groups``.
        train_batch_size: groups to train on.
        gen_batch_size: prompts of one generation round, ``train_batch_size`` by default.
    """

    def __init__(self, config: FilterGroupsConfig, *, train_batch_size: int, gen_batch_size: int | None = None) -> None:
        self.config = config
        self.train_batch_size = train_batch_size
        self.gen_batch_size = gen_batch_size or train_batch_size
        self.rounds = 0
        self.statistics: list[GroupStatistics] = []
        self._first_round = 0
        self._offered: list[Batch] = []

    @property
    def compared(self) -> list[GroupStatistics]:
        """The groups whose rewards may be compared between devices.

        With a reserve they are those of the first round: whether the second is generated depends on the outcome.
        """
        reserve = self.config.enable and self.config.mode == "reserve"
        return self.statistics[: self._first_round] if reserve else self.statistics

    @property
    def groups_kept(self) -> int:
        """Groups that qualify so far."""
        return sum(s.kept for s in self.statistics)

    @property
    def kept_fraction(self) -> float:
        """Share of the generated groups that qualify."""
        return self.groups_kept / len(self.statistics)

    @property
    def filled(self) -> int:
        """Groups of the batch that do not qualify."""
        return max(0, self.train_batch_size - self.groups_kept)

    def prompts_wanted(self) -> int:
        """How many further prompts to generate for; 0 when the batch is complete or no round is left."""
        config = self.config
        if self.rounds == 0:
            return self.gen_batch_size if config.enable and config.mode == "regenerate" else self.train_batch_size
        if not config.enable or self.groups_kept >= self.train_batch_size:
            return 0
        if config.mode == "reserve":
            return config.reserve_size if self.rounds == 1 else 0
        return 0 if 0 < config.max_num_gen_batches <= self.rounds else self.gen_batch_size

    def offer(self, batch: Batch) -> list[GroupStatistics]:
        """Takes the scored rollouts of one round and returns their statistics.

        Raises:
            InputError: a uid that an earlier round already used.
        """
        statistics = group_statistics(batch, self.config.metric if self.config.enable else "score")
        seen = {s.uid for s in self.statistics}
        for s in statistics:
            if s.uid in seen:
                raise InputError(
                    "two rounds share a uid", where="rollout, uid", expected="a new uid per prompt", found=s.uid
                )
        if not self.config.enable:
            statistics = [replace(s, kept=True) for s in statistics]
        if self.rounds == 0:
            self._first_round = len(statistics)
        self._offered.append(batch)
        self.statistics += statistics
        self.rounds += 1
        return statistics

    def take(self) -> Batch:
        """The groups to train on: the first that qualify, then, where they are too few, the first that do not.

        Groups and samples keep the order in which they were offered, qualifying groups first.

        Raises:
            InputError: fewer groups were offered than a step trains on.
        """
        ranked = sorted(self.statistics, key=lambda s: not s.kept)
        chosen = [s.uid for s in ranked[: self.train_batch_size]]
        if len(chosen) < self.train_batch_size:
            raise InputError(
                "the step has too few groups", where="filter_groups", expected=self.train_batch_size, found=len(chosen)
            )
        batch = Batch.concat(self._offered)
        rows: dict[Hashable, list[int]] = {uid: [] for uid in chosen}
        for i, uid in enumerate(batch["uid"]):
            if uid in rows:
                rows[uid].append(i)
        return batch[[i for members in rows.values() for i in members]]
