"""Tasks of inspect-ai: `inspect eval inspect_tasks.py@NAME -T rows=FILE`."""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig, ResponseSchema
from inspect_ai.scorer import choice, includes, match
from inspect_ai.solver import generate, multiple_choice, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

FIELDS = FieldSpec(input="question", target="answer", choices="cities")
LETTERS = FieldSpec(input="question", target="letter", choices="cities")
SHORT = GenerateConfig(temperature=0, max_tokens=16, seed=1)


class Capital(BaseModel):
    """A capital."""

    city: str


@tool
def look_up():
    """A tool that knows capitals."""

    async def execute(country: str) -> str:
        """Tell the capital of a country.

        Args:
            country: name of the country.
        """
        return f"a city of {country}"

    return execute


@task
def chat(rows: str):
    """Questions, answered in a few words."""
    return Task(dataset=json_dataset(rows, FIELDS), solver=generate(), scorer=includes(), config=SHORT)


@task
def choices(rows: str):
    """Questions with three answers to choose from."""
    template = "{question}\n\n{choices}\n\nAnswer with 'ANSWER: ' and one of {letters}."
    solver = multiple_choice(template=template, max_tokens=16)
    return Task(dataset=json_dataset(rows, LETTERS), solver=solver, scorer=choice(), config=SHORT)


@task
def tools(rows: str):
    """Questions for which a tool must be called."""
    solver = [use_tools(look_up(), tool_choice="any"), generate(tool_calls="single")]
    config = GenerateConfig(temperature=0, max_tokens=64, parallel_tool_calls=False)
    return Task(dataset=json_dataset(rows, FIELDS), solver=solver, scorer=includes(), config=config)


@task
def structure(rows: str):
    """Questions answered as JSON."""
    schema = ResponseSchema(name="capital", json_schema=json_schema(Capital))
    config = GenerateConfig(temperature=0, max_tokens=64, response_schema=schema, logprobs=True, top_logprobs=2)
    return Task(dataset=json_dataset(rows, FIELDS), solver=generate(), scorer=match(), config=config)
