"""Conversations of several turns as token ids: what the policy made, what it was given, and how a rollout goes on.

Tokens are kept as they were generated and never made anew from text: encode(decode(ids)) need not be ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from alignment.errors import InputError

END_OF_TURN = "<eos>\n"
"""What closes every turn in the text of a conversation: the end token *and* the newline behind it (as in ChatML)."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A run of tokens.

    Attributes:
        token_ids: as they were sent to the model or drawn from it.
        role: who speaks: system, user, assistant, tool.
        generated: whether *this policy* drew them in *this* rollout. An assistant's turn in the prompt was not.
        log_probs: of generated tokens, one each; empty otherwise.
    """

    token_ids: tuple[int, ...]
    role: str
    generated: bool = False
    log_probs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.generated and len(self.log_probs) != len(self.token_ids):
            raise InputError(
                "every generated token has a log-prob",
                where=f"{self.role} span",
                expected=len(self.token_ids),
                found=len(self.log_probs),
            )


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Spans in order. What lies before the first generated one is the prompt, the rest is the response."""

    spans: tuple[Span, ...] = ()

    def extended(self, span: Span) -> Trajectory:
        """With one span more."""
        return replace(self, spans=(*self.spans, span))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens, exactly as generated and as given."""
        return tuple(token for span in self.spans for token in span.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first generated one."""
        length = 0
        for span in self.spans:
            if span.generated:
                break
            length += len(span.token_ids)
        return length

    @property
    def group_key(self) -> tuple[int, ...]:
        """What samples of one prompt share: the tokens of the prompt."""
        return self.token_ids[: self.prompt_length]

    def loss_mask(self) -> tuple[int, ...]:
        """One per token: 1 where the policy drew it in this rollout, whatever the role."""
        return tuple(int(trained(span)) for span in self.spans for _ in span.token_ids)

    def rollout_log_probs(self) -> tuple[float, ...]:
        """One per token, 0.0 where the policy did not draw it."""
        return tuple(
            value
            for span in self.spans
            for value in (span.log_probs if span.generated else (0.0,) * len(span.token_ids))
        )

    def budget_left(self, max_response_length: int) -> int:
        """Tokens that may still follow: the response so far, observations included, counts."""
        return max(0, max_response_length - (len(self.token_ids) - self.prompt_length))


def trained(span: Span) -> bool:
    """Whether the tokens of a span enter the loss."""
    return span.generated


def next_input(trajectory: Trajectory, observation: Sequence[int] = ()) -> tuple[int, ...]:
    """What the engine is sent for the next turn: the trajectory's own tokens, then the observation's."""
    return (*trajectory.token_ids, *observation)


def continue_rollout(
    trajectory: Trajectory, drawn: Sequence[tuple[int, float]], *, max_response_length: int
) -> Trajectory:
    """Takes further tokens of an engine into a partial rollout, up to the budget that is left.

    Args:
        drawn: token and log-prob, in order; what exceeds the budget was never asked for.
    """
    asked = list(drawn)[: trajectory.budget_left(max_response_length)]
    span = Span(
        token_ids=tuple(t for t, _ in asked), role="assistant", generated=True, log_probs=tuple(p for _, p in asked)
    )
    return trajectory.extended(span)


def render(messages: Sequence[Mapping[str, str]], *, answer_next: bool = False) -> str:
    """The text of a conversation; training and inference use this one function.

    ``<|role|>content<eos>\\n`` per message, and the start of the assistant's turn with ``answer_next``.
    """
    text = "".join(f"<|{message['role']}|>{message['content']}{END_OF_TURN}" for message in messages)
    return text + ("<|assistant|>" if answer_next else "")


def training_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The text that is trained on: that of :func:`render`, to the last character."""
    return render(messages)


def mask_to_end(responses: Tensor, *, eos_token_ids: Iterable[int]) -> Tensor:
    """int64 ``[b, r]``: one up to and including the first token that ends a response, *any* of them.

    Args:
        responses: int64 ``[b, r]``, as generated; what follows the end is arbitrary.
        eos_token_ids: every id that generation stops on.
    """
    ends = torch.isin(responses, torch.tensor(sorted(eos_token_ids), dtype=responses.dtype))
    ended_before = torch.cumsum(ends.long(), dim=1) - ends.long()
    return (ended_before == 0).long()


def pad_responses(responses: Sequence[Sequence[int]], *, width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Responses ``[b, width]`` on the left, filled with ``pad_token_id``, and their mask, which comes from the
    *lengths*.

    A token id cannot tell padding from text: where the padding is the end token, the end of a response is one too.

    Raises:
        InputError: a response is longer than ``width``, or empty.
    """
    ids = torch.full((len(responses), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(responses), width), dtype=torch.int64)
    for row, response in enumerate(responses):
        if not 1 <= len(response) <= width:
            raise InputError(
                "the response does not fit", where=f"sample {row}", expected=f"1 … {width} tokens", found=len(response)
            )
        ids[row, : len(response)] = torch.tensor(list(response))
        mask[row, : len(response)] = 1
    return ids, mask
