"""Client libraries against an endpoint: `python openai_clients.py CLIENT URL MODEL` prints what each of four uses gave, as JSON."""

import asyncio
import json
import sys
import traceback
from typing import Literal

from pydantic import BaseModel

NAME, URL, MODEL = sys.argv[1:]
QUESTION = "How is the weather in Rome?"
CHAT = {"temperature": 0, "max_tokens": 16}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Report(BaseModel):
    """A weather report."""

    city: Literal["Rome", "Paris"]
    sunny: bool


def get_weather(city: Literal["Rome", "Paris"]) -> str:
    """Tell the weather of a city.

    Args:
        city: name of the city.
    """
    return f"sunny in {city}"


class OpenAi:
    """The official package, by chat completions and by responses."""

    def __init__(self):
        import openai

        self.client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
        self.messages = [{"role": "user", "content": QUESTION}]

    def chat(self):
        chat = self.client.chat.completions.create(model=MODEL, messages=self.messages, **CHAT)
        response = self.client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16)
        assert response.output_text == chat.choices[0].message.content, response
        return chat.choices[0].message.content

    def stream(self):
        pieces = self.client.chat.completions.create(model=MODEL, messages=self.messages, stream=True, **CHAT)
        return [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]

    def tools(self):
        function = {"name": "get_weather", "description": "weather", "parameters": SCHEMA}
        arguments = {"model": MODEL, "tools": [{"type": "function", "function": function}], **CHAT, "max_tokens": 64}
        first = self.client.chat.completions.create(messages=self.messages, tool_choice="required", **arguments)
        message = first.choices[0].message
        city = json.loads(message.tool_calls[0].function.arguments)["city"]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}
            for call in message.tool_calls
        ]
        answer = self.client.chat.completions.create(
            messages=[*self.messages, message, *results], tool_choice="none", **arguments
        )
        return {"city": city, "answer": answer.choices[0].message.content}

    def structure(self):
        arguments = {"model": MODEL, "temperature": 0}
        chat = self.client.chat.completions.parse(messages=self.messages, response_format=Report, **arguments)
        response = self.client.responses.parse(input=QUESTION, text_format=Report, **arguments)
        assert response.output_parsed is not None, response
        return chat.choices[0].message.parsed.model_dump()


class LiteLlm:
    """litellm."""

    def __init__(self):
        import litellm

        self.litellm = litellm
        self.messages = [{"role": "user", "content": QUESTION}]
        self.arguments = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", **CHAT}

    def chat(self):
        return self.litellm.completion(messages=self.messages, **self.arguments).choices[0].message.content

    def stream(self):
        pieces = self.litellm.completion(messages=self.messages, stream=True, **self.arguments)
        return [piece.choices[0].delta.content or "" for piece in pieces]

    def tools(self):
        function = {"name": "get_weather", "description": "weather", "parameters": SCHEMA}
        arguments = {**self.arguments, "max_tokens": 64, "tools": [{"type": "function", "function": function}]}
        message = (
            self.litellm.completion(messages=self.messages, tool_choice="required", **arguments).choices[0].message
        )
        city = json.loads(message.tool_calls[0].function.arguments)["city"]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}
            for call in message.tool_calls
        ]
        answer = self.litellm.completion(messages=[*self.messages, message, *results], tool_choice="none", **arguments)
        return {"city": city, "answer": answer.choices[0].message.content}

    def structure(self):
        arguments = {**self.arguments, "max_tokens": 64}
        reply = self.litellm.completion(messages=self.messages, response_format=Report, **arguments)
        return Report.model_validate_json(reply.choices[0].message.content).model_dump()


class LangChain:
    """langchain-openai."""

    def __init__(self):
        from langchain_openai import ChatOpenAI

        self.model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0, **CHAT)
        self.long = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=64)

    def chat(self):
        return self.model.invoke(QUESTION).content

    def stream(self):
        return [piece.content for piece in self.model.stream(QUESTION)]

    def tools(self):
        from langchain_core.messages import HumanMessage
        from langchain_core.tools import tool

        known = tool(get_weather)
        messages = [HumanMessage(QUESTION)]
        first = self.long.bind_tools([known], tool_choice="required").invoke(messages)
        messages += [first, *(known.invoke(call) for call in first.tool_calls)]
        answer = self.model.bind_tools([known], tool_choice="none").invoke(messages)
        return {"city": first.tool_calls[0]["args"]["city"], "answer": answer.content}

    def structure(self):
        return self.long.with_structured_output(Report).invoke(QUESTION).model_dump()


class PydanticAi:
    """pydantic-ai."""

    def __init__(self):
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        self.model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))

    def chat(self):
        from pydantic_ai import Agent

        return Agent(self.model, model_settings=CHAT).run_sync(QUESTION).output

    def stream(self):
        from pydantic_ai import Agent

        async def pieces():
            async with Agent(self.model, model_settings=CHAT).run_stream(QUESTION) as reply:
                return [piece async for piece in reply.stream_text(delta=True, debounce_by=None)]

        return asyncio.run(pieces())

    def tools(self):
        from pydantic_ai.direct import model_request_sync
        from pydantic_ai.messages import ModelRequest, ToolCallPart, ToolReturnPart
        from pydantic_ai.models import ModelRequestParameters
        from pydantic_ai.tools import ToolDefinition

        known = ToolDefinition(name="get_weather", parameters_json_schema=SCHEMA)
        messages = [ModelRequest.user_text_prompt(QUESTION)]
        settings = {**CHAT, "max_tokens": 64}
        first = model_request_sync(
            self.model,
            messages,
            model_settings=settings,
            model_request_parameters=ModelRequestParameters(function_tools=[known], allow_text_output=False),
        )
        calls = [part for part in first.parts if isinstance(part, ToolCallPart)]
        results = [
            ToolReturnPart(call.tool_name, get_weather(**call.args_as_dict()), call.tool_call_id) for call in calls
        ]
        answer = model_request_sync(
            self.model,
            [*messages, first, ModelRequest(parts=results)],
            model_settings={**settings, "tool_choice": "none"},
            model_request_parameters=ModelRequestParameters(function_tools=[known]),
        )
        return {"city": calls[0].args_as_dict()["city"], "answer": answer.text}

    def structure(self):
        from pydantic_ai import Agent, NativeOutput

        settings = {**CHAT, "max_tokens": 64}
        by_tool = Agent(self.model, output_type=Report, model_settings=settings).run_sync(QUESTION).output
        native = Agent(self.model, output_type=NativeOutput(Report), model_settings=settings).run_sync(QUESTION).output
        assert isinstance(native, Report), native
        return by_tool.model_dump()


class Anthropic:
    """Anthropic's package, which asks ``/v1/messages``."""

    def __init__(self):
        import anthropic

        self.client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
        self.messages = [{"role": "user", "content": QUESTION}]
        self.arguments = {"model": MODEL, "max_tokens": 16, "extra_body": {"temperature": 0}}

    def chat(self):
        return self.client.messages.create(messages=self.messages, **self.arguments).content[0].text

    def stream(self):
        with self.client.messages.stream(messages=self.messages, **self.arguments) as stream:
            return list(stream.text_stream)

    def tools(self):
        tools = [{"name": "get_weather", "description": "weather", "input_schema": SCHEMA}]
        arguments = {**self.arguments, "max_tokens": 64, "tools": tools}
        with self.client.messages.stream(messages=self.messages, tool_choice={"type": "any"}, **arguments) as stream:
            first = stream.get_final_message()
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)} for call in calls
        ]
        turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        answer = self.client.messages.create(
            messages=[*self.messages, *turns], tool_choice={"type": "none"}, **arguments
        )
        return {"city": calls[0].input["city"], "answer": answer.content[0].text}

    def structure(self):
        arguments = {**self.arguments, "max_tokens": 64}
        reply = self.client.messages.parse(messages=self.messages, output_format=Report, **arguments)
        return reply.parsed_output.model_dump()


class OpenAiAgents:
    """openai-agents, which asks ``/v1/responses``."""

    def __init__(self):
        from agents import set_default_openai_client, set_tracing_disabled
        from openai import AsyncOpenAI

        set_tracing_disabled(True)
        set_default_openai_client(AsyncOpenAI(base_url=URL, api_key="none", max_retries=0))

    def agent(self, tool_choice=None, stop=(), **options):
        """An agent; the library takes an answer at its limit of tokens for an error."""
        from agents import Agent, ModelSettings

        more = {"extra_body": {"stop": list(stop)}} if stop else {}
        settings = ModelSettings(temperature=0, max_tokens=64, tool_choice=tool_choice, **more)
        return Agent(name="weather", model=MODEL, model_settings=settings, **options)

    def chat(self):
        from agents import Runner

        return Runner.run_sync(self.agent(stop="."), QUESTION).final_output

    def stream(self):
        from agents import Runner

        async def pieces():
            running = Runner.run_streamed(self.agent(stop="."), QUESTION)
            return [
                event.data.delta
                async for event in running.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]

        return asyncio.run(pieces())

    def tools(self):
        from agents import Runner, function_tool

        cities = []

        @function_tool(name_override="get_weather")
        def weather(city: Literal["Rome", "Paris"]) -> str:
            """Tell the weather of a city."""
            cities.append(city)
            return get_weather(city)

        agent = self.agent(tools=[weather], tool_choice="required")
        answer = Runner.run_sync(agent, QUESTION, max_turns=8).final_output
        return {"city": cities[0], "answer": answer}

    def structure(self):
        from agents import Runner

        return Runner.run_sync(self.agent(output_type=Report), QUESTION).final_output.model_dump()


class LlamaIndex:
    """llama-index-llms-openai-like."""

    def __init__(self):
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        options = {"model": MODEL, "api_base": URL, "api_key": "none", "is_chat_model": True, "max_retries": 0}
        self.short = OpenAILike(**options, **CHAT)
        self.long = OpenAILike(**options, is_function_calling_model=True, temperature=0, max_tokens=64)
        self.formatted = OpenAILike(**options, should_use_structured_outputs=True, temperature=0, max_tokens=64)
        self.messages = [ChatMessage(role="user", content=QUESTION)]

    def chat(self):
        return self.short.chat(self.messages).message.content

    def stream(self):
        return [piece.delta or "" for piece in self.short.stream_chat(self.messages)]

    def tools(self):
        from llama_index.core.llms import ChatMessage
        from llama_index.core.tools import FunctionTool

        known = [FunctionTool.from_defaults(get_weather)]
        first = self.long.chat_with_tools(known, chat_history=self.messages, tool_required=True)
        calls = self.long.get_tool_calls_from_response(first)
        results = [
            ChatMessage(
                role="tool",
                content=get_weather(**call.tool_kwargs),
                additional_kwargs={"tool_call_id": call.tool_id},
            )
            for call in calls
        ]
        history = [*self.messages, first.message, *results]
        answer = self.long.chat_with_tools(known, chat_history=history, tool_choice="none")
        return {"city": calls[0].tool_kwargs["city"], "answer": answer.message.content}

    def structure(self):
        from llama_index.core.prompts import PromptTemplate

        by_tool = self.long.structured_predict(Report, PromptTemplate(QUESTION))
        formatted = self.formatted.structured_predict(Report, PromptTemplate(QUESTION))
        assert isinstance(formatted, Report), formatted
        return by_tool.model_dump()


class DsPy:
    """dspy, once by its own client and once by litellm."""

    def __init__(self):
        import dspy
        from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

        access = AccessPolicy(provider="hone", env_keys=("HONE_API_KEY",), base_url=URL)
        supports = ModelSupport(function_calling=True, response_schema=True)
        register_provider(ProviderDefinition.chat(access, compat=OpenAIChatCompat()), supports=supports)
        options = {"api_base": URL, "api_key": "none", "cache": False, "num_retries": 0, "temperature": 0}
        self.dspy = dspy
        self.short = dspy.LM(f"hone/{MODEL}", max_tokens=16, **options)
        self.long = dspy.LM(f"hone/{MODEL}", max_tokens=64, **options)
        self.litellm = dspy.LM(f"openai/{MODEL}", max_tokens=16, engine="litellm", **options)

    def chat(self):
        (answer,), (same,) = self.short(QUESTION), self.litellm(QUESTION)
        assert answer == same, (answer, same)
        return answer

    def stream(self):
        dspy = self.dspy

        class Echo(dspy.Adapter):
            """The question as it is, and the answer as it comes."""

            def format(self, signature, demos, inputs):
                return [{"role": "user", "content": inputs["question"]}]

            def parse(self, signature, completion):
                return {"answer": completion}

        async def pieces():
            with dspy.context(lm=self.short, adapter=Echo()):
                running = dspy.streamify(dspy.Predict("question -> answer"))(question=QUESTION)
                return [
                    piece.choices[0].delta.content or ""
                    async for piece in running
                    if not isinstance(piece, dspy.Prediction)
                ]

        return asyncio.run(pieces())

    def tools(self):
        dspy = self.dspy
        signature = dspy.Signature("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
        with dspy.context(lm=self.long, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
            program = dspy.Predict(signature, tool_choice="required")
            call, *_ = program(question=QUESTION, tools=[dspy.Tool(get_weather)]).calls.tool_calls
        return {"city": call.args["city"], "answer": get_weather(**call.args)}

    def structure(self):
        dspy = self.dspy
        signature = dspy.Signature({"question": (str, dspy.InputField()), "report": (Report, dspy.OutputField())})
        with dspy.context(lm=self.long, adapter=dspy.JSONAdapter()):
            return dspy.Predict(signature)(question=QUESTION).report.model_dump()


class Instructor:
    """instructor, by tools and by formats."""

    def __init__(self):
        import instructor
        import openai

        self.messages = [{"role": "user", "content": QUESTION}]
        self.modes = instructor.Mode
        self.client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
        self.instructor = instructor

    def create(self, mode, response_model, messages=None, method="create", **options):
        client = self.instructor.from_openai(self.client, mode=mode)
        options = {"model": MODEL, "messages": messages or self.messages, "max_retries": 0, **CHAT, **options}
        return getattr(client.chat.completions, method)(response_model=response_model, **options)

    def chat(self):
        return self.create(self.modes.TOOLS, None).choices[0].message.content

    def stream(self):
        partial = self.create(self.modes.JSON_SCHEMA, Report, method="create_partial", max_tokens=64)
        assert Report(**list(partial)[-1].model_dump())
        pieces = self.create(self.modes.TOOLS, None, stream=True)
        return [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]

    def tools(self):
        class Weather(BaseModel):
            city: Literal["Rome", "Paris"]

        options = {"max_tokens": 64, "method": "create_with_completion"}
        found, first = self.create(self.modes.TOOLS, Weather, **options)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": get_weather(found.city)}
        history = [*self.messages, {"content": None, **message.model_dump(exclude_none=True)}, result]
        answer = self.create(self.modes.TOOLS, None, history)
        return {"city": found.city, "answer": answer.choices[0].message.content}

    def structure(self):
        reports = [
            self.create(mode, Report, max_tokens=64)
            for mode in (self.modes.TOOLS, self.modes.TOOLS_STRICT, self.modes.JSON_SCHEMA)
        ]
        assert all(isinstance(report, Report) for report in reports), reports
        return reports[0].model_dump()


CLIENTS = {
    "openai": OpenAi,
    "litellm": LiteLlm,
    "langchain-openai": LangChain,
    "pydantic-ai": PydanticAi,
    "openai-agents": OpenAiAgents,
    "anthropic": Anthropic,
    "llama-index": LlamaIndex,
    "dspy": DsPy,
    "instructor": Instructor,
}

if __name__ == "__main__":
    results = {}
    for case in ("chat", "stream", "tools", "structure"):
        try:
            results[case] = {"result": getattr(CLIENTS[NAME](), case)()}
        except Exception:  # noqa: BLE001 - the test shows it
            results[case] = {"error": traceback.format_exc()[-3000:]}
    sys.stdout.write(json.dumps(results))
