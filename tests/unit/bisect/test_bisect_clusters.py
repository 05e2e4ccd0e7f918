"""The ends as clusters, and where everything else belongs."""

from __future__ import annotations

import math

import pytest

from alignment.bisect.clusters import Clusters, make_clusters
from alignment.bisect.observation import Observation, Result, Signature, skip
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.zones import Zone

SCALE = Signature(check="scale", where="attention")


def good(value, check="scale"):
    return Observation(result=Result.GOOD, value=value, values={check: value}, passed=(check,))


def bad(value, signature=SCALE, **rest):
    return Observation(result=Result.BAD, value=value, values={signature.check: value}, failures=(signature,), **rest)


def measured(value):
    return Observation(result=Result.MEASURED, value=value, values={"scale": value})


def test_the_middle_half_of_the_gap_is_ambiguous():
    clusters = make_clusters([measured(1.0), measured(1.1)], [measured(2.1), measured(2.0)])
    zones = {v: clusters.judge(measured(v)).zone for v in (0.9, 1.3, 1.5, 1.75, 1.9, 2.3, 9.0, math.nan, math.inf)}
    assert zones == {
        0.9: Zone.GOOD, 1.3: Zone.GOOD, 1.5: Zone.AMBIGUOUS, 1.75: Zone.AMBIGUOUS, 1.9: Zone.BAD, 2.3: Zone.BAD,
        9.0: Zone.BAD, math.nan: Zone.BAD, math.inf: Zone.BAD,
    }  # fmt: skip


def test_decades_apart_distance_is_logarithmic():
    clusters = make_clusters([good(1e-7)], [bad(1e-1)])
    assert clusters.judge(bad(1e-4)).zone is Zone.AMBIGUOUS
    assert clusters.judge(bad(5e-2)).zone is Zone.BAD


def test_a_pass_is_good_wherever_its_value_lies():
    clusters = make_clusters([good(1e-7)], [bad(1e-1)])
    assert clusters.judge(good(1e-3)).zone is Zone.GOOD


def test_another_failure_is_a_skip_and_never_bad():
    clusters = make_clusters([good(1.0)], [bad(2.0)])
    elsewhere = clusters.judge(bad(2.0, Signature(check="scale", where="router")))
    assert (elsewhere.zone, elsewhere.reason) == (Zone.SKIP, "other-failure")
    assert "failed as scale at router, not as scale at attention" in elsewhere.detail
    assert clusters.judge(bad(2.0, Signature(check="shape"))).zone is Zone.SKIP


def test_the_other_side_of_the_good_end_is_another_failure():
    clusters = make_clusters([good(1.0)], [bad(2.0)])
    assert clusters.judge(bad(-3.0)).reason == "other-failure"


def test_the_side_of_a_signature_counts():
    up, down = Signature(check="s", sign=1), Signature(check="s", sign=-1)
    assert not up.matches(down) and up.matches(Signature(check="s"))


def test_the_expected_check_may_pass_while_another_fails():
    clusters = make_clusters([good(1.0)], [bad(2.0)])
    seen = Observation(
        result=Result.BAD, failures=(Signature(check="other"),), passed=("scale",), values={"scale": 1.0}
    )
    assert clusters.judge(seen).zone is Zone.GOOD


def test_what_was_not_measured_keeps_its_reason():
    clusters = make_clusters([good(1.0)], [bad(2.0)])
    judged = clusters.judge(skip("import", "no module named x"))
    assert (judged.zone, judged.reason, judged.detail) == (Zone.SKIP, "import", "no module named x")


def test_the_signature_is_what_every_bad_run_shows():
    runs = [
        Observation(result=Result.BAD, failures=(Signature(check="noise"), SCALE), values={"scale": 2.0}),
        Observation(result=Result.BAD, failures=(Signature(check="scale", where="elsewhere"),), values={"scale": 2.0}),
    ]
    assert make_clusters([good(1.0)], runs).signature == Signature(check="scale")


def test_a_check_that_is_asked_for_has_to_fail_on_the_bad_end():
    with pytest.raises(BisectError) as caught:
        make_clusters([good(1.0)], [bad(2.0)], check="shape")
    assert caught.value.ending is Ending.BAD_END_IS_GOOD and "expected scale; found shape" in str(caught.value)


def test_overlapping_values_are_refused():
    with pytest.raises(BisectError) as caught:
        make_clusters([measured(1.0), measured(1.4)], [measured(1.3), measured(1.6)])
    assert caught.value.ending is Ending.NOT_SEPARABLE
    assert "good end 1 to 1.4, bad end 1.3 to 1.6" in str(caught.value)


def test_a_probe_without_verdict_and_value_is_refused():
    with pytest.raises(BisectError) as caught:
        make_clusters([Observation(result=Result.MEASURED)], [Observation(result=Result.MEASURED)])
    assert caught.value.ending is Ending.END_NOT_MEASURED


def test_clusters_go_round_through_json():
    import json

    clusters = make_clusters([good(1.0)], [bad(2.0)])
    assert Clusters.from_data(json.loads(json.dumps(clusters.to_data()))) == clusters
