"""Games of two seats, against a fixed opponent and in self-play."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from support.agents import play, sample, setting
from support.messages import raises

from hone.agents.environments import make_environment
from hone.agents.environments.kuhn_poker import KuhnPoker
from hone.agents.environments.tic_tac_toe import TicTacToe
from hone.agents.messages import AssistantTurn
from hone.agents.tasks.environment import EnvironmentTask
from hone.config.reward import RewardConfig
from hone.data.episode_log import EpisodeEnd
from hone.data.types import Sample
from hone.errors import ConfigError, DataError
from hone.rewards.manager import RewardManager, share_rewards, token_rewards


def game_row(name: str, seed: int = 1, *, self_play: bool = True, **options) -> Sample:
    problem = asyncio.run(EnvironmentTask(name, options, self_play=self_play).problem(seed))
    return sample(problem.question, **problem.extra, agent_name=problem.agent_name)


def says(*seats: list[str]):
    """A script for each seat; the conversation of the second one is a child of the episode."""
    return lambda name, turn: seats[1 if "/" in name else 0][turn]


def test_both_seats_are_segments_with_their_own_reward_and_role() -> None:
    made = setting()
    row = game_row("tic_tac_toe")
    played, engine = play(made, says(["1", "2", "3"], ["4", "5"]), [row])
    log = played[0].episode
    assert log is not None and log.end is EpisodeEnd.DONE and log.reward == 0.0
    assert [t.part for t in played] == [0, 1] and len({t.uid for t in played}) == 1
    assert log.turn_roles == [*["tic_tac_toe/1"] * 2, *["tic_tac_toe/0"] * 3] and log.turn_rewards == [
        0.0,
        -1.0,
        0.0,
        0.0,
        1.0,
    ]
    assert log.facts == {"draw": 0.0, "invalid_move": 0.0, "seat0": 1.0, "seat1": -1.0}
    shown = [m["content"] for m in log.messages if m["role"] == "user"]
    assert row.messages is not None and row.messages[0]["content"] == "You are X.\n1 2 3\n4 5 6\n7 8 9"
    assert shown == ["You are X.\nX 2 3\nO 5 6\n7 8 9", "You are X.\nX X 3\nO O 6\n7 8 9"]
    (other,) = log.conversations
    assert other["turns"] == 2 and other["messages"][0]["content"] == "You are O.\nX 2 3\n4 5 6\n7 8 9"
    assert [request.prompt_ids for request in engine.requests[1::-1]] == [t.prompt_ids for t in played]
    scores = share_rewards(played, asyncio.run(RewardManager(RewardConfig()).score(played)))
    placed = [sum(token_rewards(s, t.response_mask).values()) for s, t in zip(scores, played, strict=True)]
    assert placed == [-1.0, 1.0] and [score.total for score in scores] == [0.0, 0.0]


def test_an_invalid_move_loses_and_a_game_cut_short_is_worth_nothing() -> None:
    (loser, winner), _ = play(setting(), says(["5"], ["5"]), [game_row("tic_tac_toe")])
    assert loser.episode is not None and loser.episode.turn_rewards == [-1.0, 1.0]
    assert loser.episode.facts["invalid_move"] == 1.0 and winner.part == 1
    played, _ = play(setting(max_assistant_turns=1), says(["5"], ["1"]), [game_row("tic_tac_toe")])
    log = played[0].episode
    assert log is not None and log.end is EpisodeEnd.ASSISTANT_TURNS
    assert log.turn_rewards == [0.0, 0.0] and log.turn_roles == ["tic_tac_toe/1", "tic_tac_toe/0"] and len(played) == 2


def test_rows_that_self_play_cannot_play() -> None:
    row = game_row("guess_the_number", self_play=False)
    row.agent_name = "self_play"
    with raises(DataError, "self_play", code="R48", where="extra_info.environment.name"):
        play(setting(), lambda name, turn: "1", [row])
    with raises(ConfigError, "guess_the_number", where="self_play:guess_the_number"):
        EnvironmentTask("guess_the_number", {}, self_play=True)
    changed = game_row("kuhn_poker")
    assert changed.messages is not None
    changed.messages[0]["content"] = "You have A. check or bet?"
    with raises(DataError, "row", where="extra_info.environment"):
        play(setting(), lambda name, turn: "check", [changed])


MAGIC = dict(zip("123456789", (2, 7, 6, 9, 5, 1, 4, 3, 8), strict=True))
"""A magic square: three squares are a line if their numbers sum to 15."""


def winner_by_rule(moves: Sequence[str]) -> int | None:
    """The seat whose last move completes a line, 2 for a draw; None while the game goes on."""
    for count in range(5, len(moves) + 1):
        own = [MAGIC[square] for square in moves[count - 1 :: -2]]
        if any(sum(three) == 15 for three in itertools.combinations(own, 3)):
            return (count - 1) % 2
    return 2 if len(moves) == 9 else None


def test_games_of_tic_tac_toe_end_as_the_rules_say() -> None:
    async def winner(moves: Sequence[str]) -> int | None:
        game = TicTacToe()
        await game.begin(0)
        for move in moves:
            if game.mover is not None:
                await game.move(f"I take {move}.")
        return None if game.mover is not None else 2 if game.facts["draw"] else game.rewards.index(1.0)

    orders = [list(order) for order in itertools.islice(itertools.permutations("123456789"), 0, None, 1009)]
    assert {winner_by_rule(order) for order in orders} == {0, 1, 2}
    for order in orders:
        for moves in (order, order[:6]):
            assert asyncio.run(winner(moves)) == winner_by_rule(moves), moves


PAYOFFS = {  # chips of seat 0 with the better card, and with the worse one (Kuhn 1950)
    ("check", "check"): (1, -1),
    ("check", "bet", "fold"): (-1, -1),
    ("check", "bet", "call"): (2, -2),
    ("bet", "fold"): (1, 1),
    ("bet", "call"): (2, -2),
}


def kuhn(seed: int, moves: tuple[str, ...]) -> KuhnPoker:
    async def played() -> KuhnPoker:
        game = KuhnPoker()
        await game.begin(seed)
        for move in moves:
            assert game.mover is not None and move in game.moves()
            await game.move(move)
        return game

    return asyncio.run(played())


def test_kuhn_poker_pays_as_the_rules_say() -> None:
    deals = Counter(kuhn(seed, ()).cards for seed in range(600))
    assert len(deals) == 6 and min(deals.values()) > 60
    for seed in range(20):
        for moves, payoffs in PAYOFFS.items():
            game = kuhn(seed, moves)
            better = "JQK".index(game.cards[0]) > "JQK".index(game.cards[1])
            chips = payoffs[0 if better else 1]
            assert (game.mover, game.rewards) == (None, [chips, -chips]), (game.cards, moves)


def test_the_equilibrium_of_kuhn_poker_loses_an_eighteenth_of_a_chip() -> None:
    bets = {"J": 0.2, "Q": 0.0, "K": 0.6}  # alpha = 0.2: J bets alpha, K bets 3 alpha, Q calls alpha + 1/3
    calls0, bets1, calls1 = (
        {"J": 0.0, "Q": 0.2 + 1 / 3, "K": 1.0},
        {"J": 1 / 3, "Q": 0.0, "K": 1.0},
        {"J": 0.0, "Q": 1 / 3, "K": 1.0},
    )
    seeds = {kuhn(seed, ()).cards: seed for seed in range(100)}
    value = 0.0
    for cards, seed in seeds.items():
        a, b = cards
        worth = {moves: kuhn(seed, moves).rewards[0] for moves in PAYOFFS}
        called = calls0[a] * worth["check", "bet", "call"] + (1 - calls0[a]) * worth["check", "bet", "fold"]
        checked = bets1[b] * called + (1 - bets1[b]) * worth["check", "check"]
        bet = calls1[b] * worth["bet", "call"] + (1 - calls1[b]) * worth["bet", "fold"]
        value += (bets[a] * bet + (1 - bets[a]) * checked) / len(seeds)
    assert value == pytest.approx(-1 / 18)


def test_kuhn_poker_shows_each_seat_its_own_card() -> None:
    row = game_row("kuhn_poker", seed=3)
    cards = kuhn(3, ()).cards
    played, _ = play(setting(), says(["check", "I call"], ["I will bet"]), [row])
    log = played[0].episode
    assert log is not None and row.messages is not None
    assert row.messages[0]["content"] == f"You have {cards[0]}. check or bet?"
    assert (
        log.conversations[0]["messages"][0]["content"] == f"You have {cards[1]}. The other player: check. check or bet?"
    )
    assert log.messages[1]["content"] == "The other player: bet. call or fold?"
    assert log.facts["seat0"] == -log.facts["seat1"] and abs(log.facts["seat0"]) == 2.0


@pytest.mark.parametrize("seat", [0, 1])
def test_an_opponent_moves_at_random_from_the_seed(seat: int) -> None:
    async def opening(seed: int) -> tuple[str, str]:
        game = make_environment("tic_tac_toe", {"seat": seat})
        first = (await game.reset(seed))[0]["content"]
        free = [square for square in "123456789" if square in first]
        return first, (await game.step(AssistantTurn(free[0]))).messages[0]["content"]

    assert asyncio.run(opening(5)) == asyncio.run(opening(5))
    openings = [asyncio.run(opening(seed)) for seed in range(80)]
    assert {shown[0].count("X") - 1 if seat == 0 else shown[0].count("X") for shown in openings} == {seat}
    assert len({shown[1 - seat] for shown in openings}) > 6  # eight or nine replies are possible


def test_seats_are_drawn_and_checked() -> None:
    firsts = Counter(game_row("tic_tac_toe", seed, self_play=False).messages[0]["content"][:10] for seed in range(40))  # type: ignore[index]
    assert firsts.keys() == {"You are X.", "You are O."} and min(firsts.values()) > 8
    with raises(ConfigError, "seat=2", where="extra_info.environment.options"):
        make_environment("kuhn_poker", {"seat": 2})
