"""The worked numbers of an H200 with an 8B model, and the properties that hold for any profile."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.contract.goodput import (
    MARGIN,
    Acceptance,
    best,
    candidates,
    capacity,
    disable_threshold,
    expected_yield,
    plain_rate,
    plain_step_ms,
    spec_rate,
    spec_step_ms,
)
from pilotfish_engine.contract.speculation import PLAIN, CostProfile, Envelope, Settings

H200_8B = CostProfile(
    verify_ms=(
        (1, 4.084), (2, 4.095), (4, 4.084), (8, 4.112), (16, 4.159), (32, 4.253), (64, 4.380), (128, 4.894),
        (256, 7.091), (512, 12.495), (1024, 23.549),
    ),
    draft_ms=((1, 0.2), (1024, 0.2)),
)  # fmt: skip
K3 = Settings(num_steps=3, topk=1, num_draft_tokens=4)
CHAINS = Envelope(num_steps=5, topk=1, num_draft_tokens=6)
TREES = Envelope(num_steps=5, topk=4, num_draft_tokens=32)


@pytest.mark.parametrize(
    ("users", "plain", "spec"),
    [
        (1, 245, 554),
        (8, 1946, 4286),
        (32, 7524, 15144),
        (64, 14612, 21636),
        (128, 26154, 25414),
        (256, 36102, 27562),
    ],
)
def test_the_floor_at_2_6_accepted(users: int, plain: int, spec: int) -> None:
    acceptance = Acceptance.from_length(2.6, depth=3)
    assert round(plain_rate(H200_8B, users, 0)) == plain
    assert round(spec_rate(H200_8B, acceptance, users, 0, K3)) == spec


def test_three_drafts_at_256_users_lose_below_3_3_accepted() -> None:
    fixed = Envelope(num_steps=3, topk=1, num_draft_tokens=4, tuning="Fixed")
    lossy, paying = Acceptance.from_length(3.3, 3), Acceptance.from_length(3.5, 3)
    assert best(H200_8B, lossy, 256, 0, fixed).settings == PLAIN
    assert best(H200_8B, paying, 256, 0, fixed).settings == K3
    assert disable_threshold(H200_8B, paying, 0, fixed, 256) is None


def test_threshold_is_where_the_gain_falls_to_the_margin() -> None:
    fixed, acceptance = (
        Envelope(num_steps=3, topk=1, num_draft_tokens=4, tuning="Fixed"),
        Acceptance.from_length(2.6, 3),
    )
    assert disable_threshold(H200_8B, acceptance, 0, fixed, 256) == 121
    gains = [spec_rate(H200_8B, acceptance, b, 0, K3) / plain_rate(H200_8B, b, 0) for b in (120, 121)]
    assert gains[0] > 1 + MARGIN >= gains[1] > 1


def test_depth_falls_with_load_until_plain() -> None:
    acceptance = Acceptance.from_length(2.6, 3)
    depth = [best(H200_8B, acceptance, b, 0, CHAINS).settings.num_steps for b in (1, 8, 32, 64, 128, 256)]
    assert depth == [5, 5, 3, 2, 1, 0]


def test_choice_names_the_two_best_that_were_rejected() -> None:
    choice = best(H200_8B, Acceptance.from_length(2.6, 3), 128, 0, CHAINS)
    assert choice.settings == Settings(num_steps=1, topk=1, num_draft_tokens=2)
    assert [option.settings.num_steps for option in choice.rejected] == [2, 0]
    assert choice.speedup == pytest.approx(choice.tokens_per_second / choice.plain_tokens_per_second)
    assert choice.reason == (
        "Chose 1 step, top-1, 2 tokens: 30145 tok/s at 128 running (1.15 × plain). Next best: 2 steps, 28020. "
        "Bounds: 5/1/6, threshold Auto."
    )


def test_context_and_draft_costs_count() -> None:
    profile = CostProfile(
        verify_ms=((1, 10.0), (4, 16.0)),
        kv_ms_per_token=0.001,
        draft_ms=((1, 1.0), (4, 4.0)),
        extend_ms=((1, 0.5), (3, 1.5)),
        overhead_ms=0.25,
        plain_overhead_ms=0.125,
    )
    assert plain_step_ms(profile, 1, 1000) == pytest.approx(10 + 1 + 0.125)
    settings = Settings(num_steps=2, topk=2, num_draft_tokens=4)
    assert spec_step_ms(profile, 1, 1000, settings) == pytest.approx(2 * 2.0 + 16 + 1 + 1.5 + 0.25)


def test_tables_are_linear_between_and_beyond_and_noise_never_makes_more_work_cheaper() -> None:
    profile = CostProfile(verify_ms=((2, 6.0), (4, 5.0), (8, 10.0), (16, 20.0)))  # 4 was measured below 2
    cost = [plain_step_ms(profile, n, 0) for n in (1, 2, 3, 4, 6, 8, 16, 32)]
    assert cost == pytest.approx([6, 6, 6, 6, 8, 10, 20, 40])
    assert plain_step_ms(CostProfile(verify_ms=((4, 2.0),)), 8, 0) == 4.0


def test_tree_yield_by_hand() -> None:
    acceptance = Acceptance((0.5, 0.25), siblings=0.0)
    chain = Settings(num_steps=2, topk=1, num_draft_tokens=3)
    tree = Settings(num_steps=2, topk=2, num_draft_tokens=7)
    assert expected_yield(acceptance, chain) == pytest.approx(0.75)
    assert expected_yield(acceptance, tree) == pytest.approx(0.75)  # siblings catch nothing
    # second candidate: 0.5 - 0.5^(1 + 1) = 0.25; nodes .5 .25, then .25 .125 .125 .0625
    assert expected_yield(Acceptance((0.5, 0.25), 1 / 0.6931471805599453), tree) == pytest.approx(1.3125)
    cut = tree.model_copy(update={"num_draft_tokens": 4})
    assert expected_yield(Acceptance((0.5, 0.25), 1 / 0.6931471805599453), cut) == pytest.approx(1.0)


def test_depths_past_what_was_measured_keep_the_last_conditional() -> None:
    assert Acceptance((0.8, 0.4)).at_least(4) == pytest.approx(0.1)
    assert Acceptance(()).at_least(3) == 0
    assert Acceptance((0.5, 0.7, -1.0)).accept == (0.5, 0.5, 0.0)
    with pytest.raises(ValueError, match="nan"):
        Acceptance((float("nan"),))


def test_a_fixed_envelope_is_its_own_settings_below_its_threshold() -> None:
    fixed = Envelope(num_steps=3, topk=1, num_draft_tokens=4, tuning="Fixed", disable_threshold=8)
    hopeless = Acceptance((0.0,))
    assert best(H200_8B, hopeless, 7, 0, fixed).settings == K3
    assert best(H200_8B, hopeless, 8, 0, fixed).settings == PLAIN
    assert "Plain decoding from 8 running on" in best(H200_8B, hopeless, 8, 0, fixed).reason
    auto = fixed.model_copy(update={"disable_threshold": "Auto"})
    assert best(H200_8B, hopeless, 1, 0, auto).settings == PLAIN
    assert disable_threshold(H200_8B, hopeless, 0, auto, 256) == 1


def test_num_steps_zero_is_plain() -> None:
    none = Envelope(num_steps=0)
    assert best(H200_8B, Acceptance((1.0,)), 1, 0, none).settings == PLAIN
    assert disable_threshold(H200_8B, Acceptance((1.0,)), 0, none, 256) == 1


def test_capacity_is_that_of_the_settings_run_at_that_batch() -> None:
    acceptance, no_draft = Acceptance.from_length(2.6, 3), Envelope(num_steps=0)
    assert capacity(H200_8B, acceptance, 0, no_draft, 200.0, 256) == 134
    assert capacity(H200_8B, acceptance, 0, CHAINS, 200.0, 256) == 158  # one draft step a token
    assert capacity(H200_8B, acceptance, 0, CHAINS, 300.0, 256) == 84  # two
    assert capacity(H200_8B, acceptance, 0, no_draft, 300.0, 256) == 0  # plain gives one user alone 245
    assert capacity(H200_8B, acceptance, 0, CHAINS, None, 200) == 200


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match="batch is 0"):
        best(H200_8B, Acceptance(()), 0, 0, CHAINS)
    with pytest.raises(ValueError, match="verify_ms is"):
        plain_rate(CostProfile(verify_ms=()), 1, 0)


def test_candidates_stay_within_the_envelope_and_one_path_fits() -> None:
    envelope = Envelope(num_steps=8, topk=5, num_draft_tokens=20)
    found = candidates(envelope)
    assert {s.topk for s in found} == {1, 2, 4}
    assert all(s.num_steps < s.num_draft_tokens <= 20 for s in found)
    assert len(set(found)) == len(found)
    assert {s.num_steps for s in candidates(Envelope(num_steps=8, num_draft_tokens=4))} == {1, 2, 3}


def profiles() -> st.SearchStrategy[CostProfile]:
    growth = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=8)
    base = st.floats(0.1, 50.0)

    def build(base: float, growth: list[float], draft: float, overhead: float, kv: float) -> CostProfile:
        table, ms = [(1, base)], base
        for i, more in enumerate(growth, start=1):
            ms += more
            table.append((4**i, ms))
        return CostProfile(verify_ms=tuple(table), draft_ms=((1, draft),), overhead_ms=overhead, kv_ms_per_token=kv)

    return st.builds(build, base, growth, st.floats(0.0, 5.0), st.floats(0.0, 5.0), st.floats(0.0, 0.01))


conditionals = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6)
envelopes = st.builds(
    Envelope, num_steps=st.integers(0, 5), topk=st.sampled_from([1, 2, 4]), num_draft_tokens=st.integers(2, 32)
)


def curve(conditional: list[float], siblings: float = 0.5) -> Acceptance:
    accept, product = [], 1.0
    for p in conditional:
        product *= p
        accept.append(product)
    return Acceptance(tuple(accept), siblings)


@settings(deadline=None)
@given(profiles(), conditionals, st.integers(1, 256), st.integers(0, 10_000), envelopes)
def test_never_worse_than_plain(
    profile: CostProfile, accept: list[float], batch: int, context: int, envelope: Envelope
) -> None:
    choice = best(profile, curve(accept), batch, context, envelope)
    assert choice.tokens_per_second >= choice.plain_tokens_per_second
    assert all(option.tokens_per_second <= choice.tokens_per_second * (1 + MARGIN + 1e-9) for option in choice.rejected)
    assert choice.settings == PLAIN or choice.settings in candidates(envelope)


@settings(deadline=None)
@given(profiles(), conditionals, st.integers(0, 5), st.floats(0.0, 1.0), st.integers(1, 256), envelopes)
def test_better_drafts_never_slow_down(
    profile: CostProfile, accept: list[float], index: int, raised: float, batch: int, envelope: Envelope
) -> None:
    better = list(accept)
    index %= len(accept)
    better[index] = max(accept[index], raised)
    low, high = (best(profile, curve(a), batch, 0, envelope, margin=0.0) for a in (accept, better))
    assert high.tokens_per_second >= low.tokens_per_second * (1 - 1e-9)
    for setting in candidates(envelope):
        assert expected_yield(curve(better), setting) >= expected_yield(curve(accept), setting) - 1e-9


@settings(deadline=None)
@given(conditionals, st.integers(1, 5), st.integers(2, 32), st.floats(0.0, 2.0))
def test_a_tree_yields_at_least_its_chain_and_at_most_its_depth(
    accept: list[float], num_steps: int, num_draft_tokens: int, siblings: float
) -> None:
    chain = Settings(num_steps=num_steps, topk=1, num_draft_tokens=num_draft_tokens)
    drafted = [expected_yield(curve(accept, siblings), chain.model_copy(update={"topk": t})) for t in (1, 2, 4, 8)]
    assert all(more >= fewer - 1e-9 for fewer, more in pairwise(drafted))
    assert all(0 <= y <= num_steps + 1e-9 for y in drafted)


@settings(max_examples=60, deadline=None)
@given(profiles(), conditionals, st.floats(0, 500), envelopes, st.integers(1, 48))
def test_threshold_agrees_with_best(
    profile: CostProfile, accept: list[float], context: float, envelope: Envelope, max_batch: int
) -> None:
    threshold = disable_threshold(profile, curve(accept), context, envelope, max_batch)
    plain = [
        best(profile, curve(accept), b, int(context * b), envelope).settings == PLAIN for b in range(1, max_batch + 1)
    ]
    if threshold is None:
        assert not plain[-1]
    else:
        assert all(plain[threshold - 1 :])
        assert threshold == 1 or not plain[threshold - 2]


@settings(max_examples=60, deadline=None)
@given(profiles(), conditionals, st.floats(0.0, 1.0), envelopes)
def test_threshold_rises_with_acceptance(
    profile: CostProfile, accept: list[float], share: float, envelope: Envelope
) -> None:
    worse = [p * share for p in accept]
    low = disable_threshold(profile, curve(worse), 10, envelope, 64)
    high = disable_threshold(profile, curve(accept), 10, envelope, 64)
    assert high is None or (low is not None and low <= high)


@settings(max_examples=60, deadline=None)
@given(profiles(), conditionals, envelopes, st.floats(0.1, 200.0))
def test_capacity_is_the_largest_batch_that_meets_the_slo(
    profile: CostProfile, accept: list[float], envelope: Envelope, slo: float
) -> None:
    meets = [best(profile, curve(accept), b, 10 * b, envelope).tokens_per_second >= slo * b for b in range(1, 33)]
    largest = max((b for b, ok in enumerate(meets, start=1) if ok), default=0)
    assert capacity(profile, curve(accept), 10, envelope, slo, 32) == largest
