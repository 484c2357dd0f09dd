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


def game_row(name: str, seed: int = 1, *, loop: str = "self_play", **options) -> Sample:
    problem = asyncio.run(EnvironmentTask(name, options, loop=loop).problem(seed))
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
    row = game_row("guess_the_number", loop="environment")
    row.agent_name = "self_play"
    with raises(DataError, "self_play", code="R48", where="extra_info.environment.name"):
        play(setting(), lambda name, turn: "1", [row])
    with raises(ConfigError, "guess_the_number", where="self_play:guess_the_number"):
        EnvironmentTask("guess_the_number", {}, loop="self_play")
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
    firsts = Counter(
        game_row("tic_tac_toe", seed, loop="environment").messages[0]["content"][:10] for seed in range(40)
    )  # type: ignore[index]
    assert firsts.keys() == {"You are X.", "You are O."} and min(firsts.values()) > 8
    with raises(ConfigError, "seat=2", where="extra_info.environment.options"):
        make_environment("kuhn_poker", {"seat": 2})


def proposal_row(**options) -> Sample:
    return game_row("sums", 5, loop="proposer_solver", **options)


def proposes(proposal: str, *answers: str):
    """A script of the proposer, and of solvers in the order in which they are asked."""
    order: list[str] = []

    def script(name: str, turn: int) -> str:
        if "/" not in name:
            return proposal
        order.append(name)
        return answers[len(order) - 1]

    return script


def test_a_problem_is_answered_by_solvers_that_do_not_see_each_other() -> None:
    row = proposal_row()
    assert row.messages is not None
    given = int(row.messages[0]["content"].split()[-1].rstrip("."))
    played, _ = play(
        setting(), proposes(f"Take {given} + 4 - 9.", "I think 1", str(given - 5), str(given - 5), ""), [row]
    )
    log = played[0].episode
    assert log is not None and log.end is EpisodeEnd.DONE and log.reward == 0.0
    assert log.turn_roles == [*(f"sums/solver#{n}" for n in range(4)), "sums/proposer"]
    assert log.turn_rewards == [0.0, 1.0, 1.0, 0.0, 1.0], "half of the solvers are right: the best problem"
    assert log.facts == {"solved": 0.5, "valid_proposal": 1.0, "proposer": 1.0}
    assert [t.part for t in played] == [0, 1, 2, 3, 4]
    assert len({tuple(t.prompt_ids) for t in played[:4]}) == 1
    assert log.conversations[0]["messages"][0]["content"] == f"{given} + 4 - 9 = ?"
    scores = share_rewards(played, asyncio.run(RewardManager(RewardConfig()).score(played)))
    placed = [sum(token_rewards(s, t.response_mask).values()) for s, t in zip(scores, played, strict=True)]
    assert placed == [0.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "proposal", ["", "17", "1 * {given}", "{given}", "{given} + 100", "1 + 1", "{given} + 1 + 1 + 1", "{given} + 01"]
)
def test_an_invalid_proposal_has_no_solvers(proposal: str) -> None:
    row = proposal_row()
    assert row.messages is not None
    given = row.messages[0]["content"].split()[-1].rstrip(".")
    assert given not in ("1", "17")
    (played,), _ = play(setting(), proposes(proposal.format(given=given)), [row])
    assert played.episode is not None and played.episode.turn_rewards == [0.0]
    assert played.episode.facts == {"valid_proposal": 0.0, "proposer": 0.0}


@pytest.mark.parametrize("right, worth", [(0, 0.0), (1, 0.5), (2, 1.0), (3, 0.5), (4, 0.0)])
def test_what_a_problem_is_worth(right: int, worth: float) -> None:
    assert make_environment("sums", {}).worth([1.0] * right + [0.0] * (4 - right)) == worth  # type: ignore[attr-defined]


def test_solvers_share_what_the_proposer_left() -> None:
    row = proposal_row(attempts=3)
    assert row.messages is not None
    given = row.messages[0]["content"].split()[-1].rstrip(".")
    proposal, long = f"{given} + 4", "1 " * 200
    (*solvers, proposer), engine = play(setting(), proposes(proposal, long, long, long), [row], max_tokens=100)
    left = 100 - len(proposer.response_ids)
    assert [len(t.response_ids) for t in solvers] == [(left - 1) // 3] * 3
    assert {request.sampling.max_tokens for request in engine.requests[1:]} == {(left - 1) // 3}
    assert proposer.episode is not None and proposer.episode.end is EpisodeEnd.DONE
    (wordy,), _ = play(setting(), proposes(long), [row], max_tokens=100)
    assert len(wordy.response_ids) == 50
    many = proposal_row(attempts=100)
    cut, _ = play(setting(), proposes(proposal), [many], max_tokens=100)
    assert cut[0].episode is not None and cut[0].episode.end is EpisodeEnd.TOKENS and len(cut) == 1


def test_drawn_problems_are_valid_and_their_answers_right() -> None:
    async def solved(seed: int) -> float:
        problems = make_environment("sums", {"max_number": 12, "terms": 4})
        (message,) = await problems.reset(seed)
        assert message["content"].endswith(" = ?")
        value = eval(message["content"].removesuffix(" = ?"))
        assert (await problems.step(AssistantTurn(str(value + 1)))).reward == 0.0
        return (await problems.step(AssistantTurn(f"It is {value}."))).reward

    assert all(asyncio.run(solved(seed)) == 1.0 for seed in range(50))


def test_rows_without_proposals_are_refused() -> None:
    with raises(ConfigError, "tic_tac_toe", where="proposer_solver:tic_tac_toe"):
        EnvironmentTask("tic_tac_toe", {}, loop="proposer_solver")
    with raises(ConfigError, "attempts=1", where="extra_info.environment.options"):
        make_environment("sums", {"attempts": 1})
    row = game_row("tic_tac_toe")
    row.agent_name = "proposer_solver"
    with raises(DataError, "proposer_solver", code="R48", where="extra_info.environment.name"):
        play(setting(), lambda name, turn: "1", [row])
