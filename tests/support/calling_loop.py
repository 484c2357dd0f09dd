"""A tool agent whose first turn always calls the calculator, whatever the model says: with models that know nothing."""

from hone.agents.messages import ToolCall
from hone.agents.tool_agent import ToolAgent


class Calls(ToolAgent):
    """A turn, a call, its result, a turn."""

    async def play(self, episode):
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            await self.take_turn(episode, tools.schemas)
            call = ToolCall("call_0", "calculator", {"expression": "6*7"}, "", None)
            episode.log.messages[-1]["tool_calls"] = [call.as_openai()]
            self.answer(episode, await tools.answer([call]), tools.schemas)
            await self.take_turn(episode, tools.schemas)
