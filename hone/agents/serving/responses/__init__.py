"""``/v1/responses``: OpenAI's Responses API, translated to a chat and recorded like one.

==============  ===========================================================================================
``request``     body of a request, and its translation to a chat
``items``       input items as messages, a reply as output items
``call``        the call: a complete response, or the sequence of its events
``store``       earlier responses, for ``previous_response_id``
==============  ===========================================================================================
"""

from hone.agents.serving.responses.call import ResponsesCall
from hone.agents.serving.responses.request import ResponsesBody
from hone.agents.serving.responses.store import ResponseStore

__all__ = ["ResponseStore", "ResponsesBody", "ResponsesCall"]
