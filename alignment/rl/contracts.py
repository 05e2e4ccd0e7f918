"""What each stage of a training step reads and adds, and the check that data passing between stages honours it.

``FIELDS`` and ``CONTRACTS`` are the data: one row per field and one per stage. :func:`check` is the only code that
reads them. The stages and fields are those of verl's ``RayPPOTrainer.fit``; the rules are the ones whose violation
trains silently on the wrong tokens.

Conventions, for b samples, p prompt and r response tokens, s = p + r:

* prompts are left padded, responses right padded, ``input_ids`` is their concatenation;
* ``response_mask`` is one run of ones from the first response token up to and including the first end-of-sequence token
  (all r tokens where there is none), and ``attention_mask`` continues the prompt's mask with it;
* ``position_ids`` of real tokens is ``cumsum(attention_mask) - 1`` (positions of padding are never read);
* log-probs are finite everywhere and never positive on response tokens. No tolerance is needed: each usual way to
  compute one subtracts a logarithm that rounds to at least the maximum;
* a sample's scalar reward sits on its last response token, and nowhere else: it is the list entry ``score``, plus
  ``overlong_reward`` where that list exists;
* the n samples of a prompt share its ``uid`` and its prompt bytes; after the rollout they are adjacent.

Distillation carries whole sequences of s tokens, right padded. ``labels`` holds the token where it counts and −100
elsewhere, unshifted. The teacher may see another view (``teacher_input_ids`` … [b,t]); what it says comes back in the
student's frame, at the positions that *predict* the active tokens: ``teacher_topk_log_probs`` [b,s,k], −inf where there
is nothing, and ``teacher_token_log_probs`` [b,s], 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.distill_loss import IGNORED, active_positions, require_same_active, shift_labels

TOKEN = (torch.int64,)
MASK = (torch.bool, torch.int64)
FLOAT = (torch.float32, torch.float64)
LARGEST_LOGIT = 1024.0
"""No trained model has larger logits; an entropy may be negative by one unit of rounding at that size."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A tensor of the batch: its axes (``b`` samples, ``p`` prompt, ``r`` response, ``s`` = p + r) and its dtypes."""

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One stage: the fields it reads and adds, the per-sample lists, and the rules.

    ``optional`` names fields that it also reads where they are present, ``may_add`` fields that it adds where it can;
    both are checked where they are present. ``before`` names the rules that hold when the stage starts, ``rules`` those
    that hold when it has finished.
    """

    stage: str
    reads: tuple[str, ...]
    adds: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    may_add: tuple[str, ...] = ()
    meta_reads: tuple[str, ...] = ("uid",)
    meta_adds: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()


FIELDS: dict[str, Field] = {
    f.name: f
    for f in (
        Field(name="prompts", axes=("b", "p"), dtypes=TOKEN),
        Field(name="prompt_mask", axes=("b", "p"), dtypes=MASK),
        Field(name="responses", axes=("b", "r"), dtypes=TOKEN),
        Field(name="input_ids", axes=("b", "s"), dtypes=TOKEN),
        Field(name="attention_mask", axes=("b", "s"), dtypes=MASK),
        Field(name="position_ids", axes=("b", "s"), dtypes=TOKEN),
        Field(name="response_mask", axes=("b", "r"), dtypes=MASK),
        Field(name="rollout_log_probs", axes=("b", "r"), dtypes=FLOAT),
        Field(name="old_log_probs", axes=("b", "r"), dtypes=FLOAT),
        Field(name="entropys", axes=("b", "r"), dtypes=FLOAT),
        Field(name="ref_log_prob", axes=("b", "r"), dtypes=FLOAT),
        Field(name="values", axes=("b", "r"), dtypes=FLOAT),
        Field(name="token_level_scores", axes=("b", "r"), dtypes=FLOAT),
        Field(name="token_level_rewards", axes=("b", "r"), dtypes=FLOAT),
        Field(name="advantages", axes=("b", "r"), dtypes=FLOAT),
        Field(name="returns", axes=("b", "r"), dtypes=FLOAT),
        Field(name="labels", axes=("b", "s"), dtypes=TOKEN),
        Field(name="dataset_response", axes=("b",), dtypes=MASK),
        Field(name="row", axes=("b",), dtypes=TOKEN),
        Field(name="teacher_input_ids", axes=("b", "t"), dtypes=TOKEN),
        Field(name="teacher_attention_mask", axes=("b", "t"), dtypes=MASK),
        Field(name="teacher_position_ids", axes=("b", "t"), dtypes=TOKEN),
        Field(name="teacher_labels", axes=("b", "t"), dtypes=TOKEN),
        Field(name="teacher_topk_log_probs", axes=("b", "s", "k"), dtypes=FLOAT),
        Field(name="teacher_topk_indices", axes=("b", "s", "k"), dtypes=TOKEN),
        Field(name="teacher_token_log_probs", axes=("b", "s"), dtypes=FLOAT),
    )
}

_SEQUENCE = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
_SEQUENCE_RULES = (
    "binary_masks",
    "prompt_left_padded",
    "response_run",
    "one_attention_mask",
    "positions",
    "concatenation",
)

_VIEW = ("input_ids", "attention_mask", "position_ids", "labels")
_TEACHER_VIEW = tuple(f"teacher_{name}" for name in _VIEW)
_TABLES = ("teacher_topk_log_probs", "teacher_topk_indices")
_VIEW_RULES = ("binary_masks", "right_padded", "positions", "labels", "same_active")

CONTRACTS: dict[str, Contract] = {
    c.stage: c
    for c in (
        Contract(
            stage="rollout",
            reads=("prompts", "prompt_mask"),
            adds=("responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
            may_add=("rollout_log_probs",),
            before=("binary_masks", "prompt_left_padded"),
            rules=_SEQUENCE_RULES + ("log_probs", "groups_adjacent"),
        ),
        Contract(
            stage="reward",
            reads=_SEQUENCE,
            adds=("token_level_scores",),
            meta_reads=("uid", "data_source", "ground_truth"),
            meta_adds=("score",),
            before=_SEQUENCE_RULES,
            rules=_SEQUENCE_RULES + ("finite", "reward_on_last_token", "groups"),
        ),
        Contract(
            stage="old_log_prob",
            reads=_SEQUENCE,
            adds=("old_log_probs",),
            may_add=("entropys",),
            before=_SEQUENCE_RULES,
            rules=_SEQUENCE_RULES + ("log_probs", "entropies"),
        ),
        Contract(
            stage="ref_log_prob",
            reads=_SEQUENCE,
            adds=("ref_log_prob",),
            before=_SEQUENCE_RULES,
            rules=_SEQUENCE_RULES + ("log_probs",),
        ),
        Contract(
            stage="values",
            reads=_SEQUENCE,
            adds=("values",),
            before=_SEQUENCE_RULES,
            rules=_SEQUENCE_RULES + ("finite",),
        ),
        Contract(
            stage="advantage",
            reads=("prompts", "responses", "response_mask", "token_level_scores"),
            adds=("token_level_rewards", "advantages", "returns"),
            optional=("values", "old_log_probs", "ref_log_prob"),
            before=("binary_masks", "response_run", "finite", "reward_on_last_token", "groups"),
            rules=("binary_masks", "response_run", "finite", "log_probs", "zero_on_padding", "groups"),
        ),
        Contract(
            stage="update_critic",
            reads=_SEQUENCE + ("values", "returns"),
            before=_SEQUENCE_RULES + ("finite", "zero_on_padding"),
        ),
        Contract(
            stage="update_actor",
            reads=_SEQUENCE + ("old_log_probs", "advantages"),
            optional=("ref_log_prob", "rollout_log_probs", "returns"),
            before=_SEQUENCE_RULES + ("finite", "log_probs", "zero_on_padding"),
        ),
        Contract(
            stage="teacher_log_prob",
            reads=_VIEW,
            adds=("teacher_token_log_probs",),
            optional=_TEACHER_VIEW,
            may_add=_TABLES,
            before=_VIEW_RULES,
            rules=_VIEW_RULES + ("teacher_log_probs", "teacher_tables"),
        ),
        Contract(
            stage="update_student",
            reads=_VIEW + ("dataset_response", "row", "teacher_token_log_probs"),
            optional=_TABLES,
            before=_VIEW_RULES + ("teacher_log_probs", "teacher_tables"),
        ),
    )
}

STAGES: tuple[str, ...] = tuple(CONTRACTS)


def check(
    stage: str,
    batch: Batch,
    *,
    moment: str = "after",
    require: Iterable[str] = (),
    n: int | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Check the batch against the contract of a stage.

    Args:
        stage: one of ``STAGES``.
        batch: the batch about to enter the stage (``moment="before"``) or as the stage left it (``"after"``).
        moment: "before" looks at what the stage reads, "after" also at what it adds.
        require: optional fields that this run does need (``ref_log_prob`` where there is a KL loss, …).
        n: samples per prompt; `eos_token_id`: where responses end; `pad_token_id`: what padding holds. Each defaults to
            the entry of that name in ``batch.info``; a rule that needs a fact nobody gave is left out.

    Raises:
        InputError: the first violation: stage, field, expected, found, and the sample where one is to blame.
    """
    if stage not in CONTRACTS:
        raise InputError("there is no such stage", where=stage, expected=f"one of {', '.join(STAGES)}")
    if moment not in ("before", "after"):
        raise InputError("a batch is checked before or after a stage", where=stage, found=moment)
    contract = CONTRACTS[stage]
    done = moment == "after"
    needed = contract.reads + (contract.adds if done else ()) + tuple(require)
    lists = contract.meta_reads + (contract.meta_adds if done else ())
    for name in needed + lists:
        if name not in batch:
            role = "reads" if name in contract.reads + contract.meta_reads + tuple(require) else "adds"
            raise InputError(
                f"the batch lacks a field that the stage {role}", where=f"{stage}, {name}", found=sorted(batch)
            )
        if (name in lists) != (name in batch.meta):
            kind = "a per-sample list" if name in lists else "a tensor"
            raise InputError("the field has the wrong kind", where=f"{stage}, {name}", expected=kind)
    if not len(batch):
        raise InputError("the batch has no samples", where=stage, expected="at least one sample", found=0)
    ids = eos_token_id if eos_token_id is not None else batch.info.get("eos_token_id")
    view = _View(
        stage=stage,
        batch=batch,
        names=tuple(dict.fromkeys(needed + tuple(f for f in contract.optional + contract.may_add if f in batch))),
        n=n if n is not None else batch.info.get("n"),
        eos=None if ids is None else tuple([ids] if isinstance(ids, int) else ids),
        pad=pad_token_id if pad_token_id is not None else batch.info.get("pad_token_id"),
    )
    _check_shapes(view)
    for rule in dict.fromkeys(contract.rules if done and contract.rules else contract.before):
        _RULES[rule](view)


def check_untouched(stage: str, before: Batch, after: Batch) -> None:
    """Check that a stage changed nothing but what its contract lets it add: same samples, same order, same bytes.

    Raises:
        InputError: stage, field and first sample that changed or disappeared.
    """
    if stage not in CONTRACTS:
        raise InputError("there is no such stage", where=stage, expected=f"one of {', '.join(STAGES)}")
    contract = CONTRACTS[stage]
    free = set(contract.adds + contract.may_add + contract.meta_adds)
    for name in before:
        if name in free:
            continue
        if name not in after:
            raise InputError("the stage lost a field", where=f"{stage}, {name}", found=sorted(after))
        old, new = before[name], after[name]
        if len(old) != len(new):
            raise InputError(
                "the stage changed the number of samples", where=f"{stage}, {name}", expected=len(old), found=len(new)
            )
        if isinstance(old, Tensor) and isinstance(new, Tensor) and _same_bytes(old, new):
            continue
        for i in range(len(old)):
            same = _same_bytes(old[i], new[i]) if isinstance(old, Tensor) else bool(old[i] == new[i])
            if not same:
                raise InputError(
                    "the stage changed a field that it only reads",
                    where=f"{stage}, {name}, sample {i}",
                    expected="the value it was given",
                    found=_short(new[i]),
                )


@dataclass(frozen=True, kw_only=True)
class _View:
    """The batch as a rule sees it: only the fields of this stage."""

    stage: str
    batch: Batch
    names: tuple[str, ...]
    n: int | None
    eos: tuple[int, ...] | None
    pad: int | None

    def has(self, *names: str) -> bool:
        return all(name in self.names for name in names)

    def __getitem__(self, name: str) -> Tensor:
        return self.batch.tensors[name]

    def mask(self, name: str) -> Tensor:
        return self.batch.tensors[name] != 0

    def fail(self, problem: str, field: str, bad: Tensor, *, expected: object, found: object = None) -> None:
        """Raise when `bad` ([b] or [b,width], true where wrong) has a true entry, naming the first."""
        if not bool(bad.any()):
            return
        place = bad.nonzero()[0].tolist()
        value = self[field][tuple(place)] if found is None else found
        if callable(expected):
            expected = expected(*place)
        if callable(value):
            value = value(*place)
        token = f", token {place[1]}" if len(place) > 1 else ""
        raise InputError(
            problem, where=f"{self.stage}, {field}, sample {place[0]}{token}", expected=expected, found=_short(value)
        )


def _check_shapes(view: _View) -> None:
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    for name in view.names:
        if name in FIELDS and "s" not in FIELDS[name].axes and view[name].ndim == len(FIELDS[name].axes):
            for axis, size in zip(FIELDS[name].axes, view[name].shape):
                sizes.setdefault(axis, size)
                source.setdefault(axis, name)
    if "p" in sizes and "r" in sizes:
        sizes["s"] = sizes["p"] + sizes["r"]
    else:
        # Sequences that were never cut into prompt and response: the first one says how long they are.
        known = (n for n in view.names if n in FIELDS and FIELDS[n].axes == ("b", "s"))
        whole = next((n for n in known if view[n].ndim == 2), None)
        if whole is not None:
            sizes.setdefault("b", view[whole].shape[0])
            sizes["s"] = view[whole].shape[1]
    for name in view.names:
        if name not in FIELDS:
            raise InputError("there is no such batch field", where=f"{view.stage}, {name}", expected=sorted(FIELDS))
        field, value = FIELDS[name], view[name]
        expected = [sizes.get(axis, size) for axis, size in zip(field.axes, value.shape)]
        if value.ndim != len(field.axes) or list(value.shape) != expected:
            axes = "×".join(field.axes)
            raise InputError(
                "the field has the wrong shape",
                where=f"{view.stage}, {name}",
                expected=f"{axes} = {[sizes.get(axis, '?') for axis in field.axes]}",
                found=list(value.shape),
            )
        if value.dtype not in field.dtypes:
            raise InputError(
                "the field has the wrong dtype",
                where=f"{view.stage}, {name}",
                expected=" or ".join(map(_dtype, field.dtypes)),
                found=_dtype(value.dtype),
            )


def _binary_masks(view: _View) -> None:
    for name in ("prompt_mask", "attention_mask", "response_mask", "teacher_attention_mask", "dataset_response"):
        if view.has(name) and view[name].dtype != torch.bool:
            view.fail("a mask holds 0 and 1 only", name, (view[name] != 0) & (view[name] != 1), expected="0 or 1")


def _prompt_left_padded(view: _View) -> None:
    width = view["prompts"].shape[1]
    names = [name for name in ("prompt_mask", "attention_mask") if view.has(name)]
    for name in names:
        mask = view.mask(name)[:, :width]
        drop = mask[:, :-1] & ~mask[:, 1:]
        view.fail("the prompt is not left padded", name, drop, expected="zeros, then ones up to the last prompt token")
        view.fail("the prompt has no tokens", name, ~mask.any(1), expected="at least one", found=0)
    if view.has("prompt_mask", "attention_mask"):
        differs = view.mask("attention_mask")[:, :width] != view.mask("prompt_mask")
        view.fail(
            "the attention mask differs from the prompt's mask", "attention_mask", differs, expected="prompt_mask"
        )
    if view.pad is not None and names:
        padding = ~view.mask(names[0])[:, :width]
        wrong = padding & (view["prompts"] != view.pad)
        view.fail("prompt padding holds a token", "prompts", wrong, expected=f"pad_token_id {view.pad}")


def _response_run(view: _View) -> None:
    mask, responses = view.mask("response_mask"), view["responses"]
    name = "response_mask"
    view.fail("the response has no tokens", name, ~mask.any(1), expected="at least one", found=0)
    rise = torch.zeros_like(mask)
    rise[:, 1:] = mask[:, 1:] & ~mask[:, :-1]
    rise[:, 0] = ~mask[:, 0]
    view.fail("the mask is not one run from the first response token", name, rise, expected="ones, then zeros")
    if view.eos is not None:
        is_eos = torch.isin(responses, torch.tensor(view.eos, dtype=responses.dtype, device=responses.device))
        seen = is_eos.cumsum(1) - is_eos.long()
        late = mask & (seen > 0)
        view.fail("the mask goes on after the end of the response", name, late, expected="0 after the first EOS")
        early = ~mask & (seen == 0)
        view.fail("the mask stops before the end of the response", name, early, expected="1 up to the first EOS")
    if view.pad is not None:
        wrong = ~mask & (responses != view.pad)
        view.fail("response padding holds a token", "responses", wrong, expected=f"pad_token_id {view.pad}")


def _one_attention_mask(view: _View) -> None:
    width = view["prompts"].shape[1]
    differs = view.mask("attention_mask")[:, width:] != view.mask("response_mask")
    problem = "the attention mask differs from the response mask"
    view.fail(problem, "response_mask", differs, expected=lambda i, j: int(view["attention_mask"][i, width + j]))


def _positions(view: _View) -> None:
    for prefix in ("", "teacher_"):
        if not view.has(f"{prefix}attention_mask", f"{prefix}position_ids"):
            continue
        mask, name = view.mask(f"{prefix}attention_mask"), f"{prefix}position_ids"
        expected = (mask.long().cumsum(1) - 1).clamp(min=0)
        wrong = mask & (view[name] != expected)
        view.fail("a token has the wrong position", name, wrong, expected=lambda i, j, e=expected: int(e[i, j]))


def _concatenation(view: _View) -> None:
    whole = torch.cat([view["prompts"], view["responses"]], dim=1)
    problem = "input_ids is not the prompt followed by the response"
    view.fail(problem, "input_ids", view["input_ids"] != whole, expected=lambda i, j: int(whole[i, j]))


def _finite(view: _View) -> None:
    for name in view.names:
        if FIELDS[name].dtypes == FLOAT:
            view.fail("a value is not finite", name, ~torch.isfinite(view[name]), expected="a finite number")


def _log_probs(view: _View) -> None:
    mask = view.mask("response_mask")
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob"):
        if view.has(name):
            view.fail("a log-prob is not finite", name, ~torch.isfinite(view[name]), expected="a finite number")
            view.fail("a log-prob is positive", name, mask & (view[name] > 0), expected="at most 0")


def _entropies(view: _View) -> None:
    if view.has("entropys"):
        bad = ~torch.isfinite(view["entropys"])
        view.fail("an entropy is not finite", "entropys", bad, expected="a finite number")
        # logsumexp(z) − Σ p·z, which some engines compute, cancels two numbers as large as the largest logit.
        rounding = torch.finfo(view["entropys"].dtype).eps * LARGEST_LOGIT
        negative = view.mask("response_mask") & (view["entropys"] < -rounding)
        view.fail("an entropy is negative", "entropys", negative, expected="at least 0")


def _reward_on_last_token(view: _View) -> None:
    mask, scores = view.mask("response_mask"), view["token_level_scores"]
    last = mask.long().sum(1) - 1
    columns = torch.arange(mask.shape[1], device=mask.device)
    elsewhere = (columns != last.unsqueeze(1)) & (scores != 0)
    problem = "the reward is not on the last response token"
    view.fail(problem, "token_level_scores", elsewhere, expected=lambda i, j: f"0 here, the reward on token {last[i]}")
    if "score" in view.batch.meta:
        placed = scores.gather(1, last.unsqueeze(1)).squeeze(1)
        extra = view.batch.meta.get("overlong_reward", [0.0] * len(view.batch))
        total = [float(a) + float(b) for a, b in zip(view.batch.meta["score"], extra)]
        wanted = torch.tensor(total, dtype=torch.float64).to(placed)
        problem = "the token-level reward is not the sample's score (plus its overlong_reward)"
        view.fail(
            problem,
            "token_level_scores",
            placed != wanted,
            expected=lambda i: f"{total[i]} on token {last[i]}",
            found=lambda i: placed[i],
        )


def _zero_on_padding(view: _View) -> None:
    padding = ~view.mask("response_mask")
    for name in ("token_level_scores", "token_level_rewards", "advantages", "returns"):
        if view.has(name):
            view.fail("padding carries a value", name, padding & (view[name] != 0), expected=0)


def _right_padded(view: _View) -> None:
    for name in ("attention_mask", "teacher_attention_mask"):
        if view.has(name):
            rise = ~view.mask(name)[:, :-1] & view.mask(name)[:, 1:]
            view.fail("the sequence is not right padded", name, rise, expected="ones, then zeros")


def _labels(view: _View) -> None:
    for prefix in ("", "teacher_"):
        name = f"{prefix}labels"
        if not view.has(name):
            continue
        counts, ids = view[name] != IGNORED, view[f"{prefix}input_ids"]
        outside = counts & ~view.mask(f"{prefix}attention_mask")
        view.fail("padding counts in the loss", name, outside, expected=IGNORED)
        first = torch.zeros_like(counts)
        first[:, 0] = counts[:, 0]
        view.fail("the first token counts, and nothing predicts it", name, first, expected=IGNORED)
        other = counts & (view[name] != ids)
        problem = "a label is not the token that stands there (labels are not shifted)"
        view.fail(problem, name, other, expected=lambda i, j, ids=ids: int(ids[i, j]))


def _same_active(view: _View) -> None:
    if view.has("labels", "teacher_labels"):
        require_same_active(view["labels"], view["teacher_labels"], view.batch.meta.get("uid"))


def _teacher_log_probs(view: _View) -> None:
    if view.has("teacher_token_log_probs"):
        name, active = "teacher_token_log_probs", active_positions(view["labels"])
        view.fail("a log-prob is not finite", name, ~torch.isfinite(view[name]), expected="a finite number")
        view.fail("a log-prob is positive", name, view[name] > 0, expected="at most 0")
        view.fail("a position that does not count carries a value", name, ~active & (view[name] != 0), expected=0)


def _teacher_tables(view: _View) -> None:
    if not view.has("teacher_topk_log_probs"):
        return
    name, values, ids = "teacher_topk_log_probs", view["teacher_topk_log_probs"], view["teacher_topk_indices"]
    bad = torch.isnan(values).any(-1) | (values > 0).any(-1)
    view.fail("a table holds what is no log-prob", name, bad, expected="−inf … 0")
    mass = values.double().exp().sum(-1)
    # A log-prob is a difference of logits, so it is off by their rounding; a probability then by as much, relatively.
    room = 1.0 + torch.finfo(values.dtype).eps * LARGEST_LOGIT
    view.fail("the probabilities of a row add up to more than 1", name, mass > room, expected="at most 1")
    rising = (values[..., 1:] > values[..., :-1]).any(-1)
    view.fail("a row is not sorted, most likely first", name, rising, expected="falling log-probs, then −inf")
    blank = torch.isneginf(values)
    elsewhere = ~active_positions(view["labels"]) & ~blank.all(-1)
    view.fail("a position that does not count has a table", name, elsewhere, expected="−inf")
    # Open slots get ids nobody has, so that they are never taken for a repeated token.
    distinct = torch.where(blank, -1 - torch.arange(values.shape[-1], device=ids.device), ids).sort(-1).values
    repeated = (distinct[..., 1:] == distinct[..., :-1]).any(-1)
    view.fail("a row names a token twice", "teacher_topk_indices", repeated, expected="every token once")
    here = active_positions(view["labels"])
    label = shift_labels(view["labels"]).unsqueeze(-1)
    listed = (ids == label) & ~blank
    said = values.masked_fill(~listed, 0.0).sum(-1)
    # Both are the teacher's log-prob of the same token, and were rounded once.
    gap = (said - view["teacher_token_log_probs"]).abs() if view.has("teacher_token_log_probs") else said * 0
    limit = torch.finfo(values.dtype).eps * LARGEST_LOGIT
    problem = "the table and the teacher's log-prob disagree about the token that stands there"
    view.fail(
        problem,
        name,
        here & listed.any(-1) & (gap > limit),
        expected=lambda i, j: float(view["teacher_token_log_probs"][i, j]),
        found=lambda i, j: float(said[i, j]),
    )


def _groups(view: _View) -> None:
    _check_groups(view, adjacent=False)


def _groups_adjacent(view: _View) -> None:
    _check_groups(view, adjacent=True)


def _check_groups(view: _View, *, adjacent: bool) -> None:
    rows: dict[object, list[int]] = {}
    for i, uid in enumerate(view.batch.meta["uid"]):
        rows.setdefault(uid, []).append(i)
    n = view.n if view.n is not None else len(next(iter(rows.values())))
    prompts = view["prompts"]
    for uid, members in rows.items():
        place = f"{view.stage}, uid, sample {members[0]}"
        if len(members) != n:
            raise InputError(
                f"the group of uid {uid!r} has the wrong size", where=place, expected=f"{n} samples", found=len(members)
            )
        if adjacent and members != list(range(members[0], members[0] + n)):
            raise InputError(
                f"the samples of uid {uid!r} are not adjacent",
                where=place,
                expected=f"samples {members[0]} … {members[0] + n - 1} (interleaved repeat)",
                found=f"samples {_short(members)}",
            )
        for i in members[1:]:
            if not torch.equal(prompts[i], prompts[members[0]]):
                raise InputError(
                    f"samples of uid {uid!r} have different prompts",
                    where=f"{view.stage}, prompts, sample {i}",
                    expected=f"the prompt of sample {members[0]}",
                    found=_short(prompts[i]),
                )


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.reshape(-1).contiguous(), b.reshape(-1).contiguous().to(a.device)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: object) -> str:
    text = str(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 80 else text[:77] + "…"


_RULES: dict[str, Callable[[_View], None]] = {
    "binary_masks": _binary_masks,
    "prompt_left_padded": _prompt_left_padded,
    "response_run": _response_run,
    "one_attention_mask": _one_attention_mask,
    "positions": _positions,
    "concatenation": _concatenation,
    "finite": _finite,
    "log_probs": _log_probs,
    "entropies": _entropies,
    "reward_on_last_token": _reward_on_last_token,
    "zero_on_padding": _zero_on_padding,
    "right_padded": _right_padded,
    "labels": _labels,
    "same_active": _same_active,
    "teacher_log_probs": _teacher_log_probs,
    "teacher_tables": _teacher_tables,
    "groups": _groups,
    "groups_adjacent": _groups_adjacent,
}
