"""The update of a training engine: gradients per parameter under every cut of the batch, and steps of the optimizer.

Losses may agree where gradients do not, so gradients are compared parameter by parameter; a ratio that is a size of the
layout (micro-batches, DP) is named. Steps have a changing learning rate, clipping, decay, and go on after a save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from alignment.faults.check import Check, Finding, Setting, allowed, differs, expect
from alignment.faults.checks import checkpoints
from alignment.faults.checks import stages as samples
from alignment.faults.reference import optimizer as textbook
from alignment.faults.reference.toy_policy import ToyPolicy, forward_alone
from alignment.faults.scratch import scratch
from alignment.numerics.random import portable_normal

UPDATE = "actor_update"
LOW, HIGH, C, ENTROPY, KL = 0.2, 0.28, 3.0, 0.05, 0.3
SCHEDULES = (
    {"lr": 0.05, "lr_warmup_steps": 0, "lr_scheduler_type": "constant"},
    {"lr": 0.04, "lr_warmup_steps": 3, "lr_scheduler_type": "constant"},
    {"lr": 0.06, "lr_warmup_steps": 2, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.15, "total_steps": 7},
)


class Watched:
    """A data parallel rank that notes the gradients it is about to add up."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Notes copies."""
        self.seen.append([t.clone() for t in tensors])


def fields_of_update(seed: int, policy: ToyPolicy) -> dict[str, Tensor]:
    """A batch for an update: old log-probs near the policy's, a distant reference, advantages of both signs."""
    fields = samples.tensors(seed)
    log_probs = samples.alone(policy, fields)["log_probs"]
    noise = {n: portable_normal(log_probs.shape, seed=seed, stream=f"training/{n}") for n in ("old", "ref", "adv")}
    mask = fields["response_mask"]
    return fields | {
        "old_log_probs": (log_probs + 0.4 * noise["old"]) * mask,
        "ref_log_prob": (log_probs + 1.5 * noise["ref"]) * mask,
        "advantages": noise["adv"] * mask,
    }


def reference_gradients(policy: ToyPolicy, fields: dict[str, Tensor], mode: str) -> dict[str, Tensor]:
    """Gradients of the DAPO/GRPO loss of the whole batch, each sequence by itself, by autograd of the textbook
    formula.
    """
    total = torch.zeros((), dtype=torch.float64)
    lengths = (fields["response_mask"] != 0).sum(1).tolist()
    for row, r in enumerate(lengths):
        ids = fields["input_ids"][row][fields["attention_mask"][row] != 0]
        p = len(ids) - r
        logits = forward_alone(policy, ids.tolist())[p - 1 : p + r - 1] / samples.TEMPERATURE
        log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
        chosen = log_p[torch.arange(r), ids[p:]]
        old, reference, advantage = (fields[n][row, :r] for n in ("old_log_probs", "ref_log_prob", "advantages"))
        ratio = (chosen - old).exp()
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH))
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * C), loss)
        entropy = -(log_p.exp() * log_p).sum(-1)
        gap = reference - chosen
        # verl's clamp of the estimate
        loss = loss - ENTROPY * entropy + KL * (gap.exp() - 1 - gap).clamp(max=10.0)
        scale = {"token-mean": 1 / sum(lengths), "seq-mean-token-mean": 1 / (len(lengths) * r)}[mode]
        total = total + loss.sum() * scale
    names, weights = zip(*policy.named_parameters())
    return dict(zip(names, torch.autograd.grad(total, weights)))


def split(setting: Setting) -> Iterator[Finding]:
    """The gradient of every parameter, whole, in micro batches by size and by tokens, and over data parallel ranks."""
    from alignment.backends import golden_training
    from alignment.backends.training import OptimizerConfig
    from alignment.rl import aggregation, config, stages
    from alignment.rl import batch as batches

    policy = ToyPolicy(seed=setting.seed)
    fields = fields_of_update(setting.seed, policy)
    counts = aggregation.Counts(tokens=sum(samples.RESPONSES), sequences=len(samples.RESPONSES))
    orders = {1: [list(range(6))], 2: [[0, 3, 4], [5, 1, 2]]}
    for mode in ("token-mean", "seq-mean-token-mean"):
        golden = reference_gradients(policy, fields, mode)
        for label, ranks, cut in (
            ("whole", 1, {}),
            ("micro batches of 2", 1, {"ppo_micro_batch_size_per_gpu": 2}),
            ("micro batches by tokens", 1, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 11}),
            ("two ranks", 2, {"ppo_micro_batch_size_per_gpu": 1}),
        )[0 if mode == "token-mean" else 2 :]:
            actor = config.ActorConfig(
                loss_agg_mode=mode,
                clip_ratio_low=LOW,
                clip_ratio_high=HIGH,
                clip_ratio_c=C,
                entropy_coeff=ENTROPY,
                use_kl_loss=True,
                kl_loss_coef=KL,
                ppo_mini_batch_size=6,
                loss_scale_factor=9,
                **cut,
            )
            whole = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor))
            parts, micro = [], 0
            for rows in orders[ranks]:
                watched = Watched()
                engine = golden_training.GoldenTrainingEngine(
                    policy,
                    optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0),
                    device="cpu",
                    ranks=watched,
                    outputs=partial(stages.policy_outputs, temperature=samples.TEMPERATURE),
                )
                batch = batches.Batch({n: t[rows] for n, t in fields.items()})
                plan = stages.update_batching(actor)
                micro += len(plan(batch).parts)
                stages.update(
                    engine, [batch], [counts], plan, stage="update_actor", loss=partial(stages.actor_loss, whole)
                )
                parts.append(watched.seen[0])
            sizes = {"micro-batches": micro} | ({"DP": ranks} if ranks > 1 else {})
            for name, *of_ranks in zip(golden, *parts):
                yield from differs(
                    torch.stack(of_ranks).sum(0),
                    golden[name],
                    stage=UPDATE,
                    place=f"update_actor.loss.gradient.{name}",
                    what=f"{mode}, {label}",
                    ratios=sizes,
                )


def engine_steps(setting: Setting) -> Iterator[Finding]:
    """Several steps of the engine against the textbook, with a save and a load into a fresh engine on the way."""
    from alignment.backends import golden_training
    from alignment.backends.training import OptimizerConfig

    for number, schedule in enumerate(SCHEDULES):
        policy = ToyPolicy(seed=setting.seed)
        config = OptimizerConfig(
            betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, clip_grad=(0.0, 0.5, 1e3)[number], **schedule
        )
        start = {name: p.detach().clone() for name, p in policy.named_parameters()}
        reference = textbook.AdamW(start, config.betas, config.eps)
        pulls = {n: portable_normal(p.shape, seed=setting.seed, stream=f"training/pull/{n}") for n, p in start.items()}

        def loss(outputs, batch, pulls=pulls, model=policy):
            return outputs["total"] * batch["scale"].sum(), {}

        def outputs_of(model, batch, pulls=pulls):
            return {"total": sum((p * pulls[n] * (1 + p)).sum() for n, p in model.named_parameters())}

        engine = golden_training.GoldenTrainingEngine(policy, optimizer=config, device="cpu", outputs=outputs_of)
        for update in range(5):
            if update == 3:
                with scratch() as folder:
                    engine.save_state(folder)
                    policy = ToyPolicy(seed=setting.seed + 1)
                    engine = golden_training.GoldenTrainingEngine(
                        policy, optimizer=config, device="cpu", outputs=outputs_of
                    )
                    engine.load_state(folder)
                stage = "checkpoint"
            else:
                stage = UPDATE
            scale = 0.3 + 0.2 * update
            micro = [{"scale": torch.tensor([part * scale], dtype=torch.float64)} for part in (0.25, 0.75)]
            report = engine.update(micro, loss, stage="update_actor", parameter_grad_norms=True)
            gradients = {n: scale * pulls[n] * (1 + 2 * w) for n, w in reference.weights.items()}
            lr = textbook.learning_rate(
                update,
                lr=schedule["lr"],
                warmup=schedule["lr_warmup_steps"],
                kind=schedule["lr_scheduler_type"],
                min_ratio=schedule.get("min_lr_ratio", 0.0),
                total=schedule.get("total_steps", 0),
            )
            norm = reference.step(gradients, lr=lr, decay=dict.fromkeys(gradients, 0.1), max_norm=config.clip_grad)
            what = f"update {update}, {schedule['lr_scheduler_type']}"
            for place, found, golden in (
                ("optimizer.learning_rate", report.learning_rate, lr),
                ("optimizer.grad_norm", report.grad_norm, norm),
            ):
                pair = torch.tensor(found, dtype=torch.float64), torch.tensor(golden, dtype=torch.float64)
                yield from differs(*pair, stage=stage, place=place, what=what)
            place = "load_state.optimizer" if stage == "checkpoint" else "optimizer.step"
            place += ".clip_grad" if 0 < config.clip_grad < norm else ""
            exported = dict(engine.export_weights())
            for name, right in reference.weights.items():
                found = exported[name]
                yield from differs(found, right, stage=stage, place=f"{place}.{name}", what=what)


def main_weights(setting: Setting) -> Iterator[Finding]:
    """bfloat16 weights move by steps far below their last bit only if something wider adds them up, also after a
    load.
    """
    from safetensors.torch import load_file

    from alignment.backends import distributed_optimizer, golden_training
    from alignment.backends.training import OptimizerConfig

    config = OptimizerConfig(lr=1e-4, weight_decay=0.0, clip_grad=0.0)
    start = {
        "a.weight": portable_normal((6, 5), seed=setting.seed, stream="main/a", dtype=torch.bfloat16),
        "norm": portable_normal((7,), seed=setting.seed, stream="main/b", dtype=torch.bfloat16),
    }
    gradients = {n: portable_normal(w.shape, seed=setting.seed, stream=f"main/g/{n}") for n, w in start.items()}
    golden = textbook.AdamW(start, config.betas, config.eps, dtype=torch.float64)
    held = {n: w.clone() for n, w in start.items()}
    optimizer = distributed_optimizer.DistributedOptimizer(held, config=config, dp=2, bucket_size=8)

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterDict({n.replace(".", "/"): w.clone() for n, w in start.items()})

    model = Holder()

    def outputs_of(module, batch):
        return {"total": sum((w.float() * gradients[n.replace("/", ".")]).sum() for n, w in module.weights.items())}

    engine = golden_training.GoldenTrainingEngine(model, optimizer=config, device="cpu", outputs=outputs_of)
    for step in range(30):
        if step == 10:
            engine.offload()
            engine.reload()
        if step == 20:
            # A resume: what lies below the last bit of the weights has to come back, too.
            with scratch() as folder:
                engine.save_state(folder)
                model = Holder()
                engine = golden_training.GoldenTrainingEngine(model, optimizer=config, device="cpu", outputs=outputs_of)
                engine.load_state(folder)
        golden.step(gradients, lr=config.lr, decay=dict.fromkeys(gradients, 0.0), max_norm=0.0)
        optimizer.reduce([{n: 0.5 * g for n, g in gradients.items()}] * 2)
        optimizer.step()
        engine.update([{}], lambda outputs, batch: (outputs["total"], {}), stage="update_actor")
    with scratch() as folder:
        engine.save_state(folder)
        saved = load_file(folder / "optimizer.safetensors")
    mains = {n: saved.get(f"main.weights.{n.replace('.', '/')}") for n in start}
    whole = optimizer.state_dict()["main"]
    for name, right in golden.weights.items():
        for place, main, weight in (
            ("distributed_optimizer.main", whole[name], held[name]),
            ("golden_training.main", mains[name], model.weights[name.replace(".", "/")].detach()),
        ):
            where = {"stage": UPDATE, "place": f"{place}.{name}"}
            moved = f"after 30 steps that moved it by {float((right - start[name].double()).abs().max()):.3g}"
            yield from expect(main is not None, evidence="it is not saved", **where)
            if main is not None:
                # four roundings a step
                yield from differs(main, right, what=moved, bound=allowed("float32", 4 * 30), **where)
                rounded = torch.equal(main.bfloat16(), weight)
                yield from expect(rounded, evidence="the weight is not the main weight, rounded", **where)


def engines(setting: Setting) -> Iterator[Finding]:
    """Engines from one checkpoint share nothing: a reference stays what it was, also after the policy was moved
    about.
    """
    from alignment.backends import golden_training
    from alignment.backends.training import OptimizerConfig
    from alignment.models.causal_lm import CausalLM
    from alignment.rl import stages
    from alignment.weights import checkpoint

    config = checkpoints.small_config(first_k_dense_replace=2)
    weights = CausalLM(config, dtype=torch.float32).init_weights(setting.seed).state_dict()
    fields = {
        n: t % 31 if n.endswith("ids") or n in ("prompts", "responses") else t for n, t in samples.tensors(0).items()
    }
    outputs = partial(stages.policy_outputs, temperature=samples.TEMPERATURE)
    with scratch() as folder:
        checkpoint.save_checkpoint(folder / "start", config, weights)
        settings = {"outputs": outputs, "dtype": torch.float32, "device": "cpu"}
        reference = golden_training.GoldenTrainingEngine.from_checkpoint(folder / "start", optimizer=None, **settings)
        policy = golden_training.GoldenTrainingEngine.from_checkpoint(
            folder / "start", optimizer=OptimizerConfig(lr=0.05, weight_decay=0.0), **settings
        )

    def scores(engine, stage: str) -> Tensor:
        return engine.forward([fields], stage=stage)[0]["log_probs"]

    def loss(made, micro_batch):
        return -(made["log_probs"] * micro_batch["response_mask"]).sum(), {}

    before = scores(reference, "ref_log_prob")
    yield from expect(
        torch.equal(before, scores(policy, "old_log_prob")),
        stage="ref_log_prob",
        place="step 0.log_probs",
        evidence="actor and reference differ at the start",
    )
    seen = [before]
    for moved in (False, True, False):
        if moved:
            policy.offload()
            policy.reload()
        policy.update([fields], loss, stage="update_actor")
        seen.append(scores(policy, "old_log_prob"))
        still = torch.equal(seen[-1], seen[-2])
        what = " after it was moved to the host and back" if moved else ""
        yield from expect(
            not still, stage=UPDATE, place="GoldenTrainingEngine.update", evidence=f"an update changes nothing{what}"
        )
    yield from expect(
        torch.equal(scores(reference, "ref_log_prob"), before),
        stage="ref_log_prob",
        place="reference.log_probs",
        evidence="the reference moves with the policy",
    )


CHECKS = (
    Check(
        name="training.engine_steps",
        layer="unit-op",
        cost=0.06,
        run=engine_steps,
        kept_because="the engine's own steps through a save, where the optimizers above are others",
    ),
    Check(
        name="training.engines",
        layer="layer-logits",
        cost=0.05,
        run=engines,
        kept_because="weights that two engines share are no entry of the catalogue, and make every KL 0",
    ),
    Check(
        name="training.split",
        layer="layer-grad",
        cost=0.06,
        run=split,
        kept_because="gradients by parameter through the engine, on ranks and in micro batches by tokens",
    ),
    Check(
        name="training.main_weights",
        layer="layer-grad",
        cost=0.06,
        run=main_weights,
        kept_because="steps below the last bit of a weight, in both optimizers",
    ),
)
