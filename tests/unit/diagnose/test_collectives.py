"""Collectives of real ranks, recorded and replayed: the first wrong one is named with its cause."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types

import collective_faults
import collective_ranks
import pytest
import torch

from alignment.diagnose.collective_record import (
    RECORD,
    Call,
    CollectiveRecorder,
    RankRecord,
    load_records,
    remove_records,
)
from alignment.diagnose.collective_replay import replay
from alignment.errors import InputError

U = torch.finfo(torch.float32).eps / 2


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """What four ranks recorded, by case."""
    folder = tmp_path_factory.mktemp("collectives")
    for name in ("clean", "unseen", "anyone", "tags", "stale", *collective_ranks.FAULTS):
        (folder / name).mkdir()
    torch.multiprocessing.spawn(collective_ranks.main, args=(str(folder),), nprocs=collective_ranks.SIZE)
    return folder


def test_every_kind_is_recorded_and_right(recordings):
    found = replay(load_records(recordings / "clean"))
    assert found.wrong == () and found.unjudged == {}
    # The coalesced call holds two sums, objects travel as two gathers; rows of two ranks are two groups.
    assert found.judged == {
        "all_reduce": 10 + 1 + 4, "all_gather": 4, "reduce_scatter": 1 + collective_ranks.SCATTERS_LISTS, "all_to_all": 3, "broadcast": 1, "reduce": 1,
        "gather": 1, "scatter": 1, "send and recv": 2 + 4 + 4,
    }  # fmt: skip
    assert 0 < found.used <= 1


CAUSES = {
    "lost_contribution": ("all_reduce", 1, (0, 1), "the contribution of rank 1 is lost"),
    "mean_of_ranks": ("all_reduce", 1, (0, 1), "a mean in place of a sum"),
    "low_precision": ("all_reduce", 1, (0, 1), "reduced in bfloat16"),
    "wrong_group": ("all_reduce", 1, (0, 1), "the ranks 0, 2 were reduced: another group"),
    "bit_flip": ("all_reduce", 1, (0, 1), f"bit {collective_faults.WRONG_BIT} of one element is flipped"),
    "swapped_order": ("all_gather", 2, (0, 1), "the parts of ranks 0, 1 are in another order"),
}


@pytest.mark.parametrize("name", collective_ranks.FAULTS)
def test_the_first_wrong_collective_is_named_with_its_cause(recordings, name):
    op, call, ranks, cause = CAUSES[name]
    first = replay(load_records(recordings / name)).first
    # The rows of two have calls of their own: the broadcast before is the world's.
    assert (first.op, first.index, first.ranks, first.cause) == (op, call - 1, ranks, cause)
    assert str(first).startswith(f"{op} of the group of ranks 0, 1, call {call - 1}, on rank ")


def test_a_flipped_bit_is_placed(recordings):
    first = replay(load_records(recordings / "bit_flip")).first
    assert (first.rank, first.element) == (collective_faults.WRONG_RANK, (0, collective_faults.WRONG_PLACE))
    assert first.error > first.bound


def test_a_swap_is_placed_in_its_part(recordings):
    first = replay(load_records(recordings / "swapped_order")).first
    assert (first.rank, first.part, first.element) == (0, 0, (0, 0))


def test_what_goes_past_the_functions_is_counted(recordings):
    found = replay(load_records(recordings / "unseen"))
    [(why, count)] = found.unjudged.items()
    assert "allreduce" in why and "past torch.distributed's functions" in why and count == 4


def test_a_message_from_anyone_is_held_to_who_sent_it(recordings):
    records = load_records(recordings / "anyone")
    found = replay(records)
    # Three messages and three later ones to rank 0, and one in each row of two.
    assert (found.wrong, found.unjudged, found.judged) == ((), {}, {"send and recv": 3 + 3 + 2})
    senders = [call.root for call in records[0].calls]
    assert sorted(senders[:3]) == sorted(senders[3:6]) == [1, 2, 3]
    assert [records[rank].calls[-1].root for rank in (1, 3)] == [0, 2]


def test_messages_of_a_pair_meet_within_their_tag(recordings):
    records = load_records(recordings / "tags")
    assert replay(records).wrong == () and replay(records).judged == {"send and recv": 4}
    # As they were called they would be crossed: the tag is what tells.
    untagged = [[dataclasses.replace(call, tag=0) for call in record.calls] for record in records]
    crossed = [RankRecord(rank=rank, calls=calls, unseen={}) for rank, calls in enumerate(untagged)]
    assert replay(crossed).first is not None


def test_a_wrong_message_from_anyone_is_named_with_who_sent_what_it_holds(recordings):
    records = load_records(recordings / "stale")
    got_first, got_second = (call.root for call in records[0].calls[:2])
    first = replay(records).first
    assert (first.op, first.rank, first.ranks) == ("send and recv", 0, (got_second, 0))
    assert first.cause == f"it holds what rank {got_first} sent"
    assert first.place.startswith(f"send and recv of the group of ranks {got_second}, 0, call 0, on rank 0")


# --- replay alone ----------------------------------------------------------------------------------------------------


def world(*calls_by_rank: list[Call]) -> list[RankRecord]:
    return [RankRecord(rank=r, calls=calls, unseen={}) for r, calls in enumerate(calls_by_rank)]


def summed(inputs, outputs, *, reduce="SUM", dtype=torch.float32) -> list[RankRecord]:
    ranks = tuple(range(len(inputs)))
    return world(
        *(
            [
                Call(
                    op="all_reduce",
                    ranks=ranks,
                    group="",
                    rank=rank,
                    reduce=reduce,
                    inputs=[torch.tensor(inputs[rank], dtype=dtype)],
                    outputs=[torch.tensor(outputs[rank], dtype=dtype)],
                )
            ]
            for rank in ranks
        )
    )


def test_another_order_of_three_summands_is_right_and_more_is_not():
    """1 + u + u is 1 from the left and 1 + 2u from the right: both are sums of the three."""
    inputs = [[1.0], [U], [U]]
    for output in (1.0, 1.0 + 2 * U):
        assert replay(summed(inputs, [[output]] * 3)).first is None
    assert replay(summed(inputs, [[1.0 + 8 * U]] * 3)).first.error > 2 * U


def test_two_summands_have_one_sum():
    assert replay(summed([[1.0], [U]], [[1.0]] * 2)).first is None
    assert replay(summed([[1.0], [2 * U]], [[1.0]] * 2)).first is not None


def test_ranks_that_hold_different_sums_are_named():
    first = replay(summed([[1.0], [U], [U]], [[1.0], [1.0], [1.0 + 2 * U]])).first
    assert first.rank == 2 and first.cause == "rank 0 and this one hold different sums"


def halves(dtype):
    """Numbers below the smallest normal one, which sums hold without any rounding."""
    tiny = torch.finfo(dtype).tiny
    return tiny / 8, tiny / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_small_values_can_be_wrong(dtype):
    one, two = halves(dtype)
    for output, right in ((one + two, True), (0.0, True), (one, False), (-one - two, False)):
        first = replay(summed([[one] * 4, [two] * 4], [[output] * 4] * 2, dtype=dtype)).first
        assert (first is None) is right, output
    lost = replay(summed([[one] * 4, [two] * 4], [[one] * 4] * 2, dtype=dtype)).first
    assert lost.cause == "the contribution of rank 1 is lost"
    # What is normal may not be flushed.
    tiny = torch.finfo(dtype).tiny
    assert replay(summed([[tiny], [tiny]], [[0.0]] * 2, dtype=dtype)).first is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mean_of_small_values_is_rounded(dtype):
    step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    # 3 + 3 + 1 steps: the mean is 7/3; rounded on the way in 1 + 1 + 0, at the end 2.
    inputs = [[3 * step], [3 * step], [step]]
    for steps, right in ((2, True), (3, True), (7, False)):
        first = replay(summed(inputs, [[steps * step]] * 3, reduce="AVG", dtype=dtype)).first
        assert (first is None) is right, steps


def random_sums(count: int, output):
    inputs = [torch.arange(1.0, 9.0).roll(rank) * (1 + rank) for rank in range(count)]
    return summed([x.tolist() for x in inputs], [output(inputs).tolist()] * count)


@pytest.mark.parametrize("lost", [(7,), (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11)])
def test_a_loss_in_a_wide_group_is_explained(lost):
    found = replay(random_sums(12, lambda inputs: sum(x for r, x in enumerate(inputs) if r not in lost)))
    assert found.first.cause == f"the contribution of rank {', '.join(map(str, lost))} is lost"


def test_the_subsets_that_explain_a_wide_sum_are_limited(monkeypatch):
    tried = []
    from alignment.diagnose import collective_replay

    reduced = collective_replay._reduced
    monkeypatch.setattr(collective_replay, "_reduced", lambda parts, kind: tried.append(1) or reduced(parts, kind))
    first = replay(random_sums(24, lambda inputs: 1.5 * sum(inputs))).first
    assert first.cause == "" and first.error > first.bound
    # The wide group and the world are tried for single ranks, single losses and so many others.
    assert len(tried) < 2 * (2 * 24 + collective_replay._TRIED) + 10


def test_a_recorded_group_explains_a_wide_sum():
    """Half of 24 ranks is not among the first subsets that are tried; it is where the half is a group of its own."""
    half = tuple(range(0, 24, 2))
    whole = random_sums(24, lambda inputs: sum(inputs[r] for r in half))
    assert replay(whole).first.cause == ""
    for record in whole:
        if record.rank in half:
            x = torch.ones(1)
            record.calls.append(
                Call(op="broadcast", ranks=half, group="data", rank=record.rank, root=0, inputs=[x], outputs=[x])
            )
    others = ", ".join(str(r) for r in range(1, 24, 2))
    assert replay(whole).first.cause == f"the contribution of rank {others} is lost"


def test_only_the_first_wrong_one_is_explained():
    records = summed([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0]] * 2)
    for record in records:
        record.calls.append(record.calls[0])
    first, second = replay(records).wrong
    assert (first.cause, second.cause) == ("the contribution of rank 1 is lost", "")


def test_a_mean_is_judged_as_one():
    assert replay(summed([[1.0], [2.0], [4.0]], [[7 / 3]] * 3, reduce="AVG")).first is None
    first = replay(summed([[1.0], [2.0], [4.0]], [[7.0]] * 3, reduce="AVG")).first
    assert first.cause == "a sum in place of a mean"


def test_nan_and_infinity_have_to_arrive():
    nan, inf = float("nan"), float("inf")
    assert replay(summed([[nan], [1.0]], [[nan], [nan]])).first is None
    assert replay(summed([[nan], [1.0]], [[1.0], [1.0]])).first is not None
    assert replay(summed([[inf], [1.0]], [[inf], [inf]])).first is None
    assert replay(summed([[inf], [1.0]], [[0.0], [0.0]])).first is not None
    most = torch.finfo(torch.float32).max
    assert replay(summed([[most], [most]], [[inf], [inf]])).first is None
    assert replay(summed([[1.0], [1.0]], [[inf], [inf]])).first is not None


def test_nothing_reduced_is_called_so():
    first = replay(summed([[1.0, 2.0], [3.0, 5.0]], [[1.0, 2.0], [3.0, 5.0]])).first
    assert (first.rank, first.cause) == (0, "its own input: nothing was reduced")


def test_an_unknown_reduction_is_not_judged():
    found = replay(summed([[1.0], [2.0]], [[9.0], [9.0]], reduce="another reduction"))
    assert found.first is None and found.unjudged == {"all_reduce with another reduction": 1}


def moved(op: str, output: list[float], **more) -> list[RankRecord]:
    given = torch.tensor([1.0, 2.0])
    there = Call(op=op, ranks=(0, 1), group="data", rank=1, outputs=[torch.tensor(output)], **more)
    here = Call(op=op, ranks=(0, 1), group="data", rank=0, inputs=[given], outputs=[given], **more)
    return world([here], [there])


def test_a_broadcast_has_to_arrive_bit_for_bit():
    assert replay(moved("broadcast", [1.0, 2.0], root=0)).first is None
    first = replay(moved("broadcast", [1.0, 2.0 * (1 + 2 * U)], root=0)).first
    assert first.place == "broadcast of the data of ranks 0, 1, call 0, on rank 1, element [1]"
    assert first.cause == "bit 0 of one element is flipped"
    # −0 is not 0, bit by bit.
    zero = world(
        [
            Call(
                op="broadcast",
                ranks=(0, 1),
                group="",
                rank=0,
                root=0,
                inputs=[torch.zeros(1)],
                outputs=[torch.zeros(1)],
            )
        ],
        [Call(op="broadcast", ranks=(0, 1), group="", rank=1, root=0, outputs=[-torch.zeros(1)])],
    )
    assert replay(zero).first.cause == "bit 31 of one element is flipped"


def test_fewer_elements_than_were_sent():
    assert replay(moved("broadcast", [1.0], root=0)).first.cause == "1 elements came out where 2 went in"


def test_a_rank_that_stays_away_or_calls_something_else_is_named():
    one, two = moved("broadcast", [1.0, 2.0], root=0)
    gone = replay(world(list(one.calls), [])).first
    assert (gone.rank, gone.cause) == (1, "the rank did not take part")
    other = Call(op="all_reduce", ranks=(0, 1, 2), group="", rank=2, reduce="SUM")
    same = [
        Call(op="broadcast", ranks=(0, 1, 2), group="", rank=r, root=0, inputs=[torch.zeros(1)] * (r == 0))
        for r in range(2)
    ]
    odd = replay(world([same[0]], [same[1]], [other])).first
    assert (odd.rank, odd.cause) == (2, "the rank called all_reduce SUM where the others called broadcast")


def test_a_message_that_is_another_ones():
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    sent = [Call(op="send", ranks=(0, 1), group="", rank=0, root=1, inputs=[x]) for x in (first, second)]
    got = [Call(op="recv", ranks=(0, 1), group="", rank=1, root=0, outputs=[x]) for x in (first, first)]
    wrong = replay(world(sent, got)).first
    assert (wrong.op, wrong.index, wrong.rank) == ("send and recv", 1, 1)


def test_a_recv_whose_sender_nobody_told_is_not_judged_and_convicts_nobody():
    """Nobody waited for it, or the back end keeps no source: its message is one that another recv seems to lack."""
    x = torch.tensor([1.0, 2.0])
    sent = [Call(op="send", ranks=(0, 1), group="", rank=0, root=1, inputs=[x], tag=tag) for tag in (0, 0, 4)]
    got = [
        Call(op="recv", ranks=(0, 1), group="", rank=1, root=root, outputs=[x], tag=tag)
        for root, tag in ((None, 0), (0, 0), (0, 4))
    ]
    found = replay(world(sent, got))
    assert found.wrong == () and found.judged == {"send and recv": 1}
    assert found.unjudged == {
        "recv from any rank: who sent was never told": 1,
        "send and recv: to a rank that received from one that is not known": 2,
    }
    # One that is told and never sent is convicted all the same.
    lost = replay(world([], [dataclasses.replace(got[2])])).first
    assert (lost.rank, lost.cause) == (0, "the rank did not take part")


@contextlib.contextmanager
def alone(tmp_path):
    """A group of one rank, with a recorder."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    recorder = CollectiveRecorder()
    recorder.begin()
    try:
        yield dist, recorder
    finally:
        recorder.end()
        dist.destroy_process_group()


def test_what_nobody_waited_for_is_not_judged(tmp_path):
    with alone(tmp_path) as (dist, recorder):
        dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        waited = dist.all_reduce(torch.ones(4), async_op=True)
        waited.wait()
        polled = dist.all_reduce(torch.ones(5), async_op=True)
        while not polled.is_completed():
            pass
    assert [(call.finished, len(call.outputs)) for call in recorder.calls] == [(False, 0), (True, 1), (True, 1)]
    recorder.save(tmp_path / RECORD.format(rank=0))
    found = replay(load_records(tmp_path))
    assert found.wrong == () and found.judged == {"all_reduce": 2}
    assert found.unjudged == {"all_reduce: nobody waited for it": 1}


def test_a_sum_that_one_rank_did_not_wait_for_is_not_judged():
    records = summed([[1.0], [2.0]], [[4.0], [4.0]])
    assert replay(records).first is not None
    records[1].calls[0].finished = False
    assert replay(records).unjudged == {"all_reduce: nobody waited for it": 1}


def test_a_wrapper_that_a_module_kept_records_nothing_after_the_end(tmp_path):
    with alone(tmp_path) as (dist, recorder):
        late = types.ModuleType("late")
        exec("from torch.distributed import all_reduce", late.__dict__)
        late.all_reduce(torch.ones(3))
        recorder.end()
        try:
            late.all_reduce(torch.ones(3))
        finally:
            recorder.begin()
    assert len(recorder.calls) == 1


def test_records_of_more_ranks_of_an_earlier_run_are_removed(tmp_path):
    def run(count):
        remove_records(tmp_path)
        for record in summed([[1.0]] * count, [[float(count)]] * count):
            recorder = CollectiveRecorder()
            recorder.calls = list(record.calls)
            recorder.save(tmp_path / RECORD.format(rank=record.rank))
        return replay(load_records(tmp_path))

    kept = tmp_path / "facts.json"
    kept.write_text("{}")
    assert run(4).wrong == () and run(2).wrong == ()
    assert [record.rank for record in load_records(tmp_path)] == [0, 1] and kept.is_file()


def test_ranks_start_in_a_folder_without_the_records_of_an_earlier_run(tmp_path):
    from alignment.diagnose import communication
    from alignment.diagnose.trained_role import Policy
    from alignment.rl.config import load_config

    (tmp_path / RECORD.format(rank=7)).write_bytes(b"an earlier run")

    class Executor:
        def start(self, setting, placement):
            assert list(tmp_path.iterdir()) == []
            return {"actor": "group"}

        def shutdown(self):
            pass

    config = load_config("dapo-tiny")
    with communication._started(Executor(), config, "cpu", tmp_path, Policy(), record=True) as group:
        assert group == "group"


def test_recording_needs_ranks():
    with pytest.raises(InputError, match="there is no process group"):
        CollectiveRecorder().begin()


def test_a_folder_without_records_and_a_damaged_one(tmp_path):
    with pytest.raises(InputError, match="no collectives were recorded there"):
        load_records(tmp_path)
    path = tmp_path / RECORD.format(rank=0)
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_records(tmp_path)


def test_what_overflows_on_its_way_is_no_finding():
    """Adding the large ones first overflows float16, though the sum of all is finite."""
    inputs = [[60000.0], [60000.0], [-60000.0]]
    for output, right in ((float("inf"), True), (60000.0, True), (59000.0, False)):
        first = replay(summed(inputs, [[output]] * 3, dtype=torch.float16)).first
        assert (first is None) is right
