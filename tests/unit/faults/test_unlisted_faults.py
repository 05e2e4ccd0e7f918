"""Defects that are in no catalogue: checks that judge whole seams have to catch them too.

Each one is a mistake somebody might make in a seam of losses, layouts, optimizers, data or distillation.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from alignment.faults.audit import catch
from alignment.faults.checks import all_checks
from alignment.faults.fault import Fault
from alignment.faults.seam import wrapped

RL, PARALLEL, BACKENDS = "alignment.rl", "alignment.models.parallel", "alignment.backends"
TOPICS = (
    "losses advantages distributions stages step training parallel_layouts streams optimizers turns rewards batches "
    "data_path checkpoints distillation"
).split()
MUTANTS: dict[str, tuple[str, object]] = {}


def mutant(target: str):
    def decorate(make):
        MUTANTS[make.__name__] = (target, make)
        return make

    return decorate


# --- losses ----------------------------------------------------------------------------------------------------------


@mutant(f"{RL}.losses:policy_loss")
def bounds_swapped(original):
    return lambda *t, clip_ratio_low=0.2, clip_ratio_high=0.28, **k: original(
        *t, clip_ratio_low=clip_ratio_high, clip_ratio_high=clip_ratio_low, **k
    )


@mutant(f"{RL}.losses:policy_loss")
def ratio_always_one(original):
    return lambda log_prob, old, *t, **k: original(log_prob, log_prob.detach(), *t, **k)


@mutant(f"{RL}.losses:ActorLoss.__call__")
def entropy_added(original):
    def call(self, outputs, batch):
        wrong = dataclasses.replace(self.config, entropy_coeff=-self.config.entropy_coeff)
        return original(dataclasses.replace(self, config=wrong), outputs, batch)

    return call


@mutant(f"{RL}.losses:ActorLoss.__call__")
def kl_detached(original):
    def call(self, outputs, batch):
        plain, metrics = original(
            dataclasses.replace(self, config=dataclasses.replace(self.config, use_kl_loss=False)), outputs, batch
        )
        whole, _ = original(self, outputs, batch)
        return plain + (whole - plain).detach(), metrics

    return call


@mutant(f"{RL}.losses:value_loss")
def value_clipped_around_returns(original):
    return lambda vpreds, values, returns, *t, **k: original(vpreds, returns, returns, *t, **k)


@mutant(f"{RL}.losses:value_loss")
def value_loss_without_half(original):
    def value_loss(*t, **k):
        loss, metrics = original(*t, **k)
        return 2 * loss, metrics

    return value_loss


@mutant(f"{RL}.aggregation:agg_loss")
def padding_counts(original):
    return lambda mat, mask, mode, **k: original(mat.nan_to_num(), torch.ones_like(mask), mode, **k)


@mutant(f"{RL}.aggregation:agg_loss")
def scale_factor_ignored(original):
    return lambda mat, mask, mode, counts=None, loss_scale_factor=None: original(mat, mask, mode, counts=counts)


@mutant(f"{RL}.kl:kl_penalty")
def kl_arguments_swapped(original):
    return lambda log_prob, ref_log_prob, kind: original(ref_log_prob, log_prob, kind)


@mutant(f"{RL}.kl:kl_penalty")
def k2_without_half(original):
    return lambda a, b, kind: 2 * original(a, b, kind) if kind in ("k2", "mse") else original(a, b, kind)


@mutant(f"{RL}.kl:apply_kl_penalty")
def kl_added_to_rewards(original):
    return lambda *t, kind, kl_coef: original(*t, kind=kind, kl_coef=-kl_coef)


@mutant(f"{RL}.kl:KlController.update")
def controller_never_moves(original):
    return lambda self, current_kl, samples: None


# --- advantages ------------------------------------------------------------------------------------------------------


@mutant(f"{RL}.advantages:grpo_advantages")
def biased_deviation(original):
    def grpo(rewards, mask, uid, *, norm_adv_by_std_in_grpo=True, **k):
        advantages, returns = original(rewards, mask, uid, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo, **k)
        sizes = torch.tensor([list(uid).count(u) for u in uid], dtype=torch.float64)
        factor = torch.where(sizes > 1, (sizes / (sizes - 1).clamp(min=1)).sqrt(), 1.0)[:, None]
        return (advantages * factor, returns * factor) if norm_adv_by_std_in_grpo else (advantages, returns)

    return grpo


@mutant(f"{RL}.advantages:grpo_advantages")
def groups_by_place(original):
    return lambda rewards, mask, uid, **k: original(rewards, mask, [i // 2 for i in range(len(uid))], **k)


@mutant(f"{RL}.advantages:gae_advantages")
def gamma_and_lambda_swapped(original):
    return lambda *t, gamma=1.0, lam=1.0, whiten=True: original(*t, gamma=lam, lam=gamma, whiten=whiten)


@mutant(f"{RL}.advantages:gae_advantages")
def returns_of_whitened_advantages(original):
    def gae(rewards, values, mask, **k):
        advantages, _ = original(rewards, values, mask, **k)
        return advantages, torch.where(mask != 0, advantages + values, 0.0)

    return gae


@mutant(f"{RL}.advantages:rloo_advantages")
def leave_one_out_with_itself(original):
    def rloo(rewards, mask, uid):
        advantages, returns = original(rewards, mask, uid)
        n = torch.tensor([list(uid).count(u) for u in uid], dtype=torch.float64)[:, None]
        factor = torch.where(n > 1, (n - 1) / n, 1.0)
        return advantages * factor, returns * factor

    return rloo


# --- log-probs and stages --------------------------------------------------------------------------------------------


@mutant(f"{RL}.log_prob:response_logits")
def one_position_late(original):
    return lambda logits, n: logits[:, -n:]


@mutant(f"{RL}.log_prob:log_probs_and_entropy")
def temperature_multiplies(original):
    return lambda logits, labels, *, temperature=1.0: original(logits, labels, temperature=1 / temperature)


@mutant(f"{RL}.log_prob:log_probs_and_entropy")
def entropy_untempered(original):
    def both(logits, labels, *, temperature=1.0):
        return original(logits, labels, temperature=temperature)[0], original(logits, labels)[1]

    return both


@mutant(f"{RL}.log_prob:chunked_log_probs_and_entropy")
def chunks_lose_their_temperature(original):
    return lambda logits, labels, *, temperature=1.0, chunk_size=1024: original(logits, labels, chunk_size=chunk_size)


@mutant(f"{RL}.stages:policy_outputs")
def attention_mask_forgotten(original):
    def outputs(model, batch, *, temperature):
        return original(
            model, {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}, temperature=temperature
        )

    return outputs


@mutant(f"{RL}.stages:policy_outputs")
def positions_from_slots(original):
    def outputs(model, batch, *, temperature):
        slots = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
        return original(model, {**batch, "position_ids": slots}, temperature=temperature)

    return outputs


@mutant(f"{RL}.stages:trim")
def trimmed_by_the_first_sample(original):
    def trim(batch):
        n = int(batch["response_mask"][0].sum())
        tensors = original(batch)
        longest = int((batch["response_mask"] != 0).sum(1).max())
        cut = longest - n
        return {
            k: t if k in ("prompts", "prompt_mask") or not cut else torch.nn.functional.pad(t[:, :-cut], (0, cut))
            for k, t in tensors.items()
        }

    return trim


@mutant(f"{RL}.batching:Partition.restore")
def order_not_restored(original):
    return lambda self, results: torch.cat(list(results))


@mutant(f"{RL}.stages:generate")
def positions_count_padding(original):
    def generate(engine, batch, config):
        done = original(engine, batch, config)
        slots = torch.arange(done["input_ids"].shape[1]).expand_as(done["input_ids"]).clone()
        return done.add({"position_ids": slots})

    return generate


@mutant(f"{RL}.critic:value_outputs")
def values_one_position_late(original):
    def outputs(model, batch):
        n = batch["responses"].shape[1]
        values = model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"])
        return {"values": values[:, -n:]}

    return outputs


@mutant(f"{RL}.worker:Worker.ref_log_prob")
def policy_as_its_own_reference(original):
    def ref_log_prob(self, batch):
        held, self.reference = self.reference, self.actor
        try:
            return original(self, batch)
        finally:
            self.reference = held

    return ref_log_prob


@mutant(f"{RL}.worker:Worker.old_log_prob")
def rollout_log_probs_taken_for_old_ones(original):
    def old_log_prob(self, batch):
        return original(self, batch).add({"old_log_probs": 0.9 * batch["rollout_log_probs"].double()})

    return old_log_prob


@mutant(f"{RL}.worker:Worker.update_actor")
def counts_of_another_mini_batch(original):
    return lambda self, batch, mini_batches, counts: original(self, batch, mini_batches, list(counts)[::-1])


@mutant(f"{RL}.worker:Worker.update_actor")
def mini_batches_by_stride(original):
    def update(self, batch, mini_batches, counts):
        rows = [i for start in range(mini_batches) for i in range(start, len(batch), mini_batches)]
        return original(self, batch[rows], mini_batches, counts)

    return update


# --- engines and optimizers ------------------------------------------------------------------------------------------


@mutant(f"{BACKENDS}.golden_training:adamw_step")
def epsilon_inside_the_root(original):
    def step(p, g, m, v, *, step, lr, betas, eps, weight_decay):
        p.mul_(1.0 - lr * weight_decay)
        m.lerp_(g, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        p.addcdiv_(m, (v / (1 - betas[1] ** step) + eps).sqrt(), value=-lr / (1 - betas[0] ** step))

    return step


@mutant(f"{BACKENDS}.golden_training:adamw_step")
def no_bias_correction(original):
    return lambda *t, step, **k: original(*t, step=10**6, **k)


@mutant(f"{BACKENDS}.golden_training:adamw_step")
def decay_coupled_to_the_gradient(original):
    return lambda p, g, m, v, *, weight_decay, **k: original(p, g + weight_decay * p, m, v, weight_decay=0.0, **k)


@mutant(f"{BACKENDS}.golden_training:GoldenTrainingEngine.load_state")
def moments_not_loaded(original):
    def load(self, directory):
        held = {
            k: t.clone() for k, t in {**self._exp_avg, **{f"sq.{k}": t for k, t in self._exp_avg_sq.items()}}.items()
        }
        original(self, directory)
        for k in self._exp_avg:
            self._exp_avg[k].copy_(held[k])
            self._exp_avg_sq[k].copy_(held[f"sq.{k}"])

    return load


@mutant(f"{BACKENDS}.golden_training:GoldenTrainingEngine.load_state")
def schedule_begins_anew(original):
    def load(self, directory):
        original(self, directory)
        self.updates = 0

    return load


@mutant(f"{BACKENDS}.golden_training:GoldenTrainingEngine._step")
def clipping_forgotten(original):
    return lambda self, gradients, norm, lr: original(self, gradients, 0.0, lr)


@mutant(f"{BACKENDS}.golden_training:GoldenTrainingEngine._optimizer_state")
def main_weights_not_saved(original):
    return lambda self: {k: t for k, t in original(self).items() if not k.startswith("main.")}


@mutant(f"{BACKENDS}.golden_training:GoldenTrainingEngine._move")
def main_weights_rounded_by_a_move(original):
    def move(self, device):
        original(self, device)
        held = dict(self.model.named_parameters())
        self._main = {k: t.to(held[k].dtype).to(t.dtype) for k, t in self._main.items()}

    return move


@mutant(f"{BACKENDS}.training:OptimizerConfig.learning_rate")
def warm_up_begins_at_zero(original):
    def rate(self, update):
        return self.lr * update / self.lr_warmup_steps if update < self.lr_warmup_steps else original(self, update)

    return rate


@mutant(f"{BACKENDS}.training:OptimizerConfig.learning_rate")
def floor_ignored(original):
    return lambda self, update: original(dataclasses.replace(self, min_lr_ratio=0.0), update)


@mutant(f"{BACKENDS}.distributed_optimizer:decays")
def norms_decay(original):
    return lambda name, parameter: True


@mutant(f"{BACKENDS}.distributed_optimizer:DistributedOptimizer.gradient_of")
def not_unscaled(original):
    return lambda self, bucket, rank: original(self, bucket, rank) * self.scaler.scale


@mutant(f"{BACKENDS}.distributed_optimizer:DistributedOptimizer.is_finite")
def one_rank_looks_for_overflow(original):
    return lambda self, shards: all(bool(torch.isfinite(of_bucket[0]).all()) for of_bucket in shards)


@mutant(f"{BACKENDS}.distributed_optimizer:DistributedOptimizer._whole")
def state_is_a_view(original):
    def whole(self, held):
        if self.dp > 1 and len(held[0]) > 1 and held[0][0].data_ptr() == held[0][1].data_ptr():
            return original(self, held)
        return _Live(self, held, original)

    class _Live(dict):
        def __init__(self, optimizer, held, make):
            super().__init__(make(optimizer, held))
            self._later = lambda: make(optimizer, held)

        def __getitem__(self, name):
            return self._later()[name]

    return whole


@mutant(f"{BACKENDS}.distributed_optimizer:LossScaler.update")
def scale_never_grows(original):
    return lambda self, *, overflow: original(self, overflow=overflow) if overflow else None


# --- layouts ---------------------------------------------------------------------------------------------------------


@mutant(f"{PARALLEL}.context_parallel:causal_mask")
def causal_by_local_place(original):
    def mask(query, key, cu):
        q, k = torch.arange(len(query)), torch.arange(len(key))
        return (k[None, :] <= q[:, None])[None, None]

    return mask


@mutant(f"{PARALLEL}.context_parallel:partial_attention")
def remote_keys_have_no_gradient(original):
    return lambda query, key, value, **k: original(query, key.detach(), value, **k)


@mutant(f"{PARALLEL}.context_parallel:unshard")
def joined_without_reordering(original):
    return lambda parts, cu, *, dim=1: torch.cat(list(parts), dim=dim)


@mutant(f"{PARALLEL}.packing:cumulative_lengths")
def all_samples_as_long_as_the_first(original):
    return lambda lengths: original(
        [min(lengths[0], n) for n in lengths[:-1]]
        + [
            sum(lengths) - min(lengths[0], sum(lengths) - 1)
            if len(lengths) == 1
            else sum(lengths) - sum(min(lengths[0], n) for n in lengths[:-1])
        ]
    )


@mutant(f"{PARALLEL}.packing:positions")
def positions_run_through(original):
    return lambda cu: torch.arange(int(cu[-1]))


@mutant(f"{PARALLEL}.packing:shift_within")
def labels_cross_boundaries(original):
    return lambda values, cu, *, fill=0: values.roll(-1, dims=-1)


@mutant(f"{PARALLEL}.vocab_parallel:log_probs_and_entropy")
def labels_stay_global_on_rank_zero(original):
    return lambda shards, labels, *, vocab_size, temperature=1.0: original(
        shards, labels % shards[0].shape[-1], vocab_size=vocab_size, temperature=temperature
    )


@mutant(f"{PARALLEL}.vocab_parallel:linear_gradients")
def gradient_without_temperature(original):
    def gradients(*t, temperature, **k):
        hidden, weights = original(*t, temperature=temperature, **k)
        return hidden * temperature, [w * temperature for w in weights]

    return gradients


@mutant(f"{PARALLEL}.sequence_parallel:reduced_gradient")
def norm_gradient_not_reduced(original):
    return lambda gradients, *, kind, dim=0: (
        gradients[0] if kind == "sequence_parallel" else original(gradients, kind=kind, dim=dim)
    )


@mutant(f"{PARALLEL}.collectives:reduce_scatter")
def reduce_scatter_averages(original):
    return lambda wholes, *, dim=0: [part / len(wholes) for part in original(wholes, dim=dim)]


@mutant(f"{PARALLEL}.collectives:all_to_all")
def exchange_in_reverse(original):
    return lambda parts, *, split_dim, concat_dim: original(
        list(reversed(parts)), split_dim=split_dim, concat_dim=concat_dim
    )


@mutant(f"{PARALLEL}.data_parallel:global_tokens")
def tokens_of_the_first_rank(original):
    return lambda counts: original([counts[0]]) * len(counts)


@mutant(f"{PARALLEL}.data_parallel:rank_factor")
def context_parallel_twice(original):
    return lambda dp, cp: dp * cp * cp


@mutant(f"{PARALLEL}.gradient_norm:counted")
def experts_left_out(original):
    return lambda gradients, rank: original(gradients, rank) and not (gradients.kind == "sharded" and rank > 0)


@mutant(f"{PARALLEL}.pipeline:stages")
def virtual_chunks_by_rank(original):
    def stages(layers, *, pp, virtual=1):
        chunks = original(layers, pp=pp, virtual=virtual)
        flat = [stage for chunk in chunks for stage in chunk]
        return [[flat[rank * virtual + chunk] for rank in range(pp)] for chunk in range(virtual)]

    return stages


@mutant(f"{PARALLEL}.expert_parallel:local_experts")
def combine_without_weights(original):
    return lambda moe, tokens, chosen, weights, held: original(moe, tokens, chosen, torch.ones_like(weights), held)


@mutant(f"{PARALLEL}.expert_parallel:kept_by_capacity")
def capacity_per_choice(original):
    def kept(chosen, experts, places):
        return torch.cat([original(chosen[:, i : i + 1], experts, places) for i in range(chosen.shape[1])], 1)

    return kept


@mutant(f"{PARALLEL}.side_loss:SideLoss.attach")
def side_loss_detached(original):
    return lambda self, activation, loss: original(self, activation, loss.detach())


@mutant(f"{BACKENDS}.simulated_streams:Event.wait")
def waits_for_one_step_less(original):
    return lambda self: self._stream.run_until(self._position - 1)


# --- data, turns and rewards -----------------------------------------------------------------------------------------


@mutant(f"{RL}.data:PromptSampler._epoch_order")
def one_order_for_all_epochs(original):
    def order(self):
        epoch, self.epoch = self.epoch, 0
        try:
            return original(self)
        finally:
            self.epoch = epoch

    return order


@mutant(f"{RL}.data:_truncate")
def cut_on_the_other_side(original):
    other = {"left": "right", "right": "left"}
    return lambda ids, limit, truncation, where: original(ids, limit, other.get(truncation, truncation), where)


@mutant(f"{RL}.data:prompt_batch")
def padded_on_the_right(original):
    def batch(prompts, **k):
        made = original(prompts, **k)
        lengths = made["prompt_mask"].sum(1).tolist()
        rolled = {
            n: torch.stack([row.roll(int(m)) for row, m in zip(made[n], lengths)]) for n in ("prompts", "prompt_mask")
        }
        return made.add(rolled)

    return batch


@mutant(f"{RL}.turns:Trajectory.rollout_log_probs")
def log_probs_without_gaps(original):
    def log_probs(self):
        said = [p for span in self.spans for p in span.log_probs]
        return tuple(said + [0.0] * (len(self.token_ids) - len(said)))

    return log_probs


@mutant(f"{RL}.turns:mask_to_end")
def end_token_left_out(original):
    def mask(responses, *, eos_token_ids):
        found = original(responses, eos_token_ids=eos_token_ids)
        return found * ~torch.isin(responses, torch.tensor(sorted(eos_token_ids)))

    return mask


@mutant(f"{RL}.scoring:final_answer")
def the_first_answer(original):
    return lambda response: original(
        response.split("</answer>")[0] + "</answer>" if "</answer>" in response else response
    )


@mutant(f"{RL}.scoring:Score.of")
def partial_credit_is_correct(original):
    return lambda cls, credit: original(cls, 1.0 if credit > 0 else 0.0)


@mutant(f"{RL}.shaping:place_on_last_token")
def reward_on_the_last_column(original):
    def place(rewards, mask, **k):
        scores = original(rewards, mask, **k)
        return torch.nn.functional.pad(scores.sum(1, keepdim=True), (mask.shape[1] - 1, 0))

    return place


@mutant(f"{RL}.shaping:overlong_reward")
def penalty_beyond_the_limit_only(original):
    return lambda length, *, max_response_length, buffer_len, penalty_factor=1.0: (
        original(length, max_response_length=max_response_length, buffer_len=buffer_len, penalty_factor=penalty_factor)
        if length == max_response_length
        else 0.0
    )


@mutant(f"{RL}.batch:Batch.repeat")
def repeated_in_blocks(original):
    return lambda self, n, interleave=True: original(self, n, interleave=False)


@mutant(f"{RL}.filtering:group_statistics")
def all_wrong_groups_kept(original):
    def statistics(batch, metric="acc"):
        return [dataclasses.replace(s, kept=s.kept or s.mean < 0) for s in original(batch, metric)]

    return statistics


@mutant(f"{RL}.checkpoint:finished")
def checkpoints_by_name(original):
    return lambda root: [int(name) for name in sorted(map(str, original(root)))]


# --- distillation ----------------------------------------------------------------------------------------------------


@mutant(f"{RL}.distill_loss:token_divergence")
def times_temperature_squared(original):
    def divergence(*t, beta, temperature=1.0, **k):
        value, agreement = original(*t, beta=beta, temperature=temperature, **k)
        return value * temperature**2, agreement

    return divergence


@mutant(f"{RL}.distill_loss:shift_labels")
def labels_not_shifted(original):
    return lambda labels: labels.clone()


@mutant(f"{RL}.distill_loss:jsd")
def beta_of_the_other_convention(original):
    return lambda student, teacher, beta: original(student, teacher, 1.0 - beta)


@mutant(f"{RL}.gkd_stages:distill_loss")
def cross_entropy_on_everything(original):
    def loss(config, counts, outputs, batch):
        return original(
            config, counts, outputs, {**batch, "dataset_response": torch.ones_like(batch["dataset_response"])}
        )

    return loss


@mutant(f"{RL}.gkd_stages:teacher_view")
def teacher_sees_the_students_prompt(original):
    def view(batch):
        from alignment.rl import gkd_stages
        from alignment.rl.batch import Batch

        return gkd_stages.trim(Batch({name: batch[name] for name in gkd_stages.VIEW}))

    return view


@mutant(f"{RL}.gkd_data:GkdSample.answered")
def answers_pass_for_data(original):
    return lambda self, ids, mask: dataclasses.replace(original(self, ids, mask), on_policy=False)


@mutant(f"{RL}.gkd_stages:place_tables")
def tables_left_in_the_teachers_frame(original):
    def place(log_probs, indices, batch, *, k):
        return original(log_probs, indices, batch.drop(["teacher_labels"]), k=k)

    return place


@mutant(f"{RL}.gkd_data:Encoder.fits")
def only_the_student_has_to_fit(original):
    return lambda self, sample: original(self, dataclasses.replace(sample, teacher_prompt_ids=None))


@mutant(f"{RL}.distill_loss:align_vocabularies")
def vocabularies_cut_to_the_shorter(original):
    def align(student, teacher):
        n = min(student.shape[-1], teacher.shape[-1])
        return student[..., :n], teacher[..., :n]

    return align


@mutant(f"{RL}.lora:LoraModel.merged_weight")
def alpha_without_rank(original):
    def merged(self, name):
        weight = self.base_model.get_parameter(name)
        return weight + (original(self, name) - weight) * self.down[name.replace(".", "/")].shape[0]

    return merged


@mutant(f"{RL}.gkd_data:OnPolicySchedule.load_state_dict")
def schedule_resumes_at_the_start(original):
    return lambda self, state: original(self, {"draws": 0})


@mutant("alignment.weights.checkpoint:iter_tensors")
def a_tensor_is_rounded(original):
    def tensors(*t, **k):
        for name, tensor in original(*t, **k):
            yield name, tensor.bfloat16().to(tensor.dtype) if "kv_b_proj" in name else tensor

    return tensors


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_that_nobody_listed_is_caught(name):
    target, make = MUTANTS[name]
    fault = Fault(
        id=name,
        title=name,
        source="imagined",
        category="outside",
        stage=("actor_update",),
        culprit="any",
        layer="unit-op",
        setting="any",
        why="any",
        apply=lambda: wrapped(target, make),
    )
    row = catch(fault, [check for check in all_checks() if check.name.partition(".")[0] in TOPICS])
    assert row.caught
    assert math.isfinite(row.seconds)
