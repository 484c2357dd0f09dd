"""Agent loop ``proposer_solver``: the policy writes a problem, and answers it several times."""

from __future__ import annotations

from hone.agents.base import AGENT_LOOPS
from hone.agents.environments.proposals import Proposals
from hone.agents.episode import BudgetSpent, Episode
from hone.agents.tool_agent import EnvironmentLoop, check_prompt, wrong_environment
from hone.data.episode_log import EpisodeEnd
from hone.text import valid_data
from hone.together import gather_or_cancel


@AGENT_LOOPS.register("proposer_solver")
class ProposerSolver(EnvironmentLoop):
    """Loop of one turn that proposes a problem, and one turn of each solver, all at the same time.

    A row is that of the loop ``environment``, whose prompt is the proposer's. The proposer may take half of the episode's tokens. Each
    solver has a conversation of its own, a segment of the episode, and an equal share of what is left. The turns have the roles ``NAME/proposer`` and ``NAME/solver#K``,
    so that an estimator can compare solvers with solvers (``hierarchical_grpo``). An episode that a limit cuts short is worth 0 to all.
    """

    async def play(self, episode: Episode) -> None:
        problems, seed = self.environment_of(episode)
        if not isinstance(problems, Proposals):
            why = "the policy writes the problem that it then solves: sums, or your own class derived from Proposals"
            raise wrong_environment(episode, "proposer_solver", "takes no proposals", why)
        name, limit = episode.sample.extra_info["environment"]["name"], self.context.multi_turn.tool_timeout
        episode.on_finish(problems.close)
        episode.log.reward = 0.0  # all rewards are those of turns
        shown = await episode.outside(problems.ask(seed), limit)
        check_prompt(episode, valid_data([{"role": "user", "content": shown}]))
        solvers: list[Episode] = []
        try:
            proposal = await self._turn(episode, (), max_tokens=max(1, episode.tokens_left // 2))
            problem = await episode.outside(problems.pose(proposal.content), limit)
            scores: list[float] = []
            if problem is not None:
                messages = valid_data([{"role": "user", "content": problem}])
                prompt = self.renderer.prompt(messages)
                share = (episode.tokens_left - 1) // problems.attempts  # all shares together leave one token
                if share < 1:
                    raise BudgetSpent(EpisodeEnd.TOKENS)
                solvers = [episode.child(messages, prompt) for _ in range(problems.attempts)]
                answers = await gather_or_cancel([self._turn(solver, (), max_tokens=share) for solver in solvers])
                scores = [await episode.outside(problems.check(answer.content), limit) for answer in answers]
                for solver, score in zip(solvers, scores, strict=True):
                    solver.reward_turn(score)
                episode.log.facts["solved"] = sum(scores) / len(scores)
            worth = problems.worth(scores) if scores else 0.0
            episode.reward_turn(worth)
            episode.log.facts |= {"valid_proposal": float(problem is not None), "proposer": worth}
            episode.log.end = EpisodeEnd.DONE
            for conversation in (episode, *solvers):
                self.check_tokens(conversation)
        finally:
            episode.log.turn_roles = [f"{name}/proposer"] * episode.log.assistant_turns
            for number, solver in enumerate(solvers):
                solver.log.turn_roles = [f"{name}/solver#{number}"] * solver.log.assistant_turns
            await episode.absorb_children()
