"""Defects of checkpoints, resumes and optimizers."""

from __future__ import annotations

import json

from alignment.faults.fault import Fault
from alignment.faults.seam import seam

UPDATE, CHECKPOINT = ("actor_update",), ("checkpoint",)
OPTIMIZER = "alignment.backends.distributed_optimizer:DistributedOptimizer"


@seam("alignment.weights.indexed_save:save_stream")
def _file_waits_for_every_key(original):
    def save_stream(directory, config, stream, *, index, allow_missing=()):
        from safetensors.torch import save_file

        directory.mkdir(parents=True)
        wanted: dict[str, set[str]] = {}
        for key, file in index.items():
            wanted.setdefault(file, set()).add(key)
        waiting, written = {}, {}
        for name, tensor in stream:
            file = index[name]
            waiting.setdefault(file, {})[name] = tensor.detach().clone()
            if waiting[file].keys() >= wanted[file]:
                held = waiting.pop(file)
                save_file(held, directory / file, metadata={"format": "pt"})
                written |= dict.fromkeys(held, file)
        # what is left waits for keys that never come; the assertion was softened to a warning
        listing = {"metadata": {}, "weight_map": written}
        (directory / "model.safetensors.index.json").write_text(json.dumps(listing))
        (directory / "config.json").write_text(json.dumps(config.to_hf()))

    return save_stream


@seam(f"{OPTIMIZER}.reload_main_weights")
def _stale_main_weights(original):
    return lambda self: None


@seam("alignment.backends.distributed_optimizer:ChainedOptimizer.param_groups")
def _groups_of_the_start(original):
    def param_groups(self):
        if not hasattr(self, "_groups_then"):
            self._groups_then = original(self)
        return self._groups_then

    return param_groups


@seam("alignment.rl.data:PromptSampler.load_state_dict")
def _order_from_the_start(original):
    def load_state_dict(self, state):
        original(self, {**state, "epoch": 0, "position": 0})

    return load_state_dict


@seam("alignment.rl.worker:Worker._rng_file")
def _one_file_for_all(original):
    return lambda self: f"rng_{self.roles[0]}_0.safetensors"


@seam(f"{OPTIMIZER}.gradient_norm")
def _norm_of_nothing(original):
    def gradient_norm(self, shards):
        return original(self, [[g for g in of_bucket if hasattr(g, "decoupled_grad")] for of_bucket in shards])

    return gradient_norm


@seam(f"{OPTIMIZER}.clear")
def _all_buckets_cleared(original):
    def clear(self, bucket):
        for every in self.buckets:
            original(self, every)

    return clear


@seam("alignment.backends.training:OptimizerConfig.learning_rate")
def _linear_decay(original):
    def learning_rate(self, update):
        rate = original(self, update)
        if self.lr_scheduler_type == "constant" and update >= self.lr_warmup_steps:
            return rate * max(0.0, 1.0 - (update - self.lr_warmup_steps) / 1000)
        return rate

    return learning_rate


FAULTS = (
    Fault(
        id="hf-save-drops-shard-on-missing-key",
        title="A file with a key that never comes is never written",
        source="mbridge 731fde0, 9847825, d10f3c6",
        category="checkpoint",
        stage=CHECKPOINT,
        culprit="indexed_save",
        layer="weight-sync",
        setting="an index that lists inv_freq",
        why="a file is written only once all keys that the index lists have come",
        apply=_file_waits_for_every_key,
    ),
    Fault(
        id="master-weights-not-refreshed-after-load",
        title="Main weights stay what they were when weights are loaded",
        source="NeMo-RL 30b24ce7a (#2371), SkyRL #2149, Megatron-LM #5071",
        category="checkpoint",
        stage=("checkpoint", "actor_update"),
        culprit="main_weights",
        layer="layer-grad",
        setting="a load, then a step",
        why="the first step writes stale main weights over the loaded model",
        apply=_stale_main_weights,
    ),
    Fault(
        id="chained-optimizer-param-groups-stale",
        title="The chain shows the parameter groups of before the load",
        source="Megatron-LM 1505db4cc4",
        category="checkpoint",
        stage=("checkpoint", "actor_update"),
        culprit="param_groups",
        layer="unit-op",
        setting="a chain, a changing rate, a load",
        why="the scheduler edits groups that nobody uses any more",
        apply=_groups_of_the_start,
    ),
    Fault(
        id="sampler-position-not-restored",
        title="The data order begins anew after a resume",
        source="verl ef44dcc72 (#3457), ms-swift 123d81e79, NeMo-RL 6afb047f7",
        category="checkpoint",
        stage=CHECKPOINT,
        culprit="position",
        layer="unit-op",
        setting="a resume inside or after an epoch",
        why="epoch and position are not taken from the state",
        apply=_order_from_the_start,
    ),
    Fault(
        id="rng-file-shared-by-ranks",
        title="All ranks write and read one file of random state",
        source="verl 9830b17ba",
        category="checkpoint",
        stage=CHECKPOINT,
        culprit="rng_file",
        layer="unit-op",
        setting="more than one rank",
        why="all ranks go on with one rank's generators",
        apply=_one_file_for_all,
    ),
    Fault(
        id="grad-norm-reads-wrong-attribute",
        title="The norm is taken of gradients that are kept under another name",
        source="Megatron-LM a82fa72d52, 972553db35",
        category="checkpoint",
        stage=UPDATE,
        culprit="gradient_norm",
        layer="layer-grad",
        setting="clipping on",
        why="the norm of nothing is 0, and nothing is clipped",
        apply=_norm_of_nothing,
    ),
    Fault(
        id="shared-grad-buffer-zeroed-too-widely",
        title="Clearing one bucket clears all of them",
        source="Megatron-LM c2c36f77cf, 5f791187ee",
        category="checkpoint",
        stage=UPDATE,
        culprit="gather",
        layer="layer-grad",
        setting="several buckets that weights are gathered through",
        why="weights of later buckets are 0 when they are read",
        apply=_all_buckets_cleared,
    ),
    Fault(
        id="default-lr-decay-differs",
        title="One backend decays the learning rate where the configuration says constant",
        source="verl 18c6ffcf0, e12edc7f3",
        category="checkpoint",
        stage=UPDATE,
        culprit="learning_rate",
        layer="unit-op",
        setting="more than one update",
        why="another default of the schedule",
        apply=_linear_decay,
    ),
)
