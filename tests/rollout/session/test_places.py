"""The number of samples that a server asks for."""

from protocol.wire import messages as m
from rollout.session.samples_in_flight import Places
from tests.rollout.session.scene import playing


def test_places_are_the_engines_own_limit_at_first() -> None:
    assert Places(256).num_samples == 256
    assert Places(256, cache_tokens=1_000_000).num_samples == 256


def test_places_follow_the_length_of_answers_when_the_cache_is_small() -> None:
    places = Places(256, cache_tokens=10_000)
    places.observe(num_prompt=100, num_written=200, inside_s=2.0, total_s=2.0)
    assert places.num_samples == 45  # of 0.9 * 10,000 tokens each holds 100 + 200 / 2
    for _ in range(2000):
        places.observe(num_prompt=100, num_written=800, inside_s=2.0, total_s=2.0)
    assert places.num_samples == 18


def test_long_answers_weigh_by_the_time_that_they_hold_the_cache() -> None:
    places = Places(256, cache_tokens=10_000)
    for num_written in (10, 1990):
        places.observe(0, num_written, 1.0, 1.0)
    assert places.num_samples == 9  # half of 1,990 tokens, nearly all of the time


def test_group_holds_its_prompt_once_until_its_longest_sample_ends() -> None:
    places, unshared = Places(256, cache_tokens=10_000), Places(256, cache_tokens=10_000, shares_prompts=False)
    before = 0
    for num_written in (100, 100, 300, 300):
        places.observe(1000, num_written, 2.0, 2.0, before)
        unshared.observe(1000, num_written, 2.0, 2.0, before)
        before = max(before, num_written)
    assert places.num_samples == 18  # about (300 * 1,000 + 100,000) / 800 = 500 tokens for each of the 800
    assert unshared.num_samples == 7


def test_samples_with_the_reward_leave_their_places_to_others() -> None:
    places = Places(64)
    places.observe(10, 100, inside_s=1.0, total_s=2.0)
    assert places.num_samples == 128
    slow = Places(64)
    slow.observe(10, 100, inside_s=0.0, total_s=4.0)
    assert slow.num_samples == 4 * 64


def test_room_is_in_samples_so_that_a_nearly_finished_group_takes_little() -> None:
    places = Places(64)
    assert places.room(num_here=0, group_size=8) == 8
    assert places.room(num_here=33, group_size=8) == 4
    assert places.room(num_here=64, group_size=8) == 0
    assert places.room(num_here=70, group_size=8) == 0


async def test_server_asks_for_as_many_groups_as_its_engine_decodes_at_a_time() -> None:
    async with playing(group_size=8) as scene:
        await scene.coordinator.welcome()
        assert (await scene.coordinator.next(m.Demand)).num_groups == 32
